"""A host whose network can be changed, and time that does not pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spark_core.fabric import proof, rollback
from spark_core.journal import StackFolder, open_journal
from tests.fake_host import FakeHost


@dataclass
class Clock:
    """Stands for :mod:`time`: sleeping costs nothing, and what is due happens.

    Attributes:
        now: Seconds.
        due: What happens at which second, once.
    """

    now: float = 1000.0
    due: dict[float, Callable[[], object]] = field(default_factory=dict)

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        # What is asked meanwhile takes its time as well.
        self.now += max(seconds, 0.5)
        for at in [at for at in self.due if at <= self.now]:
            self.due.pop(at)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rollback, "time", clock)
    monkeypatch.setattr(proof, "time", clock)
    return clock


@pytest.fixture
def host(tmp_path: Path, clock: Clock) -> FakeHost:
    host = FakeHost(tmp_path / "host")
    host.set_link("enP7s7", 1500, "10.1.230.180/24")
    host.set_link("enp1s0f1np1", 1500, "169.254.35.62/16")
    host.set_link("enP2p1s0f1np1", 1500)
    return host


@pytest.fixture
def folder(host: FakeHost) -> StackFolder:
    folder = StackFolder(f"{host.base}/root", "dev")
    open_journal(host.node, folder)
    return folder
