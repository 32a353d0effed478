"""When to try again, and when to stop trying. Pure.

A group that has served is started again at once, however often: each time it did serve. What counts are generations
that failed before they served. Those for which something that was started is to blame are spaced by a growing
back-off and end in a verdict when the same error comes back; those that a rank or a node ended by going away need no
back-off, since the next one cannot begin before all ranks are back, and end in a verdict only when they never end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from spark_runtime.observations import Failure, Limits

_NUMBER = re.compile(r"(?:0x)?[0-9a-f]*\d[0-9a-f]*")


@dataclass(frozen=True)
class Crash:
    """A generation that failed before it served: when, in which way, by its first error."""

    at: float
    kind: str
    line: str
    outside: bool


@dataclass
class Attempts:
    """The generations that failed since the group last served or was last asked to start."""

    crashes: list[Crash] = field(default_factory=list)
    unfinished: bool = False
    """A generation has been started and has neither served nor been closed. On disk: a head that dies must know it."""

    def reopen(self, number: int, now: float) -> None:
        """At the start of a head: a life that was cut short counts as a failure."""
        if self.unfinished:
            line = f"the head's supervisor ended in the middle of generation {number}"
            self.crashes.append(Crash(now, kind_of(line), line, outside=True))
            self.unfinished = False

    def failed(self, line: str, failure: Failure, now: float) -> None:
        """A generation has failed before it served."""
        self.crashes.append(Crash(now, kind_of(line), line, failure.outside))

    def forget(self) -> None:
        """The group has served, or somebody asks for it anew."""
        self.crashes.clear()
        self.unfinished = False

    def verdict(self, now: float, limits: Limits) -> str:
        """Why there is no use in another attempt; empty if there is."""
        self.crashes[:] = [crash for crash in self.crashes if now - crash.at <= limits.forget_s]
        own = [crash.kind for crash in self.crashes if not crash.outside]
        same = max((own.count(kind) for kind in own), default=0)
        if same >= limits.same_failures:
            return f"crash loop: {same} generations failed in the same way before they served"
        if len(self.crashes) >= limits.all_failures:
            return f"crash loop: {len(self.crashes)} generations failed before they served"
        return ""

    def backoff_s(self, limits: Limits) -> float:
        """How long to wait before the next attempt."""
        own = sum(not crash.outside for crash in self.crashes)
        return limits.backoff_s[min(own, len(limits.backoff_s) - 1)]


def kind_of(line: str) -> str:
    """Errors that differ in numbers and addresses only are of one kind."""
    return _NUMBER.sub("#", line.lower())[:160]
