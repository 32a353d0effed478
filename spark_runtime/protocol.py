"""What the ranks of one group agree on. Pure: no clock, no socket, no process; time is passed in.

Words
    group        one model served by N nodes; rank 0 is the head, the others are workers.
    incarnation  random, drawn at each start of a supervisor. A restarted rank is another incarnation.
    generation   one attempt to serve: (deployment, head incarnation, n). Compared for equality only.
    lease        what a worker renews at the head every few seconds. It names the worker's incarnation.
    members      rank -> incarnation, fixed when the generation starts Ray and never changed afterwards.

The head's phases (the arrows are the only ways)

    starting -> waiting_for_ranks -> ray_starting -> ray_ready -> loading -> canary -> serving
        waiting_for_ranks   until all N ranks hold a fresh lease and are idle; then the members are fixed
        ray_starting        Ray head first, then the workers are ordered to join; until N nodes and N*G GPUs
        loading             vllm runs, until /health answers 200
        canary              until the first completion has come back through the real port
    each of these -> failed     on a breach (below), a dead process or a deadline; after everything was ended
    each of these -> stopping -> stopped    on SIGTERM
    failed | any of these -> starting       on a restart request, with n + 1

A generation is breached, for good, when a member's lease lapses, its incarnation changes, it reports a
failure, drops out, or says that it is being stopped. Nothing un-breaches a generation: a worker that crashes
and comes back fast is another incarnation and can only be a member of the next one.

The worker is told one of two orders in each answer: ``join`` generation g, or be ``idle``.

    idle, order join g, g not ended before  -> start Ray for g
    in g, order join g                      -> keep
    in g, anything else                     -> end everything, report idle; g is never joined again
    in g, no answer for the lease time      -> the same (the head is gone)

So a rank that follows may be restarted at any moment. The head stays in ``failed`` until it is asked for a
restart; a head that begins the next generation by itself needs no other message than these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal[
    "starting",
    "waiting_for_ranks",
    "ray_starting",
    "ray_ready",
    "loading",
    "canary",
    "serving",
    "failed",
    "stopping",
    "stopped",
]
PHASES: tuple[Phase, ...] = (
    "starting",
    "waiting_for_ranks",
    "ray_starting",
    "ray_ready",
    "loading",
    "canary",
    "serving",
    "failed",
    "stopping",
    "stopped",
)
Order = Literal["idle", "join"]
Step = Literal["keep", "start", "end"]

MAX_TEXT = 4000


class BadMessage(Exception):
    """A message that is not of this protocol. The text says what is wrong with it."""


class Refused(Exception):
    """A well-formed message from somebody who does not belong here."""


@dataclass(frozen=True)
class Generation:
    """One attempt to serve. Equality is the only comparison that means anything."""

    deployment: str
    head_incarnation: str
    n: int

    def as_json(self) -> dict[str, Any]:
        """The form used in messages and in the status file."""
        return {"deployment": self.deployment, "head_incarnation": self.head_incarnation, "n": self.n}

    @classmethod
    def from_json(cls, value: object) -> Generation | None:
        """Read the form above; None stays None."""
        if value is None:
            return None
        if not isinstance(value, dict):
            raise BadMessage("generation: expected an object or null")
        return cls(_text(value, "deployment"), _text(value, "head_incarnation"), _number(value, "n", 1, 2**53))


@dataclass(frozen=True)
class LeaseRequest:
    """What a worker says every few seconds."""

    group: str
    deployment: str
    rank: int
    nodes: int
    address: str
    incarnation: str
    phase: str
    detail: str = ""
    running: Generation | None = None
    """The generation this rank has processes of; None only when nothing of any generation is left."""
    failed: Generation | None = None
    """The generation this rank had to end by itself, and why in the next two."""
    failure_source: str = ""
    failure_line: str = ""
    leaving: bool = False
    """SIGTERM: somebody stops this rank."""
    restart: bool = False
    """Somebody asks, on this rank, for a new generation."""

    def as_json(self) -> dict[str, Any]:
        """The message body."""
        body = dict(self.__dict__)
        for name in ("running", "failed"):
            value: Generation | None = body[name]
            body[name] = value.as_json() if value else None
        return body

    @classmethod
    def from_json(cls, value: object) -> LeaseRequest:
        """Read a message body; raises BadMessage."""
        if not isinstance(value, dict):
            raise BadMessage("expected a JSON object")
        return cls(
            group=_text(value, "group"),
            deployment=_text(value, "deployment"),
            rank=_number(value, "rank", 0, 10_000),
            nodes=_number(value, "nodes", 1, 10_000),
            address=_text(value, "address"),
            incarnation=_text(value, "incarnation"),
            phase=_text(value, "phase"),
            detail=_text(value, "detail", ""),
            running=Generation.from_json(value.get("running")),
            failed=Generation.from_json(value.get("failed")),
            failure_source=_text(value, "failure_source", ""),
            failure_line=_text(value, "failure_line", ""),
            leaving=value.get("leaving") is True,
            restart=value.get("restart") is True,
        )


@dataclass(frozen=True)
class LeaseReply:
    """The head's answer: what to do, and enough of its own state for the worker's status."""

    group: str
    deployment: str
    generation: Generation | None
    order: Order
    phase: str
    detail: str = ""

    def as_json(self) -> dict[str, Any]:
        """The message body."""
        return {**self.__dict__, "generation": self.generation.as_json() if self.generation else None}

    @classmethod
    def from_json(cls, value: object) -> LeaseReply:
        """Read an answer; raises BadMessage."""
        if not isinstance(value, dict):
            raise BadMessage("expected a JSON object")
        generation = Generation.from_json(value.get("generation"))
        order: Order = "join" if _text(value, "order") == "join" and generation else "idle"
        return cls(
            group=_text(value, "group"),
            deployment=_text(value, "deployment"),
            generation=generation,
            order=order,
            phase=_text(value, "phase"),
            detail=_text(value, "detail", ""),
        )


def next_step(running: Generation | None, ended: Generation | None, reply: LeaseReply) -> Step:
    """What a worker does after an answer. ``ended`` is what it has ended last, and never joins again."""
    wanted = reply.generation if reply.order == "join" else None
    if running is not None:
        return "keep" if running == wanted else "end"
    return "start" if wanted is not None and wanted != ended else "keep"


@dataclass
class Lease:
    """The last thing a worker said, and when (the head's monotonic clock)."""

    request: LeaseRequest
    seen: float


@dataclass(frozen=True)
class Breach:
    """Why a generation cannot go on: one sentence, and whose fault it is in the first place."""

    text: str
    source: str


@dataclass
class Gang:
    """What the head knows of its ranks, and every decision that follows from it."""

    group: str
    deployment: str
    nodes: int
    incarnation: str
    lease_timeout_s: float
    generation: Generation | None = None
    members: dict[int, str] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    restart_wanted: bool = False
    may_join: bool = False
    ended: bool = True
    end_reason: str = ""
    _joined: set[int] = field(default_factory=set)
    _breach: Breach | None = None
    _last_advance: float | None = None

    def begin(self, n: int) -> Generation:
        """A new generation without members; whoever still runs an older one is told to end it."""
        if self.generation is not None and n <= self.generation.n:
            raise ValueError(f"generation {n} after {self.generation.n}")
        self.generation = Generation(self.deployment, self.incarnation, n)
        self.members, self._joined, self._breach = {}, set(), None
        self.may_join = self.restart_wanted = self.ended = False
        self.end_reason = ""
        self.refusals.clear()
        return self.generation

    def take(self, request: LeaseRequest, now: float, phase: str = "", detail: str = "") -> LeaseReply:
        """Renew a lease and answer with the order for that rank; raises Refused."""
        self._advance(now)
        self._check_belongs(request)
        before = self.leases.get(request.rank)
        self.leases[request.rank] = Lease(request, now)
        self.restart_wanted = self.restart_wanted or request.restart
        if request.rank in self.members:
            self._judge_member(request, before, now)
        joins = self.may_join and not self.ended and self.members.get(request.rank) == request.incarnation
        return LeaseReply(self.group, self.deployment, self.generation, "join" if joins else "idle", phase, detail)

    def missing(self, now: float) -> list[str]:
        """What still keeps the members from being fixed, one text per rank."""
        self._advance(now)
        texts = []
        for rank in range(1, self.nodes):
            lease = self.leases.get(rank)
            if lease is None:
                texts.append(f"rank {rank} has never reported")
            elif now - lease.seen > self.lease_timeout_s:
                texts.append(f"rank {rank} ({lease.request.address}) does not report any more")
            elif lease.request.leaving:
                texts.append(f"rank {rank} ({lease.request.address}) was stopped")
            elif lease.request.running is not None:
                texts.append(f"rank {rank} ({lease.request.address}) is still ending its last generation")
        addresses = [lease.request.address for lease in self.leases.values()]
        texts += [f"address {a} is claimed by two ranks" for a in set(addresses) if addresses.count(a) > 1]
        return texts

    def fix_members(self, now: float) -> bool:
        """Fix the members if all N ranks are there and idle."""
        if self.missing(now):
            return False
        self.members = {rank: self.leases[rank].request.incarnation for rank in range(1, self.nodes)}
        return True

    def breach(self, now: float) -> Breach | None:
        """Why this generation must end; None while every member holds its lease."""
        self._advance(now)
        if self._breach is None and not self.ended:
            for rank in self.members:
                self._judge_lapse(rank, now)
        return self._breach

    def silent(self, now: float, longer_than_s: float) -> list[int]:
        """Members not heard of for a while, though their lease has not lapsed yet."""
        return [rank for rank in self.members if now - self.leases[rank].seen > longer_than_s]

    def may_serve(self, now: float) -> bool:
        """Whether all N ranks are members of this generation, run it, and hold their leases."""
        if self.ended or self.breach(now) or len(self.members) != self.nodes - 1:
            return False
        return all(self.leases[rank].request.running == self.generation for rank in self.members)

    def end(self, reason: str) -> None:
        """End the generation: from now on every rank is told to be idle."""
        self.ended, self.end_reason = True, reason

    def all_idle(self) -> bool:
        """Whether every member has said that nothing of its generation is left."""
        requests = [self.leases[rank].request for rank in self.members]
        return all(request.running is None or request.leaving for request in requests)

    def address(self, rank: int) -> str:
        """The address a rank leased from."""
        return self.leases[rank].request.address

    def _check_belongs(self, request: LeaseRequest) -> None:
        reason = ""
        if request.group != self.group:
            reason = f"group {request.group!r}, this head serves {self.group!r}"
        elif request.deployment != self.deployment:
            reason = f"deployment {request.deployment!r}, this head is of {self.deployment!r}"
        elif request.nodes != self.nodes:
            reason = f"{request.nodes} nodes, this head expects {self.nodes}"
        elif not 1 <= request.rank < self.nodes:
            reason = f"rank {request.rank}, this head expects ranks 1 to {self.nodes - 1}"
        if reason:
            text = f"refused rank {request.rank} at {request.address}: it is of {reason}"
            if text not in self.refusals:
                self.refusals[:] = [*self.refusals[-4:], text]
            raise Refused(text)

    def _judge_member(self, request: LeaseRequest, before: Lease | None, now: float) -> None:
        rank, who = request.rank, f"rank {request.rank} ({request.address})"
        if before is not None and now - before.seen > self.lease_timeout_s:
            self._breaks(f"{who} was not heard of for {now - before.seen:.0f} s", f"rank {rank}")
        if request.incarnation != self.members[rank]:
            self._breaks(f"{who} was restarted while the generation ran", f"rank {rank}")
        elif request.leaving:
            self._breaks(f"{who} was stopped by hand or by its deployment (SIGTERM)", f"rank {rank}")
        elif request.failed is not None and request.failed == self.generation:
            source = f"rank {rank} {request.failure_source}".strip()
            self._breaks(f"{who}: {request.failure_line or 'failed without a word'}", source)
        elif request.running is not None and request.running == self.generation:
            self._joined.add(rank)
        elif rank in self._joined:
            self._breaks(f"{who} has left the generation", f"rank {rank}")

    def _judge_lapse(self, rank: int, now: float) -> None:
        age = now - self.leases[rank].seen
        if age > self.lease_timeout_s:
            who = f"rank {rank} ({self.address(rank)})"
            self._breaks(f"{who} was not heard of for {age:.0f} s", f"rank {rank}")

    def _breaks(self, text: str, source: str) -> None:
        # Only the first breach counts: what follows is a consequence. Once ended there is nothing to breach.
        if self._breach is None and not self.ended:
            self._breach = Breach(text, source)

    def _advance(self, now: float) -> None:
        # A head that did not run itself (starved, stopped) has not listened either: that time is no worker's
        # silence. The caller's loop turns several times a second, so a long gap can only be such a pause.
        last, self._last_advance = self._last_advance, now
        if last is not None and now - last > self.lease_timeout_s / 2:
            for lease in self.leases.values():
                lease.seen += now - last


def _text(value: Mapping[str, Any], name: str, default: str | None = None) -> str:
    found = value.get(name, default)
    if not isinstance(found, str):
        raise BadMessage(f"{name}: expected a text")
    return found[:MAX_TEXT]


def _number(value: Mapping[str, Any], name: str, low: int, high: int) -> int:
    found = value.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or not low <= found <= high:
        raise BadMessage(f"{name}: expected a whole number from {low} to {high}")
    return found
