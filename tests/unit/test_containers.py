"""Containers: ours are found by their label; a foreign one is never touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_core.containers import make_way, remove_labelled, stop_container
from spark_core.errors import CommandError, ForeignObjectError
from spark_core.transport.base import Result
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
