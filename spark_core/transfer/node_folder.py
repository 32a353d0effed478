"""Runs on a node, sent there as text: what is in a folder of large files, by size and SHA-256.

Standard library only, since hosts have no installs. Orders are a line of JSON on standard input.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

THREADS = 4
BLOCK = 1 << 20


def sha256_of(path: Path) -> str:
    """SHA-256 of a file; what reading it put into the page cache is given back."""
    digest, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(block[:count])
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.hexdigest()


class Hashes:
    """Hashes by size, times and inode, so that a file that has not changed is not read again."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.known = self._stored()
        self.fresh: dict[str, Any] = {}

    def recall(self, path: Path) -> str | None:
        """The hash of a file, or None if it is not the one that was hashed."""
        known = self.known.get(str(path))
        if isinstance(known, list) and len(known) == 2 and known[0] == _mark(path):
            self.fresh[str(path)] = known
            return str(known[1])
        return None

    def note(self, path: Path, digest: str) -> None:
        self.fresh[str(path)] = [_mark(path), digest]

    def save(self, *folders: Path) -> None:
        """Write down what was noted; of what was known in the folders nothing else stays."""
        stored = self._stored()
        gone = tuple(f"{folder}/" for folder in folders)
        known = {path: value for path, value in stored.items() if not path.startswith(gone)} | self.fresh
        if known != stored:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside = Path(f"{self.path}.{os.getpid()}")
            beside.write_text(json.dumps(known))
            beside.replace(self.path)

    def _stored(self) -> dict[str, Any]:
        try:
            known = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}


def _mark(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def contents(root: Path, hashes: Hashes, only: list[str] | None = None) -> dict[str, Any] | None:
    """Relative path to [size, SHA-256] of what is in a folder, links resolved; None if there is no such folder.

    Args:
        only: Names of the files that are looked at, or None for all.
    """
    if not root.is_dir():
        return None
    found: dict[str, Any] = {}
    for path in files_of(root) if only is None else [root / name for name in only if os.path.lexists(root / name)]:
        name = str(path.relative_to(root))
        try:
            status = path.stat()
        except FileNotFoundError:
            found[name] = [-1, "a link that leads nowhere"]
            continue
        regular = stat.S_ISREG(status.st_mode)
        found[name] = [status.st_size, hashes.recall(path)] if regular else [-1, "not a file"]
    unknown = [name for name, (_, digest) in found.items() if digest is None]
    if unknown:
        from concurrent.futures import ThreadPoolExecutor  # only here: it takes as long as all of the rest

        with ThreadPoolExecutor(THREADS) as pool:
            for name, digest in zip(unknown, pool.map(sha256_of, [root / name for name in unknown]), strict=True):
                found[name][1] = digest
                hashes.note(root / name, digest)
    return found


def files_of(root: Path) -> Iterator[Path]:
    """Every file below a folder, also behind links to folders."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, _, names in os.walk(root, onerror=refuse, followlinks=True):
        yield from (Path(folder) / name for name in names)


def sizes(root: Path) -> dict[str, int]:
    """Relative path to size of what is in a folder at this moment."""
    found = {}
    for folder, _, names in os.walk(root):
        for path in (Path(folder) / name for name in names):
            try:
                found[str(path.relative_to(root))] = path.lstat().st_size
            except FileNotFoundError:
                continue
    return found


def beside(target: Path, ending: str) -> Path:
    """A neighbour of the folder: ``partial`` has its whole files, ``incoming`` what arrives, ``lock`` who fills it."""
    return target.with_name(f"{target.name}.{ending}")


def holder(target: Path) -> int | None:
    """The process that fills the folder. None if none does: a lock goes when its process ends, however that was."""
    try:
        with beside(target, "lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or 0)
    except FileNotFoundError:
        pass
    return None


def look(orders: dict[str, Any]) -> dict[str, Any]:
    """What is in the folder; for one that is to be filled also what is on its way into it, and the space there is."""
    target, hashes, found = Path(orders["target"]), Hashes(orders["cache"]), dict[str, Any]()
    for name in orders["anew"]:
        hashes.known.pop(str(target / name), None)
    looked_at = [target]
    if orders["to_fill"]:
        disk = os.statvfs(next(folder for folder in (target, *target.parents) if folder.is_dir()))
        partial, parts, held = beside(target, "partial"), sizes(beside(target, "incoming")), holder(target)
        moved = sum(parts.values()) + sum(sizes(partial).values())
        found = {"free": disk.f_bavail * disk.f_frsize, "parts": parts, "held": held, "moved": moved, "staged": {}}
        if held is None:
            found["staged"] = contents(partial, hashes) or {}
            looked_at.append(partial)
    found["files"] = contents(target, hashes, orders.get("only"))
    hashes.save(*looked_at)
    return found


def main() -> None:
    """Answer the orders."""
    try:
        print(json.dumps(look(json.loads(sys.stdin.buffer.readline()))))
    except OSError as error:
        sys.exit(f"{error.filename or 'the folder'}: {error.strerror}")
