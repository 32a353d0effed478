"""The generations that a node keeps, read by the real script from what the supervisor's own log wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from automation.deployment_report import GenerationPart, PhasePart
from automation.generations import PHASES, parse_generations, read_generations
from automation.step_times import seconds_of, step_times
from spark_core.gate import Rank
from spark_runtime.logs import GenerationLog
from spark_runtime.metrics import PHASES as SUPERVISOR_PHASES
from tests.local_node import LocalNode


def kept(state: Path, number: int, lines: list[tuple[str, str]], end: object = None) -> None:
    """What a generation leaves on its node."""
    folder = state / "logs" / str(number)
    log = GenerationLog(folder, 0, 1 << 20)
    for source, text in lines:
        log.write(source, text)
    log.close()
    if end is not None:
        (folder / "rank0.end.json").write_text(json.dumps(end))


def read(state: Path, count: int = 5) -> tuple[list[GenerationPart], list[PhasePart]]:
    return read_generations(Rank(LocalNode(), 0, "c", str(state)), count)


def test_phases_are_the_supervisor_s() -> None:
    assert PHASES == SUPERVISOR_PHASES


def test_what_the_supervisor_wrote_is_read_back_newest_last(tmp_path: Path) -> None:
    first = {"at": 20.0, "source": "vllm", "line": "RuntimeError: no memory", "lines": ["a", "b"], "diagnosis": None}
    healing = {"last_failure": {"generation": 10, "phase": "loading"}}
    end = {"generation_started": 10.0, "phase": "backing_off", "first_error": first, "healing": healing}
    kept(tmp_path, 9, [("supervisor", "generation 9"), ("vllm", "noise")])
    kept(tmp_path, 10, [("supervisor", "waiting_for_ranks"), ("ray", "supervisor | serving")], end)
    kept(tmp_path, 11, [("supervisor", "loading: 3 of 9 shards"), ("supervisor", "serving")])
    generations, phases = read(tmp_path, 2)
    assert [(one.number, one.phase, one.error) for one in generations] == [
        (10, "loading", "RuntimeError: no memory"),
        (11, "serving", ""),
    ]
    assert (generations[0].began, generations[0].ended, generations[0].lines) == (10.0, 20.0, ["a", "b"])
    assert [phase.phase for phase in phases] == ["loading"]


def test_no_generation_and_one_that_was_cut_off_at_once(tmp_path: Path) -> None:
    assert read(tmp_path) == ([], [])
    kept(tmp_path, 1, [("vllm", "\x00\xff binary")])
    (tmp_path / "logs" / "1" / "rank0.end.json").write_text('{"phase": "fai')
    generations, phases = read(tmp_path)
    assert [(one.number, one.phase, one.began) for one in generations] == [(1, "cut off", None)]
    assert phases == []


@pytest.mark.parametrize("text", ["", "=== said 1", "=== end 1\n[]\n=== said 1\n", "=== said 99999999999999999999\n"])
def test_whatever_a_node_answers_nothing_is_raised(text: str) -> None:
    generations, _ = parse_generations("spark-a", 0, text)
    assert all(one.error == "" for one in generations)


def test_a_generation_that_is_still_loading_counts_until_its_last_word() -> None:
    said = "100.0 supervisor | joining\n103.5 supervisor | loading\n120.0 supervisor | loading: 4 of 9 shards\n"
    _, phases = parse_generations("spark-a", 0, f"=== said 3\n{said}")
    assert {one.phase: one.seconds for one in phases} == {"joining": 3.5, "loading": 16.5}


def test_a_step_counts_from_the_end_of_what_it_waits_for_over_parents_and_providers() -> None:
    def resource(name: str, minute: int, **more: object) -> Mapping[str, Any]:
        return {"urn": f"urn:pulumi:s::p::{name}", "type": "t", "modified": f"2026-01-01T00:{minute:02}:00Z", **more}

    resources: list[Mapping[str, Any]] = [
        resource("old", 1, dependencies=[]),
        resource("host", 31),
        resource("provider", 32, type="pulumi:providers:docker", dependencies=["urn:pulumi:s::p::host"]),
        {"urn": "urn:pulumi:s::p::component", "type": "spark:x", "dependencies": ["urn:pulumi:s::p::host"]},
        resource("container", 35, provider="urn:pulumi:s::p::provider::id", parent="urn:pulumi:s::p::component"),
        resource("gate", 40, dependencies=["urn:pulumi:s::p::container", "urn:pulumi:s::p::old"]),
        resource("later", 59),
    ]
    steps = step_times(resources, "2026-01-01T00:30:00Z", "2026-01-01T00:40:00Z")
    assert [(step.name, step.begun_s, step.seconds) for step in steps] == [
        ("host", 0, 60),
        ("container", 120, 180),
        ("gate", 300, 300),
    ]


def test_times_that_cannot_be_read_give_no_steps() -> None:
    assert step_times([{"urn": "u", "modified": "yesterday"}], "2026-01-01T00:30:00Z", None) == []
    assert step_times([{"urn": "u", "modified": "2026-01-01T00:31:00Z"}], "soon", None) == []
    assert seconds_of(None) is None
