"""A hub with a model, and nodes that can start the hub's client in what stands for a container."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lab.hub import Hub
from spark_core.hub.ask import ask_hub
from spark_core.hub.bring import bring_hub_model
from spark_core.hub.download import HubOrigin
from spark_core.hub.listing import Listing
from spark_core.settings import HubSettings, ModelSettings
from spark_core.transfer import chain
from spark_core.transfer.look import Place
from spark_core.transfer.manifest import Manifest
from tests.unit.transfer.live_node import LiveNode

CLIENT = Path(__file__).resolve().parents[2] / "fixtures" / "hub-client"
TOKEN = "hf_a_marker"
IMAGE = "sha256:" + "1" * 64
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SHARD_BYTES = 3 << 20

DOCKER = """#!/bin/sh
echo "$*" | head -c 2000 >> '{base}/docker.log'
exec {python} '{client}/container.py' '{client}' "$@"
"""


@dataclass
class HubSite:
    """A hub and nodes.

    Attributes:
        told: Lines for the person.
    """

    hub: Hub
    nodes: dict[str, LiveNode]
    model: ModelSettings
    told: list[str] = field(default_factory=list)

    @property
    def settings(self) -> HubSettings:
        return HubSettings(endpoint=self.hub.endpoint)

    @property
    def folder(self) -> Path:
        """The model's files on the hub."""
        return self.hub.folder / "org" / "model" / "main"

    def listing(self, node: str = "spark-a") -> Listing:
        return ask_hub(self.nodes[node], self.model, self.settings, TOKEN).listing

    def place(self, node: str, listing: Listing) -> Place:
        return self.nodes[node].place(f"weights/{listing.commit}")

    def bring(
        self,
        listing: Listing,
        *places: Place,
        check: Callable[[], None] = lambda: None,
        **changes: Any,
    ) -> Manifest:
        self.told.clear()
        origin = HubOrigin(self.model, self.settings, listing.commit, IMAGE, "python3", "dev", TOKEN, **changes)
        return bring_hub_model(origin, listing, places, self.told.append, check)


def contents(folder: str | Path) -> dict[str, bytes]:
    root = Path(folder)
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubSite]:
    """A hub with one model, and three nodes without it."""
    if sys.platform != "linux":
        pytest.skip("what runs on nodes needs Linux")
    monkeypatch.setattr(chain, "_LAST_WORDS_S", 0.3)
    folder = tmp_path / "hub" / "org" / "model" / "main"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "tiny"}')
    (folder / "README.md").write_text("no part of what serves")
    (folder / "tokenizer" / "vocab.json").write_text("{}")
    for name in SHARDS:
        (folder / name).write_bytes(os.urandom(SHARD_BYTES))
    index = {"weight_map": {f"w{number}": name for number, name in enumerate(SHARDS)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    nodes = {}
    for number, name in enumerate(("spark-a", "spark-b", "spark-c"), 11):
        base = tmp_path / name
        node = LiveNode(name, base=base, address=f"127.0.0.{number}", programs=base / "programs")
        program = DOCKER.format(base=base, client=CLIENT, python=sys.executable)
        node.install("docker", program)
        nodes[name] = node
    with Hub(tmp_path / "hub", token=TOKEN) as hub:
        yield HubSite(hub, nodes, ModelSettings(source="hf://org/model@main", served_name="model"))
    for node in nodes.values():
        for process in node.streams:
            assert process.poll() is not None, f"a program on {node.node} was left"
