"""Stopping, starting and rebooting, by what the nodes say."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from automation import lifecycle
from automation.lifecycle import Steps, _reboot, stop_group
from spark_core.errors import CommandError, UnreachableError
from spark_core.gate import RankState
from spark_core.transport.base import Command, Result, script
from tests.local_node import LocalNode
from tests.scripted_transport import ScriptedTransport


@dataclass
class Stopper:
    naps: list[float] = field(default_factory=list)

    def wait(self, seconds: float) -> None:
        self.naps.append(seconds)

    def check(self) -> None:
        """Never stops."""


@dataclass
class Here:
    stopper: Stopper = field(default_factory=Stopper)


def session() -> Any:
    return Here()


def test_a_node_counts_as_booted_once_it_is_another_boot_and_docker_answers() -> None:
    answers: Iterator[Result | str | None] = iter(
        ["id-1 5\n", Result(0, "", ""), "id-1 5\n", "", None, "id-2 7\n", Result(1, "", "down"), "id-2 7\n", "ok"]
    )

    def answer(_: Command) -> Result | str:
        given = next(answers)
        if given is None:
            raise UnreachableError("expected sshd, found none", node="spark-b", step="connect (TCP)")
        return given

    said: list[str] = []
    _reboot(ScriptedTransport("spark-b", answer), session(), Steps(said.append))
    assert said == ["spark-b: rebooting", "spark-b: booted"]
    with pytest.raises(StopIteration):
        next(answers)


def test_a_reboot_that_is_refused_is_told_with_what_to_do() -> None:
    answers: Iterator[Result | str] = iter(["id-1 5\n", Result(1, "", "sudo: a password is required")])
    with pytest.raises(CommandError, match="a password is required") as refused:
        _reboot(ScriptedTransport("spark-b", lambda _: next(answers)), session(), Steps(lambda _: None))
    assert "allow it in sudoers" in refused.value.do


def test_the_question_for_the_boot_can_be_asked_and_a_second_reboot_is_none(tmp_path: Any) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/asked"\n')
    systemctl.chmod(0o755)
    node = LocalNode("spark-b", programs=tmp_path)
    boot = node.run(script(lifecycle._BOOT)).stdout.strip()
    assert len(boot.split()) == 2
    assert node.run(script(lifecycle._REBOOT, "another boot")).ok
    assert not (tmp_path / "asked").exists()
    assert node.run(script(lifecycle._REBOOT, boot)).ok
    assert (tmp_path / "asked").read_text() == "reboot\n"


@pytest.mark.parametrize(("last", "lets_go"), [("waiting_for_ranks", True), ("serving", False)])
def test_a_stop_ends_when_every_rank_has_let_go(last: str, lets_go: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [ScriptedTransport("spark-a", lambda _: ""), ScriptedTransport("spark-b", lambda _: "")]
    phases = {"spark-a": ["serving", "ending", "stopped"], "spark-b": ["serving", "ending", last]}

    class Nodes:
        name = "main"

    def observe(rank: Any) -> RankState:
        left = phases[rank.node]
        phase = left.pop(0) if len(left) > 1 else left[0]
        return RankState(rank.node, 0, "id", True, 0, False, "", {"phase": phase})

    wanted: list[str] = []
    monkeypatch.setattr(lifecycle, "_all_ranks", lambda _: ranks)
    monkeypatch.setattr(lifecycle, "observe_rank", observe)
    monkeypatch.setattr(lifecycle, "want_stopped", lambda rank: wanted.append(rank.node))
    monkeypatch.setattr(lifecycle, "PARKING_S", 0.3)
    monkeypatch.setattr(ScriptedTransport, "transport", property(lambda self: self), raising=False)
    expected = contextlib.nullcontext() if lets_go else pytest.raises(CommandError, match="spark-b: serving")
    with expected:
        stop_group(session(), Nodes(), Steps(lambda _: None))  # type: ignore[arg-type]
    assert wanted == ["spark-a"]
