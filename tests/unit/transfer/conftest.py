"""Three nodes, and a model on the controller."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spark_core.transfer import chain, distribution
from spark_core.transfer.manifest import Manifest
from spark_core.transfer.session import Outcome
from spark_core.weights import local_manifest
from tests.unit.transfer.live_node import Cable, LiveNode

BIG = "model-00001-of-00002.safetensors"
SMALL = "model-00002-of-00002.safetensors"
BIG_BYTES = 10 << 20


@dataclass
class Site:
    """The controller and its nodes.

    Attributes:
        source: Folder of the model on the controller.
        wanted: What is in it.
        nodes: The nodes, the head first.
        told: Lines for the person.
        rounds: How each transfer ended.
    """

    source: Path
    wanted: Manifest
    nodes: list[LiveNode]
    told: list[str] = field(default_factory=list)
    rounds: list[dict[str, Outcome]] = field(default_factory=list)

    def __getitem__(self, letter: str) -> LiveNode:
        return next(node for node in self.nodes if node.node == f"spark-{letter}")

    def up(self, letters: str = "abc", check: Callable[[], None] = lambda: None) -> None:
        """Bring the model to some of the nodes."""
        self.rounds.clear()
        self.told.clear()
        places = [self[letter].place() for letter in letters]
        distribution.distribute(str(self.source), places, self.wanted, self.told.append, check)

    def received(self, letter: str) -> int:
        """Bytes that came to a node in the last run."""
        return sum(outcomes[f"spark-{letter}"].received for outcomes in self.rounds if f"spark-{letter}" in outcomes)

    def whole(self, letters: str = "abc") -> bool:
        """Whether nodes have the very model, and nothing is left beside it."""
        for letter in letters:
            target = self[letter].target
            if contents(target) != contents(self.source) or [path.name for path in target.parent.iterdir()] != [
                target.name
            ]:
                return False
            # A killed program leaves its status behind, until the next one that comes after a minute.
            left = [path.name for path in (self[letter].base / "root" / "cache").iterdir()]
            if [name for name in left if not name.startswith("transfer-")] != ["hashes.json"]:
                return False
        return True


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Three nodes without weights."""
    if sys.platform != "linux":
        pytest.skip("what runs on nodes needs Linux")
    monkeypatch.setenv("HOME", str(tmp_path))
    source = tmp_path / "model"
    (source / "tokenizer").mkdir(parents=True)
    (source / "config.json").write_text("{}")
    (source / "tokenizer" / "vocab with blank.json").write_text('{"a": 1}')
    (source / "empty.txt").touch()
    (source / BIG).write_bytes(os.urandom(BIG_BYTES))
    (source / SMALL).write_bytes(os.urandom(1 << 20))
    nodes = [
        LiveNode(f"spark-{letter}", base=tmp_path / letter, address=f"127.0.0.{number}")
        for number, letter in enumerate("abc", 11)
    ]
    found = Site(source, local_manifest(str(source)), nodes)
    monkeypatch.setattr(chain, "_LAST_WORDS_S", 0.3)
    carry = chain.carry

    def kept(*args: object) -> dict[str, Outcome]:
        found.rounds.append(carry(*args))  # type: ignore[arg-type]
        return found.rounds[-1]

    monkeypatch.setattr(distribution, "carry", kept)
    yield found
    for node in nodes:
        if node.cable is not None:
            node.cable.cut()
        for process in node.streams:
            assert process.poll() is not None, f"a program on {node.node} was left"


@pytest.fixture
def slow(site: Site) -> Site:
    """The same, and spark-a has the weights; the others are reached over slow cables."""
    shutil.copytree(site.source, site["a"].target)
    for letter in "bc":
        site[letter].cable = Cable(bytes_per_s=6e6)
    return site


def is_root() -> bool:
    return os.geteuid() == 0
