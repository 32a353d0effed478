"""The endpoint gate: a group serves only if a real completion comes back through its public endpoint.

``/health`` answers 200 while an engine is about to die, so it counts for nothing here. What counts: every container
runs, every rank is in the same generation, the head's own canary has passed, and so has ours, with the API key,
through the address that people will use. The deadline is renewed by progress: loading may take long, standing still
may not.
"""

from __future__ import annotations

import calendar
import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spark_core.errors import CommandError, GateError, SparkError, UnreachableError
from spark_core.group import RUNTIME_TARGET
from spark_core.kernel_lines import keep_kernel_lines
from spark_core.transport.base import Transport, command, parse_sections, run_checked, script

POLL_S = 1.0
UNANSWERED_LOOKS = 5
CRASH_LOOP_RESTARTS = 3
SILENT_S = 90.0
"""A supervisor that has not written its status for this long is stuck; generous: a loading node can be starved."""

_OBSERVE = """
docker container inspect --format '=== container
{{json .State}}
=== restarts
{{.RestartCount}}
=== id
{{.Id}}' "$1" 2>/dev/null || docker ps -q > /dev/null  # no such container, unless Docker says here what is wrong
echo '=== now'; date +%s
echo '=== status'; cat "$2/status.json" 2>/dev/null || echo null
"""


@dataclass(frozen=True)
class RankState:
    """What a node says of its rank.

    Attributes:
        node: Name of the node.
        rank: 0 is the head.
        container_id: Id of the container, or None if there is none.
        running: Whether the container runs.
        exit_code: Exit status of a container that does not run.
        oom_killed: Whether the kernel killed it for memory.
        started_at: Docker's text for when it was started.
        restarts: How often Docker has restarted the container by itself.
        silent_s: Seconds since the supervisor wrote its status, by the node's own clock.
        status: The supervisor's own status, or None if it has not written one since the container was started.
    """

    node: str
    rank: int
    container_id: str | None
    running: bool
    exit_code: int | None
    oom_killed: bool
    started_at: str
    status: Mapping[str, Any] | None = field(default=None)
    restarts: int = 0
    silent_s: float = 0.0

    @property
    def held(self) -> bool:
        """Whether somebody has asked for it to be stopped; its supervisor then runs and starts nothing."""
        return self.running and (self.status or {}).get("desired") == "stopped"

    @property
    def silent(self) -> bool:
        """Whether the supervisor runs and has long not said anything: it writes every second or two."""
        return self.running and self.silent_s > SILENT_S

    @property
    def phase(self) -> str:
        """The rank's phase in one word."""
        if self.container_id is None:
            return "no container"
        if not self.running:
            return "container stopped"
        return str(self.status.get("phase", "unknown")) if self.status else "starting"

    @property
    def generation(self) -> tuple[str, int] | None:
        generation = self.status.get("generation") if self.status else None
        if not isinstance(generation, Mapping):
            return None
        number = generation.get("n")
        return str(generation.get("head_incarnation")), number if isinstance(number, int) else 0


@dataclass(frozen=True)
class Rank:
    """Where one rank is to be found."""

    transport: Transport
    rank: int
    container: str
    state_folder: str


def observe_rank(rank: Rank) -> RankState:
    """What a node says of its rank, in one round trip; changes nothing."""
    text = run_checked(
        rank.transport,
        script(_OBSERVE, rank.container, rank.state_folder),
        purpose="expected to read the state of the rank",
    )
    return parse_rank_state(rank.transport.node, rank.rank, text)


def parse_rank_state(node: str, rank: int, text: str) -> RankState:
    """A rank's state from the output of the observation script."""
    sections = parse_sections(text)
    container = _json(sections.get("container", "null"))
    status = _json(sections.get("status", "null"))
    if container is None:
        return RankState(node, rank, None, False, None, False, "", None)
    started = str(container.get("StartedAt", ""))
    if status is not None and not _written_since(status, started):
        status = None  # left by an earlier container of this rank
    return RankState(
        node=node,
        rank=rank,
        container_id=sections.get("id", "").strip() or None,
        running=bool(container.get("Running")),
        exit_code=container.get("ExitCode"),
        oom_killed=bool(container.get("OOMKilled")),
        started_at=started,
        status=status,
        restarts=int(sections.get("restarts", "").strip() or 0),
        silent_s=_silence(status, sections.get("now", "")),
    )


ON_REQUEST = "stopped on request"
"""End of the state of a group that is wanted stopped (spark_core/wanted.py): it is no drift."""


def drift_of(states: Sequence[RankState]) -> str:
    """``serving`` if the group serves, else what is wrong, in words short enough for a diff."""
    for state in states:
        if state.phase in ("no container", "container stopped"):
            return f"{state.node}: {state.phase}"
        if state.silent:
            return f"{state.node}: supervisor silent"
    head = states[0]
    if head.held:
        return f"{head.node}: {ON_REQUEST}"
    if head.phase != "serving":
        return f"{head.node}: {head.phase}"
    for state in states[1:]:
        if state.generation != head.generation:
            return f"{state.node}: not in the head's generation"
        if state.phase not in ("serving", "ray_ready"):
            return f"{state.node}: {state.phase}"
    return "serving"


def wait_until_serving(
    ranks: Sequence[Rank],
    *,
    stall_s: float,
    progress: Callable[[str], None],
    newer_than: tuple[str, int] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[RankState]:
    """Follow the ranks until the group serves.

    Args:
        ranks: All ranks, the head first.
        stall_s: Seconds without any progress after which the start is given up.
        progress: Called with one line for each change that a person should see.
        newer_than: Generation that does not count, because a new one was asked for.

    Raises:
        GateError: naming what failed first, on which node, with the log lines that say so.
    """
    last_said: dict[int, str] = {}
    last_mark: object = None
    unanswered = 0
    moved_at = clock()
    while True:
        try:
            states = [observe_rank(rank) for rank in ranks]
            unanswered = 0
        except (UnreachableError, CommandError) as error:
            # A loading node can be starved for a while; only a node that stays away ends the wait.
            unanswered += 1
            if unanswered > UNANSWERED_LOOKS:
                raise
            progress(f"{error.line} (looking again)")
            sleep(POLL_S)
            continue
        for state in states:
            said = _describe(state)
            if last_said.get(state.rank) != said:
                last_said[state.rank] = said
                progress(f"{state.node} rank {state.rank}: {said}")
        head = states[0]
        fresh = newer_than is None or (head.generation is not None and head.generation != newer_than)
        if fresh:
            failure = failure_of(states, ranks)
            if failure is not None:
                raise failure
            if drift_of(states) == "serving":
                return states
        mark = [(state.phase, _progress_of(state), state.generation) for state in states]
        if mark != last_mark:
            last_mark, moved_at = mark, clock()
        if clock() - moved_at > stall_s:
            waiting = "; ".join(f"{state.node} rank {state.rank}: {_describe(state)}" for state in states)
            raise GateError(
                f"expected the group to serve, found no progress for {stall_s:.0f} s ({waiting})",
                where=head.node,
                do="read the logs of the ranks (docker logs); run up again to wait on",
                evidence=[*(line for rank in ranks for line in _diagnosis(rank)), *_log_tail(ranks[0])],
            )
        sleep(POLL_S)


def failure_of(states: Sequence[RankState], ranks: Sequence[Rank]) -> GateError | None:
    """The failure that came first, if any rank has failed.

    A rank's own account of its first error is preferred to a container that stopped, and the earliest account wins:
    the others usually only say that their peer went away.
    """
    # An account of an earlier generation counts no more: its rank has only not yet heard of the new one.
    head = states[0]
    present = [state for state in states if not head.running or state.generation in (None, head.generation)]
    if heals(head) and head.phase != "failed":
        present = []  # a failure is what it heals from; one that it cannot heal is told by the head
    accounts = [(_time_of(account), state, account) for state in present if (account := _account(state))]
    if accounts:
        _, state, first = min(accounts, key=lambda found: found[0])
        kernel = [line for known, rank in zip(states, ranks, strict=True) for line in _kernel(rank, known)]
        return _told(first, state, states, kernel)
    for state, rank in zip(states, ranks, strict=True):
        if state.phase == "no container":
            return GateError(
                f"expected the container {rank.container}, found none", where=state.node, do="run up again"
            )
        if state.silent:
            return GateError(
                f"expected the supervisor to write its status, found none for {state.silent_s:.0f} s",
                where=f"{state.node}, rank {state.rank}",
                do="run up again: it restarts a rank whose supervisor is stuck",
                evidence=_log_tail(rank),
            )
        if state.restarts >= CRASH_LOOP_RESTARTS and state.status is None:
            return GateError(
                f"expected the container {rank.container} to start, found that it ended {state.restarts} times at once",
                where=f"{state.node}, rank {state.rank}",
                do="read its last lines below: the supervisor itself cannot run in this image",
                evidence=_log_tail(rank),
            )
        if state.phase == "container stopped":
            oom = ", killed by the kernel for memory" if state.oom_killed else ""
            return GateError(
                f"expected the container {rank.container} to run, found it stopped (exit code {state.exit_code}{oom})",
                where=f"{state.node}, rank {state.rank}",
                do="read its last lines below; run up again to start it",
                evidence=_log_tail(rank),
            )
        if state.phase == "failed" and state in present:
            return GateError(
                "the rank failed without an account of it",
                where=f"{state.node}, rank {state.rank}",
                evidence=_log_tail(rank),
            )
    return None


def _kernel(rank: Rank, state: RankState) -> list[str]:
    lines = keep_kernel_lines(rank.transport, rank.state_folder, rank.rank, state.status or {})
    return [f"kernel of {state.node}: {line}" for line in lines]


def _told(
    first: Mapping[str, Any], state: RankState, states: Sequence[RankState], kernel: Sequence[str] = ()
) -> GateError:
    """A first error with the rank it is of, what it means, and what to do."""
    culprit = _culprit(first, state, states)
    diagnosis = first.get("diagnosis")
    diagnosis = diagnosis if isinstance(diagnosis, Mapping) else {}
    do = f"{diagnosis['do']}; then run up again" if diagnosis.get("do") else "correct the cause and run up again"
    meaning = [f"this means: {diagnosis['text']}"] if diagnosis.get("text") else []
    hints = [
        f"also: {hint.get('text')}; {hint.get('do')}" for hint in first.get("hints") or [] if isinstance(hint, Mapping)
    ]
    codes = (state.status or {}).get("exit_codes")
    ended = [f"exit codes: {', '.join(f'{k} {v}' for k, v in codes.items())}"] if codes else []
    oom = ["the kernel killed the container for memory"] if culprit.oom_killed else []
    lines = [str(line) for line in first.get("lines") or []]
    return GateError(
        str(first.get("line") or "the rank failed"),
        where=f"{culprit.node}, rank {culprit.rank}",
        do=do,
        evidence=[*meaning, *hints, *ended, *oom, *kernel, *lines],
    )


def _culprit(first: Mapping[str, Any], state: RankState, states: Sequence[RankState]) -> RankState:
    """The rank that an account is about: the head tells others' errors too, by rank or by address."""
    said = re.match(r"rank (\d+)", str(first.get("source") or ""))
    rank = int(said.group(1)) if said else None
    address = first.get("address")
    listed = (states[0].status or {}).get("ranks")
    if rank is None and address and isinstance(listed, Mapping):
        known = [number for number, entry in listed.items() if entry.get("address") == address]
        rank = int(known[0]) if known else None
    return next((other for other in states if other.rank == rank), state)


def heals(head: RankState) -> bool:
    """Whether the head begins the next generation by itself, so that nobody has to ask for it."""
    healing = (head.status or {}).get("healing")
    return head.running and isinstance(healing, Mapping) and healing.get("policy") == "restart"


def ask_new_generation(rank: Rank, python: str) -> None:
    """Ask the head's supervisor to end its generation and begin a new one."""
    run_checked(
        rank.transport,
        command("docker", "exec", rank.container, python, RUNTIME_TARGET, "restart", timeout_s=60),
        purpose="expected the supervisor to begin a new generation",
    )


@dataclass(frozen=True)
class Completion:
    """A completion that came back.

    Attributes:
        text: Content, or reasoning where a reasoning parser put the answer there.
        seconds: How long it took.
    """

    text: str
    seconds: float


def complete(
    endpoint: str, model: str, key: str | None, *, timeout_s: float, prompt: str = "Say hello.", max_tokens: int = 16
) -> Completion:
    """One bounded chat completion through the public endpoint.

    Raises:
        GateError: refused, no answer in time, an error answer, or an empty one. Never holds the key.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{endpoint}/chat/completions", json.dumps(body).encode(), headers)  # noqa: S310
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    start = time.monotonic()
    try:
        with opener.open(request, timeout=timeout_s) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        detail = error.read(2000).decode(errors="replace")
        raise GateError(f"expected a completion, found HTTP {error.code}", where=endpoint, evidence=[detail]) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise GateError(
            f"expected a completion in {timeout_s:.0f} s, found: {getattr(error, 'reason', error)}",
            where=endpoint,
            do="check that nothing between here and the head blocks the port",
        ) from None
    try:
        message = answer["choices"][0]["message"]
        text = message.get("content") or message.get("reasoning") or message.get("reasoning_content") or ""
    except (TypeError, KeyError, IndexError, AttributeError):
        text = ""
    if not text:
        raise GateError("expected a non-empty completion, found an empty one", where=endpoint)
    return Completion(text, time.monotonic() - start)


def _account(state: RankState) -> Mapping[str, Any]:
    """A failed rank's own account of its first error; empty if it gives none that can be read."""
    account = (state.status or {}).get("first_error") if state.phase == "failed" else None
    return account if isinstance(account, Mapping) else {}


def _time_of(account: Mapping[str, Any]) -> float:
    at = account.get("at")
    return float(at) if isinstance(at, int | float) else 0.0


def _describe(state: RankState) -> str:
    progress = _progress_of(state)
    return f"{state.phase} ({progress})" if progress else state.phase


def _progress_of(state: RankState) -> str:
    status = state.status or {}
    return str(status.get("progress") or status.get("detail") or "")


def _diagnosis(rank: Rank) -> list[str]:
    """What a rank that stands still says of its log and its sockets so far; nothing if it cannot be asked."""
    words = (rank.container, "sh", "-c", f'exec "$(readlink /proc/1/exe)" {RUNTIME_TARGET} diagnose')
    try:
        report = _json(rank.transport.run(command("docker", "exec", *words, timeout_s=60)).stdout) or {}
    except SparkError:
        return []
    who = f"{rank.transport.node} rank {rank.rank}"
    found = [report.get("first_error"), *(report.get("hints") or [])]
    told = [entry for entry in found if isinstance(entry, Mapping)]
    lines = [f"{who}: {entry.get('line') or entry.get('text')}" for entry in told]
    sockets = [s for s in report.get("sockets") or [] if isinstance(s, Mapping)]
    half_open = [s for s in sockets if s.get("state") in ("connecting", "accepting")]
    lines += [f"{who}: {s.get('process')} waits for {s.get('peer')} from {s.get('address')}" for s in half_open]
    return lines


def _log_tail(rank: Rank) -> list[str]:
    try:
        result = rank.transport.run(command("docker", "logs", "--tail", "25", rank.container))
    except SparkError:
        return []
    return (result.stdout + result.stderr).splitlines()[-25:]


def _json(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _silence(status: Mapping[str, Any] | None, now: str) -> float:
    """Seconds since a status was written; none counts as just now, since a container may just have started."""
    updated = (status or {}).get("updated")
    if not isinstance(updated, int | float) or not now.strip().isdigit():
        return 0.0
    return max(0.0, float(now) - float(updated))


def _written_since(status: Mapping[str, Any], started_at: str) -> bool:
    """Whether a status was written by the container that runs now; both times are the node's own clock."""
    written = status.get("updated")
    if not isinstance(written, int | float) or len(started_at) < 19:
        return False
    started = time.strptime(started_at[:19], "%Y-%m-%dT%H:%M:%S")
    return float(written) >= calendar.timegm(started)
