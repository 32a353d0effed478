"""Runs on a node, sent there as text: the files of one folder while they arrive, and how it becomes visible.

Standard library only. A folder fills in ``<folder>.partial``, or in itself if it is visible already; what arrives lies
in ``<folder>.incoming`` until it is whole and verified; who fills it holds ``<folder>.lock``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from spark_core.transfer.node_folder import BLOCK, Hashes, beside, contents
from spark_core.transfer.node_links import said

FLUSH = 256 << 20
"""Bytes of a file after which they are brought to the disk: memory must not fill with what waits for it."""
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EISDIR, errno.ENOTDIR)


class Store:
    """The files of one folder: which are whole, and how much there is of the others.

    Args:
        folder: The folder.
        files: Relative path to [size, SHA-256] of what it is to hold.
        cache: File of the hashes that are known.
        onward: Whether what arrives is passed on, and its page cache needed for that.
    """

    def __init__(self, folder: str, files: dict[str, list[Any]], cache: str, *, onward: bool) -> None:
        self.target, self.files, self.onward = Path(folder), files, onward
        self.root, self.incoming = self.target, beside(self.target, "incoming")
        self.names = sorted(files)
        self.hashes = Hashes(cache)
        self.changed = threading.Condition()
        """Guards and announces what follows."""
        self.have = dict.fromkeys(self.names, 0)
        self.whole: set[str] = set()
        self.todo: list[str] = []
        self.latest = ""
        self.moved = self.total = self.received = 0
        self.faults: list[dict[str, Any]] = []
        self.arrived = threading.Event()

    def fault(self, kind: str, name: str = "", found: object = "") -> None:
        self.faults.append({"kind": kind, "file": name, "found": str(found), "got": self.have.get(name, 0)})

    def is_whole(self) -> bool:
        return len(self.whole) == len(self.files)

    def progress(self) -> int:
        """Bytes that this process has brought further, for who asks how far it is."""
        return self.moved

    def path(self, name: str) -> Path:
        """Where a file is now."""
        return (self.root if name in self.whole else self.incoming) / name

    def declare_whole(self) -> None:
        """Take the word of the controller, which has looked, that everything is here."""
        self.have, self.whole = {name: size for name, (size, _) in self.files.items()}, set(self.names)
        self.arrived.set()

    def fill(self, bring: Callable[[], object]) -> None:
        """Fill the folder, unless another process does."""
        try:
            if self._prepare():
                bring()
                self._finish()
            else:
                self.fault("busy")
        except OSError as error:
            self.fault("disk", "its folder", said(error))
        with self.changed:
            self.arrived.set()
            self.changed.notify_all()

    def _prepare(self) -> bool:
        """Take the folder for this process and see what is in it; False if another one has it."""
        path = beside(self.target, "lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._lock), path.stat()):
                return False
        except (BlockingIOError, FileNotFoundError):
            return False
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        self.root = self.target if self.target.is_dir() else beside(self.target, "partial")
        self.root.mkdir(parents=True, exist_ok=True)
        found = contents(self.root, self.hashes) or {}
        self._extra = found.keys() - self.files.keys()
        with self.changed:
            self.whole = {name for name in self.names if found.get(name) == self.files[name]}
            self.have |= {name: self.files[name][0] for name in self.whole}
            self.todo = sorted(self.files.keys() - self.whole, key=lambda name: (-self.files[name][0], name))
            self.total = sum(self.files[name][0] for name in self.todo)
            self.changed.notify_all()
        return True

    def take(self, name: str, rest: Callable[[int], Iterator[memoryview]]) -> bool:
        """Bring a file to its end, from what has arrived of it before; False if the rest does not come.

        Args:
            rest: Gives the bytes from an offset on.
        """
        (size, wanted), path = self.files[name], self.incoming / name
        digest, offset, flushed = hashlib.sha256(), 0, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
                before = min(os.fstat(file.fileno()).st_size, size)
                file.truncate(before)
                while offset < before:
                    view = memoryview(file.read(min(BLOCK, before - offset)))
                    digest.update(view)
                    offset = self._advance(name, len(view))
                for view in rest(offset):
                    written = 0
                    while written < len(view):
                        written += file.write(view[written:])
                    offset = self._advance(name, len(view), received=len(view))
                    digest.update(view)
                    if offset - flushed >= FLUSH:
                        flushed = self._settle(file.fileno(), offset)
                self._settle(file.fileno(), offset)
            if digest.hexdigest() == wanted:
                final = self.root / name
                final.parent.mkdir(parents=True, exist_ok=True)
                with self.changed:
                    path.replace(final)
                    self.hashes.note(final, wanted)
                    self.whole.add(name)
            else:
                self.fault("wrong", name)  # it goes once it is passed on: the next node finds out by itself
        except OSError as error:
            self.fault("disk" if error.errno in OF_THE_DISK else "cut", name, said(error))
            return False
        return True

    def _advance(self, name: str, count: int, *, received: int = 0) -> int:
        with self.changed:
            self.received += received
            self.latest = name
            self.moved += count
            self.have[name] += count
            self.changed.notify_all()
            return self.have[name]

    def _settle(self, descriptor: int, offset: int) -> int:
        """Bring what has arrived to the disk; give its page cache back, unless it is still to be passed on."""
        os.fdatasync(descriptor)
        if not self.onward:
            os.posix_fadvise(descriptor, 0, offset, os.POSIX_FADV_DONTNEED)
        return offset

    def _finish(self) -> None:
        """If all is whole, let the folder become visible by one rename. Then it is free for others."""
        if self.is_whole():
            for name in self._extra:
                self._remove(name)
            with self.changed:
                if self.root != self.target:
                    self.root.rename(self.target)
                    self.root, self.hashes.fresh = self.target, {}
                    for name, (_, digest) in self.files.items():
                        self.hashes.note(self.target / name, digest)
            for folder in {(self.target / name).parent for name in self.names} | {self.target.parent}:
                descriptor = os.open(folder, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
            for leftover in ("partial", "incoming"):
                shutil.rmtree(beside(self.target, leftover), ignore_errors=True)
        self.remember()
        beside(self.target, "lock").unlink()
        os.close(self._lock)

    def _remove(self, name: str) -> None:
        """Remove what is no part of the folder; of what is behind a link, only the link."""
        path = self.root / name
        steps = [step for step in reversed([path, *path.parents]) if self.root in step.parents]
        next((step for step in steps if step.is_symlink()), path).unlink(missing_ok=True)

    def remember(self) -> None:
        """Write down the hashes of what is whole; without them files are read again, no more."""
        with self.changed, contextlib.suppress(OSError):
            self.hashes.save(self.target, beside(self.target, "partial"))

    def clear_up(self) -> None:
        """Give the page cache back, and remove what arrived wrong, once nothing is passed on any more."""
        for fault in self.faults:
            if fault["kind"] == "wrong":
                (self.incoming / fault["file"]).unlink(missing_ok=True)
        for name in self.whole if self.onward else ():
            with contextlib.suppress(OSError), self.path(name).open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
