"""``ImageCopy`` over gRPC, on nodes whose Docker is a fake with a real layer store."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from providers.image_check import ImageCheckProvider
from providers.image_copy import ImageCopyProvider
from tests.providers.conftest import Deployment
from tests.providers.engine import UNKNOWN, Managed, ProviderError
from tests.unit.image.conftest import FAKE_DOCKER, layer_tar, write_archive

pytestmark = pytest.mark.slow

FABRIC = {"spark-a": "127.0.0.41", "spark-b": "127.0.0.42"}
NAME = "registry.example/vllm:latest"


class Images:
    """The nodes' Docker and an image in a registry that only the first one reaches."""

    def __init__(self, deployment: Deployment, folder: Path) -> None:
        self.deployment, self.folder = deployment, folder
        for host in deployment.ssh.hosts.values():
            program = host.programs / "docker"
            program.write_text(f"#!{sys.executable}\n{FAKE_DOCKER.read_text()}")
            (host.programs / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
            (host.base / "registry").mkdir()
        self.layers = [layer_tar("base", 100_000), layer_tar("top", 50_000)]
        self.image_id = self.publish(self.layers)

    def publish(self, layers: list[bytes]) -> str:
        return write_archive(self.base("spark-a") / "registry" / "registry.example_vllm_latest.tar", layers)

    def base(self, node: str) -> Path:
        return self.deployment.host(node).base

    def there(self, node: str) -> set[str]:
        folder = self.base(node) / "docker-root/image/overlay2/imagedb/content/sha256"
        return {f"sha256:{path.name}" for path in folder.iterdir()} if folder.is_dir() else set()

    def forget(self, node: str) -> None:
        for name in self.there(node):
            (self.base(node) / "docker-root/image/overlay2/imagedb/content/sha256" / name[7:]).unlink()
        (self.base(node) / "docker-root/tags.json").write_text("{}")

    def props(self, **changes: Any) -> dict[str, Any]:
        nodes = ["spark-a", "spark-b"]
        return {
            "stack": "dev",
            "source": NAME,
            "image_id": "",
            "nodes": nodes,
            "roots": {node: self.deployment.root(node) for node in nodes},
            "addresses": FABRIC,
            **changes,
        }


@pytest.fixture
def images(deployment: Deployment, tmp_path: Path) -> Images:
    found = Images(deployment, tmp_path)
    deployment.next_run({"image": {"registry": NAME}})
    return found


def managed(deployment: Deployment) -> Managed:
    return deployment.manage(ImageCopyProvider)


def test_the_life_of_an_image(deployment: Deployment, images: Images) -> None:
    image = managed(deployment)
    image.create(images.props())
    assert image.outputs["found_id"] == images.image_id
    assert len(image.outputs["layers"]) == 2
    assert image.refresh()
    assert image.up(images.props()) == "same"
    images.forget("spark-b")
    assert image.refresh()
    assert image.outputs["nodes"] == ["spark-a"]
    assert image.up(images.props()) == "update"
    assert images.image_id in images.there("spark-b")
    image.delete()
    assert images.image_id in images.there("spark-a")
    said = [line for line in deployment.servicer.said().splitlines() if line.startswith("image: ")]
    assert said[0] == f"image: spark-a pulls {NAME}"
    assert said[1] == "image: 2 of 2 layers, 0.00 GB, from spark-a over the fabric to spark-b"
    assert said[-1].startswith("image: 0.00 GB came to spark-b and are in Docker")


def test_a_floating_tag_stays_what_it_was_until_its_source_changes(deployment: Deployment, images: Images) -> None:
    image = managed(deployment)
    image.create(images.props())
    newer = images.publish([*images.layers, layer_tar("newer", 1000)])
    images.forget("spark-b")
    assert image.refresh()
    assert image.up(images.props()) == "update"
    assert image.outputs["found_id"] == images.image_id
    for node in ("spark-a", "spark-b"):
        images.forget(node)
    assert image.up(images.props(source="registry.example/vllm:latest ")) == "update"
    assert image.outputs["found_id"] == newer


def test_two_nodes_that_have_different_images_under_the_name_are_refused(
    deployment: Deployment, images: Images, tmp_path: Path
) -> None:
    image = managed(deployment)
    image.create(images.props())
    other = write_archive(tmp_path / "other.tar", [layer_tar("other", 1000)])
    content = images.base("spark-b") / "docker-root/image/overlay2/imagedb/content/sha256"
    with tarfile.open(tmp_path / "other.tar") as tar:
        member = tar.extractfile(f"{other[7:]}.json")
        assert member is not None
        (content / other[7:]).write_bytes(member.read())
    (images.base("spark-b") / "docker-root/tags.json").write_text(f'{{"{NAME}": "{other}"}}')
    with pytest.raises(ProviderError) as failed:
        managed(deployment).create(images.props())
    assert "spark-b (image): expected the image of spark-a" in str(failed.value)
    assert images.image_id[:19] in str(failed.value)
    assert other[:19] in str(failed.value)


def test_a_daemon_that_does_not_answer_is_no_missing_image(deployment: Deployment, images: Images) -> None:
    image = managed(deployment)
    image.create(images.props())
    (images.base("spark-b") / "docker-error").write_text("Cannot connect to the Docker daemon")
    with pytest.raises(ProviderError) as failed:
        image.refresh()
    assert "spark-b (docker): expected an answer about image" in str(failed.value)
    assert image.outputs["nodes"] == ["spark-a", "spark-b"]


def test_a_registry_that_does_not_know_the_name_is_told_with_its_setting(
    deployment: Deployment, images: Images
) -> None:
    (images.base("spark-a") / "registry" / "registry.example_vllm_latest.tar").unlink()
    with pytest.raises(ProviderError) as failed:
        managed(deployment).create(images.props())
    assert "spark-a (image.registry): expected the daemon to pull" in str(failed.value)


def test_values_that_are_not_known_yet_pass_check_and_count_as_a_change(deployment: Deployment, images: Images) -> None:
    image = managed(deployment)
    assert image.check(images.props(image_id=UNKNOWN))["image_id"] == UNKNOWN


def check_props(images: Images, **changes: Any) -> dict[str, Any]:
    nodes = ("spark-a", "spark-b")
    interface = {"netdev": "enp1s0f1np1", "hca": None}
    return {
        "stack": "dev",
        "group": "main",
        "image_id": images.image_id,
        "question": "first",
        "architectures": ["Known"],
        "interfaces": {
            node: {"fabric": [interface | {"address": f"192.168.200.{12 + number}/24"}]}
            for number, node in enumerate(nodes)
        },
        "roots": {node: images.deployment.root(node) for node in nodes},
        "runtime": "hash/runtime.pyz",
        "patches": [],
        **changes,
    }


def looked(images: Images, node: str) -> int:
    """How often a container looked into the image on a node."""
    calls = (images.base(node) / "docker-calls").read_text().splitlines()
    return len([line for line in calls if line.startswith("run ") and "-check " in line])


def test_an_image_that_lacks_what_is_needed_ends_up_before_anything_starts(
    deployment: Deployment, images: Images
) -> None:
    managed(deployment).create(images.props())
    with pytest.raises(ProviderError) as failed:
        deployment.manage(ImageCheckProvider).create(check_props(images))
    text = str(failed.value)
    assert "spark-vllm: spark-a, spark-b (image): expected vLLM in image" in text
    assert "[vllm-missing]" in text
    assert "[ray-missing]" in text


def test_a_look_into_the_image_is_made_once_for_each_question(deployment: Deployment, images: Images) -> None:
    managed(deployment).create(images.props())
    severities = {"vllm-missing": "warn", "ray-missing": "ignore"}
    deployment.next_run({"severities": severities})
    check = deployment.manage(ImageCheckProvider)
    check.create(check_props(images))
    assert check.outputs["versions"]["python"]
    assert [line for line in check.outputs["warnings"] if "[vllm-missing]" in line]
    assert check.refresh()
    assert check.up(check_props(images)) == "same"
    assert looked(images, "spark-a") == looked(images, "spark-b") == 1
    again = deployment.manage(ImageCheckProvider)
    again.create(check_props(images))  # as after a lost state: the nodes remember
    assert looked(images, "spark-a") == 1
    assert check.up(check_props(images, question="second", architectures=["Other"])) == "update"
    assert looked(images, "spark-a") == 2
    check.delete()
