"""The commands that the README and the tutorial give, read from their text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
README = PROJECT / "README.md"
TUTORIAL = PROJECT / "docs" / "tutorial.md"

NOT_RUN = {"make test": "it is what runs the tests"}
"""Commands of README and tutorial that no test runs, with the reason."""

_BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_GOES_ON = re.compile(r"(?:\\|\||&&)$")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page: The page that it stands on.
        language: What stands behind its first fence, such as ``sh``.
        text: What is between the fences.
    """

    page: Path
    language: str
    text: str

    def commands(self) -> Iterator[str]:
        """Each command as a person would enter it; one that goes on in the next line is one."""
        begun: list[str] = []
        for line in self.text.splitlines():
            bare = line.rstrip()
            if not begun and (not bare.strip() or bare.lstrip().startswith("#")):
                continue
            begun.append(bare)
            if not _GOES_ON.search(bare):
                yield "\n".join(begun)
                begun = []
        if begun:
            yield "\n".join(begun)


def blocks_of(page: Path) -> list[Block]:
    """Every block of code of a page, in its order."""
    return [Block(page, found[2].strip(), found[3]) for found in _BLOCK.finditer(page.read_text("utf-8"))]


def commands_of(page: Path) -> list[str]:
    """Every command of the page's ``sh`` blocks, in its order."""
    return [command for block in blocks_of(page) if block.language == "sh" for command in block.commands()]


def bare(command: str) -> str:
    """A command without what a comment says about it."""
    return shlex.join(shlex.split(command, comments=True))
