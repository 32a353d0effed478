"""What ``bench`` prints with ``--json``, and the figures that are kept with the settings that served."""

from __future__ import annotations

from pydantic import Field

from automation.reports import Document, Report


class SpeedReport(Document):
    """Figures of one concurrency, from vLLM's own serving benchmark."""

    concurrency: int = Field(description="requests that were under way at a time")
    prompts: int
    input_tokens: int = Field(description="of each prompt")
    output_tokens: int = Field(description="of each answer")
    output_tokens_per_s: float = Field(description="of all requests together")
    ttft_median_ms: float = Field(description="time to the first token")
    ttft_p99_ms: float
    tpot_median_ms: float = Field(description="time for each token after the first")
    at: float = Field(description="when it was measured, in seconds since the epoch")
    image: str = Field("", description="local id of the image that served")


class FigureReport(Document):
    """One figure beside what it was before."""

    concurrency: int
    figure: str
    before: float
    now: float
    slower_by: float = Field(description="share by which it is worse, such as 0.12; negative where it is better")
    fell: bool = Field(description="whether it is worse by more than the tolerance")


class ComparisonReport(Document):
    """The figures beside earlier ones."""

    settings: str = Field(description="digest of the settings that the earlier figures are of")
    at: float = Field(description="when those were measured, in seconds since the epoch")
    changed: list[str] = Field(description="what has changed since: paths of settings, and image or weights")
    figures: list[FigureReport]


class BenchReport(Report):
    """What was measured, and how it compares."""

    endpoint: str
    model: str
    node: str = Field(description="where the benchmark ran")
    settings: str = Field(description="digest of the settings that serve")
    speed: list[SpeedReport]
    comparisons: list[ComparisonReport] = Field(
        description="with the last settings before these, and with the last time that these were measured"
    )
    kept: bool = Field(description="whether the figures were kept with the settings")
