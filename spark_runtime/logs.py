"""The log of one rank in one generation: on the host's disk and on the container's own output.

The size is bounded by leaving out the middle: the beginning holds the cause of a failed load, the end holds
the cause of a death after weeks of serving.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True)
class Line:
    """One line of output: when it was read, whose it is, and the text as it was written."""

    at: float
    source: str
    text: str


def make_folder(folder: Path) -> None:
    """Make a folder and what is missing above it, each owned as the one above.

    The container's root would otherwise leave folders in the host's state folder that its owner cannot remove.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    above = folder.parent.stat()
    with contextlib.suppress(OSError):
        os.chown(folder, above.st_uid, above.st_gid)


class GenerationLog:
    """Takes lines from several threads. A full disk loses lines, never the rank."""

    def __init__(self, folder: Path, rank: int, limit_bytes: int) -> None:
        self.folder, self._rank = folder, rank
        self.first = folder / f"rank{rank}.log"
        self._older = folder / f"rank{rank}.tail.1.log"
        self._newer = folder / f"rank{rank}.tail.log"
        self._limits = {self.first: limit_bytes // 2, self._newer: limit_bytes // 4}
        self._lock = threading.Lock()
        self._path = self.first
        self._size = 0
        self._file: TextIO | None = None
        with contextlib.suppress(OSError):
            make_folder(folder)
            self._size = self.first.stat().st_size if self.first.exists() else 0
            self._file = self.first.open("a", encoding="utf-8", errors="replace")

    def write(self, source: str, text: str) -> None:
        """Add one line."""
        with self._lock:
            with contextlib.suppress(OSError, ValueError):  # nobody reads the container's output any more
                print(f"{source} | {text}", flush=True)
            line = f"{time.time():.3f} {source} | {text}\n"
            with contextlib.suppress(OSError):
                if self._size + len(line) > self._limits[self._path]:
                    self._turn()
                if self._file is not None:
                    self._file.write(line)
                    self._file.flush()
                    self._size += len(line.encode("utf-8", "replace"))

    def lines(self) -> Iterator[Line]:
        """Everything that was kept, in order."""
        return read_lines(self.folder, self._rank)

    def close(self) -> None:
        """Close the file; later lines go to the container's output only."""
        with self._lock, contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
            self._file = None

    def _turn(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._path == self._newer:
            self._newer.replace(self._older)
        self._path, self._size = self._newer, 0
        self._file = self._newer.open("w", encoding="utf-8", errors="replace")


def read_lines(folder: Path, rank: int) -> Iterator[Line]:
    """Every line of a rank's log of one generation that was kept, in order."""
    for name in (f"rank{rank}.log", f"rank{rank}.tail.1.log", f"rank{rank}.tail.log"):
        try:
            with (folder / name).open(encoding="utf-8", errors="replace") as file:
                for raw in file:
                    head, _, text = raw.rstrip("\n").partition(" | ")
                    at, _, source = head.partition(" ")
                    with contextlib.suppress(ValueError):
                        yield Line(float(at), source, text)
        except OSError:
            continue


def keep_newest(logs: Path, keep: int) -> None:
    """Remove the folders of all but the newest generations."""
    try:
        numbers = sorted(int(entry.name) for entry in logs.iterdir() if entry.name.isdigit())
    except OSError:
        return
    for number in numbers[:-keep]:
        shutil.rmtree(logs / str(number), ignore_errors=True)


def keep_ray_logs(ray_folder: Path, target: Path, budget_bytes: int = 8 * 1024 * 1024) -> None:
    """Copy the ends of Ray's own logs beside ours: some causes (its memory monitor's) stand only there."""
    with contextlib.suppress(OSError):
        for path in sorted((ray_folder / "session_latest" / "logs").glob("*.*")):
            size = path.stat().st_size
            if not path.is_file() or size == 0 or budget_bytes <= 0:
                continue
            part = min(size, 256 * 1024, budget_bytes)
            budget_bytes -= part
            make_folder(target)
            with path.open("rb") as file:
                file.seek(size - part)
                (target / path.name).write_bytes(file.read(part))


def say(text: str) -> None:
    """One line of the supervisor's own, before there is a generation to write it to."""
    with contextlib.suppress(OSError, ValueError):
        print(f"supervisor | {text}", file=sys.stdout, flush=True)
