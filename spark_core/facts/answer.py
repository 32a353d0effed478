"""What a node said to one question, and what is left of a fact that cannot be read from it.

A fact is a value, ``None`` (there is nothing of that kind on the node, or it was not asked), or :class:`Unread`. A
parser never raises: a node may say anything, in any language, cut off anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")

_ABSENT = 127
_CUT_OFF = -1
_TIMED_OUT = (124, 137)
STATUS_MARK = "--status "
"""An answer ends in a line with this mark and the exit status."""

_SHOWN = 100


@dataclass(frozen=True)
class Unread:
    """A fact that could not be read.

    Args:
        fact: What was asked for, in words.
        source: The program or file that was asked.
        found: What it said instead.
    """

    fact: str
    source: str
    found: str

    @property
    def line(self) -> str:
        return f"could not read {self.fact} from {self.source}, found: {self.found}"


Fact: TypeAlias = T | Unread | None
"""A value, nothing of that kind, or what could not be read."""


@dataclass(frozen=True)
class Answer:
    """What a program printed, or a file holds.

    Args:
        text: Its output, errors included.
        status: Its exit status; 127 means that there is no such program or file, -1 that the answer was cut off, and
            None that none came.
    """

    text: str = ""
    status: int | None = 0

    @property
    def absent(self) -> bool:
        return self.status == _ABSENT

    @property
    def timed_out(self) -> bool:
        return self.status in _TIMED_OUT

    @property
    def lines(self) -> list[str]:
        """Its lines without surrounding blanks, empty ones left out."""
        return [line.strip() for line in self.text.split("\n") if line.strip()]

    def unread(self, fact: str, source: str) -> Unread:
        """The fact that this answer does not hold, with what it says instead."""
        if self.status is None:
            return Unread(fact, source, "no answer")
        if self.status == _CUT_OFF:
            return Unread(fact, source, "an answer that is cut off")
        if self.timed_out:
            return Unread(fact, source, "no answer in time")
        if self.absent:
            return Unread(fact, source, "no such program or file")
        return Unread(fact, source, excerpt(self.text))


NO_ANSWER = Answer(status=None)


def answer_in(sections: Mapping[str, str], name: str) -> Answer:
    """The answer in a section. Of one that was cut off nothing is kept: half a number is a wrong number."""
    text = sections.get(name)
    if text is None:
        return NO_ANSWER
    body, mark, status = text.rstrip().rpartition(STATUS_MARK)
    if mark and re.fullmatch(r"\d{1,3}", status, re.ASCII):
        return Answer(body, int(status))
    return Answer("", _CUT_OFF)


def excerpt(text: str) -> str:
    """The first line that says anything, short and printable."""
    for line in text.splitlines():
        shown = "".join(letter if letter.isprintable() else "?" for letter in " ".join(line.split()))
        if shown:
            return shown[: _SHOWN - 1] + "…" if len(shown) > _SHOWN else shown
    return "nothing"


def known(fact: Fact[T]) -> T | None:
    """The value of a fact, or None if there is none."""
    return None if isinstance(fact, Unread) else fact


def version_in(text: str) -> str | None:
    """The first dotted version number of a text, without what may stand after it.

    Newer drivers add notes in brackets, such as ``610.57.04 [Deprecated; will be removed]``.
    """
    found = re.search(r"(?<![\w.])\d{1,6}(?:\.\d{1,6})+(?![\w.])", text, re.ASCII)
    return found.group() if found else None
