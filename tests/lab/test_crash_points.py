"""kill -9 at random points of up and destroy on emulated hosts: the next run converges, with no manual step.

Containers that a killed run made and nobody recorded, changes of hosts whose resource was never recorded, pending
operations and stale locks are all met on the way. SPARK_VLLM_CRASH_POINTS says how many points (6 by default; each
takes about two minutes).

To clean up after an aborted run: ``SPARK_VLLM_HOME=… python -m lab down --instance t-crash``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator

import pytest

from automation.exit_codes import Exit
from tests.engine.test_automation import providers_below
from tests.lab.deployment import Deployment
from tests.lab.operating import HOSTS, PROJECT, assert_serves, run
from tests.lab.runs import BackgroundRun
from tests.lab.test_end_to_end import differences

pytestmark = [pytest.mark.lab, pytest.mark.campaign]

POINTS = int(os.environ.get("SPARK_VLLM_CRASH_POINTS", "6"))
VICTIMS = ("engine", "command", "provider")
SEED = 20261201
LATEST_S = {"up": 45.0, "destroy": 12.0}
NEXT = ("--yes", "--clear-stale-lock", "--wait-lock", "2m")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment("t-crash", tmp_path_factory.mktemp("home"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


def kill(served: Deployment, command: str, victim: str, delay_s: float) -> str:
    """Run a command and kill a part of it a while after it took the lock; what it had printed."""
    line = f". ./env && exec python -m automation {command} --stack dev {' '.join(NEXT)}"
    begun = BackgroundRun(["sh", "-c", line], PROJECT, served.environment)
    folder = served.home / "backend" / ".pulumi" / "locks" / "organization" / "spark-vllm" / "dev"
    end = time.monotonic() + 60
    while not (locks := list(folder.glob("*.json"))) and time.monotonic() < end:
        time.sleep(0.05)
    assert locks, begun.text[-2000:]
    engine = int(json.loads(locks[0].read_text())["pid"])
    time.sleep(delay_s)
    plugins = providers_below(engine)
    pid = {"engine": engine, "command": begun._process.pid, "provider": (plugins or [engine])[0]}[victim]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    begun.wait(240)
    return begun.text


def test_the_next_run_converges_after_a_kill_at_each_of_many_random_points(served: Deployment) -> None:
    pristine = {host: served.snapshot(host) for host in HOSTS}
    chance = random.Random(SEED)  # noqa: S311
    for point in range(POINTS):
        victim = VICTIMS[point % len(VICTIMS)]
        command = "up" if point % 2 == 0 else "destroy"
        printed = kill(served, command, victim, chance.uniform(0.0, LATEST_S[command]))
        again, said = run(served, command, *NEXT)
        assert again["exit_code"] == Exit.DONE, (point, victim, command, printed[-1500:], said[-3000:])
        if command == "up":
            assert_serves(served)
            assert run(served, "up")[0]["changes"] == [], (point, victim)
        else:
            left = {host: differences(pristine[host], served.snapshot(host)) for host in HOSTS}
            assert left == {host: [] for host in HOSTS}, (point, victim, json.dumps(left, indent=1))
