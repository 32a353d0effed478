"""Files are read anew and compared with what was verified; a bit that turned over is found and remembered."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from automation.verify import differences, recorded_weights
from spark_core.transfer.look import contents_of
from spark_core.weights import local_manifest
from tests.local_node import LocalNode

SHARD = "model.safetensors"
KIND = "pulumi-python:dynamic/spark:WeightsCopy"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / SHARD).write_bytes(os.urandom(10_000))
    return folder


def state_of(base: Path, source: str, content: str, **outputs: Any) -> dict[str, Any]:
    nodes = ("spark-a", "spark-b")
    folders = {node: str(base / node / "weights" / "x") for node in nodes}
    roots = {node: str(base / node) for node in nodes}
    known = {"folders": folders, "roots": roots, "source": source, "content": content, "commit": "", "listing": {}}
    return {"deployment": {"resources": [{"type": "x"}, {"type": KIND, "outputs": {**known, **outputs}}]}}


def turn_a_bit(path: Path) -> None:
    """As a bad disk does it: size, times and inode stay."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("from_hub", [False, True])
def test_a_turned_bit_is_named_by_node_and_file_and_seen_by_the_next_cheap_look(
    tmp_path: Path, model: Path, from_hub: bool
) -> None:
    manifest = local_manifest(str(model))
    listing = {name: f"{size}:{digest}" for name, (size, digest) in manifest.files.items()} if from_hub else {}
    state = state_of(tmp_path, f"controller:{model}", manifest.revision, listing=listing, commit="a" * 40)
    recorded = recorded_weights(state)
    assert recorded is not None
    nodes = {name: LocalNode(name) for name in recorded.folders}
    for folder in recorded.folders.values():
        shutil.copytree(model, folder)
    assert differences(nodes, recorded) == {"spark-a": [], "spark-b": []}
    turn_a_bit(Path(recorded.folders["spark-b"]) / SHARD)
    assert differences(nodes, recorded) == {"spark-a": [], "spark-b": [f"{SHARD}: content differs"]}
    seen = contents_of(nodes["spark-b"], recorded.folders["spark-b"], f"{recorded.roots['spark-b']}/cache/hashes.json")
    assert seen is not None
    assert seen.revision != manifest.revision


def test_where_all_nodes_are_wrong_the_controller_tells_what_is(tmp_path: Path, model: Path) -> None:
    manifest = local_manifest(str(model))
    recorded = recorded_weights(state_of(tmp_path, f"controller:{model}", manifest.revision))
    assert recorded is not None
    nodes = {name: LocalNode(name) for name in recorded.folders}
    for folder in recorded.folders.values():
        shutil.copytree(model, folder)
        (Path(folder) / SHARD).write_bytes(b"short")
    assert set(map(tuple, differences(nodes, recorded).values())) == {(f"{SHARD}: size differs",)}
    (model / SHARD).unlink()
    told = differences(nodes, recorded)["spark-a"]
    assert told[0].startswith(f"expected content {manifest.revision[:12]} in ")


def test_a_missing_folder_is_told(tmp_path: Path, model: Path) -> None:
    manifest = local_manifest(str(model))
    recorded = recorded_weights(state_of(tmp_path, f"controller:{model}", manifest.revision))
    assert recorded is not None
    shutil.copytree(model, recorded.folders["spark-a"])
    wrong = differences({name: LocalNode(name) for name in recorded.folders}, recorded)
    assert wrong["spark-a"] == []
    assert wrong["spark-b"][0].startswith("expected the weights in ")


def test_a_state_without_weights_has_none() -> None:
    assert recorded_weights({"deployment": None}) is None
    assert recorded_weights({"deployment": {"resources": [{"type": "pulumi:pulumi:Stack"}]}}) is None
