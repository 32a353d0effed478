"""Starting ``ssh`` with its own log apart from what the remote command writes to standard error."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_CHECK_EVERY_S = 0.5
SSH_FAILED = 255
"""Exit status of ssh itself; a remote command may end with it too, and then ssh's log is empty."""


class OwnLog:
    """A file for ssh's own words, as long as the ``with`` lasts."""

    def __enter__(self) -> OwnLog:
        self._folder = tempfile.TemporaryDirectory(prefix="spark-vllm-")
        self._path = Path(self._folder.name, "log")
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def options(self) -> list[str]:
        """Options of ssh that send its words there."""
        return ["-E", str(self._path)]

    @property
    def text(self) -> str:
        """What ssh has said so far."""
        return self._path.read_text(errors="replace") if self._path.exists() else ""


@dataclass(frozen=True)
class Attempt:
    """How an attempt to connect ended.

    Attributes:
        status: Exit status, or None if it did not end in time.
        log: ssh's own log, at level DEBUG1.
        aside: Standard error, with the node's banner and the words of a jump host's ssh.
    """

    status: int | None
    log: str
    aside: str


def attempt(words: Sequence[str], timeout_s: float, check: Callable[[], None] = lambda: None) -> Attempt:
    """Run an ssh that connects and prints nothing, without a terminal that anything could ask on.

    Args:
        words: Its arguments.
        check: Called often; what it raises ends it.
    """
    # What goes on in the background keeps standard error open, so it must be a file: a pipe would never end.
    with OwnLog() as log, tempfile.TemporaryFile() as aside:
        process = subprocess.Popen(
            # -v and not LogLevel: only so does a ProxyCommand of a connection that stays keep its standard error.
            ["ssh", *log.options(), "-v", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=aside,
            start_new_session=True,
        )
        try:
            status = _ended(process, timeout_s, check)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        aside.seek(0)
        return Attempt(status, log.text, aside.read().decode(errors="replace"))


def _ended(process: subprocess.Popen[bytes], timeout_s: float, check: Callable[[], None]) -> int | None:
    """The exit status, or None if it does not end in time."""
    end = time.monotonic() + timeout_s
    while (left := end - time.monotonic()) > 0:
        try:
            return process.wait(min(left, _CHECK_EVERY_S))
        except subprocess.TimeoutExpired:
            check()
    return None
