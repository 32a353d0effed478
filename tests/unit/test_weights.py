"""Weights: whole, the same everywhere, copied once, never read half."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_core import weights
from spark_core.errors import ObservationError, SettingsError, SparkError, UnreachableError
from spark_core.transfer.manifest import Manifest
from spark_core.transport.base import Command, Result
from spark_core.weights import local_manifest, missing_shards, observe_weights, verify_in_place
from tests.local_node import LocalNode
from tests.scripted_transport import ScriptedTransport

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
NAMES = st.sampled_from(["config.json", "model.safetensors", "a/b/tokenizer.json", "with blank.txt", "-dash", "é.txt"])
FOLDERS = st.dictionaries(NAMES, st.binary(max_size=40), max_size=5)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of who runs this, where hashes of the controller are kept."""
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setenv("HOME", str(path))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole model of two shards with an index."""
    index = {"weight_map": {"layer.0": SHARDS[0], "layer.1": SHARDS[1], "layer.2": SHARDS[1]}}
    return write(
        tmp_path / "model",
        {
            "config.json": b"{}",
            SHARDS[0]: b"first" * 100,
            SHARDS[1]: b"second" * 100,
            "model.safetensors.index.json": json.dumps(index).encode(),
        },
    )


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Our folder on a node."""
    return str(tmp_path / "node" / "root")


MANIFESTS = st.dictionaries(
    st.text(max_size=8), st.tuples(st.integers(0, 9), st.sampled_from(["aa", "bb"])), max_size=5
)


@given(files=MANIFESTS)
def test_a_manifest_does_not_differ_from_itself(files: dict[str, tuple[int, str]]) -> None:
    again = Manifest(dict(reversed(list(files.items()))))
    assert Manifest(files).differences(again) == []
    assert Manifest(files).revision == again.revision


@given(one=MANIFESTS, other=MANIFESTS)
def test_two_manifests_differ_if_and_only_if_their_revisions_do(
    one: dict[str, tuple[int, str]], other: dict[str, tuple[int, str]]
) -> None:
    assert bool(Manifest(one).differences(Manifest(other))) == (Manifest(one).revision != Manifest(other).revision)


def test_each_kind_of_difference_has_its_words() -> None:
    one = Manifest({"a": (1, "x"), "b": (1, "x"), "c": (1, "x")})
    assert one.differences(Manifest({"b": (2, "x"), "c": (1, "y"), "d": (1, "x")})) == [
        "a: missing",
        "b: size differs",
        "c: content differs",
        "d: not part of it",
    ]


@pytest.mark.parametrize(
    ("index", "files", "missing"),
    [
        (None, {}, ["config.json", "*.safetensors"]),
        (None, {"config.json": (1, "")}, ["*.safetensors"]),
        (None, {"config.json": (1, ""), "model.gguf": (1, "")}, []),
        ({"weight_map": {"l": "a.safetensors"}}, {"config.json": (1, "")}, ["a.safetensors"]),
        (
            {"weight_map": {"l": "a.safetensors"}},
            {"config.json": (1, ""), "a.safetensors": (0, "")},
            ["a.safetensors"],
        ),
        (
            {"weight_map": {"l": "a.safetensors"}},
            {"config.json": (1, ""), "a.safetensors": (-1, "")},
            ["a.safetensors"],
        ),
        ({"weight_map": {"l": "a.safetensors"}}, {"config.json": (1, ""), "a.safetensors": (5, "")}, []),
        ({}, {"config.json": (1, "")}, []),
    ],
    ids=[
        "nothing",
        "no weights",
        "one file",
        "no shard",
        "empty shard",
        "broken link",
        "whole",
        "an index of nothing",
    ],
)
def test_shards_that_the_index_names_must_be_there(
    index: dict[str, object] | None, files: dict[str, tuple[int, str]], missing: list[str]
) -> None:
    assert missing_shards(None if index is None else json.dumps(index), Manifest(files)) == missing


def test_a_directory_that_is_not_there_is_a_setting_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as failed:
        local_manifest(str(tmp_path / "none"))
    assert failed.value.violations == (f"model.source: found no directory {tmp_path}/none on the controller",)


def test_a_broken_link_of_the_controller_is_told(model: Path) -> None:
    (model / "vocab.json").symlink_to("/nonexistent")
    with pytest.raises(SettingsError) as failed:
        local_manifest(str(model))
    assert failed.value.violations == (f"model.source: found vocab.json in {model}, a link that leads nowhere",)


def test_a_missing_shard_of_the_controller_is_told(model: Path) -> None:
    (model / SHARDS[1]).unlink()
    with pytest.raises(SettingsError) as failed:
        local_manifest(str(model))
    assert failed.value.violations == (f"model.source: found no {SHARDS[1]} in {model}, which its index names",)


def test_links_count_as_what_they_lead_to(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(model, cache / "blobs")
    (cache / "snapshot").mkdir()
    for path in (cache / "blobs").iterdir():
        (cache / "snapshot" / path.name).symlink_to(path)
    assert local_manifest(str(cache / "snapshot")) == local_manifest(str(model))
    assert observe_weights(LocalNode(), str(cache / "snapshot"), str(tmp_path)) == local_manifest(str(model))


@settings(max_examples=5)
@given(files=FOLDERS)
def test_node_and_controller_give_a_folder_the_same_manifest(
    files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write(tmp_path_factory.mktemp("same") / "folder", files | {"config.json": b"{}", "w.bin": b"w"})
    assert observe_weights(LocalNode(), str(folder), str(folder.parent)) == local_manifest(str(folder))


def test_no_folder_is_none_and_not_an_empty_one(root: str, tmp_path: Path) -> None:
    assert observe_weights(LocalNode(), str(tmp_path / "none"), root) is None
    (tmp_path / "empty").mkdir()
    assert observe_weights(LocalNode(), str(tmp_path / "empty"), root) == Manifest({})


def test_a_silent_node_is_not_a_node_without_weights(root: str) -> None:
    def silent(_: Command) -> Result:
        raise UnreachableError("no answer", node="spark-a", step="login")

    with pytest.raises(UnreachableError):
        observe_weights(ScriptedTransport("spark-a", silent), "/x", root)


@pytest.mark.parametrize("answer", ["", "rubbish", "{}", '{"files": 3}', '{"files": {"a": [1]}}', "[]"])
def test_an_answer_that_is_no_list_of_files_is_not_understood(answer: str) -> None:
    with pytest.raises(ObservationError):
        observe_weights(ScriptedTransport("spark-a", lambda _: answer), "/x", "/y")


def test_a_file_changed_to_the_same_size_is_seen_in_spite_of_the_cache(model: Path, root: str) -> None:
    before = observe_weights(LocalNode(), str(model), root)
    status = (model / SHARDS[0]).stat()
    (model / SHARDS[0]).write_bytes(b"FIRST" * 100)
    os.utime(model / SHARDS[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    after = observe_weights(LocalNode(), str(model), root)
    assert before is not None
    assert after is not None
    assert before.differences(after) == [f"{SHARDS[0]}: content differs"]


def test_unchanged_files_are_not_read_again(model: Path, root: str) -> None:
    first = observe_weights(LocalNode(), str(model), root)
    cache = Path(root) / "cache" / "hashes.json"
    known = json.loads(cache.read_text())
    known[str(model / SHARDS[0])][1] = "remembered"
    cache.write_text(json.dumps(known))
    second = observe_weights(LocalNode(), str(model), root)
    assert first is not None
    assert second is not None
    assert second.files[SHARDS[0]] == (500, "remembered")
    assert {**second.files, SHARDS[0]: first.files[SHARDS[0]]} == first.files


@pytest.mark.parametrize("text", ["", "{", "null", "[]", '{"x": 1}'])
def test_a_cache_that_was_cut_is_made_anew(text: str, model: Path, root: str) -> None:
    cache = Path(root) / "cache" / "hashes.json"
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    assert observe_weights(LocalNode(), str(model), root) == local_manifest(str(model))


def test_the_controller_does_not_read_unchanged_files_again(
    model: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = local_manifest(str(model))
    read: list[str] = []
    original = weights._sha256
    monkeypatch.setattr(weights, "_sha256", lambda path: read.append(path.name) or original(path))  # type: ignore[func-returns-value]
    assert local_manifest(str(model)) == first
    assert read == []
    status = (model / SHARDS[0]).stat()
    (model / SHARDS[0]).write_bytes(b"FIRST" * 100)
    os.utime(model / SHARDS[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert first.differences(local_manifest(str(model))) == [f"{SHARDS[0]}: content differs"]
    assert read == [SHARDS[0]]
    assert [path.name for path in (home / ".cache/spark-vllm").iterdir()] == ["hashes.json"]


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "\xff", '{"x": 1}', "bad entries"])
def test_a_bad_cache_of_the_controller_is_made_anew(text: str, model: Path, home: Path) -> None:
    cache = home / ".cache/spark-vllm/hashes.json"
    cache.parent.mkdir(parents=True)
    if text == "bad entries":
        text = json.dumps({str(path): [[0], 3] for path in model.iterdir()})
    cache.write_text(text, encoding="latin-1")
    first = local_manifest(str(model))
    cache.unlink()
    assert local_manifest(str(model)) == first
    assert set(json.loads(cache.read_text())) == {str(path) for path in model.iterdir()}


def test_a_home_that_takes_no_cache_changes_nothing(model: Path, home: Path) -> None:
    (home / ".cache").write_text("no folder")
    assert local_manifest(str(model)) == local_manifest(str(model))
    assert (home / ".cache").read_text() == "no folder"


def test_a_file_of_the_controller_that_cannot_be_read_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(weights, "_sha256", denied)
    with pytest.raises(SettingsError) as failed:
        local_manifest(str(model))
    assert failed.value.violations == (
        f"model.source: expected to read config.json in {model}, found: Permission denied",
    )


def two_nodes(*folders: Path) -> tuple[dict[str, LocalNode], dict[str, str]]:
    """Nodes that share this machine: which folder each sees is decided by a link of the same name."""
    names = ["spark-a", "spark-b"][: len(folders)]
    return {name: LocalNode(name) for name in names}, {name: str(folders[0].parent / f"root-{name}") for name in names}


def test_a_folder_used_in_place_is_verified_and_not_changed(model: Path) -> None:
    nodes, roots = two_nodes(model, model)
    before = {path: path.stat().st_ctime_ns for path in model.iterdir()}
    assert verify_in_place(nodes, str(model), roots) == local_manifest(str(model))
    assert {path: path.stat().st_ctime_ns for path in model.iterdir()} == before


def test_a_node_without_the_folder_is_named(tmp_path: Path) -> None:
    nodes, roots = two_nodes(tmp_path / "none")
    with pytest.raises(SparkError) as failed:
        verify_in_place(nodes, str(tmp_path / "none"), roots)
    assert str(failed.value) == (
        f"spark-a (model.source): expected the weights in {tmp_path}/none, found no such directory\n"
        "  do: put the model there on every node"
    )


@pytest.mark.parametrize("broken", ["missing", "empty", "link"])
def test_a_download_that_is_not_whole_is_told_with_its_shard(broken: str, model: Path) -> None:
    (model / SHARDS[1]).unlink()
    if broken == "empty":
        (model / SHARDS[1]).touch()
    if broken == "link":
        (model / SHARDS[1]).symlink_to("/nonexistent")
    nodes, roots = two_nodes(model)
    with pytest.raises(SparkError) as failed:
        verify_in_place(nodes, str(model), roots)
    assert failed.value.line == f"spark-a (model.source): expected {SHARDS[1]} in {model}, found none"


def test_two_nodes_with_different_files_are_told_apart(model: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    (other / "config.json").write_bytes(b"[]")

    class OtherNode(LocalNode):
        def run(self, cmd: Command) -> Result:
            words = tuple(word.replace(str(model), str(other)) for word in cmd.argv)
            stdin = cmd.stdin.replace(str(model).encode(), str(other).encode())
            return super().run(Command(words, cmd.sudo, stdin, cmd.timeout_s))

    nodes = {"spark-a": LocalNode("spark-a"), "spark-b": OtherNode("spark-b")}
    with pytest.raises(SparkError) as failed:
        verify_in_place(nodes, str(model), dict.fromkeys(nodes, str(tmp_path)))
    assert failed.value.line == (
        "spark-b (model.source): expected the same weights as on spark-a, found config.json: content differs"
    )


def test_an_index_that_cannot_be_read_is_not_no_index(model: Path, tmp_path: Path) -> None:
    nodes, roots = two_nodes(model)
    nodes["spark-a"].programs = tmp_path / "programs"
    nodes["spark-a"].install("cat", '#!/bin/sh\necho "cat: Input/output error" >&2; exit 1\n')
    with pytest.raises(SparkError) as failed:
        verify_in_place(nodes, str(model), roots)
    assert failed.value.line == (
        f"spark-a (model.source): expected to read model.safetensors.index.json in {model}: "
        "expected exit status 0, found 1 (cat: Input/output error)"
    )


def test_a_model_without_an_index_is_verified_without_one(model: Path) -> None:
    (model / "model.safetensors.index.json").unlink()
    nodes, roots = two_nodes(model)
    assert verify_in_place(nodes, str(model), roots) == local_manifest(str(model))


def test_the_nodes_hash_at_the_same_time_and_all_their_faults_are_told(model: Path) -> None:
    together = threading.Barrier(2, timeout=20)

    def silent(node: str) -> ScriptedTransport:
        def answer(_: Command) -> Result:
            together.wait()
            raise UnreachableError(f"no answer of {node}", node=node, step="login")

        return ScriptedTransport(node, answer)

    with pytest.raises(SparkError) as failed:
        verify_in_place(
            {"spark-a": silent("spark-a"), "spark-b": silent("spark-b")}, str(model), {"spark-a": "/r", "spark-b": "/r"}
        )
    assert "no answer of spark-a" in failed.value.line
    assert any("no answer of spark-b" in line for line in failed.value.evidence)


def test_verifying_on_no_node_is_refused() -> None:
    with pytest.raises(SparkError):
        verify_in_place({}, "/x", {})
