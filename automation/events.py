"""What a run of the engine does, from its events: changes, findings, warnings, and what failed."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pulumi.automation import EngineEvent, OpType

from spark_core.findings import KINDS, Severity

CONTAINER = "docker:index/container:Container"
GATE = "pulumi-python:dynamic/spark:EndpointGate"
GROUP = "spark:cluster:VllmRayCluster$"
"""Part of the URN of what a group is made of; other containers watch it, and nothing ends with them."""
_COMPONENTS = ("pulumi:pulumi:Stack", "spark:")
_MARKUP = re.compile(r"<\{%.*?%\}>")
_CODE = re.compile(r"\[([a-z0-9-]+)\]$")
_NOISE = ("using pulumi-resource-", "Attempting to deploy or update resources")
_STEPS = {
    OpType.CREATE: "create",
    OpType.UPDATE: "update",
    OpType.DELETE: "delete",
    OpType.REPLACE: "replace",
    OpType.CREATE_REPLACEMENT: "replace",
    OpType.DELETE_REPLACED: "replace",
}


@dataclass(frozen=True)
class Change:
    """A resource that a run changes, or would.

    Attributes:
        urn: Its name in the state.
        kind: Its type.
        action: ``create``, ``update``, ``replace`` or ``delete``.
        properties: What differs, as far as the engine says.
    """

    urn: str
    kind: str
    action: str
    properties: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its name in the program."""
        return self.urn.rpartition("::")[2]

    @property
    def restarts(self) -> bool:
        """Whether serving ends with it: a rank's container is replaced, removed, or another than the running one."""
        return self.kind == CONTAINER and GROUP in self.urn and self.action in ("create", "replace", "delete")


@dataclass(frozen=True)
class Told:
    """A finding, a warning or an error of a run.

    Attributes:
        severity: ``fail``, ``warn`` or ``unknown``.
        code: Kind of the finding; empty for what is none.
        text: All of it, what to do included.
    """

    severity: Severity
    code: str
    text: str


@dataclass
class Recorder:
    """Takes the events of one run, in the threads of whoever sends them.

    Attributes:
        begun: Called with (name, action) when a step begins.
        ended: Called with (name, action, seconds, whether it succeeded) when it ends.
        said: Called with (name or nothing, line) for what a step says while it goes on.
        totals: Number of resources for each operation, by the engine's own count.
    """

    begun: Callable[[str, str], None] = lambda _name, _action: None
    ended: Callable[[str, str, float, bool], None] = lambda _name, _action, _seconds, _ok: None
    said: Callable[[str, str], None] = lambda _name, _line: None
    changes: dict[str, Change] = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)
    _started: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, event: EngineEvent) -> None:
        """Take one event."""
        with self._lock:
            self._take(event)

    @property
    def errors(self) -> list[Told]:
        return [told for told in self.told if told.severity == "fail"]

    def _take(self, event: EngineEvent) -> None:
        if event.diagnostic_event is not None:
            diagnostic = event.diagnostic_event
            self._diagnostic(diagnostic.severity, diagnostic.message, diagnostic.urn or "", bool(diagnostic.ephemeral))
        elif event.resource_pre_event is not None:
            step = event.resource_pre_event.metadata
            action = _STEPS.get(step.op)
            if action is None or step.type.startswith(_COMPONENTS) or _name(step.urn).startswith("default"):
                return
            before = self.changes.get(step.urn)
            properties = tuple(step.diffs or step.keys or ()) or (before.properties if before else ())
            self.changes[step.urn] = Change(step.urn, step.type, action, properties)
            self._started.setdefault(step.urn, time.monotonic())
            if not event.resource_pre_event.planning:
                self.begun(_name(step.urn), action)
        elif event.res_outputs_event is not None:
            step = event.res_outputs_event.metadata
            if step.op in _STEPS and step.urn in self.changes and not event.res_outputs_event.planning:
                self._end(step.urn, _STEPS[step.op], True)
        elif event.res_op_failed_event is not None:
            step = event.res_op_failed_event.metadata
            self.failed.append(_name(step.urn))
            self._end(step.urn, _STEPS.get(step.op, str(step.op.value)), False)
        elif event.summary_event is not None:
            counts = event.summary_event.resource_changes or {}
            self.totals = {OpType(op).value: int(n) for op, n in counts.items()}

    def _end(self, urn: str, action: str, ok: bool) -> None:
        self.ended(_name(urn), action, time.monotonic() - self._started.get(urn, time.monotonic()), ok)

    def _diagnostic(self, severity: str, message: str, urn: str, ephemeral: bool) -> None:
        text = _MARKUP.sub("", message).strip()
        if severity == "debug" or not text or text.startswith(_NOISE):
            return
        if severity in ("warning", "error"):
            self.told += findings_of(text, "warn" if severity == "warning" else "fail")
        elif text.startswith("not yet known: "):
            self.told += findings_of(text.removeprefix("not yet known: "), "unknown")
        if severity != "error" and not ephemeral:
            for line in text.splitlines():
                self.said(_name(urn) if urn and not urn.split("::")[2].startswith("pulumi:pulumi:Stack") else "", line)


def findings_of(text: str, severity: Severity) -> list[Told]:
    """The findings of a diagnostic, each with the indented lines below it; the engine tells several in one."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith((" ", "\t")) and blocks:
            blocks[-1].append(line)
        elif line.strip():
            blocks.append([line])
    found = []
    for block in blocks:
        match = _CODE.search(block[0])
        code = match.group(1) if match and match.group(1) in KINDS else ""
        found.append(Told(severity, code, "\n".join(block)))
    return found


def _name(urn: str) -> str:
    return urn.rpartition("::")[2]
