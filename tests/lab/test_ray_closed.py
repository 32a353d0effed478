"""Ray asks for the generation's token, over two hosts, on real Docker and Ray; what listens where is shown.

It needs what test_end_to_end.py needs, and about five minutes.

To clean up after an aborted run: ``SPARK_VLLM_HOME=… python -m lab down --instance t-ray``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.lab.deployment import Deployment, chat

pytestmark = pytest.mark.lab

HEAD, WORKER = "spark-a", "spark-b"
CONTAINERS = {HEAD: "spark-vllm-dev-main-rank0", WORKER: "spark-vllm-dev-main-rank1"}
PYTHON, RUNTIME = "/opt/vllm/bin/python3", "/opt/spark-vllm/runtime.pyz"
JOIN = "import ray; ray.init(address='192.168.200.12:6379', log_to_driver=False); print('joined')"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment("t-ray", tmp_path_factory.mktemp("home"))
    try:
        made.start()
        made.configure({"ray_token": "auto"})
        outcome = made.up()
        assert outcome.code == 0, outcome.text[-3000:]
        yield made
    finally:
        made.stop()


def test_a_stranger_without_the_token_cannot_join_and_the_group_serves(deployment: Deployment) -> None:
    outputs = deployment.outputs()
    assert chat(outputs, outputs["api_key"]).status == 200
    container = CONTAINERS[WORKER]
    # A process in the container that knows the token's file joins; one that does not is refused.
    with_token = "RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/tmp/spark-vllm-ray-token"
    run = f'docker exec {container} sh -c "{{}} timeout 60 {PYTHON} -c \\"{JOIN}\\" 2>&1 | tail -20; true"'
    assert "joined" in deployment.on(WORKER, run.format(with_token))
    refused = deployment.on(WORKER, run.format("RAY_AUTH_MODE=disabled"))
    assert "joined" not in refused, refused
    for host, name in CONTAINERS.items():
        assert deployment.on(host, f"docker exec {name} stat -c %a /tmp/spark-vllm-ray-token").strip() == "600"
        token = deployment.on(host, f"docker exec {name} cat /tmp/spark-vllm-ray-token").strip()
        shown = deployment.on(host, f"docker inspect {name}; docker logs {name} 2>&1; docker top {name}")
        state = deployment.on(host, "cat /home/spark/.spark-vllm/stacks/dev/state/main/status.json")
        assert len(token) == 64 and token not in shown and token not in state


def test_every_listener_on_all_interfaces_but_torch_s_store_is_one_that_the_filter_knows(
    deployment: Deployment,
) -> None:
    known = {6379, 10001, 30000, *range(6400, 6500)}
    for host, name in CONTAINERS.items():
        text = deployment.on(host, f"docker exec {name} {PYTHON} {RUNTIME} diagnose")
        listening = [each for each in json.loads(text)["sockets"] if each["state"] == "listening"]
        everywhere = [each for each in listening if each["address"] in ("0.0.0.0", "::")]
        unknown = [each["process"].partition(" ")[0] for each in everywhere if each["port"] not in known]
        # The store where the ranks meet, at a port that vLLM draws anew each time (docs/explanation/security.md).
        assert unknown == (["ray::RayWorkerP"] if host == HEAD else []), everywhere
        assert {30000, 6379} <= {each["port"] for each in everywhere} or host != HEAD
