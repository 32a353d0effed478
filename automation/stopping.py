"""When a run of the engine must stop: Ctrl-C in two stages, and one overall deadline.

The first Ctrl-C asks the engine to stop: it begins no other step and tells every provider, and those park what they
are doing at a point from which the next run goes on. The second ends the engine and all its plugins at once. A deadline
that passes is a first Ctrl-C, and a second one where that has not helped after a minute.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from automation.exit_codes import CommandEnd, Exit

PARKING_S = 60.0
"""Time between the first and the second stage where nobody presses Ctrl-C again."""
TERMINATING_S = 3.0
TURN_S = 0.1


class Stopper:
    """Follows one process of the engine at a time, and stops it when it must.

    Args:
        limit_s: Seconds that the whole command may take; None for no limit.
        say: Called with one line for the person.
        clock: Monotonic seconds.
    """

    def __init__(
        self, limit_s: float | None, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._say = say
        self._limit_s = limit_s
        self._end = None if limit_s is None else clock() + limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._asked_at: float | None = None
        self._late = False
        self.signals = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGINT and SIGTERM while this lasts."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self) -> None:
        """Between two steps of a command.

        Raises:
            CommandEnd: the command was interrupted, or its time is over.
        """
        if self.signals:
            raise CommandEnd(Exit.INTERRUPTED, "interrupted", do="run the same command again to go on")
        if self._late or (self._end is not None and self._clock() >= self._end):
            raise CommandEnd(
                Exit.OUT_OF_TIME,
                f"expected the command to end in {self._limit_s:.0f} s, found it not done",
                where="--deadline",
                do="run the same command again to go on, or give it more time",
            )

    def wait(self, seconds: float) -> None:
        """Sleep, unless the command must stop; raises as :meth:`check` does."""
        until = self._clock() + seconds
        while self._clock() < until:
            self.check()
            time.sleep(min(TURN_S, seconds))

    def follow(self, process: subprocess.Popen[bytes], tick: Callable[[], None]) -> int:
        """Wait for a process; its exit status.

        Args:
            tick: Called a few times a second.
        """
        self._process = process
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(TURN_S)
                self._turn(process)
                tick()
        finally:
            self._process = None

    def _turn(self, process: subprocess.Popen[bytes]) -> None:
        now = self._clock()
        if self._end is not None and now >= self._end and not self._late:
            self._late = True
            self._say("the deadline has passed: stopping")
            self._ask(process)
        if self.signals >= 2 or (self._asked_at is not None and self._late and now - self._asked_at > PARKING_S):
            self._end_now(process)

    def _ask(self, process: subprocess.Popen[bytes]) -> None:
        if self._asked_at is None:
            self._asked_at = self._clock()
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)

    def _end_now(self, process: subprocess.Popen[bytes]) -> None:
        """The engine ends at its second SIGINT, which frees its lock; what does not is killed with its plugins."""
        self._ask(process)
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATING_S)
        for pid in session_of(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.signals += 1
        if self.signals == 1:
            self._say("interrupted: finishing or parking the step in hand; Ctrl-C again stops at once")
            if self._process is not None:
                self._ask(self._process)


def session_of(leader: int) -> list[int]:
    """Every process of the session that a process leads, itself included; on Linux only, elsewhere just itself."""
    found = [leader]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and int(entry.name) != leader:
            found.append(int(entry.name))
    return found
