"""The exit status of ``status``: what is wanted, what is not, and what could not be told."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from automation import status
from automation.exit_codes import Exit
from automation.group_nodes import GroupNodes
from automation.stack_file import StackFile
from providers.connections import Run
from spark_core.errors import UnreachableError
from spark_core.transport.base import Command, Result
from tests.config_cases import load_base
from tests.scripted_transport import ScriptedTransport

STARTED = "2026-01-01T00:00:00Z"


class Nodes:
    """Two nodes whose ranks say what a test wants."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.phases = {"spark-a": "serving", "spark-b": "ray_ready"}
        self.desired = ""
        self.silent: set[str] = set()
        monkeypatch.setattr(
            Run, "transport", lambda _self, name, _remembered=None: ScriptedTransport(name, self.answer(name))
        )
        monkeypatch.setattr(status, "updates_of", lambda *_: [])
        monkeypatch.setattr(status, "pulumi_json", lambda *_: {"deployment": {}})

    def answer(self, name: str) -> Any:
        def answered(cmd: Command) -> Result | str:
            if name in self.silent:
                raise UnreachableError("expected sshd, found none", node=name, step="connect (TCP)")
            if cmd.argv[0] == "cat":
                return (
                    Result(0, self.desired, "") if self.desired and name == "spark-a" else Result(1, "", "No such file")
                )
            document = {
                "phase": self.phases[name],
                "desired": self.desired.strip() or "run",
                "updated": time.time(),
                "generation": {"deployment": "d", "head_incarnation": "x", "n": 3},
            }
            container = {"Running": True, "ExitCode": 0, "OOMKilled": False, "StartedAt": STARTED}
            return f"=== container\n{json.dumps(container)}\n=== id\nid\n=== status\n{json.dumps(document)}\n"

        return answered

    def report(self) -> Any:
        base = load_base()
        text = yaml.safe_dump({"config": {f"p:{key}": value for key, value in base.items()}})
        file = StackFile("dev", Path("Pulumi.dev.yaml"), "p", text)
        run = Run(base)
        return status.status_of(file, GroupNodes("dev", run, next(iter(run.settings.groups))))


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    return Nodes(monkeypatch)


def test_a_group_that_serves_as_wanted_is_0(nodes: Nodes) -> None:
    report = nodes.report()
    assert (report.exit_code, report.state, report.wanted) == (Exit.DONE, "serving", "running")
    assert [rank.generation for rank in report.ranks] == [3, 3]
    assert "main is serving (wanted: running)" in status.told(report)


def test_a_group_that_does_not_serve_is_2_and_says_why(nodes: Nodes) -> None:
    nodes.phases["spark-a"] = "loading"
    report = nodes.report()
    assert (report.exit_code, report.state) == (Exit.DRIFT, "spark-a: loading")


def test_a_group_that_is_stopped_as_wanted_is_0_and_one_that_still_runs_is_2(nodes: Nodes) -> None:
    nodes.desired, nodes.phases = "stopped\n", {"spark-a": "stopped", "spark-b": "waiting_for_ranks"}
    stopped = nodes.report()
    assert (stopped.exit_code, stopped.wanted) == (Exit.DONE, "stopped")
    assert stopped.state.endswith("stopped on request")


def test_a_node_that_does_not_answer_is_1_and_the_others_are_told(nodes: Nodes) -> None:
    nodes.silent.add("spark-b")
    report = nodes.report()
    assert (report.exit_code, report.state) == (Exit.FAILED, "not every node answers")
    assert [rank.phase for rank in report.ranks] == ["serving", "unreachable"]
