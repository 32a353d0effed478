"""Two nodes whose docker runs probes on this machine."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import spark_runtime
from spark_core.group import GroupFiles, RankContainer, plan_group
from spark_core.proof import collective
from spark_core.settings import Settings, read_settings
from tests.config_cases import apply_change, load_base
from tests.local_node import LocalNode

IMAGE = "sha256:" + "a" * 64
NODES = ("spark-a", "spark-b")
FILES = GroupFiles("hash/runtime.pyz", (), dict.fromkeys(NODES, "/"))
FAKES = Path(__file__).parents[1] / "runtime" / "fakes" / "probe"
DOCKER = Path(__file__).with_name("fake_docker.py")


@dataclass(frozen=True)
class Pair:
    """Two nodes, and what they serve."""

    settings: Settings
    base: Path
    nodes: dict[str, LocalNode]

    @property
    def containers(self) -> tuple[RankContainer, ...]:
        return plan_group(self.settings, "main", "dev", IMAGE, FILES).containers

    def with_settings(self, change: Mapping[str, Any]) -> Pair:
        root = {"node_root": self.settings.node_root, "hardware": "cpu"}
        return replace(self, settings=read_settings(apply_change(load_base(), {**root, **change})))

    def put(self, node: str, name: str, text: str) -> None:
        (self.base / node / name).write_text(text)

    def ran(self) -> list[str]:
        """The nodes on which a container was started."""
        return [node for node in NODES if (self.base / node / "runs").exists()]

    def left(self) -> list[str]:
        return [path.name for path in self.base.glob("*/containers/*")]


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setenv("FAKE_LIBRARY", str(FAKES))
    monkeypatch.setenv("FAKE_MEETING", str(tmp_path / "meeting"))
    monkeypatch.setattr(collective, "_LOOK_EVERY_S", 0.05)
    (tmp_path / "meeting").mkdir()
    root = tmp_path / "root"
    put_bundle(root / "stacks/dev/files/hash/runtime.pyz")
    nodes = {name: node_with_docker(tmp_path, name) for name in NODES}
    bare = Pair(read_settings(load_base() | {"node_root": str(root)}), tmp_path, nodes)
    return bare.with_settings({})


def put_bundle(path: Path) -> None:
    """The supervisor as it lies on a node."""
    source = Path(spark_runtime.__file__).parent
    shutil.copytree(source, path / "spark_runtime", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(source / "entry" / "__main__.py", path / "__main__.py")


def node_with_docker(base: Path, name: str) -> LocalNode:
    node = LocalNode(name, programs=base / name / "programs")
    node.install("docker", f"#!{sys.executable}\n{DOCKER.read_text()}")
    return node
