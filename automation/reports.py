"""What ``--json`` prints. The JSON schemas in docs/schemas/ are made from these models."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from automation.exit_codes import CommandEnd, Exit
from automation.redaction import redacted
from spark_core.errors import SparkError
from spark_core.foreign_recipes.account import Verdict
from spark_core.settings.recipe import Recipe


class Document(BaseModel):
    """A part of a report; nothing undeclared gets into one."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ErrorText(Document):
    """Why a command did not do what was asked."""

    what: str = Field(description="expected and found, in one line")
    where: str = Field("", description="the node, and the setting if there is one")
    do: str = Field("", description="what to do")
    evidence: list[str] = Field(default_factory=list, description="lines that prove it")


class Report(Document):
    """What every report has."""

    command: str
    stack: str
    exit_code: int = Field(description="the exit status of the command; docs/automation.md has their meanings")


class FailureReport(Report):
    """Printed instead of a command's own report where it ended before it had one."""

    error: ErrorText


class ChangeReport(Document):
    """A resource that was changed, or would be."""

    name: str
    type: str
    action: Literal["create", "update", "replace", "delete"]
    properties: list[str] = Field(default_factory=list, description="what differs, as far as the engine says")
    restarts: bool = Field(description="whether serving ends with it")


class FindingReport(Document):
    """A finding of the preflight, or another warning or error."""

    severity: Literal["fail", "warn", "unknown", "ignore"]
    code: str = Field("", description="its kind, as docs/findings.md has it; empty for what is no finding")
    text: str


class RunReport(Report):
    """A run of the engine: preview, up, refresh, destroy, drift, rollback."""

    result: Literal["succeeded", "failed", "interrupted", "out of time", "refused"]
    seconds: float
    changes: list[ChangeReport]
    totals: dict[str, int] = Field(description="number of resources for each operation, by the engine's count")
    findings: list[FindingReport]
    failed: list[str] = Field(default_factory=list, description="names of the resources whose step failed")
    restarts: list[str] = Field(default_factory=list, description="names of the containers that start anew")
    downtime_s: float | None = Field(None, description="expected seconds without serving; null where none was measured")
    not_applied: list[str] = Field(default_factory=list, description="names of what `--no-restart` left out")
    rolled_back_to: str | None = Field(None, description="digest of the settings that serve again after a failure")
    error: ErrorText | None = None


class QuestionReport(Document):
    """A question that came up."""

    question: str
    option: str = Field(description="the option that says yes to it")
    answer: bool


class FoundNode(Document):
    """A node as it was found."""

    name: str
    address: str
    user: str
    host_key: str
    via: str = Field("", description="address of the node that it is reached through")
    found: list[str] = Field(description="what is there already, one line each")


class InitReport(Report):
    """The first look at nodes, and the stack file made from it."""

    file: str
    written: bool
    nodes: list[FoundNode]
    questions: list[QuestionReport]
    findings: list[FindingReport] = Field(description="what preview says with these settings")
    next: list[str] = Field(description="commands to go on with")


class CutoverReport(Report):
    """A cluster of another launcher that was replaced by the stack."""

    stopped: dict[str, list[str]] = Field(description="for each node, the containers that were stopped")
    way_back: list[str] = Field(description="commands that bring the old cluster back, in order")
    run: RunReport = Field(description="the up that followed")


class UpdateReport(Document):
    """One update of a stack's history."""

    kind: str
    result: str
    started: str
    ended: str | None
    message: str
    changes: dict[str, int]
    version: int | None


class HistoryReport(Report):
    """The history of a stack, newest first."""

    updates: list[UpdateReport]


class RankReport(Document):
    """One rank of a group."""

    node: str
    rank: int
    phase: str = Field(description="the supervisor's phase, or no container, container stopped, unreachable")
    detail: str = ""
    wanted: str = Field("running", description="running or stopped, as recorded on the node")
    generation: int | None = None
    since: float | None = Field(None, description="when the phase began, in seconds since the epoch")
    restarts: int = 0
    first_error: str = ""


class SettingsReport(Document):
    """The settings that served last beside those of the stack's file."""

    file: str = Field(description="digest of the file's settings")
    served: str | None = Field(description="digest of those that served last; null where none has")
    differs: list[str] = Field(description="paths of what differs")


class LockReport(Document):
    """Who holds the stack."""

    holder: str
    stale: bool = Field(description="whether the run is dead")


class StatusReport(Report):
    """What runs."""

    group: str
    wanted: Literal["running", "stopped", "unknown"]
    state: str = Field(description="serving, stopped, or what is wrong")
    endpoint: str
    model: str
    ranks: list[RankReport]
    settings: SettingsReport
    lock: LockReport | None
    last_update: UpdateReport | None


class LogLine(Document):
    """One line of a rank."""

    at: float = Field(description="seconds since the epoch, by the node's clock")
    node: str
    rank: int
    generation: int
    source: str = Field(description="who said it: supervisor, ray, vllm")
    text: str


class LogsReport(Report):
    """Lines of ranks, by time."""

    lines: list[LogLine]


class CheckReport(Document):
    """One thing that was looked at."""

    name: str
    ok: bool
    text: str


class DoctorReport(Report):
    """All that was looked at."""

    checks: list[CheckReport]
    findings: list[FindingReport]
    bundle: str | None = Field(description="the file with everything in it, without secrets")


class LifecycleReport(Report):
    """A group that was stopped or started, or a node that was maintained."""

    group: str
    state: str = Field(description="serving, stopped, or what is wrong")
    seconds: float
    steps: list[str]
    findings: list[FindingReport] = Field(default_factory=list)


class ScriptReport(Document):
    """What starts a node's rank without Pulumi."""

    node: str
    script: str = Field(description="for sh, run on the node")


class RenderReport(Report):
    """The scripts of all nodes."""

    nodes: list[ScriptReport]


class StackEntry(Document):
    """One stack of the backend."""

    name: str
    current: bool
    resources: int | None
    updated: str | None
    in_progress: bool


class StacksReport(Report):
    """The stacks of the backend."""

    stacks: list[StackEntry]


class PinnedNode(Document):
    """The host key that a node shows, beside its pin."""

    name: str
    address: str
    state: Literal["pinned", "unpinned", "different", "silent"]
    type: str | None
    fingerprint: str | None
    host_key: str | None
    remark: str


class PinHostsReport(Report):
    """The host keys of a stack's nodes."""

    file: str
    nodes: list[PinnedNode]
    written: list[str] = Field(description="names of the nodes whose pins were written")


class SudoersReport(Report):
    """What a node's sudoers need."""

    node: str
    text: str = Field(description="a drop-in for /etc/sudoers.d")


class AdoptReport(Report):
    """The containers that were written into a state."""

    adopted: dict[str, str] = Field(description="name of each container to Docker's id of it")


class ItemReport(Document):
    """Something of ours on a node that takes space."""

    node: str
    kind: Literal["revision", "copy", "image"]
    name: str
    bytes: int
    used_by: str = Field(description="who uses it; empty if nobody does")


class GcReport(Report):
    """What weights and images take on the nodes."""

    items: list[ItemReport]
    freed: list[ItemReport]


class StageReport(Report):
    """What was brought for other settings."""

    settings: str = Field(description="the file of the other settings")
    image_id: str
    revision: str = Field(description="of the weights; empty for a directory of the nodes")
    source: str = Field(description="model.source, with a revision that can never be another one")
    nodes: list[str]


class VerifyReport(Report):
    """Files of the weights that are not as they were verified."""

    wrong: dict[str, list[str]] = Field(description="for each node, its wrong files, with what is wrong")


class RecipeEntry(Document):
    """A recipe."""

    name: str
    file: str
    recipe: Recipe


class RecipesReport(Report):
    """The recipes that there are, or the one that was asked for."""

    recipes: list[RecipeEntry]


class PlaceReport(Document):
    """What became of one place of another tool's file."""

    place: str
    verdict: Verdict
    text: str = Field(description="of what is taken its meaning; of the rest why not")
    setting: str = Field(description="the setting that it became; empty if it became none")


class ImportRecipeReport(Report):
    """A recipe file of another tool, as it was read."""

    file: str
    tool: str
    places: list[PlaceReport]
    recipe: Recipe | None = Field(description="null if it cannot be served here")
    written: str | None = Field(description="the file that it was written to")
    error: ErrorText | None = None


def error_text(error: SparkError) -> ErrorText:
    """An error as a report has it."""
    evidence = [redacted(line) for line in error.evidence]
    return ErrorText(what=redacted(error.what), where=redacted(error.where), do=redacted(error.do), evidence=evidence)


def failure(command: str, stack: str, error: SparkError) -> FailureReport:
    """The report of a command that ended early."""
    code = error.code if isinstance(error, CommandEnd) else Exit.FAILED
    return FailureReport(command=command, stack=stack, exit_code=code, error=error_text(error))
