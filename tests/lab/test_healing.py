"""A group that loses a process, a container or a host serves again without any command, on real Docker, Ray and vLLM.

One deployment; each fault waits for the group to serve before the next one. What was measured is printed (``-s``): how
long until the group knew, and until the endpoint answered a completion again, beside a plain restart of the group.

To clean up after an aborted run: ``SPARK_VLLM_HOME=… python -m lab down --instance t-heal``.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.lab.deployment import Deployment, chat

pytestmark = [pytest.mark.lab, pytest.mark.campaign]

PATIENCE_S = 400
HEAD, WORKER = "spark-a", "spark-b"
RANK0, RANK1 = "spark-vllm-dev-main-rank0", "spark-vllm-dev-main-rank1"
PYTHON, RUNTIME = "/opt/vllm/bin/python3", "/opt/spark-vllm/runtime.pyz"


@dataclass
class Group:
    """The deployed group, as its users see it."""

    deployment: Deployment
    outputs: dict[str, Any]
    measured: list[str] = field(default_factory=list)

    def number(self) -> int:
        """The head's generation."""
        return int(self.deployment.status(HEAD)["generation"]["n"])

    def answers(self) -> bool:
        """Whether a completion comes back now."""
        with contextlib.suppress(OSError, ValueError):
            return chat(self.outputs, self.outputs["api_key"]).status == 200
        return False

    def wait_until(self, phase: str, newer_than: int = 0) -> dict[str, Any]:
        """The head's status once it is in a phase, in a generation after the given one."""
        deadline = time.monotonic() + PATIENCE_S
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            with contextlib.suppress(AssertionError, ValueError):
                status = self.deployment.status(HEAD)
                if status["phase"] == phase and status["generation"]["n"] > newer_than:
                    return status
            time.sleep(0.5)
        raise AssertionError(f"the head is not {phase} after {PATIENCE_S} s: {json.dumps(status, indent=1)}")

    def healed(self, fault: str, before: int, start: float) -> dict[str, Any]:
        """Wait until a new generation has answered a completion, and note how long it took."""
        known = None
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and known is None:
            with contextlib.suppress(AssertionError, ValueError):
                status = self.deployment.status(HEAD)
                if status["generation"]["n"] > before or status["phase"] not in ("serving", "stopped"):
                    known = time.monotonic() - start
            time.sleep(0.2)
        status = self.wait_until("serving", newer_than=before)
        while not self.answers():
            assert time.monotonic() < deadline, "serving, and no completion comes back"
        served = time.monotonic() - start
        last = (status["healing"]["last_failure"] or {}).get("line", "")
        self.measured.append(f"{fault:40} known after {known or 0:5.1f} s, answers after {served:5.1f} s; {last}")
        return status


@pytest.fixture(scope="module", params=["ray", "mp"])
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    made = Deployment("t-heal", tmp_path_factory.mktemp("home"))
    try:
        made.start()
        made.configure({"backend": request.param})
        outcome = made.up()
        assert outcome.code == 0, outcome.text[-3000:]
        deployed = Group(made, made.outputs())
        yield deployed
        print("\n" + "\n".join(deployed.measured))
    finally:
        made.stop()


def test_a_plain_restart_is_the_measure(group: Group) -> None:
    before, start = group.number(), time.monotonic()
    group.deployment.on(HEAD, f"docker exec {RANK0} {PYTHON} {RUNTIME} restart")
    assert group.healed("restart, asked for", before, start)["healing"]["last_failure"] is None


def test_a_killed_supervisor_of_the_worker(group: Group) -> None:
    before, start = group.number(), time.monotonic()
    group.deployment.on(WORKER, f"kill -9 $(docker inspect -f '{{{{.State.Pid}}}}' {RANK1})", root=True)
    status = group.healed("SIGKILL of PID 1 of the worker", before, start)
    assert "rank 1 on spark-b" in status["healing"]["last_failure"]["line"]
    assert status["generation"]["n"] == before + 1


def test_a_killed_engine_of_the_head(group: Group) -> None:
    before, start = group.number(), time.monotonic()
    group.deployment.on(HEAD, "pkill -9 -f 'VLLM::EngineCore|multiprocessing.*spawn_main'", root=True)
    status = group.healed("SIGKILL of the engine on the head", before, start)
    assert status["healing"]["last_failure"]["source"] == "vllm"


def test_a_head_that_is_restarted_alone_restarts_the_whole_group(group: Group) -> None:
    before, start = group.number(), time.monotonic()
    group.deployment.on(HEAD, f"docker restart -t 60 {RANK0}")
    status = group.healed("docker restart of the head alone", before, start)
    assert group.deployment.status(WORKER)["generation"] == status["generation"]


@pytest.mark.parametrize(
    ("verb", "phase", "text"),
    [
        ("kill", "waiting_for_ranks", "does not report any more; its node answers: killed by hand"),
        ("stop", "failed", "was stopped by hand or by its deployment (SIGTERM)"),
    ],
)
def test_a_worker_stopped_by_hand_stays_down_and_is_named_until_the_next_up(
    group: Group, verb: str, phase: str, text: str
) -> None:
    before, start = group.number(), time.monotonic()
    group.deployment.on(WORKER, f"docker {verb} {RANK1}")
    deadline = time.monotonic() + PATIENCE_S
    named = f"rank 1 on spark-b (192.168.200.13) {text}"
    while named not in (status := group.deployment.status(HEAD))["detail"]:
        assert time.monotonic() < deadline, json.dumps(status, indent=1)
        time.sleep(0.5)
    group.measured.append(f"{f'docker {verb} of the worker':40} named after {time.monotonic() - start:5.1f} s")
    assert status["phase"] == phase and not group.answers()
    assert "rank 1 on spark-b" in status["healing"]["last_failure"]["line"]
    shown = group.deployment.preview()
    assert shown.code == 0 and "spark-b: " in shown.text, shown.text[-3000:]
    running = group.deployment.on(WORKER, f"docker inspect -f '{{{{.State.Running}}}}' {RANK1}")
    assert running.strip() == "false"
    start = time.monotonic()
    outcome = group.deployment.up()
    assert outcome.code == 0, outcome.text[-3000:]
    group.healed("the next up", before, start)


def test_a_host_that_loses_its_power_and_gets_it_back(group: Group) -> None:
    before, start = group.number(), time.monotonic()
    group.deployment.lab("power-cut", WORKER)
    group.wait_until("waiting_for_ranks", newer_than=before)
    known = time.monotonic() - start
    group.deployment.lab("power-on", WORKER)
    start = time.monotonic()
    status = group.healed("power cut of the worker, from power on", before, start)
    group.measured.append(f"{'power cut of the worker':40} known after {known:5.1f} s")
    assert status["healing"]["failures_before_serving"] == 0


def test_nothing_of_what_was_healed_is_a_change(group: Group) -> None:
    outcome = group.deployment.up()
    assert outcome.code == 0, outcome.text[-3000:]
    assert outcome.count("unchanged") > 0
    for host, container in ((HEAD, RANK0), (WORKER, RANK1)):
        names = [Path(line.split()[0]).name for line in group.deployment.containers(host)]
        assert names == [container]
