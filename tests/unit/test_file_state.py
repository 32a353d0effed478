"""A file of root as it is: what the deploy user sees, what root must tell, and what is no plain file."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_core.errors import CommandError, ObservationError
from spark_core.journal.file_state import FileState, complete, observe_files_of_root, parse_files, require_plain
from spark_core.transport.base import Command, Result
from tests.local_node import LocalNode
from tests.scripted_transport import ScriptedTransport


@pytest.mark.parametrize("content", [b"", b"text\n", b"=== file 0\nabsent\n", b"\x00\xff", b"x" * 100_000])
def test_a_file_is_read_byte_for_byte(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    path.chmod(0o604)
    [state] = observe_files_of_root(LocalNode(), [str(path)]).values()
    assert (state.there, state.kind, state.content, state.mode) == (True, "file", content, "0604")


def test_what_is_missing_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    names = ["none", "a/none", "a/b/none", "folder", "link"]
    states = list(observe_files_of_root(LocalNode(), [f"{tmp_path}/{name}" for name in names]).values())
    assert [(s.there, s.kind, s.no_folder, s.no_parents) for s in states] == [
        (False, "file", False, False),
        (False, "file", True, False),
        (False, "file", True, True),
        (True, "folder", False, False),
        (True, "link", False, False),
    ]
    for state in states[3:]:
        with pytest.raises(CommandError):
            require_plain("spark-a", state, "host.files")
    require_plain("spark-a", states[0], "host.files")


def test_root_tells_of_a_file_that_the_deploy_user_cannot_see() -> None:
    def answer(cmd: Command) -> str:
        assert cmd.sudo
        if cmd.argv[0] == "stat":
            return "41c0 0:0\n8180 0:998\n"
        assert cmd.argv == ("base64", "-w0", "--", "/root/x")
        return base64.b64encode(b"\xffsecret").decode()

    state = complete(ScriptedTransport("spark-a", answer), FileState("/root/x", None))
    assert state == FileState("/root/x", there=True, content=b"\xffsecret", mode="0600", owner="0:998")


def test_root_tells_that_there_is_none() -> None:
    state = complete(
        ScriptedTransport("spark-a", lambda _: Result(1, "41c0 0:0\n", "stat: …")), FileState("/x/y", None)
    )
    assert state.there is False


@pytest.mark.parametrize("stderr", ["sudo: a password is required", ""])
def test_a_refused_sudo_is_never_an_absent_file(stderr: str) -> None:
    with pytest.raises(CommandError):
        complete(ScriptedTransport("spark-a", lambda _: Result(1, "", stderr)), FileState("/x/y", None))
    with pytest.raises(CommandError):
        complete(ScriptedTransport("spark-a", lambda _: Result(1, "", stderr)), FileState("/x/y", there=True))


def test_what_is_readable_needs_no_root() -> None:
    def never(cmd: Command) -> Result:
        raise AssertionError(f"asked: {cmd.argv}")

    for state in (FileState("/x", there=False), FileState("/x", there=True, content=b"")):
        assert complete(ScriptedTransport("spark-a", never), state) == state


@given(text=st.text(max_size=60))
def test_an_answer_that_is_not_understood_is_told_and_never_a_trace(text: str) -> None:
    try:
        state = parse_files("spark-a", {"file 0": text}, ["/x"])["/x"]
    except ObservationError as error:
        assert error.line.startswith("spark-a: expected to learn of the file /x, found: ")
    else:
        assert state.path == "/x"


@pytest.mark.parametrize("sections", [{}, {"file 1": "absent"}, {"file 0": ""}])
def test_a_cut_answer_is_not_absent(sections: dict[str, str]) -> None:
    with pytest.raises(ObservationError):
        parse_files("spark-a", sections, ["/x"])
