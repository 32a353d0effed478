"""One writer at a time: locks that vanish with the process that holds them."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.errors import StepFailed


@contextmanager
def locked(path: Path, *, what: str, timeout_s: float) -> Iterator[None]:
    """Hold the lock file `path` during the block; waits up to `timeout_s` for whoever holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _wait_for(descriptor, path, what, timeout_s)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def _wait_for(descriptor: int, path: Path, what: str, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = path.read_text().strip() or "unknown"
        if time.monotonic() > end:
            raise StepFailed(f"{what}: process {holder} still holds {path} after {timeout_s:.0f} s")
        if not told:
            print(f"lab: waiting for process {holder} ({what})", file=sys.stderr, flush=True)
            told = True
        time.sleep(0.2)
