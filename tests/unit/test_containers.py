"""Containers: ours are found by their label; a foreign one is never touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spark_core.containers import STOP_TIMEOUT_S, make_way, remove_labelled, restart_container, stop_container
from spark_core.errors import CommandError, ForeignObjectError
from spark_core.transport.base import Command, Result
from tests.fake_host import FakeHost
from tests.scripted_transport import ScriptedTransport

NAME = "spark-vllm-dev-main-rank0"
OURS = {"spark-vllm.stack": "dev"}


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path / "host")


def test_nothing_is_in_the_way_of_a_name_that_nobody_has(host: FakeHost) -> None:
    assert make_way(host.node, NAME, "dev") is None


def test_a_container_of_ours_that_no_state_knows_is_stopped_and_removed(host: FakeHost) -> None:
    host.set_container(NAME, Labels=OURS)
    assert make_way(host.node, NAME, "dev") == f"spark-a: removed the container {NAME} that an interrupted run left"
    assert host.read()["containers"] == {}
    assert [call[0] for call in host.calls("docker")] == ["container", "stop", "rm"]


@pytest.mark.parametrize("labels", [None, {}, {"spark-vllm.stack": "prod"}, {"other": "dev"}])
def test_a_foreign_container_is_left_and_told_with_its_image_and_age(
    labels: dict[str, str] | None, host: FakeHost
) -> None:
    host.set_container(NAME, Labels=labels, Image="ollama/ollama:latest")
    with pytest.raises(ForeignObjectError) as failed:
        make_way(host.node, NAME, "dev")
    assert failed.value.line == (
        f"spark-a: expected no container named {NAME}, found one that is not ours "
        "(image ollama/ollama:latest, created 2026-01-01T00:00:00)"
    )
    assert NAME in host.read()["containers"]


@pytest.mark.parametrize("stderr", ["Cannot connect to the Docker daemon", "permission denied", ""])
def test_a_daemon_that_could_not_be_asked_is_not_a_free_name(stderr: str) -> None:
    with pytest.raises(CommandError):
        make_way(ScriptedTransport("spark-a", lambda _: Result(1, "", stderr)), NAME, "dev")


def test_stopping_keeps_the_container(host: FakeHost) -> None:
    host.set_container(NAME, Labels=OURS)
    stop_container(host.node, NAME)
    assert host.read()["containers"][NAME]["Running"] is False


def test_stopping_what_is_not_there_is_fine(host: FakeHost) -> None:
    stop_container(host.node, NAME)
    assert host.read()["containers"] == {}


def test_removing_takes_only_what_carries_the_stack_s_label(host: FakeHost) -> None:
    host.set_container(NAME, Labels=OURS)
    host.set_container("theirs", Labels={"spark-vllm.stack": "prod"})
    host.set_container("foreign")
    host.change(volumes={"ours": OURS, "theirs": {"spark-vllm.stack": "prod"}, "foreign": {}})
    for _ in range(2):
        remove_labelled(host.node, "dev")
        assert sorted(host.read()["containers"]) == ["foreign", "theirs"]
        assert sorted(host.read()["volumes"]) == ["foreign", "theirs"]


def test_a_daemon_that_does_not_answer_is_not_a_node_without_containers(host: FakeHost) -> None:
    host.change(docker_error="Cannot connect to the Docker daemon")
    with pytest.raises(CommandError):
        remove_labelled(host.node, "dev")
    with pytest.raises(CommandError):
        stop_container(host.node, NAME)


def serving_elsewhere(serves: bool) -> ScriptedTransport:
    """A node with a running container of ours whose supervisor says whether it serves."""

    def answer(cmd: Command) -> Result | str:
        words = cmd.argv
        if words[:3] == ("docker", "container", "inspect"):
            config = {"Labels": OURS, "Image": "x", "Entrypoint": ["python3", "/opt/spark-vllm/runtime.pyz"]}
            return json.dumps([{"Config": config, "State": {"Running": True}, "Created": "2026-01-01T00:00:00Z"}])
        if words[:2] == ("docker", "exec"):
            assert words[2:] == (NAME, "python3", "/opt/spark-vllm/runtime.pyz", "status")
            return Result(0 if serves else 1, "{}", "")
        return ""

    return ScriptedTransport("spark-a", answer)


def test_a_container_of_this_stack_that_serves_without_this_state_is_left_alone() -> None:
    node = serving_elsewhere(True)
    with pytest.raises(ForeignObjectError) as failed:
        make_way(node, NAME, "dev")
    assert "one of a stack dev that serves and is not in this state" in failed.value.line
    assert not any("rm" in word for cmd in node.asked for word in cmd.argv)


def test_a_container_of_this_stack_that_does_not_serve_makes_way() -> None:
    assert make_way(serving_elsewhere(False), NAME, "dev") is not None


def test_a_restart_waits_as_long_as_the_supervisor_may_need() -> None:
    node = ScriptedTransport("spark-a", lambda _: "")
    restart_container(node, NAME)
    [cmd] = node.asked
    assert cmd.argv == ("docker", "restart", "-t", str(STOP_TIMEOUT_S), NAME)
    assert cmd.timeout_s > STOP_TIMEOUT_S
