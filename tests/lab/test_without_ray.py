"""`backend: mp` serves over two hosts without Ray, on real Docker and vLLM.

It needs what test_end_to_end.py needs, and about six minutes. The tests build on each other and run in order.

To clean up after an aborted run: ``SPARK_VLLM_HOME=… python -m lab down --instance t-mp``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from tests.lab.deployment import Deployment, chat

pytestmark = [pytest.mark.lab, pytest.mark.campaign]

HEAD, WORKER = "spark-a", "spark-b"
RANK1 = "spark-vllm-dev-main-rank1"
PATIENCE_S = 400


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment("t-mp", tmp_path_factory.mktemp("home"))
    try:
        made.start()
        made.configure({"backend": "mp"})
        yield made
    finally:
        made.stop()


def completes(deployment: Deployment) -> bool:
    """Whether a completion comes back now."""
    outputs = deployment.outputs()
    with contextlib.suppress(OSError, ValueError):
        return chat(outputs, outputs["api_key"]).status == 200
    return False


def processes(deployment: Deployment, host: str) -> str:
    return deployment.on(host, f"docker top spark-vllm-dev-main-rank{int(host == WORKER)}")


def test_up_serves_over_two_hosts_without_ray(deployment: Deployment) -> None:
    outcome = deployment.up()
    assert outcome.code == 0, outcome.text[-3000:]
    assert "joining" in outcome.text and "ray_starting" not in outcome.text
    status = deployment.status(HEAD)
    assert status["phase"] == "serving" and status["last_canary"]["ok"] and len(status["ranks"]) == 2
    assert completes(deployment)
    for host in (HEAD, WORKER):
        running = processes(deployment, host)
        assert "vllm serve" in running and "raylet" not in running and "gcs_server" not in running
    assert "--headless" in processes(deployment, WORKER) and "--headless" not in processes(deployment, HEAD)


def test_a_killed_engine_of_the_other_host_is_healed_without_a_command(deployment: Deployment) -> None:
    before = deployment.status(HEAD)["generation"]["n"]
    deployment.on(WORKER, f"kill -9 $(docker inspect -f '{{{{.State.Pid}}}}' {RANK1})", root=True)
    deadline = time.monotonic() + PATIENCE_S
    while (status := deployment.status(HEAD))["phase"] != "serving" or status["generation"]["n"] == before:
        assert time.monotonic() < deadline, status
        time.sleep(1)
    assert "rank 1 on spark-b" in status["healing"]["last_failure"]["line"]
    assert completes(deployment)
