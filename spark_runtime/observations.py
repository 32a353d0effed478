"""What the protocol is told: its limits, what went wrong, and what a rank sees of its own node. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Times in seconds, and how often a start may fail."""

    lease_interval_s: float = 2.0
    lease_timeout_s: float = 25.0
    """A cable pulled for 10 s is ridden out, with the connection attempts that follow; a dead rank is told in 30 s."""
    join_timeout_s: float = 600.0
    start_timeout_s: float = 3600.0
    canary_interval_s: float = 30.0
    canary_retry_s: float = 5.0
    last_words_s: float = 20.0
    """How long vLLM may take to die after a bad answer: its last words explain more than an HTTP error."""
    grace_s: float = 30.0
    """How long vLLM may take to leave when a new generation was asked for."""
    leave_s: float = 3.0
    """The same for a worker's Ray, or its vLLM."""
    kill_s: float = 30.0
    memory_s: float = 60.0
    same_failures: int = 3
    all_failures: int = 10
    forget_s: float = 6 * 3600.0
    backoff_s: tuple[float, ...] = (1.0, 5.0, 20.0, 60.0, 300.0)
    """By the number of failures of its own making before serving; the first is for a group that has served."""


@dataclass(frozen=True)
class Failure:
    """Why a generation ends: one sentence, and whose fault it is in the first place."""

    text: str
    source: str
    from_log: bool = False
    """The log explains it better."""
    outside: bool = False
    """A rank or a node went away: nothing that was started is to blame."""
    waits: bool = False
    """Trying again is no use until all ranks are back."""


@dataclass(frozen=True)
class Remains:
    """What an ending rank still finds on its node."""

    processes: Sequence[str] = ()
    asked: bool = False
    """Whether the process that was asked to leave is among them."""
    lacking_bytes: int = 0
    """Memory that was there before the generation and is not back yet."""
    room: bool = True
    """Whether there is as much memory as a generation takes, whoever has the rest."""


@dataclass(frozen=True)
class Answer:
    """How a completion ended; a busy server that makes progress counts as good."""

    ok: bool
    text: str = ""
    stalled: bool = False
    """It did not come back in time, and meanwhile nothing moved for anybody else either."""


@dataclass(frozen=True)
class Seen:
    """What a rank sees of its own node in one turn."""

    joinable: bool = False
    """Whether the other ranks can join: Ray's control store listens, or without Ray the head's vLLM runs."""
    complete: bool = False
    """Whether Ray counts every node and GPU; without Ray there is nothing to count."""
    count_text: str = ""
    healthy: bool = False
    progress: str = ""
    answer: Answer | None = None
    died: Failure | None = None
    remains: Remains = Remains()
