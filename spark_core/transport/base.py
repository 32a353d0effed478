"""Commands as values, and the protocol of whatever carries them to a node.

A command is an argument vector, never a string: quoting happens in one place (:meth:`Command.remote_line`), and a
secret can only travel on standard input.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from spark_core.errors import CommandError

DEFAULT_TIMEOUT_S = 20.0

_BARE = re.compile(r"[\w@%+:,./-][\w@%+=:,./-]*", re.ASCII)
"""A word that needs no quotes; zsh takes one that begins with ``=`` for the path of a program."""


@dataclass(frozen=True)
class Command:
    """One program run on a node.

    Args:
        argv: The argument vector.
        sudo: Whether it needs root. The carrier adds ``sudo`` only if the deploy user is not root.
        stdin: Bytes for its standard input; the only way for a secret to reach a node, so never shown.
        timeout_s: Seconds after which it is given up.
        purpose: What it is for, in words ("expected to …"), for the person who reads that it gave no answer.
    """

    argv: tuple[str, ...]
    sudo: bool = False
    stdin: bytes = field(default=b"", repr=False)
    timeout_s: float = DEFAULT_TIMEOUT_S
    purpose: str = field(default="", compare=False)

    def remote_line(self) -> str:
        """The command as one string that a login shell (POSIX, zsh, fish) splits into exactly ``argv`` again."""
        return " ".join(quoted(word) for word in self.argv)

    @property
    def told(self) -> str:
        """What a person is told of it: its purpose, else its first words; never a script's text or a value."""
        if self.purpose:
            return self.purpose
        words: list[str] = []
        for word in self.argv[:3]:
            if word in ("env", "bash") or not re.fullmatch(r"\w[\w.-]*", word):
                break
            words.append(word)
        return f"expected an answer of {'`' + ' '.join(words) + '`' if words else 'a script'}"


def quoted(word: str) -> str:
    """A word as a login shell takes it.

    Quotes and backslashes stand outside of the single quotes: fish takes some backslashes inside them as escapes.
    """
    if _BARE.fullmatch(word):
        return word
    runs = re.findall(r"[^'\\]+|['\\]", word)
    return "".join(f"\\{run}" if run in ("'", "\\") else f"'{run}'" for run in runs) or "''"


def command(
    *argv: str, sudo: bool = False, stdin: bytes = b"", timeout_s: float = DEFAULT_TIMEOUT_S, purpose: str = ""
) -> Command:
    """A :class:`Command` from plain words."""
    return Command(tuple(argv), sudo=sudo, stdin=stdin, timeout_s=timeout_s, purpose=purpose)


def script(
    text: str,
    *args: str,
    sudo: bool = False,
    stdin: bytes = b"",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    purpose: str = "",
) -> Command:
    """A strict bash script; ``args`` are its ``$1``, ``$2``, … so that no value is ever pasted into the text.

    ``-p`` keeps the deploy user's own set-up out: the file that ``BASH_ENV`` names would run first, under our strict
    options, and an exported function may have the name of a program.
    """
    return Command(
        ("env", "LC_ALL=C", "bash", "--norc", "-peuo", "pipefail", "-c", text, "spark-vllm", *args),
        sudo=sudo,
        stdin=stdin,
        timeout_s=timeout_s,
        purpose=purpose,
    )


@dataclass(frozen=True)
class Fragment:
    """A part of an observation script, with its own ``$1``, ``$2``, …; it prints sections and changes nothing."""

    text: str
    args: tuple[str, ...] = ()


def compose(*fragments: Fragment, timeout_s: float = DEFAULT_TIMEOUT_S, purpose: str = "") -> Command:
    """One script of several fragments, so that one round trip brings the facts of several domains.

    A fragment that fails does not take the others' answers away: what it did not print is missing from the sections,
    and its reader says so.
    """
    parts: list[str] = []
    args: list[str] = []
    for index, fragment in enumerate(fragments):
        start, count = len(args) + 1, len(fragment.args)
        # A command on the left of || would run without -e; a subshell that is waited for keeps it.
        parts.append(
            f"part_{index}() {{\n{fragment.text}\n}}\n"
            f'set +e; (set -e; part_{index} "${{@:{start}:{count}}}"); '
            f'[ $? = 0 ] || echo "=== failed-{index}"; set -e\n'
        )
        args += fragment.args
    return script("".join(parts), *args, timeout_s=timeout_s, purpose=purpose)


@dataclass(frozen=True)
class Result:
    """How a remote command ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.status == 0


class Transport(Protocol):
    """Carries commands to one node. Raises ``UnreachableError`` when the node could not be asked."""

    @property
    def node(self) -> str:
        """The node's name in the settings."""
        ...

    def run(self, cmd: Command) -> Result:
        """Run a command; a non-zero status is an answer, not an exception."""
        ...

    def stream(self, cmd: Command, chunks: Iterable[bytes]) -> Result:
        """Run a command that reads a stream too large for memory on its standard input."""
        ...

    def fresh_answer(self, timeout_s: float) -> bool:
        """Whether the node answers over a connection made anew for this, within the time."""
        ...

    def log_in_again(self) -> None:
        """Let the next command log in anew: what changes with a login, such as the user's groups, is seen then."""
        ...


def run_checked(transport: Transport, cmd: Command, *, purpose: str, setting: str = "") -> str:
    """Run a command that must succeed; its standard output.

    Raises:
        CommandError: with the purpose in words and the end of stderr; the command's stdin is never shown.
    """
    result = transport.run(replace(cmd, purpose=purpose))
    if not result.ok:
        where = f"{transport.node} ({setting})" if setting else transport.node
        tail = [line for line in result.stderr.splitlines() if line.strip()][-8:]
        raise CommandError(
            f"{purpose}: expected exit status 0, found {result.status}" + (f" ({tail[-1].strip()})" if tail else ""),
            where=where,
            evidence=tail,
        )
    return result.stdout


def parse_sections(text: str) -> dict[str, str]:
    """Split the output of an observation script into its sections.

    The scripts print ``=== name`` before each part, so that one round trip brings many facts.
    """
    sections: dict[str, list[str]] = {}
    current: list[str] | None = None
    # Not splitlines(): what a file of the node holds may have other letters that it takes for the end of a line.
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("=== "):
            current = sections.setdefault(line[4:].strip(), [])
        elif current is not None:
            current.append(line)
    return {name: "\n".join(lines) for name, lines in sections.items()}


def tail_lines(text: str, count: int = 8) -> Sequence[str]:
    """The last non-empty lines of an output, for evidence."""
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
