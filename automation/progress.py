"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

HEARTBEAT_S = 30.0
"""Off a terminal, a step that says nothing is named this often, so that a log shows that it still goes on."""


class Progress:
    """Shows the steps of a run. Called from several threads.

    Args:
        stream: Where it goes; standard error, so that standard output has only the result.
        live: Whether the last line may be written over; by default where the stream is a terminal.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        live: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty() if live is None else live
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[str, tuple[str, float]] = {}
        self._latest: dict[str, str] = {}
        self._done = 0
        self._drawn = ""
        self._spoke = clock()

    def say(self, text: str) -> None:
        """One line that stays."""
        with self._lock:
            self._line(text)

    def begun(self, name: str, action: str) -> None:
        """A step begins."""
        with self._lock:
            self._running[name] = (action, self._clock())
            if not self._live:
                self._line(f"{name}: {action}")

    def ended(self, name: str, action: str, seconds: float, ok: bool) -> None:
        """A step ends."""
        with self._lock:
            self._running.pop(name, None)
            self._latest.pop(name, None)
            self._done += ok
            self._line(f"{name}: {action} {'done' if ok else 'FAILED'} in {duration(seconds)}")

    def said(self, name: str, line: str) -> None:
        """A step says how far it is, such as shards loaded or bytes copied."""
        with self._lock:
            if name:
                self._latest[name] = line
            if not (self._live and name in self._running):
                self._line(f"{name}: {line}" if name else line)

    def tick(self) -> None:
        """Called a few times a second."""
        with self._lock:
            if self._live:
                self._draw(self._status())
            elif self._running and self._clock() - self._spoke > HEARTBEAT_S:
                self._line(self._status())

    def close(self) -> None:
        """Take the live line away."""
        with self._lock:
            self._draw("")
            self._running.clear()

    def _status(self) -> str:
        if not self._running:
            return ""
        parts = []
        for name, (action, since) in self._running.items():
            latest = self._latest.get(name, action)
            parts.append(f"{name}: {latest} ({duration(self._clock() - since)})")
        return f"{self._done} done, " + "; ".join(parts)

    def _line(self, text: str) -> None:
        self._spoke = self._clock()
        drawn = self._drawn
        self._draw("")
        self._stream.write(f"{text}\n")
        self._draw(drawn)
        self._stream.flush()

    def _draw(self, text: str) -> None:
        if not self._live or text == self._drawn:
            return
        width = shutil.get_terminal_size().columns - 1
        shown = text if len(text) <= width else text[: max(0, width - 1)] + "…"
        self._stream.write(f"\r\x1b[K{shown}")
        self._stream.flush()
        self._drawn = text


def duration(seconds: float) -> str:
    """12 s below two minutes, 5 min 34 s above."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
