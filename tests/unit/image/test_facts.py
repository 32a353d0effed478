"""The image: one and the same on every node, and absent only if the daemon says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_core.errors import CommandError, SparkError, UnreachableError
from spark_core.image import ImageFacts, observe_image, require_parity
from spark_core.transport.base import Command, Result
from tests.fake_host import FakeHost
from tests.scripted_transport import ScriptedTransport

ID = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64
IMAGE = {"image_id": ID, "architecture": "arm64", "layers": ["sha256:1", "sha256:2"]}
FACTS = ImageFacts(ID, "arm64", ("sha256:1", "sha256:2"))
NAME = "registry.example/vllm@sha256:" + "c" * 64


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path / "host")


def test_an_image_that_is_there_is_told_with_its_layers(host: FakeHost) -> None:
    host.change(images={NAME: IMAGE})
    assert observe_image(host.node, NAME) == FACTS
    assert observe_image(host.node, ID) == FACTS


def test_an_image_is_absent_only_if_the_daemon_says_so(host: FakeHost) -> None:
    assert observe_image(host.node, ID) is None


@pytest.mark.parametrize(
    "stderr",
    [
        "Cannot connect to the Docker daemon at unix:///var/run/docker.sock.",
        "permission denied",
        "bash: docker: command not found",
        "",
    ],
)
def test_a_daemon_that_could_not_be_asked_is_not_a_missing_image(stderr: str) -> None:
    with pytest.raises(CommandError) as failed:
        observe_image(ScriptedTransport("spark-a", lambda _: Result(1, "", stderr)), ID)
    assert failed.value.line == f"spark-a (docker): expected an answer about image {ID}, found: {stderr}"


def test_a_silent_node_is_not_a_missing_image() -> None:
    def silent(_: Command) -> Result:
        raise UnreachableError("no answer", node="spark-a", step="login")

    with pytest.raises(UnreachableError):
        observe_image(ScriptedTransport("spark-a", silent), ID)


@pytest.mark.parametrize(
    "other",
    [
        ImageFacts(OTHER, "arm64", ("sha256:1",)),
        ImageFacts(OTHER, "amd64", FACTS.layers),
        ImageFacts(OTHER, "arm64", FACTS.layers[::-1]),
    ],
    ids=["layers", "architecture", "order of layers"],
)
def test_two_nodes_with_different_images_are_refused(other: ImageFacts) -> None:
    with pytest.raises(SparkError) as failed:
        require_parity({"spark-a": FACTS, "spark-b": other})
    assert failed.value.line == (
        f"spark-b (image): expected the image of spark-a ({ID[:19]}, arm64), "
        f"found another one ({OTHER[:19]}, {other.architecture})"
    )


def test_one_image_under_two_ids_is_refused_since_the_nodes_keep_images_differently() -> None:
    with pytest.raises(SparkError) as failed:
        require_parity({"spark-a": FACTS, "spark-b": ImageFacts(OTHER, FACTS.architecture, FACTS.layers)})
    assert failed.value.line == (
        f"spark-b (image): expected the image id of spark-a ({ID}), found the same image as {OTHER}"
    )
    assert "same image store" in failed.value.do


def test_the_same_image_everywhere_is_that_image() -> None:
    assert require_parity({"spark-a": FACTS, "spark-b": FACTS}) == FACTS
