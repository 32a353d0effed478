"""Every command that a page gives exists: targets, programs, subcommands and options, by the real parsers."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from automation.__main__ import build_parser
from lab.__main__ import build_parser as build_lab_parser
from tests.command_blocks import NOT_RUN, PROJECT, README, TUTORIAL, bare, blocks_of, commands_of
from tests.lab.terminal import open_terminal

PAGES = sorted([*PROJECT.glob("*.md"), *(PROJECT / "docs").rglob("*.md")])
# What its --help prints is no command of a person.
TEXTS = [page for page in PAGES if page.name != "automation.md" or page.parent.name == "how-to"]
SHOWN = {"text", "yaml", "mermaid", "json"}
"""Languages of blocks that are not to be run."""
A_COMMAND = re.compile(r"^\s*(?:make|pulumi|python3?|curl|ssh|cat|echo|docker|sudo|git|\.) ", re.MULTILINE)
PULUMI = {"preview", "up", "refresh", "destroy", "cancel", "stack", "config", "import"}


def refused_by(parser: argparse.ArgumentParser, words: list[str]) -> str:
    """Why a parser does not take words; empty if it does."""
    try:
        parser.parse_args(words)
    except SystemExit as end:
        return "" if not end.code and {"-h", "--help"} & set(words) else f"{shlex.join(words)}: not accepted"
    return ""


def program_of(words: list[str]) -> tuple[str, list[str]]:
    """The module or file that python runs, and its words."""
    return (words[2], words[3:]) if words[1] == "-m" else (words[1], words[2:])


def fault_of_python(words: list[str]) -> str:
    """What is wrong with a command of python."""
    program, rest = program_of(words)
    parsers: dict[str, Callable[[], argparse.ArgumentParser]] = {"automation": build_parser, "lab": build_lab_parser}
    if program in parsers:
        return refused_by(parsers[program](), rest)
    path = PROJECT / (program if program.endswith(".py") else program.replace(".", "/"))
    if not (path.is_file() or path.with_suffix(".py").is_file() or path.is_dir()):
        return f"{program}: no such program"
    text = (path if path.is_file() else path.with_suffix(".py") if path.suffix != ".py" else path).read_text("utf-8")
    unknown = [word for word in rest if word.startswith("--") and f'"{word}"' not in text]
    return f"{program}: unknown {unknown}" if unknown else ""


def fault_of(command: str) -> str:
    """What is wrong with one command of README or tutorial; empty if nothing is."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^([a-z][a-z-]*):(?!=)", (PROJECT / "Makefile").read_text("utf-8"), re.MULTILINE)
        return "" if len(words) == 2 and words[1] in targets else f"{command}: no such target"
    if words[0] in ("python", "python3"):
        return fault_of_python(words)
    if words[0] == "pulumi":
        return "" if words[1] in PULUMI else f"{command}: no such command"
    if words[0] in (".", "cat"):
        return "" if (PROJECT / words[1]).is_file() else f"{command}: no such file"
    if "curl" in words:
        exported = re.findall(r'pulumi\.export\("(\w+)"', (PROJECT / "__main__.py").read_text("utf-8"))
        asked = re.findall(r"pulumi stack output (\w+)", command)
        return "" if asked and set(asked) <= set(exported) else f"{command}: no such output"
    return f"{command}: what this is cannot be told"


def mentioned(page: Path) -> Iterator[tuple[str, bool]]:
    """Every command of our own programs on a page, and whether it stands in a block, as a whole."""
    text = page.read_text("utf-8")
    for block in blocks_of(page):
        for line in block.commands():
            found = re.match(r"\s*(python3? -m (?:automation|lab) .*)", line, re.DOTALL)
            if found:
                yield found[1], True
    prose = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for inline in re.findall(r"`(python3? -m (?:automation|lab) [^`]+)`", prose):
        yield " ".join(inline.split()), False


def fault_of_mention(command: str, whole: bool) -> str:
    """A command in a block must be accepted; in a sentence its name and its options must exist."""
    words = shlex.split(command.replace("...", "WORD"), comments=True)
    if words[3:4] and words[3].isupper():  # `python -m automation COMMAND`
        return ""
    if whole:
        return fault_of_python(words)
    parser = build_parser() if words[2] == "automation" else build_lab_parser()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            if words[3] not in action.choices:
                return f"{command}: no such command" if not words[3].startswith("-") else ""
            known = action.choices[words[3]]._option_string_actions
            unknown = [word for word in words[4:] if word.startswith("--") and word not in known]
            return f"{command}: unknown {unknown}" if unknown else ""
    return f"{command}: no commands"


@pytest.mark.parametrize("page", [README, TUTORIAL], ids=lambda page: page.name)
def test_every_block_is_run_or_only_shown_and_says_which(page: Path) -> None:
    blocks = blocks_of(page)
    assert len([block for block in blocks if block.language == "sh"]) >= 2
    assert [block.text for block in blocks if block.language not in {"sh", *SHOWN}] == []
    hidden = [block.text for block in blocks if block.language in SHOWN and A_COMMAND.search(block.text)]
    assert hidden == []


@pytest.mark.parametrize("command", [*commands_of(README), *commands_of(TUTORIAL)])
def test_every_command_of_readme_and_tutorial_exists(command: str) -> None:
    assert fault_of(command) == ""


def test_what_is_not_run_is_still_there_and_is_little() -> None:
    assert set(NOT_RUN) <= {bare(command) for command in commands_of(README)}
    assert set(NOT_RUN) & {bare(command) for command in commands_of(TUTORIAL)} == set()


def test_pages_name_many_commands_of_ours() -> None:
    assert len([command for page in TEXTS for command, whole in mentioned(page) if whole]) > 20


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(PROJECT)))
def test_every_command_of_ours_on_a_page_is_one_that_our_parsers_take(page: Path) -> None:
    faults = [fault_of_mention(command, whole) for command, whole in mentioned(page)]
    assert [fault for fault in faults if fault] == []


@pytest.mark.parametrize(
    "command",
    [
        "make no-such-target",
        "python -m automation no-such-command",
        "python -m automation drift --no-such-option",
        "python -m lab up --no-such-option",
        "python3 toolchain/no_such_file.py",
        "python3 toolchain/stack.py dev --no-such-option",
        "pulumi no-such-command",
        "cat no-such-file",
        'curl "$(pulumi stack output no_such_output)"',
        "rm -rf /",
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    assert fault_of(command) != ""


def test_a_command_that_goes_on_in_the_next_line_is_one() -> None:
    tutorial = commands_of(TUTORIAL)
    [asked] = [command for command in tutorial if "curl" in command]
    assert asked.startswith("echo ") and asked.count("\n") == 3
    assert tutorial[:2] == ["make bootstrap", ". ./env"]


def test_a_terminal_keeps_what_a_command_sets_and_tells_each_status() -> None:
    with open_terminal(PROJECT, os.environ) as terminal:
        assert terminal.run("export WORD=kept   # a comment", 20) == (0, "")
        assert terminal.run('echo "$WORD" |\n  tr a-z A-Z', 20) == (0, "KEPT\n")
        assert terminal.run("false", 20) == (1, "")
        assert terminal.run("cat", 20) == (0, "")  # nobody is there to type
        assert terminal.run("echo said >&2; (exit 3)", 20) == (3, "said\n")
        with pytest.raises(AssertionError, match="no end after"):
            terminal.run("sleep 20", 0.2)
    with open_terminal(PROJECT, os.environ) as terminal, pytest.raises(AssertionError, match="the shell ended"):
        terminal.run("exit 1", 20)
