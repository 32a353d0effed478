"""What is made of the engine's events: changes, findings, and what a person sees meanwhile."""

from __future__ import annotations

import io
from typing import Any

from pulumi.automation import EngineEvent

from automation.events import CONTAINER, Change, Recorder, findings_of
from automation.progress import Progress, duration

RANK = f"urn:pulumi:dev::spark-vllm::spark:cluster:VllmRayCluster${CONTAINER}::main-spark-a"
STACK = "urn:pulumi:dev::spark-vllm::pulumi:pulumi:Stack::spark-vllm-dev"


def event(kind: str, **data: Any) -> EngineEvent:
    return EngineEvent.from_json({"sequence": 1, "timestamp": 1, kind: data})


def step(op: str, urn: str = RANK, kind: str = CONTAINER, diffs: list[str] | None = None) -> dict[str, Any]:
    return {"op": op, "urn": urn, "type": kind, "provider": "", "diffs": diffs}


def test_a_replaced_container_is_one_change_that_restarts() -> None:
    recorder = Recorder()
    for op in ("delete-replaced", "replace", "create-replacement"):
        recorder(event("resourcePreEvent", metadata=step(op, diffs=["command"]), planning=True))
    assert list(recorder.changes.values()) == [Change(RANK, CONTAINER, "replace", ("command",))]
    assert recorder.changes[RANK].restarts
    assert recorder.changes[RANK].name == "main-spark-a"


def test_what_stays_the_same_and_components_are_no_changes() -> None:
    recorder = Recorder()
    recorder(event("resourcePreEvent", metadata=step("same")))
    recorder(event("resourcePreEvent", metadata=step("create", STACK, "pulumi:pulumi:Stack")))
    recorder(event("resourcePreEvent", metadata=step("refresh")))
    assert recorder.changes == {}


def test_findings_keep_their_code_and_what_to_do_and_markup_goes() -> None:
    recorder = Recorder()
    text = "<{%reset%}>spark-a (fabric): found MTU 1500 [mtu-differs]\n  do: set it\nspark-b: found none\n"
    recorder(event("diagnosticEvent", severity="error", message=text, urn=STACK))
    recorder(event("diagnosticEvent", severity="debug", message="registering"))
    recorder(event("diagnosticEvent", severity="info", message="not yet known: image: not there [memory-unknown]"))
    told = [(one.severity, one.code, one.text) for one in recorder.told]
    assert told == [
        ("fail", "mtu-differs", "spark-a (fabric): found MTU 1500 [mtu-differs]\n  do: set it"),
        ("fail", "", "spark-b: found none"),
        ("unknown", "memory-unknown", "image: not there [memory-unknown]"),
    ]
    assert findings_of("x [no-such-kind]", "warn")[0].code == ""


def test_a_failed_step_is_named_and_shown_as_failed() -> None:
    ended: list[tuple[str, str, bool]] = []
    recorder = Recorder(ended=lambda name, action, _seconds, ok: ended.append((name, action, ok)))
    recorder(event("resourcePreEvent", metadata=step("create")))
    recorder(event("resOpFailedEvent", metadata=step("create"), status=1, steps=1))
    assert recorder.failed == ["main-spark-a"]
    assert ended == [("main-spark-a", "create", False)]


def test_a_terminal_gets_one_line_that_is_written_over_and_a_file_gets_plain_lines() -> None:
    now = [0.0]
    live, plain = io.StringIO(), io.StringIO()
    shown = [Progress(live, live=True, clock=lambda: now[0]), Progress(plain, live=False, clock=lambda: now[0])]
    for progress in shown:
        progress.begun("main-gate", "create")
        progress.said("main-gate", "spark-a rank 0: loading: shards 3/10")
    now[0] = 65.0
    for progress in shown:
        progress.tick()
    assert "\r\x1b[K0 done, main-gate: spark-a rank 0: loading: shards 3/10 (65 s)" in live.getvalue()
    assert plain.getvalue().splitlines() == [
        "main-gate: create",
        "main-gate: spark-a rank 0: loading: shards 3/10",
        "0 done, main-gate: spark-a rank 0: loading: shards 3/10 (65 s)",
    ]
    for progress in shown:
        progress.ended("main-gate", "create", 65.0, True)
        progress.close()
    assert live.getvalue().endswith("\r\x1b[K")
    assert plain.getvalue().splitlines()[-1] == "main-gate: create done in 65 s"


def test_durations_are_told_in_the_unit_that_fits() -> None:
    assert [duration(s) for s in (3, 334, 9000)] == ["3 s", "5 min 34 s", "2 h 30 min"]
