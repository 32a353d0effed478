"""The files below the stack's folder: told by their content, removed when no container has them any more."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from spark_core.errors import CommandError, ObservationError
from spark_core.journal import StackFolder
from spark_core.node_files import observe_files, parse_hashes, prune_files
from tests.local_node import LocalNode


def test_files_are_told_by_their_content_and_absent_ones_too(tmp_path: Path) -> None:
    there = tmp_path / "a file with blanks"
    there.write_bytes(b"content")
    found = observe_files(LocalNode(), [str(there), str(tmp_path / "none"), str(tmp_path)])
    assert found == {
        str(there): hashlib.sha256(b"content").hexdigest(),
        str(tmp_path / "none"): "absent",
        str(tmp_path): "absent",
    }


def test_an_answer_without_a_file_is_not_absent() -> None:
    with pytest.raises(ObservationError) as failed:
        parse_hashes("spark-a", {"hash 0": "absent"}, ["/a", "/b"])
    assert failed.value.line == "spark-a: expected the hash of /b, found an answer without it"


def test_without_files_the_node_is_not_asked() -> None:
    node = LocalNode()
    assert observe_files(node, []) == {}
    assert node.asked == []


def test_files_no_longer_wanted_go_unless_a_container_has_them_mounted(tmp_path: Path) -> None:
    folder = StackFolder(str(tmp_path / "root"), "dev")
    for name in ("wanted", "mounted", "stale"):
        (Path(folder.files) / name).mkdir(parents=True)
        (Path(folder.files) / name / "runtime.pyz").write_text(name)
    node = LocalNode(programs=tmp_path / "bin")
    node.install("docker", f'#!/bin/sh\n[ "$1" = ps ] && echo c1 || echo "{folder.files}/mounted/runtime.pyz /etc "\n')
    assert prune_files(node, folder, [f"{folder.files}/wanted/runtime.pyz"]) == ["stale"]
    assert sorted(path.name for path in Path(folder.files).iterdir()) == ["mounted", "wanted"]


def test_no_file_is_removed_when_docker_cannot_be_asked(tmp_path: Path) -> None:
    folder = StackFolder(str(tmp_path / "root"), "dev")
    (Path(folder.files) / "stale").mkdir(parents=True)
    node = LocalNode(programs=tmp_path / "bin")
    node.install("docker", "#!/bin/sh\nexit 1\n")
    with pytest.raises(CommandError):
        prune_files(node, folder, [])
    assert (Path(folder.files) / "stale").is_dir()


def test_no_file_is_removed_when_docker_cannot_tell_the_mounts(tmp_path: Path) -> None:
    folder = StackFolder(str(tmp_path / "root"), "dev")
    (Path(folder.files) / "mounted").mkdir(parents=True)
    node = LocalNode(programs=tmp_path / "bin")
    node.install(
        "docker",
        f'#!/bin/sh\n[ "$1" = ps ] && printf "c1\\nc2\\n" && exit\necho "$*" >> {tmp_path}/asked\n'
        'echo "/etc "; exit 1\n',
    )
    with pytest.raises(CommandError):
        prune_files(node, folder, [])
    assert (Path(folder.files) / "mounted").is_dir()
    [asked] = (tmp_path / "asked").read_text().splitlines()
    assert asked.endswith(" c1 c2")
