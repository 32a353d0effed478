"""A file on a node as it is: kind, mode, owner and content, read without root where that suffices."""

from __future__ import annotations

import base64
import binascii
import hashlib
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from spark_core import root_commands as root
from spark_core.errors import CommandError, ObservationError
from spark_core.transport.base import Fragment, Transport, compose, parse_sections, run_checked

_LOOK = """
n=0
for f in "$@"; do
  echo "=== file $n"
  n=$((n + 1))
  d=${f%/*}
  while [ ! -d "$d/" ]; do d=${d%/*}; done
  if [ -e "$f" ] || [ -L "$f" ]; then
    stat -c '%f %u:%g' -- "$f"
    if [ -f "$f" ] && [ -r "$f" ]; then base64 -w0 -- "$f"; echo; else echo unreadable; fi
  elif [ ! -x "$d/" ]; then echo hidden
  elif [ "$d" = "${f%/*}" ]; then echo absent
  elif [ "$d" = "${f%/*/*}" ]; then echo "absent, no folder"
  else echo "absent, no parents"
  fi
done
"""


@dataclass(frozen=True)
class FileState:
    """A file as it is.

    Attributes:
        path: Where it is.
        there: Whether there is one; None where only root can tell.
        content: Its bytes; None if there is none, or where only root can read it.
        mode: Octal mode, four digits.
        owner: ``user:group`` as numbers.
        kind: ``file``, or what else is there: ``link``, ``folder``, ``other``.
        no_folder: Whether its folder is missing too.
        no_parents: Whether the folder above that one is missing too.
    """

    path: str
    there: bool | None
    content: bytes | None = None
    mode: str | None = None
    owner: str | None = None
    kind: str = "file"
    no_folder: bool = False
    no_parents: bool = False

    @property
    def digest(self) -> str:
        """SHA-256 of the content, or ``absent``."""
        return hashlib.sha256(self.content).hexdigest() if self.content is not None else "absent"

    @property
    def old(self) -> str | None:
        """The content as a journal entry keeps it."""
        return base64.b64encode(self.content).decode() if self.content is not None else None


def files_fragment(paths: Sequence[str]) -> Fragment:
    """The part of an observation script that looks at files; changes nothing and needs no root."""
    return Fragment(_LOOK, tuple(paths))


def parse_files(node: str, sections: Mapping[str, str], paths: Sequence[str]) -> dict[str, FileState]:
    """The files from the sections of :func:`files_fragment`.

    Raises:
        ObservationError: an answer is missing or was not understood.
    """
    found = {}
    for number, path in enumerate(paths):
        lines = sections.get(f"file {number}", "").splitlines()
        try:
            found[path] = _state(path, lines)
        except (ValueError, IndexError, binascii.Error) as error:
            raise ObservationError(
                f"expected to learn of the file {path}, found: {' '.join(lines)[:80] or 'nothing'}", where=node
            ) from error
    return found


def observe_files_of_root(
    transport: Transport, paths: Sequence[str], with_root: Sequence[str] = ()
) -> dict[str, FileState]:
    """Look at files, as root at those of ``with_root`` that the deploy user cannot see or read."""
    if not paths:
        return {}
    text = run_checked(transport, compose(files_fragment(paths), timeout_s=30), purpose="expected to look at files")
    found = parse_files(transport.node, parse_sections(text), paths)
    return {path: complete(transport, state) if path in with_root else state for path, state in found.items()}


def complete(transport: Transport, state: FileState) -> FileState:
    """Let root tell what the deploy user could not see.

    Raises:
        CommandError: root could not be asked; that is not "absent".
    """
    if state.there is None:
        text = transport.run(root.look_at_file(state.path)).stdout.splitlines()
        if not text:
            raise CommandError(f"expected root to look at {state.path}, found no answer", where=transport.node)
        state = replace(state, there=False) if len(text) == 1 else _described(state.path, text[1])
    if state.there and state.kind == "file" and state.content is None:
        text64 = run_checked(transport, root.read_file(state.path), purpose=f"expected to read {state.path}")
        state = replace(state, content=base64.b64decode(text64))
    return state


def require_plain(node: str, state: FileState, setting: str) -> None:
    """Refuse to replace what is no plain file.

    Raises:
        CommandError: a link, a folder or a device is there.
    """
    if state.there and state.kind != "file":
        raise CommandError(
            f"expected a plain file or none at {state.path}, found a {state.kind}",
            where=f"{node} ({setting})",
            do="name the file itself; a link would be lost when the file is put back",
        )


def folder_of_file(path: str) -> str:
    """The folder that a file is in."""
    return str(PurePosixPath(path).parent)


def _state(path: str, lines: Sequence[str]) -> FileState:
    match lines:
        case ["hidden"]:
            return FileState(path, None)
        case ["absent"]:
            return FileState(path, there=False)
        case ["absent, no folder"]:
            return FileState(path, there=False, no_folder=True)
        case ["absent, no parents"]:
            return FileState(path, there=False, no_folder=True, no_parents=True)
        case [first, "unreadable"]:
            return _described(path, first)
        case [first]:  # an empty file
            return replace(_described(path, first), content=b"")
        case [first, text]:
            return replace(_described(path, first), content=base64.b64decode(text, validate=True))
    raise ValueError("too many lines")


def _described(path: str, line: str) -> FileState:
    number, owner = line.split()
    bits = int(number, 16)
    kinds = {stat.S_IFREG: "file", stat.S_IFLNK: "link", stat.S_IFDIR: "folder"}
    kind = kinds.get(stat.S_IFMT(bits), "other")
    return FileState(path, there=True, mode=f"{stat.S_IMODE(bits):04o}", owner=owner, kind=kind)
