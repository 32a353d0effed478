"""Files that we write onto nodes: whole or not at all, with the right mode, and the key file among them."""

from __future__ import annotations

import hashlib
import stat
import subprocess
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_core.api_key import generate_key, key_digest, observe_key, read_key, remove_key, write_key
from spark_core.errors import CommandError, SparkError
from spark_core.transport.base import Command, Result
from spark_core.transport.ssh import write_file
from tests.local_node import LocalNode
from tests.scripted_transport import ScriptedTransport

MARKER = "sk-marker-a1b2c3d4"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@settings(max_examples=10)
@given(
    content=st.binary(max_size=2000),
    name=st.sampled_from(["plain", "with blanks", "quote'd", "$(touch x)", "-dash"]),
)
def test_a_file_arrives_byte_for_byte_under_any_name(
    content: bytes, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("files") / "new folder"
    assert LocalNode().run(write_file(str(folder / name), content)).ok
    assert (folder / name).read_bytes() == content
    assert [path.name for path in folder.iterdir()] == [name]


@pytest.mark.parametrize("mode", ["0600", "0644", "0755"])
def test_a_file_has_the_asked_mode_whatever_it_had(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    path.chmod(0o777)
    assert LocalNode().run(write_file(str(path), b"new", mode=mode)).ok
    assert mode_of(path) == int(mode, 8)


def test_a_reader_keeps_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old content")
    with path.open() as reader:
        LocalNode().run(write_file(str(path), b"new"))
        assert reader.read() == "old content"
    assert path.read_text() == "new"


@pytest.mark.parametrize("program", ["chmod", "sync", "mv"])
def test_a_write_that_fails_half_way_leaves_the_old_file_and_no_other(program: str, tmp_path: Path) -> None:
    node = LocalNode(programs=tmp_path / "programs")
    node.install(program, "#!/bin/sh\necho 'No space left on device' >&2; exit 1\n")
    path = tmp_path / "folder" / "file"
    path.parent.mkdir()
    path.write_text("old")
    assert not node.run(write_file(str(path), b"new")).ok
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_a_connection_that_is_cut_while_the_content_travels_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    cut = replace(write_file(str(path), b"whole content"), stdin=b"whole con")
    result = LocalNode().run(cut)
    assert (result.status, result.stderr) == (5, "the input was cut\n")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_shell_that_is_killed_while_the_content_travels_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    process = subprocess.Popen(write_file(str(path), b"").argv, stdin=subprocess.PIPE)
    if process.stdin is None:
        raise AssertionError("no pipe")
    process.stdin.write(b"half of")
    process.stdin.flush()
    process.terminate()
    process.stdin.close()
    process.wait(timeout=30)
    assert process.returncode != 0
    assert path.read_text() == "old"


def test_keys_are_long_and_never_the_same() -> None:
    keys = {generate_key() for _ in range(50)}
    assert len(keys) == 50
    assert all(key.startswith("sk-") and len(key) >= 46 for key in keys)


def test_the_digest_is_that_of_the_file() -> None:
    assert key_digest(MARKER) == hashlib.sha256(f"{MARKER}\n".encode()).hexdigest()


def test_a_key_is_a_file_that_only_the_deploy_user_can_read(tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "main" / "api_key"
    node = LocalNode()
    write_key(node, str(path), MARKER)
    assert path.read_text() == f"{MARKER}\n"
    assert mode_of(path) == 0o600
    assert mode_of(path.parent) == 0o700
    assert observe_key(node, str(path)) == key_digest(MARKER)
    assert read_key(node, str(path)) == MARKER


def test_the_key_is_in_no_argument_and_no_text_of_any_command(tmp_path: Path) -> None:
    node = LocalNode()
    write_key(node, str(tmp_path / "api_key"), MARKER)
    assert len(node.asked) == 2
    for cmd in node.asked:
        assert MARKER not in " ".join(cmd.argv)
        assert MARKER not in repr(cmd)


@pytest.mark.parametrize(("mode", "told"), [(0o644, "mode 644"), (0o400, "mode 400"), (0o660, "mode 660")])
def test_a_key_file_with_another_mode_is_told(mode: int, told: str, tmp_path: Path) -> None:
    path = tmp_path / "api_key"
    write_key(LocalNode(), str(path), MARKER)
    path.chmod(mode)
    assert observe_key(LocalNode(), str(path)) == f"{key_digest(MARKER)} {told}"


def test_no_key_file_is_absent_and_removing_it_again_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "api_key"
    write_key(LocalNode(), str(path), MARKER)
    for _ in range(2):
        remove_key(LocalNode(), str(path))
        assert observe_key(LocalNode(), str(path)) == "absent"


def test_an_altered_key_file_is_told_by_its_digest_only(tmp_path: Path) -> None:
    path = tmp_path / "api_key"
    write_key(LocalNode(), str(path), "other")
    path.write_text(MARKER)
    found = observe_key(LocalNode(), str(path))
    assert found != key_digest(MARKER)
    assert MARKER not in found


def test_a_key_that_did_not_arrive_is_an_error_without_it(tmp_path: Path) -> None:
    def swallow(cmd: Command) -> Result | str:
        return "absent" if "sha256sum" in " ".join(cmd.argv) else ""

    with pytest.raises(CommandError) as failed:
        write_key(ScriptedTransport("spark-a", swallow), str(tmp_path / "k"), MARKER)
    assert failed.value.line == f"spark-a: expected the key just written in {tmp_path}/k, found something else"
    assert MARKER not in "".join(traceback.format_exception(failed.value))


def test_a_folder_that_cannot_be_written_is_an_error_without_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SparkError) as failed:
        write_key(LocalNode(), str(tmp_path / "file" / "api_key"), MARKER)
    assert "expected to write the key file" in failed.value.line
    assert MARKER not in "".join(traceback.format_exception(failed.value))
