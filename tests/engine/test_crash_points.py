"""kill -9 at random points of up and destroy: the next run converges, with no manual step.

The engine, its locks, its state and the provider process are real; the resources reach no node. The same on emulated
hosts, with containers: tests/lab/test_crash_points.py.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time

import pytest

from automation.exit_codes import Exit
from tests.engine.test_automation import Parked, parked, providers_below

__all__ = ["parked"]

POINTS = int(os.environ.get("SPARK_VLLM_CRASH_POINTS", "20"))
VICTIMS = ("engine", "command", "provider")
SEED = 20261130


def kill(parked: Parked, command: str, victim: str, delay_s: float) -> bool:
    """Run a command and kill a part of it a while after it took the lock; whether it still ran then."""
    run = parked.begin(command, "--yes", "--clear-stale-lock", "--wait-lock", "60s")
    end = time.monotonic() + 60
    while not parked.locks and run.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(delay_s)
    pid = run.pid
    if victim != "command" and parked.locks:
        engine = int(json.loads(parked.locks[0].read_text())["pid"])
        plugins = providers_below(engine)
        pid = engine if victim == "engine" or not plugins else plugins[0]
    alive = run.poll() is None
    if alive:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            alive = False
    run.communicate(timeout=120)
    return alive


@pytest.mark.campaign
def test_the_next_run_converges_after_a_kill_at_each_of_many_random_points(parked: Parked) -> None:
    chance = random.Random(SEED)  # noqa: S311
    (parked.state / "seconds").write_text("0.7")
    killed = 0
    for point in range(POINTS):
        victim = VICTIMS[point % len(VICTIMS)]
        command = "up" if point % 2 == 0 else "destroy"
        if command == "up":
            parked.configure(max_model_len=1000 + point, max_num_seqs=100 + point)
        killed += kill(parked, command, victim, chance.uniform(0.0, 5.0))
        again = parked.report(command, "--yes", "--clear-stale-lock", "--wait-lock", "60s")
        assert again["exit_code"] == Exit.DONE, (point, victim, command, again)
        if command == "up":
            assert (parked.state / "made-rank").read_text() == str(1000 + point), (point, victim)
            assert parked.report("up")["changes"] == [], (point, victim)
        else:
            assert not list(parked.state.glob("made-*")), (point, victim)
        assert parked.locks == []
    assert killed >= POINTS // 2
