"""Three nodes whose Docker is a fake with a real layer store, and archives of images."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spark_core.image import Bringing, ImageFacts, ImageNode, bring_image, spread
from spark_core.settings import ImageSettings
from spark_core.transfer import chain
from spark_core.transfer.session import Outcome
from spark_core.transport.base import command
from tests.unit.transfer.live_node import LiveNode

FAKE_DOCKER = Path(__file__).resolve().parents[2] / "fixtures" / "fake_docker.py"
MIB = 1 << 20


def layer_tar(seed: str, size: int) -> bytes:
    """The tar of a layer: a large file, small ones, a link and an empty one."""
    out, content = io.BytesIO(), random.Random(seed).randbytes(max(size, 2000))  # noqa: S311
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number in range(5):
            member = tarfile.TarInfo(f"./{seed}/small {number}.py")
            member.size = 1000 + number
            tar.addfile(member, io.BytesIO(content[: member.size]))
        member = tarfile.TarInfo(f"./{seed}/large.bin")
        member.size = size
        tar.addfile(member, io.BytesIO(content[:size]))
        tar.addfile(tarfile.TarInfo(f"./{seed}/empty"))
    return out.getvalue()


def write_archive(
    path: Path, layers: list[bytes], *, architecture: str = "amd64", inside: dict[str, object] | None = None
) -> str:
    """Write a docker-save archive; the id of its image."""
    ids = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    config = json.dumps(
        {
            "architecture": architecture,
            "os": "linux",
            "config": inside or {},
            "rootfs": {"type": "layers", "diff_ids": ids},
        }
    ).encode()
    name = hashlib.sha256(config).hexdigest()
    files = {f"{number}/layer.tar": layer for number, layer in enumerate(layers)}
    manifest = [{"Config": f"{name}.json", "RepoTags": [f"test:{name[:8]}"], "Layers": list(files)}]
    with tarfile.open(path, "w") as tar:
        for member_name, content in {
            **files,
            f"{name}.json": config,
            "manifest.json": json.dumps(manifest).encode(),
        }.items():
            member = tarfile.TarInfo(member_name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return f"sha256:{name}"


@dataclass
class Site:
    """The nodes, and an image on the controller.

    Attributes:
        folder: Folder of everything.
        layers: The image's layers.
        archive: Its archive.
        image_id: Its id.
        told: Lines for the person of the last run.
        rounds: How each transfer of the last run ended.
    """

    folder: Path
    nodes: list[LiveNode]
    layers: list[bytes]
    archive: Path
    image_id: str
    told: list[str] = field(default_factory=list)
    rounds: list[dict[str, Outcome]] = field(default_factory=list)

    def __getitem__(self, letter: str) -> LiveNode:
        return next(node for node in self.nodes if node.node == f"spark-{letter}")

    def node(self, letter: str) -> ImageNode:
        node = self[letter]
        return ImageNode(node, str(node.base / "root"), node.address or None, self.management.get(letter))

    management: dict[str, str] = field(default_factory=dict)

    def bring(
        self,
        letters: str = "abc",
        *,
        settings: ImageSettings | None = None,
        image_id: str | None = None,
        recorded: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> ImageFacts:
        """Bring the image to some nodes; by default that of the archive, from a node that has it."""
        self.told.clear()
        self.rounds.clear()
        return bring_image(
            Bringing(
                settings=settings or ImageSettings(local_id=self.image_id),
                nodes=[self.node(letter) for letter in letters],
                project=self.folder,
                image_id=self.image_id if image_id is None else image_id,
                recorded=recorded,
                report=self.told.append,
                check=check,
            )
        )

    def load(self, letter: str, archive: Path | None = None) -> None:
        """Let a node have an image."""
        result = self[letter].run(command("docker", "load", stdin=(archive or self.archive).read_bytes()))
        assert result.ok, result.stderr

    def images(self, letter: str) -> set[str]:
        folder = self[letter].base / "docker-root/image/overlay2/imagedb/content/sha256"
        return {f"sha256:{path.name}" for path in folder.iterdir()} if folder.is_dir() else set()

    def received(self, letter: str) -> int:
        return sum(found[f"spark-{letter}"].received for found in self.rounds if f"spark-{letter}" in found)

    def is_clean(self, letters: str = "abc") -> bool:
        """Whether nothing is left of a transfer, and no image but the wanted one."""
        for letter in letters:
            folder = self[letter].base / "root" / "images"
            if (folder.is_dir() and list(folder.iterdir())) or self.images(letter) != {self.image_id}:
                return False
        return True


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Three nodes without an image."""
    if sys.platform != "linux":
        pytest.skip("what runs on nodes needs Linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    nodes = []
    for number, letter in enumerate("abc", 21):
        base = tmp_path / letter
        node = LiveNode(f"spark-{letter}", programs=base / "programs", base=base, address=f"127.0.0.{number}")
        node.install("docker", f"#!{sys.executable}\n{FAKE_DOCKER.read_text()}")
        node.install("python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        nodes.append(node)
    layers = [layer_tar("base", 2 * MIB), layer_tar("middle", 6 * MIB), layer_tar("top", MIB)]
    archive = tmp_path / "image.tar"
    found = Site(tmp_path, nodes, layers, archive, write_archive(archive, layers))
    monkeypatch.setattr(chain, "_LAST_WORDS_S", 0.3)
    carry = chain.carry

    def kept(*args: object) -> dict[str, Outcome]:
        found.rounds.append(carry(*args))  # type: ignore[arg-type]
        return found.rounds[-1]

    monkeypatch.setattr(spread, "carry", kept)
    yield found
    for node in nodes:
        if node.cable is not None:
            node.cable.cut()
        for process in node.streams:
            assert process.poll() is not None, f"a program on {node.node} was left"


def is_root() -> bool:
    return os.geteuid() == 0
