"""Every decision of the rank supervisor. Pure: time and what was seen are passed in, what to do comes out.

Words
    group        one model served by N nodes; rank 0 is the head, the others are workers.
    incarnation  random, drawn at each start of a supervisor. A restarted rank is another incarnation.
    generation   one attempt to serve: (deployment, head incarnation, n). Compared for equality only.
    lease        what a worker renews at the head every few seconds. It names the worker's incarnation.
    members      rank -> incarnation, fixed before anything is started and never changed afterwards.
    idle         of a rank: no process, no shared memory is left of any generation, and memory has come back.

The head (the arrows are the only ways)

    starting -> waiting_for_ranks -> ray_starting -> ray_ready -> loading -> canary -> serving      backend: ray
    starting -> waiting_for_ranks -> joining -> loading -> canary -> serving                        backend: mp
        starting            this node is made idle: what an earlier life has left goes first
        waiting_for_ranks   until all ranks hold a lease, are idle, and know of this generation; fixes the members
        ray_starting        Ray's head first, then the workers are told to join; until N nodes and N*G GPUs
        joining             without Ray: the head's vLLM first, then the workers are told to start theirs; until all run
        loading             vLLM runs, until /health answers 200
        canary              until the first completion has come back through the real port
    any of these -> ending        on a breach, a dead process, a deadline, a request; everything is ended here
    ending -> backing_off         heal: the next generation begins when the time is up
           -> starting            a new generation was asked for
           -> failed              a verdict, see below
    backing_off -> waiting_for_ranks
    failed -> waiting_for_ranks   on request; by itself only if it waits for ranks and all of them are back
    any -> stopping -> stopped    on SIGTERM
    any -> ending -> stopped      while the node's disk says that the group is to be stopped; then a new generation

A generation is breached, for good, when a member's lease lapses, its incarnation changes, it reports a failure,
drops out, or says that it is being stopped, and when the head itself stood still for longer than a lease.

A worker runs one generation or none. It starts its part (Ray, or without Ray its vLLM) when it is idle and told to
join; it ends everything when told anything else, when its part dies, or when the head was silent for the lease time. A
generation it has ended it never joins again.

Ending, on every rank: kill until nothing is left, empty /dev/shm and Ray's folder, wait for memory; only then idle.
What will not die, or memory that does not come back, shows as ``failed``; the rank goes on trying and is not idle.

Verdicts: the same failure ``same_failures`` times before serving, or any ``all_failures`` times, or one that no
second try can cure; a rank that did not come in time or was stopped by hand; any failure under heal: report.

What must hold at every moment (tests/simulation asserts it, with this file, under faults of every kind)

    1  No two generations can serve: one head has processes, and all its members run its very generation.
    2  While a head has processes of a generation, no rank of its deployment has processes of another.
    3  Only a member's incarnation, of the head's deployment, ever starts anything of a generation.
    4  In ``serving`` every member holds its lease and runs this generation.
    5  A rank starts processes only on a node that is idle.
    6  Ray's head, then the workers' Ray, then vLLM. Without Ray: the head's vLLM, then the workers'.
    7  No generation has the name of an earlier one.
    8  Failures before serving are bounded in number and spaced by the back-off.
    9  Once faults stop, the group serves or has a verdict within a bounded time.
    10 No rank is blamed for what the head has not heard because it stood still, or because a message came late.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from spark_runtime.healing import Attempts
from spark_runtime.messages import Generation, LeaseReply, LeaseRequest, Order, Phase, Refused
from spark_runtime.observations import Answer, Failure, Limits, Remains, Seen

Heal = Literal["restart", "report"]
Step = Literal["wait", "begin", "join", "start_vllm", "ask", "leave", "kill", "sweep", "close"]
"""What the shell has to do now. ``join``: start what this rank takes part with, Ray or without Ray its vLLM;
``start_vllm``: over Ray, start the server; ``leave``: ask vLLM or Ray to end; ``ask``: send a completion; ``close``:
explain the failure and keep the log."""
FOLLOWED: tuple[Phase, ...] = ("ray_starting", "ray_ready", "joining", "loading", "canary", "serving")


BY_HAND = "was stopped by hand or by its deployment (SIGTERM)"
ON_REQUEST = "on request; nothing runs until it is started again"


def lapsed(seen: float, now: float, timeout_s: float) -> bool:
    """Whether somebody last heard of at ``seen`` counts as gone."""
    return now - seen > timeout_s


@dataclass
class Ending:
    """How a rank becomes idle: everything dies, then is swept, then memory comes back; in this order."""

    since: float
    grace_s: float = 0.0
    """How long the process that is asked to leave may take."""
    stuck: str = ""
    """Why this rank cannot become idle, for people; it goes on trying."""
    _asked: bool = False
    _swept_at: float | None = None

    def step(self, now: float, remains: Remains, limits: Limits) -> Step | None:
        """What to do next; None when this rank is idle."""
        if remains.processes:
            return self._end_processes(now, remains, limits)
        if self._swept_at is None:
            self._swept_at, self.stuck = now, ""
            return "sweep"
        if remains.lacking_bytes > 0:
            waited = now - self._swept_at
            if not (remains.room and waited > limits.memory_s / 4):
                if waited > limits.memory_s:
                    gib = remains.lacking_bytes / 1024**3
                    self.stuck = f"memory has not come back: {gib:.1f} GiB are missing; find who has them, or reboot"
                return "wait"
        self.stuck = ""
        return None

    def _end_processes(self, now: float, remains: Remains, limits: Limits) -> Step:
        waited = now - self.since
        if remains.asked and waited < self.grace_s:
            asked, self._asked = self._asked, True
            return "wait" if asked else "leave"
        if waited > self.grace_s + limits.kill_s:
            self.stuck = f"reboot the node, these will not die: {', '.join(remains.processes)}"
        return "kill"


@dataclass
class Lease:
    """The last thing a worker said, when (the head's monotonic clock), and the patience it was granted since."""

    request: LeaseRequest
    seen: float
    credit_s: float = 0.0


@dataclass
class HeadProtocol:
    """What the head knows of its ranks, and what it does next."""

    group: str
    deployment: str
    nodes: int
    incarnation: str
    limits: Limits
    heal: Heal = "restart"
    over_ray: bool = True
    names: Sequence[str] = ()
    """Names of the nodes, for people; by rank."""
    number: int = 0
    """Of the last generation; the shell keeps it on disk."""
    phase: Phase = "starting"
    detail: str = ""
    generation: Generation | None = None
    members: dict[int, str] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    reachable: set[int] = field(default_factory=set)
    """Silent ranks whose node answers; the shell looks."""
    wedged: set[int] = field(default_factory=set)
    """Silent ranks whose node's kernel answers and no program does."""
    refusals: list[str] = field(default_factory=list)
    attempts: Attempts = field(default_factory=Attempts)
    """The shell keeps these on disk too."""
    restart_wanted: bool = False
    held: bool = False
    """Somebody wants this group stopped; the shell reads it from the node's disk."""
    token: str = field(default="", repr=False)
    """Told to members only; the shell draws it anew for each generation."""
    digest: Mapping[str, Any] = field(default_factory=dict)
    """What every answer tells the workers of the group; the shell keeps it."""
    may_join: bool = False
    ended: bool = True
    end_reason: str = ""
    failure: Failure | None = None
    failed_in: Phase = "starting"
    retry_at: float = 0.0
    _ending: Ending | None = None
    _resumes: bool = False
    _entered: float = 0.0
    _progress: str = ""
    _joined: set[int] = field(default_factory=set)
    _breach: Failure | None = None
    _doubt: Failure | None = None
    _doubt_until: float = 0.0
    _complete_since: float | None = None
    _ask_at: float | None = None
    _bad_answers: int = 0
    _ran: float | None = None

    def open(self, now: float) -> None:
        """Once, at the start of this head: the node is made idle first."""
        self._entered, self._ending = now, Ending(now)
        self.generation = Generation(self.deployment, self.incarnation, self.number)
        self.attempts.reopen(self.number, now)

    # What workers say

    def take(self, request: LeaseRequest, now: float) -> LeaseReply:
        """Renew a lease and answer with the order for that rank; raises Refused."""
        self._advance(now)
        self._check_belongs(request)
        before = self.leases.get(request.rank)
        last = before.request if before else None
        if last is None or last.incarnation != request.incarnation or last.sequence < request.sequence:
            self.leases[request.rank] = Lease(request, now)
            self.restart_wanted = self.restart_wanted or request.restart
            if request.rank in self.members:
                self._judge_member(request, before, now)
        joins = self.may_join and not self.ended and self._breach is None and self._is_member(request)
        detail = self.end_reason or self.detail
        order: Order = "join" if joins else "idle"
        token = self.token if joins else ""
        return LeaseReply(self.group, self.deployment, self.generation, order, self.phase, detail, token, self.digest)

    def missing(self, now: float) -> list[str]:
        """What still keeps the members from being fixed, one text per rank."""
        texts = []
        for rank in range(1, self.nodes):
            lease = self.leases.get(rank)
            if lease is None:
                texts.append(f"{self._who(rank)} has never reported")
            elif lease.request.leaving:
                texts.append(self._left(lease.request))
            elif lapsed(lease.seen, now, self.limits.lease_timeout_s):
                why = self.of_node(rank) if rank in self.reachable | self.wedged else ""
                texts.append(f"{self._who(rank)} does not report any more{'; ' if why else ''}{why}")
            elif not lease.request.idle:
                texts.append(f"{self._who(rank)} is not ready: {lease.request.detail or lease.request.phase}")
            elif lease.request.known != self.generation:
                texts.append(f"{self._who(rank)} has not heard of this generation yet")
        addresses = [lease.request.address for lease in self.leases.values()]
        return texts + [f"address {a} is claimed by two ranks" for a in set(addresses) if addresses.count(a) > 1]

    def breach(self, now: float) -> Failure | None:
        """Why this generation must end; None while every member holds its lease."""
        self._advance(now)
        for rank in self.members:
            self._judge_lapse(rank, self.leases[rank], now)
        return self._breach

    def may_serve(self, now: float) -> bool:
        """Whether all ranks are members of this generation, run it, and hold their leases."""
        if self.ended or self.breach(now) or len(self.members) != self.nodes - 1:
            return False
        return all(self.leases[rank].request.running == self.generation for rank in self.members)

    def all_left(self) -> bool:
        """Whether every member has left the generation that was ended."""
        requests = [self.leases[rank].request for rank in self.members]
        return all(request.idle or request.leaving for request in requests)

    def silent(self, now: float) -> list[int]:
        """Ranks that once held a lease and let it lapse."""
        return [rank for rank, lease in self.leases.items() if lapsed(lease.seen, now, self.limits.lease_timeout_s)]

    def of_node(self, rank: int) -> str:
        """What is known of the node of a silent rank."""
        if rank in self.wedged:
            return "its node accepts connections and nobody speaks: node wedged, power cycle it"
        if rank in self.reachable:
            return "its node answers: killed by hand, or its container cannot start"
        return "its node does not answer: no power, no link, or booting"

    def address(self, rank: int) -> str:
        """The address a rank leased from."""
        return self.leases[rank].request.address

    # What the head does

    def turn(self, now: float, seen: Seen) -> Step:
        """The next thing to do; called several times a second."""
        self._advance(now)
        if self._ending is not None:
            return self._end_turn(now, seen.remains)
        if self.held and not self.ended:
            self.end(Failure("stopped on request", "supervisor"), now, self.limits.grace_s)
            return "wait"
        if self.restart_wanted and not self.ended:
            self.end(Failure("a new generation was asked for", "supervisor"), now, self.limits.grace_s)
            return "wait"
        if self.phase in ("starting", "backing_off", "failed", "stopped"):
            return self._between(now)
        failure = self._trouble(now, seen)
        if failure is not None:
            self.end(failure, now)
            return "wait"
        return "wait" if self._doubt else self._go_on(now, seen)

    def begin(self, now: float) -> Generation:
        """A new generation without members; whoever still runs an older one is told to end it."""
        self.number += 1
        self.generation = Generation(self.deployment, self.incarnation, self.number)
        self.members, self._joined, self._breach, self._doubt = {}, set(), None, None
        self.may_join = self.restart_wanted = self.ended = self._resumes = False
        self.end_reason, self.failure = "", None
        self.refusals.clear()
        self._enter("waiting_for_ranks", now)
        return self.generation

    def end(self, failure: Failure, now: float, grace_s: float = 0.0) -> None:
        """End the generation: from now on every rank is told to be idle."""
        if self._ending is None:
            self.failure, self.failed_in = failure, self.phase
            self.ended, self.end_reason = True, f"generation {self.number} ended: {failure.text}"
            self._ending = Ending(now, grace_s)
            self._enter("ending", now, failure.text)

    def close(self, line: str, hopeless: bool, now: float) -> None:
        """This node is idle again: decide what comes next. ``line`` is the first error, found in the log."""
        failure, self._ending, self.attempts.unfinished = self.failure, None, False
        if failure is None or self.restart_wanted or self.held:
            self._enter("starting", now)
            return
        self.end_reason = f"generation {self.number} ended: {line}"
        if self.failed_in != "serving" and not failure.waits:
            self.attempts.failed(line, failure, now)
        verdict = self.attempts.verdict(now, self.limits)
        self._resumes = self.heal == "restart" and failure.waits
        if self.heal == "report" or failure.waits or hopeless or verdict:
            self._enter("failed", now, f"{verdict}: {line}" if verdict else line)
            return
        delay = self.attempts.backoff_s(self.limits)
        self.retry_at = now + delay
        self._enter("backing_off", now, f"{line}; the next generation begins in {delay:.0f} s")

    def stop(self) -> None:
        """SIGTERM: every rank is told to be idle."""
        self.ended, self.end_reason = True, f"{self._who(0)} {BY_HAND}"
        self.phase = "stopping"
        self.attempts.forget()

    @property
    def is_ending(self) -> bool:
        """Whether this node is on its way to being idle."""
        return self._ending is not None

    @property
    def stuck(self) -> str:
        """Why this node cannot become idle; empty if it can."""
        return self._ending.stuck if self._ending else ""

    def _between(self, now: float) -> Step:
        if self.held:
            self.restart_wanted = False
            self.attempts.forget()
            if self.phase != "stopped":
                self._enter("stopped", now, ON_REQUEST)
            return "wait"
        if self.restart_wanted or self.phase == "stopped":
            self.attempts.forget()
        elif self.phase == "backing_off":
            return "begin" if now >= self.retry_at else "wait"
        elif self.phase == "failed":
            return "begin" if self._resumes and not self.missing(now) else "wait"
        verdict = self.attempts.verdict(now, self.limits)
        if verdict:
            self._enter("failed", now, f"{verdict}: {self.attempts.crashes[-1].line}")
            return "wait"
        return "begin"

    def _end_turn(self, now: float, remains: Remains) -> Step:
        if self._ending is None:
            return "wait"
        step = self._ending.step(now, remains, self.limits)
        if self._ending.stuck:
            self.phase, self.detail = "failed", self._ending.stuck
        return step or "close"

    def _go_on(self, now: float, seen: Seen) -> Step:
        if self.phase == "waiting_for_ranks":
            missing = self.missing(now)
            if not missing:
                self.members = {rank: self.leases[rank].request.incarnation for rank in range(1, self.nodes)}
                self.attempts.unfinished = True
                if self.over_ray:
                    self._enter("ray_starting", now, "starting Ray's head")
                else:
                    self._enter("joining", now, "starting vLLM on every rank")
                return "join"
            self.detail = "; ".join([*missing, *self.refusals])
            if now - self._entered > self.limits.join_timeout_s:
                text = f"not all ranks came within {self.limits.join_timeout_s:.0f} s: {self.detail}"
                self.end(Failure(text, "supervisor", waits=True), now)
        elif self.phase in ("ray_starting", "joining"):
            self._gather(now, seen)
        elif self.phase == "ray_ready":
            self._enter("loading", now)
            return "start_vllm"
        elif self.phase == "loading":
            return self._load(now, seen)
        elif seen.answer is not None:
            self._judge_answer(seen.answer, now)
        elif self._ask_at is not None and now >= self._ask_at:
            self._ask_at = None
            return "ask"
        return "wait"

    def _gather(self, now: float, seen: Seen) -> None:
        if not self.may_join and seen.joinable:
            self.may_join = True
        complete = self.may_join and seen.complete and self.may_serve(now)
        self.detail = seen.count_text or self.detail
        if not complete:
            self._complete_since = None
        elif self._complete_since is None:
            self._complete_since = now
        elif now - self._complete_since >= 2 * self.limits.lease_interval_s:
            # Seen once is not enough: a node can join for seconds and be declared dead again.
            self._enter("ray_ready" if self.over_ray else "loading", now, seen.count_text)
            return
        if now - self._entered > self.limits.join_timeout_s:
            who = "Ray was not complete" if self.over_ray else "not every rank ran vLLM"
            text = f"{who} within {self.limits.join_timeout_s:.0f} s: {self.detail}"
            self.end(Failure(text, "ray" if self.over_ray else "vllm", from_log=not self.may_join), now)

    def _load(self, now: float, seen: Seen) -> Step:
        if seen.healthy:
            self._enter("canary", now, "vllm answers /health with 200; waiting for the first completion")
            return "ask"
        if seen.progress != self._progress:
            self._progress, self._entered = seen.progress, now
        if now - self._entered > self.limits.start_timeout_s:
            limit = f"loading made no progress for {self.limits.start_timeout_s:.0f} s"
            self.end(Failure(f"{limit}; last step: {self._progress or 'none'}", "vllm"), now)
        return "wait"

    def _judge_answer(self, answer: Answer, now: float) -> None:
        self._bad_answers = 0 if answer.ok else self._bad_answers + 1
        self._ask_at = now + (self.limits.canary_interval_s if answer.ok else self.limits.canary_retry_s)
        if self.phase == "canary" and answer.ok:
            if self.may_serve(now):
                self._enter("serving", now)
                self._ask_at = now + self.limits.canary_interval_s
                self.attempts.forget()
            else:
                self.end(Failure("not all ranks hold their lease", "supervisor", outside=True), now)
        elif self.phase == "canary":
            text = f"vllm answered /health with 200, but {answer.text}"
            self._suspect(Failure(text, "vllm"), now + self.limits.last_words_s)
        elif answer.stalled:
            text = f"the engine stands still: {answer.text}, and no request made any progress"
            self.end(Failure(text, "vllm"), now)
        elif self._bad_answers >= 2:  # one may be a moment's overload
            text = f"vllm stopped serving: {answer.text}"
            self._suspect(Failure(text, "vllm"), now + self.limits.last_words_s)

    def _trouble(self, now: float, seen: Seen) -> Failure | None:
        breach = self.breach(now)
        if breach is not None:
            return breach
        # When a node dies, vLLM notices long before its lease lapses. A few more seconds tell the two apart.
        patience = 3 * self.limits.lease_interval_s
        if seen.died is not None and not (self._doubt and self._doubt.from_log):
            self._suspect(seen.died, now + (patience if self.members else 0))
        if self._doubt is None or now < self._doubt_until:
            return None
        for rank in self.members:
            if now - self.leases[rank].seen > patience - self.limits.lease_interval_s / 2:
                text = f"{self._who(rank)} fell silent, then {self._doubt.text}"
                return Failure(text, f"rank {rank}", outside=True)
        return self._doubt

    def _suspect(self, failure: Failure, until: float) -> None:
        self._doubt, self._doubt_until = failure, until

    def _enter(self, phase: Phase, now: float, detail: str = "") -> None:
        self.phase, self.detail, self._entered = phase, detail, now
        self._progress, self._complete_since, self._ask_at, self._bad_answers = "", None, None, 0

    def _who(self, rank: int) -> str:
        lease = self.leases.get(rank)
        name = f" on {self.names[rank]}" if rank < len(self.names) else ""
        return f"rank {rank}{name}" + (f" ({lease.request.address})" if lease else "")

    def _left(self, request: LeaseRequest) -> str:
        why = "is stopped on request" if request.phase == "stopped" else BY_HAND
        return f"{self._who(request.rank)} {why}"

    def _is_member(self, request: LeaseRequest) -> bool:
        return self.members.get(request.rank) == request.incarnation

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
        rank, who = request.rank, self._who(request.rank)
        if before is not None:
            self._judge_lapse(rank, before, now)
        if not self._is_member(request):
            self._breaks(f"{who} was restarted while the generation ran", f"rank {rank}")
        elif request.leaving:
            text = self._left(request)
            self._breaks(text, f"rank {rank}", waits=True)
        elif request.failed is not None and request.failed == self.generation:
            source = f"rank {rank} {request.failure_source}".strip()
            text = f"{who}: {request.failure_line or 'failed without a word'}"
            self._breaks(text, source, outside=request.failure_source == "head")
        elif request.running is not None and request.running == self.generation:
            self._joined.add(rank)
        elif rank in self._joined:
            self._breaks(f"{who} has left the generation", f"rank {rank}")

    def _judge_lapse(self, rank: int, lease: Lease, now: float) -> None:
        if lapsed(lease.seen, now, self.limits.lease_timeout_s):
            text = f"{self._who(rank)} was not heard of for {now - lease.seen:.0f} s"
            self._breaks(text, f"rank {rank}")

    def _breaks(self, text: str, source: str, outside: bool = True, waits: bool = False) -> None:
        # Only the first breach counts: what follows is a consequence. Once ended there is nothing to breach.
        if self._breach is None and not self.ended:
            self._breach = Failure(text, source, outside=outside, waits=waits)

    def _advance(self, now: float) -> None:
        # A head that did not run has not listened either: a short pause is no worker's silence. After a pause longer
        # than a lease the workers have ended the generation, and the one to blame is the head.
        gap = 0.0 if self._ran is None else now - self._ran
        self._ran = now
        timeout = self.limits.lease_timeout_s
        if gap <= timeout / 2:
            return
        self._entered += gap  # no deadline runs meanwhile either
        if gap > timeout and self.members:
            self._breaks(f"the head stood still for {gap:.0f} s (paused, or starved of CPU)", "rank 0")
        else:
            for lease in self.leases.values():
                credit = min(gap, timeout - lease.credit_s)
                lease.seen += credit
                lease.credit_s += credit


@dataclass
class WorkerProtocol:
    """What a worker knows of its head and of itself, and what it does next."""

    group: str
    deployment: str
    rank: int
    nodes: int
    address: str
    incarnation: str
    limits: Limits
    head: str = ""
    """Where the head is asked, for people."""
    over_ray: bool = True
    phase: Phase = "starting"
    detail: str = ""
    running: Generation | None = None
    ended: Generation | None = None
    known: Generation | None = None
    failed: Generation | None = None
    failure: Failure | None = None
    leaving: bool = False
    held: bool = False
    """Somebody wants this rank stopped; the shell reads it from the node's disk."""
    restart_wanted: bool = False
    call_at: float = 0.0
    """When to ask the head next."""
    _heard: float = 0.0
    _sequence: int = 0
    _silence: str = ""
    _ending: Ending | None = None

    def open(self, now: float) -> None:
        """Once, at the start of this worker: the node is made idle first."""
        self._heard, self._ending = now, Ending(now)

    def request(self, now: float, line: str = "") -> LeaseRequest:
        """The next question to the head. ``line`` is the first error of the generation that failed here."""
        self.call_at = now + self.limits.lease_interval_s
        self._sequence += 1
        return LeaseRequest(
            group=self.group,
            deployment=self.deployment,
            rank=self.rank,
            nodes=self.nodes,
            address=self.address,
            incarnation=self.incarnation,
            sequence=self._sequence,
            phase="stopped" if self.held else self.phase,
            detail=self.detail,
            idle=self.running is None and self._ending is None,
            running=self.running,
            known=self.known,
            failed=self.failed,
            failure_source=self.failure.source if self.failure and self.failed else "",
            failure_line=(line or (self.failure.text if self.failure else "")) if self.failed else "",
            leaving=self.leaving or self.held,
            restart=self.restart_wanted,
        )

    def answered(self, reply: LeaseReply, now: float) -> Step:
        """The head has answered; ``join`` if that is to be done."""
        if (reply.group, reply.deployment) != (self.group, self.deployment):
            self.unanswered(f"there is a head of {reply.group}/{reply.deployment}, not ours")
            return "wait"
        self._heard, self._silence, self.restart_wanted = now, "", False
        if self.known != reply.generation:
            self.known, self.call_at = reply.generation, now  # let the head know at once
        wanted = reply.generation if reply.order == "join" else None
        if self._ending is not None or self.held:
            return "wait"
        if self.running is not None:
            if self.running != wanted:
                why = reply.detail if reply.generation == self.running else "it begins another generation"
                self._end(f"ended by the head: {why}", now, self.limits.leave_s)
            else:
                self.phase, self.detail = next((p for p in FOLLOWED if p == reply.phase), self.phase), ""
            return "wait"
        if wanted is not None and wanted != self.ended:
            self.running, self.failed, self.failure = wanted, None, None
            self.phase, self.detail = ("ray_starting", "joining Ray") if self.over_ray else ("joining", "starting vLLM")
            return "join"
        if self.failed is None or self.failed != reply.generation:  # or its own failure is the news
            told = f": {reply.detail}" if reply.detail else ""
            self.phase, self.detail = "waiting_for_ranks", f"leased; the head is in {reply.phase}{told}"
        return "wait"

    def unanswered(self, why: str) -> None:
        """The head has not answered, or has refused this rank."""
        self._silence = why

    def turn(self, now: float, seen: Seen) -> Step:
        """The next thing to do; called several times a second."""
        if self._ending is not None:
            step = self._ending.step(now, seen.remains, self.limits)
            if self._ending.stuck:
                self.phase, self.detail = "failed", self._ending.stuck
            return step or "close"
        silence, why = now - self._heard, self._silence or "no answer"
        if self.held:
            if self.running is not None:
                self._end("stopped on request", now, self.limits.leave_s)
            elif self.phase != "stopped":
                self.phase, self.detail, self.call_at = "stopped", ON_REQUEST, now
        elif self.phase == "stopped":
            self.phase, self.detail, self.call_at = "waiting_for_ranks", "", now
        elif self.running is not None:
            if seen.died is not None:
                self.fail(seen.died, now)
            elif lapsed(self._heard, now, self.limits.lease_timeout_s):
                text = f"the head at {self.head} was not heard of for {silence:.0f} s: {why}"
                self.fail(Failure(text, "head", outside=True), now)
        elif silence > self.limits.join_timeout_s:  # still asking: a head that comes after all finds this rank
            limit = f"{self.limits.join_timeout_s:.0f} s"
            self.phase, self.detail = "failed", f"no lease from the head at {self.head} within {limit}: {why}"
        elif self._silence and self.phase != "failed":
            self.phase, self.detail = "waiting_for_ranks", f"waiting for the head at {self.head}: {why}"
        return "wait"

    def fail(self, failure: Failure, now: float) -> None:
        """This rank cannot go on with its generation."""
        if self._ending is None:
            self.failed, self.failure = self.running, failure
            self._end(failure.text, now)

    def close(self, line: str, now: float) -> None:
        """Nothing is left on this node. ``line`` is the first error, if this rank has failed."""
        self.ended, self.running, self._ending = self.running or self.ended, None, None
        self.phase, self.detail = ("failed", line) if self.failed else ("waiting_for_ranks", self.detail)
        self.call_at = now  # let the head know at once

    @property
    def is_ending(self) -> bool:
        """Whether this node is on its way to being idle."""
        return self._ending is not None

    @property
    def stuck(self) -> str:
        """Why this node cannot become idle; empty if it can."""
        return self._ending.stuck if self._ending else ""

    def _end(self, text: str, now: float, grace_s: float = 0.0) -> None:
        self.phase, self.detail, self._ending = "ending", text, Ending(now, grace_s)
