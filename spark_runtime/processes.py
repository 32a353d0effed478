"""The processes of this rank: start them, reap everything, end everything.

The supervisor is PID 1 of its container, so every orphan becomes its child. Outside a container (tests) it
asks the kernel for the same with PR_SET_CHILD_SUBREAPER. "Everything of this rank" is therefore always the
same set: the descendants of this process. What `docker exec` starts has no parent inside the container and is
rightly left alone: a `status` or a health check must not be killed by the end of a generation.

All methods are called from the main thread: whoever reaps any child must be the only one who waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PR_SET_CHILD_SUBREAPER = 36
MAX_LINE_BYTES = 16 * 1024
_COLOUR = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")


@dataclass
class Child:
    """A process started by this rank. ``exit_code`` is negative for a signal, None while it runs."""

    name: str
    popen: subprocess.Popen[bytes]
    pump: threading.Thread
    exit_code: int | None = None

    @property
    def running(self) -> bool:
        """Whether it has not been reaped yet."""
        return self.exit_code is None


class Processes:
    """Starts, reaps and ends what belongs to this rank."""

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}
        self._pumps: list[threading.Thread] = []
        with contextlib.suppress(OSError, AttributeError):  # not Linux, or no C library to be found
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def spawn(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], on_line: Callable[[str, str], None]
    ) -> Child:
        """Start a child in its own session; each line of its output goes to ``on_line(name, line)``."""
        popen = subprocess.Popen(
            list(argv),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            bufsize=0,
        )
        if popen.stdout is None:
            raise RuntimeError("no pipe")
        pump = threading.Thread(target=_pump, args=(popen.stdout, name, on_line), name=f"log-{name}", daemon=True)
        child = Child(name, popen, pump)
        self._children[popen.pid] = child
        self._pumps.append(pump)
        pump.start()
        return child

    def reap(self) -> None:
        """Collect everything that has ended, ours and adopted."""
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is not None:
                child.exit_code = os.waitstatus_to_exitcode(wait_status)
                child.popen.returncode = child.exit_code  # or Popen would wait for it a second time

    def terminate(self, child: Child, grace_s: float, tick: Callable[[], None]) -> None:
        """SIGTERM, a bounded wait, then SIGKILL for its whole session."""
        deadline = time.monotonic() + grace_s
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.popen.pid, signal.SIGTERM)
        while child.running and time.monotonic() < deadline:
            tick()
        if child.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.popen.pid, signal.SIGKILL)
            deadline = time.monotonic() + 10
            while child.running and time.monotonic() < deadline:
                tick()

    def ask_to_leave(self, child: Child) -> None:
        """SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.popen.pid, signal.SIGTERM)

    def left(self) -> list[str]:
        """Every descendant that has not been reaped, as "pid name (state)"."""
        self.reap()
        return [f"{pid} {name} ({state})" for pid, name, state in descendants(os.getpid())]

    def kill(self) -> list[str]:
        """SIGKILL for every descendant. Returns what was left before; what they start meanwhile takes another turn."""
        self.reap()
        left = descendants(os.getpid())
        for pid, _, state in left:
            if state != "Z":
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        return [f"{pid} {name} ({state})" for pid, name, state in left]

    def drain(self, timeout_s: float = 2.0) -> None:
        """Wait until the last words of what has ended are in the log: they are still in the pipes."""
        for pump in self._pumps:
            pump.join(timeout_s)
        self._pumps = [pump for pump in self._pumps if pump.is_alive()]


def descendants(root: int) -> list[tuple[int, str, str]]:
    """(pid, name, state) of everything below ``root``, from /proc."""
    children: dict[int, list[tuple[int, str, str]]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text(errors="replace")
        except OSError:  # gone meanwhile
            continue
        # The name stands in parentheses and may itself contain any character.
        name, rest = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()
        children.setdefault(int(rest[1]), []).append((int(entry.name), name, rest[0]))
    found: list[tuple[int, str, str]] = []
    todo = [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += [pid for pid, _, _ in below]
    return found


def empty_folder(folder: Path) -> None:
    """Remove what a killed generation left in a folder; the folder itself stays (it may be a mount)."""
    for path, folders, files in os.walk(folder, topdown=False):
        for name in files:
            with contextlib.suppress(OSError):
                (Path(path) / name).unlink()
        for name in folders:
            entry = Path(path) / name
            with contextlib.suppress(OSError):
                entry.unlink() if entry.is_symlink() else entry.rmdir()


def has_own_shm(mountinfo: str) -> bool:
    """Whether /dev/shm is the container's own: Docker names that mount "shm", --ipc=host shows the host's."""
    rows = [line for line in mountinfo.splitlines() if line.split()[4:5] == ["/dev/shm"]]  # noqa: S108
    return bool(rows) and rows[-1].partition(" - ")[2].split()[1:2] == ["shm"]


def _pump(stream: IO[bytes], name: str, on_line: Callable[[str, str], None]) -> None:
    # Progress bars end their lines with a carriage return only.
    pending = b""
    while True:
        try:
            chunk = stream.read(65536)  # unbuffered: whatever there is
        except OSError:
            chunk = b""
        lines = (pending + chunk).replace(b"\r", b"\n").split(b"\n")
        pending = lines.pop()
        if not chunk or len(pending) > MAX_LINE_BYTES:
            lines.append(pending)
            pending = b""
        for line in lines:
            if line.strip():
                on_line(name, _COLOUR.sub(b"", line[:MAX_LINE_BYTES]).decode("utf-8", "replace").rstrip())
        if not chunk:
            stream.close()
            return
