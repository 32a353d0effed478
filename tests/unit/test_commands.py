"""Commands: quoting, secrets on standard input, answers told in one line."""

from __future__ import annotations

import shutil
import subprocess
import traceback
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spark_core.errors import CommandError
from spark_core.transport.base import (
    Command,
    Result,
    command,
    parse_sections,
    run_checked,
    script,
    tail_lines,
)
from tests.local_node import LocalNode
from tests.scripted_transport import ScriptedTransport

MARKER = "marker-a1b2c3d4"
WORD = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
PRINT_EACH = 'for w in "$@"; do printf "%s\\0" "$w"; done'


SHELLS = ["sh", "bash", *(shell for shell in ("zsh", "fish") if shutil.which(shell))]


@pytest.mark.parametrize("shell", SHELLS)
@given(words=st.lists(WORD, min_size=1, max_size=5))
@example(words=["", " ", "'", '"', "$HOME"])
@example(words=["a\nb", "`id`", "$(id)", "\\", "!!"])
@example(words=["-n", "--", "*", "~", "#x"])
@example(words=["\\\\", "\\'", "a\\\\'b", "''", "=ls", "a=b", "{1..3}", "%1"])
@example(words=["\t", "é", "\U0001f980", ";", "&&"])
def test_a_login_shell_splits_the_remote_line_into_the_same_words(shell: str, words: list[str]) -> None:
    line = command("sh", "-c", PRINT_EACH, "sh", *words).remote_line()
    done = subprocess.run([shell, "-c", line], capture_output=True, check=True, timeout=20)
    assert done.stdout.decode().split("\0")[:-1] == words


@given(words=st.lists(WORD, max_size=4))
def test_a_script_gets_its_values_as_arguments_and_never_as_text(words: list[str]) -> None:
    result = LocalNode().run(script(PRINT_EACH, *words))
    assert result.ok
    assert result.stdout.split("\0")[:-1] == words


def test_quotes_and_backslashes_stand_outside_of_single_quotes() -> None:
    # fish takes a backslash before either of them inside single quotes as an escape, a POSIX shell does not.
    assert command("a\\\\b", "it's", "=ls", "").remote_line() == r"""'a'\\\\'b' 'it'\''s' '=ls' ''"""


def test_a_script_is_run_without_the_set_up_of_the_deploy_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = tmp_path / "start"
    start.write_text('echo noise; unalias -a; trap "echo end" EXIT; echo "$never_set"\n')
    monkeypatch.setenv("BASH_ENV", str(start))
    monkeypatch.setenv("BASH_FUNC_id%%", "() { echo function; }")
    monkeypatch.setenv("CDPATH", "/")
    result = LocalNode().run(script('id -u; cd tmp && pwd || echo "no $1"', "x"))
    assert result.ok, result
    assert result.stdout.splitlines()[0].isdigit()
    assert result.stdout.splitlines()[1:] == ["no x"]


def test_what_other_languages_take_for_the_end_of_a_line_ends_no_section() -> None:
    text = "=== a\none\x85=== b\rtwo\u2028three\n=== c\n"
    assert parse_sections(text) == {"a": "one\x85=== b\rtwo\u2028three", "c": ""}


def test_a_script_stops_at_its_first_failure() -> None:
    assert LocalNode().run(script("false; echo reached")) == Result(1, "", "")


def test_a_script_fails_when_the_first_part_of_a_pipe_fails() -> None:
    assert not LocalNode().run(script("false | cat")).ok


def test_a_script_fails_on_an_unset_variable() -> None:
    assert not LocalNode().run(script('echo "$never_set"')).ok


def test_what_travels_on_standard_input_shows_in_no_text_of_the_command() -> None:
    cmd = script("cat >/dev/null", stdin=MARKER.encode())
    assert MARKER not in repr(cmd)
    assert MARKER not in cmd.remote_line()
    assert not any(MARKER in word for word in cmd.argv)


def test_a_failed_command_does_not_show_its_standard_input() -> None:
    node = LocalNode()
    with pytest.raises(CommandError) as failed:
        run_checked(
            node,
            script("cat >/dev/null; echo broken >&2; exit 3", stdin=MARKER.encode()),
            purpose="expected x",
        )
    assert str(failed.value) == "spark-a: expected x: expected exit status 0, found 3 (broken)\n  seen: broken"
    assert MARKER not in "".join(traceback.format_exception(failed.value))


def test_a_failed_command_names_the_setting_behind_it() -> None:
    node = ScriptedTransport("spark-b", lambda _: Result(1, "", ""))
    with pytest.raises(CommandError) as failed:
        run_checked(node, command("true"), purpose="expected to set it", setting="host.sysctls")
    assert str(failed.value) == "spark-b (host.sysctls): expected to set it: expected exit status 0, found 1"


def test_a_command_keeps_the_end_of_what_was_said_as_evidence() -> None:
    node = ScriptedTransport("spark-b", lambda _: Result(1, "", "\n".join(f"line {n}" for n in range(50))))
    with pytest.raises(CommandError) as failed:
        run_checked(node, command("true"), purpose="expected x")
    assert failed.value.evidence == tuple(f"line {n}" for n in range(42, 50))


def test_a_command_travels_with_its_purpose() -> None:
    node = ScriptedTransport("spark-b", lambda _: "")
    run_checked(node, command("true"), purpose="expected x")
    assert [cmd.told for cmd in node.asked] == ["expected x"]


@pytest.mark.parametrize(
    ("cmd", "told"),
    [
        (script("secret; text"), "a script"),
        (command("docker", "image", "inspect", "--format", "x"), "`docker image inspect`"),
        (command("sysctl", "-q", "-w", "a.b=1"), "`sysctl`"),
        (command("rm", "/some/where"), "`rm`"),
        (command("/opt/program"), "a script"),
    ],
)
def test_without_a_purpose_only_the_first_words_are_told(cmd: Command, told: str) -> None:
    assert cmd.told == f"expected an answer of {told}"


def test_two_commands_are_equal_when_they_would_do_the_same() -> None:
    assert command("a", "b") == Command(("a", "b"))
    assert command("a", "b", purpose="expected x") == Command(("a", "b"))
    assert command("a", "b") != command("a b")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("noise before\n=== one\na\nb\n=== two\n", {"one": "a\nb", "two": ""}),
        ("=== one\n\n=== one\nx", {"one": "\nx"}),
        ("===one\nx", {}),
        ("=== one\n====\n", {"one": "===="}),
    ],
    ids=[
        "nothing",
        "noise is dropped",
        "a name twice is one section",
        "no blank is no header",
        "longer rules are text",
    ],
)
def test_sections_of_an_observation(text: str, expected: dict[str, str]) -> None:
    assert parse_sections(text) == expected


def test_tail_lines_leave_out_empty_ones() -> None:
    assert tail_lines("a\n\n b \n\n", 2) == ["a", " b"]
