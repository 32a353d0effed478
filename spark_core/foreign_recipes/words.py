"""The command of a recipe as words, as a shell would read it, without running one.

Both tools fill ``{name}`` from the recipe's defaults and hand the text to bash: eugr's with Python's ``format``, in
which a brace is written twice; sparkrun's with single braces around JSON, or doubled ones where any are doubled.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w-]*)\}")
_SINGLE = re.compile(r"\{([A-Za-z_][\w-]*)\}")
_CONTINUED = re.compile(r"\\[ \t]*(\r?\n|\Z)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_JOINS = "|<>()"
_ROUNDS = 5
"""Values may name other values."""
_LONGEST = 128 * 1024
"""Characters of a command that is read."""


@dataclass(frozen=True)
class Word:
    """A word of a command.

    Attributes:
        text: The word without its quotes.
        expands: Whether a shell would replace something in it.
    """

    text: str
    expands: bool = False

    @property
    def missing(self) -> str:
        """A placeholder that nothing filled, or an empty text."""
        found = _SINGLE.search(self.text)
        return found.group(1) if found else ""


@dataclass
class Statement:
    """One command of a text.

    Attributes:
        words: Its words, without leading assignments.
        assignments: Variables that are set for it, or exported by it.
        line: Line of the text on which it begins.
        joined: Whether a shell joins it to the one before by a pipe or a redirection.
    """

    line: int
    joined: bool = False
    words: list[Word] = field(default_factory=list)
    assignments: dict[str, Word] = field(default_factory=dict)

    @property
    def is_serve(self) -> bool:
        """Whether it starts vLLM's server."""
        texts = [word.text for word in self.words]
        return (len(texts) > 1 and texts[0].rpartition("/")[2] == "vllm" and texts[1] == "serve") or (
            len(texts) > 2
            and re.fullmatch(r"(\S*/)?python3?(\.\d+)?", texts[0]) is not None
            and texts[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
        )

    @property
    def arguments(self) -> list[Word]:
        """Words behind the program of a server."""
        return self.words[2 if self.words[1].text == "serve" else 3 :]


def filled(template: str, values: Mapping[str, Any]) -> tuple[str, set[str]]:
    """A text with its placeholders filled, and the names that were used. What has no value stays as it is.

    Raises:
        ValueError: it becomes too long.
    """
    used: set[str] = set()
    doubled = "{{" in template
    pattern = _PLACEHOLDER if doubled else _SINGLE
    length = len(template)

    def put(match: re.Match[str]) -> str:
        if match.group(0) in ("{{", "}}"):
            return match.group(0)[0]
        name = match.group(1)
        if name not in values or values[name] is None or isinstance(values[name], dict | list):
            return match.group(0)
        used.add(name)
        nonlocal length
        length += len(str(values[name]))
        if length > _LONGEST:
            raise ValueError("too long")
        return str(values[name])

    text = pattern.sub(put, template)
    for _ in range(0 if doubled else _ROUNDS):
        again = _SINGLE.sub(put, text)
        if again == text:
            break
        text = again
    return text, used


def statements(text: str) -> list[Statement]:
    """The commands of a text.

    Raises:
        ValueError: a quote is not closed.
    """
    return [found for found in map(_without_prefix, _scan(text)) if found.words or found.assignments]


def _scan(text: str) -> list[Statement]:
    found, line, place = [Statement(1)], 1, 0
    letters: list[str] | None = None
    expands = False

    def end_word() -> None:
        nonlocal letters, expands
        if letters is not None:
            found[-1].words.append(Word("".join(letters), expands))
        letters, expands = None, False

    while place < len(text):
        letter = text[place]
        continued = _CONTINUED.match(text, place)
        if continued:
            line += continued.group(0).count("\n")
            place = continued.end()
            continue
        place += 1
        if letter in " \t\r":
            end_word()
        elif letter in "\n;&|<>()":
            end_word()
            line += letter == "\n"
            if found[-1].words:
                found.append(Statement(line, joined=letter in _JOINS))
            else:
                found[-1].line = line
                found[-1].joined = found[-1].joined or letter in _JOINS
        elif letter == "#" and letters is None:
            place = text.find("\n", place) if "\n" in text[place:] else len(text)
        elif letter == "'":
            end = text.index("'", place)
            letters = [*(letters or []), text[place:end]]
            line += text.count("\n", place, end)
            place = end + 1
        elif letter == '"':
            inside, place, some = _double_quoted(text, place)
            letters, expands = [*(letters or []), inside], expands or some
        elif letter == "\\":
            letters = [*(letters or []), text[place : place + 1]]
            place += 1
        elif letter in "$`":
            inside = _substitution(text, place - 1)
            letters, expands = [*(letters or []), inside], True
            line += inside.count("\n")
            place += len(inside) - 1
        else:
            letters = [*(letters or []), letter]
    end_word()
    return found


def _substitution(text: str, place: int) -> str:
    """What begins with a dollar sign or a backtick, as far as it belongs together; its content is not read."""
    if text[place] == "`":
        return text[place : text.index("`", place + 1) + 1]
    if text[place + 1 : place + 2] not in ("(", "{"):
        return text[place]
    opening, closing = text[place + 1], ")" if text[place + 1] == "(" else "}"
    depth = 0
    for end in range(place + 1, len(text)):
        depth += (text[end] == opening) - (text[end] == closing)
        if depth == 0:
            return text[place : end + 1]
    raise ValueError("no closing bracket")


def _double_quoted(text: str, place: int) -> tuple[str, int, bool]:
    """(content, place behind it, whether a shell would replace something in it)."""
    letters: list[str] = []
    expands = False
    while True:
        if place >= len(text):
            raise ValueError("no closing quote")
        letter = text[place]
        if letter == '"':
            return "".join(letters), place + 1, expands
        if letter == "\\" and text[place + 1 : place + 2] in ('"', "\\", "$", "`", "\n"):
            place += 1
            letters += [] if text[place] == "\n" else [text[place]]
        else:
            letters.append(letter)
            expands = expands or letter in "$`"
        place += 1


def _without_prefix(statement: Statement) -> Statement:
    """The same without ``export``, ``exec``, ``env`` and assignments in front."""
    words = list(statement.words)
    exporting = False
    while words:
        first = words[0]
        match = _ASSIGNMENT.fullmatch(first.text)
        if match:
            statement.assignments[match.group(1)] = Word(match.group(2), first.expands)
        elif first.text in ("exec", "env") or (first.text == "export" and not exporting):
            exporting = first.text == "export"
        else:
            break
        words.pop(0)
    statement.words = words
    return statement
