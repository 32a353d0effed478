"""What ``report`` tells of a deployment, whether as a page or as JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from automation.bench_report import SpeedReport
from automation.reports import ChangeReport, Document, FindingReport, Report, SettingsReport, UpdateReport

Verdict = Literal["serving", "drifted", "stopped", "broken", "unknown"]


class UnreadPart(Document):
    """A part that could not be read; the others are told all the same."""

    part: str
    why: str


class InterfacePart(Document):
    """A fabric interface of a node."""

    netdev: str
    address: str = Field(description="with prefix length, as declared or discovered; as found after a refresh")
    hca: str = ""
    mtu_bytes: int | None = None


class NodePart(Document):
    """A node, and its rank if it has one."""

    name: str
    management_address: str
    user: str
    interfaces: list[InterfacePart]
    rank: int | None = None
    phase: str = Field("no rank", description="as in `status`; unreachable where the node does not answer")
    detail: str = ""
    generation: int | None = None
    since: float | None = None
    restarts: int = Field(0, description="how often Docker has restarted the container by itself")
    memory_available_bytes: int | None = None
    versions: dict[str, str] = Field(default_factory=dict, description="of what the rank runs")
    weights: str = Field("", description="folder of the weights on the node")
    changed: list[str] = Field(default_factory=list, description="what was changed on the node, as its journal has it")


class SubnetPart(Document):
    """A subnet of the fabric."""

    network: str
    interfaces: dict[str, str] = Field(description="node to its network device on it")


class MeasuredPart(Document):
    """What two nodes move over all their links together, measured when the fabric was proven."""

    pair: str
    method: str
    links: int
    gbps: list[float] = Field(description="in each direction")
    round_trip_us: float


class DriftPart(Document):
    """What an ``up`` would change, and what it would find."""

    result: str
    changes: list[ChangeReport]
    findings: list[FindingReport]
    error: str = ""


class StepPart(Document):
    """One step of the last ``up``."""

    name: str
    begun_s: float = Field(description="seconds after the beginning of the update at which it could begin")
    seconds: float = Field(description="until its end, by the times that the state keeps")


class PhasePart(Document):
    """One phase of the head while the group came to serve."""

    phase: str
    seconds: float


class LastUpPart(Document):
    """Where the time of the last ``up`` went."""

    update: UpdateReport
    seconds: float | None = Field(description="of the whole update; null while it goes on")
    steps: list[StepPart]
    phases: list[PhasePart] = Field(description="of the newest generation on the head")


class GenerationPart(Document):
    """One generation as a node has kept it."""

    number: int
    node: str
    rank: int
    began: float | None = Field(description="seconds since the epoch, by the node's clock")
    ended: float | None = Field(description="null while it goes on, and where it was cut off")
    phase: str = Field(description="the last one; cut off: the node or the container went without a word")
    error: str = Field("", description="the first error, if it ended with one")
    source: str = ""
    meaning: str = ""
    do: str = ""
    lines: list[str] = Field(default_factory=list, description="the lines that say so")


class DeploymentReport(Report):
    """A deployment at one moment."""

    at: float
    verdict: Verdict
    headline: str
    group: str
    wanted: str
    state: str
    endpoint: str
    model: str
    image: str = Field(description="local id of the image, or how the settings name it")
    image_source: str
    weights: str = Field(description="revision of the weights; empty where the nodes' own folder is used")
    weights_source: str
    last_good_canary_at: float | None = Field(None, description="when the head last saw a completion come back")
    nodes: list[NodePart]
    subnets: list[SubnetPart]
    measured: list[MeasuredPart]
    not_proven: list[str] = Field(default_factory=list, description="what of the fabric was not proven, and why")
    drift: DriftPart | None = Field(description="null where it was not looked for, or could not be")
    last_up: LastUpPart | None
    generations: list[GenerationPart] = Field(description="newest first")
    speed: list[SpeedReport] = Field(description="what `bench` measured with the settings that served last")
    settings: SettingsReport | None
    history: list[UpdateReport] = Field(description="newest first")
    held_by: str = Field("", description="who holds the stack")
    unread: list[UnreadPart]
