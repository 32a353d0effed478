"""An engine that is killed: its provider comes to the end of what it has in hand, and ends by itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from automation.stopping import session_of
from providers import cancel
from tests.engine.parking_resource import ParkingProvider
from tests.providers.conftest import Deployment
from tests.providers.engine import Managed, Servicer

SOON_S = 5.0
ENGINE = ["-m", "tests.providers.engine_process"]


@pytest.fixture
def servicer(deployment: Deployment) -> Iterator[Servicer]:
    """A provider below a process that stands for the engine."""
    with Servicer(deployment.config, deployment.ssh.programs, deployment.ssh.home, words=ENGINE) as found:
        yield found


def begin(servicer: Servicer, folder: Path, seconds: float, *, deaf: bool = False) -> Any:
    """Begin a create that takes so long; it is in hand when this returns."""
    folder.mkdir()
    (folder / "seconds").write_text(str(seconds))
    if deaf:
        (folder / "deaf").touch()
    managed = Managed(servicer, ParkingProvider())
    props = managed.check({"folder": str(folder), "mark": "1", "name": "step"})
    running = servicer.start("Create", managed.create_request(props))
    wait_until(lambda: (folder / "begun").exists(), 30.0)
    return running


def processes(servicer: Servicer) -> list[int]:
    """What is left of the engine's session, beside the engine."""
    return [pid for pid in session_of(servicer.pid) if pid != servicer.pid]


def wait_until(happened: Callable[[], bool], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def kill_engine(servicer: Servicer) -> None:
    assert processes(servicer), "no provider runs"
    os.kill(servicer.pid, signal.SIGKILL)


def test_a_provider_that_waits_for_work_ends_with_its_engine(servicer: Servicer) -> None:
    Managed(servicer, ParkingProvider()).check({"folder": "/nowhere", "mark": "1", "name": "step"})
    before = time.monotonic()
    kill_engine(servicer)
    wait_until(lambda: not processes(servicer), SOON_S)
    assert time.monotonic() - before < SOON_S


def test_an_operation_that_looks_for_ctrl_c_is_parked_when_the_engine_is_gone(
    servicer: Servicer, tmp_path: Path
) -> None:
    begin(servicer, tmp_path / "state", 60.0)
    kill_engine(servicer)
    wait_until(lambda: not processes(servicer), SOON_S)
    assert not (tmp_path / "state" / "made-step").exists()


def test_an_operation_that_does_not_comes_to_its_end_though_nobody_hears_what_it_says(
    servicer: Servicer, tmp_path: Path
) -> None:
    begin(servicer, tmp_path / "state", 3.0, deaf=True)
    kill_engine(servicer)
    time.sleep(1)
    assert processes(servicer) and not (tmp_path / "state" / "made-step").exists()
    wait_until(lambda: not processes(servicer), 3.0 + SOON_S)
    assert (tmp_path / "state" / "made-step").read_text() == "1"


def test_an_engine_that_closes_our_input_and_lives_is_not_taken_for_a_dead_one(
    servicer: Servicer, tmp_path: Path
) -> None:
    running = begin(servicer, tmp_path / "state", 2.0)
    os.kill(servicer.pid, signal.SIGUSR1)
    assert running.result(timeout=30).id == "step"
    assert processes(servicer)
    kill_engine(servicer)
    wait_until(lambda: not processes(servicer), cancel.ASK_S + SOON_S)
