"""What the supervisors live in: hosts with clocks, processes, memory and Docker; links between them.

Physics only. Nothing here decides what a supervisor should do, and nothing is real time: ``World.time`` moves by ticks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from spark_runtime.healing import Crash
from spark_runtime.messages import Generation, LeaseReply, LeaseRequest, Refused
from spark_runtime.observations import Limits

TICK_S = 0.5
CALL_TIMEOUT_S = 3.0


class Violation(Exception):
    """Something happened that must never happen."""


@dataclass(eq=False)
class Process:
    """A process tree of Ray or vLLM. A frozen one answers /health and does nothing else.

    Kinds: ``ray``, ``vllm`` (the head's server), and without Ray ``headless`` (a worker's vLLM).
    """

    kind: str
    generation: Generation
    born: float
    frozen: bool = False
    immortal: bool = False


class Supervisor(Protocol):
    """A rank's supervisor as its host sees it."""

    deployment: str
    incarnation: str
    rank: int
    born: float
    limits: Limits

    def turn(self) -> None:
        """One turn of its main loop."""

    def ask_to_stop(self) -> None:
        """SIGTERM."""

    def take(self, request: LeaseRequest) -> LeaseReply:
        """A question has arrived (only a head is asked)."""


@dataclass
class Disk:
    """What of a rank survives its container."""

    number: int = 0
    crashes: list[Crash] = field(default_factory=list)
    unfinished: bool = False


@dataclass(eq=False)
class Node:
    """One host with one container."""

    index: int
    powered: bool = True
    container: Callable[[], Supervisor] | None = None
    """Makes the supervisor of the container that is declared here."""
    supervisor: Supervisor | None = None
    stopped_by_hand: bool = False
    held_since: float | None = None
    """Since when its disk says that nothing is to run."""
    starts_at: float | None = None
    paused_until: float = 0.0
    clock_ahead: float = 0.0
    processes: list[Process] = field(default_factory=list)
    shm: set[Generation] = field(default_factory=set)
    owed_until: float = 0.0
    """When the memory of what died here is back."""
    memory_delay: float = 0.0
    room: bool = True
    ray_delay: float = 1.0
    load_delay: float = 2.0
    disk: Disk = field(default_factory=Disk)
    queue: list[Call] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"10.0.0.{self.index}"


@dataclass(eq=False)
class Call:
    """A question on its way, and its answer on the way back."""

    asker: Node
    asked: Node
    request: LeaseRequest
    sent: float
    arrives: float
    answer: LeaseReply | str | None = None
    returns: float | None = None


class World:
    """Hosts 0 to N-1 of a group, and one spare host."""

    def __init__(self, nodes: int, rng: random.Random, check: Callable[[World], None], over_ray: bool = True) -> None:
        self.size = nodes
        self.over_ray = over_ray
        self.rng = rng
        self.time = 0.0
        self.nodes = [Node(index) for index in range(nodes + 1)]
        self.cut: set[tuple[int, int]] = set()
        self.delay: Callable[[], float] = lambda: 0.0
        self.loss = 0.0
        self.calls: list[Call] = []
        self.births = 0
        self.trace: list[str] = []
        self.failing_loads: list[str] = []
        """First errors of the next loads, each used once."""
        self.busy = False
        self.begun: set[Generation] = set()
        self.listened: set[Generation] = set()
        self.joined: dict[Generation, set[int]] = {}
        self.accepted: dict[tuple[str, str], float] = {}
        """(head incarnation, worker incarnation) -> when the last question that was counted had been sent."""
        self.failures: dict[str, list[str]] = {}
        """Of each deployment, the kinds of its failures since it last served or was asked to start."""
        self.dead_since: dict[str, float] = {}
        """Head incarnation -> since when it has said that it serves though no completion could come back."""
        self._check = check

    def say(self, text: str) -> None:
        """One line of the trace that is shown with a violation."""
        self.trace.append(f"{self.time:8.1f} {text}")

    def clock(self, node: Node) -> float:
        """The monotonic clock of a host: its own zero, and never backwards."""
        return 1000.0 * (node.index + 1) + self.time + node.clock_ahead

    def connected(self, one: Node, other: Node) -> bool:
        return one.powered and other.powered and (one.index, other.index) not in self.cut

    def tick(self) -> None:
        """Half a second: hosts and links, then each supervisor's turn. Checked here and whenever a process starts."""
        self.time += TICK_S
        for node in self.nodes:
            self._docker(node)
            self._engine(node)
        for call in list(self.calls):
            self._carry(call)
        order = list(self.nodes)
        self.rng.shuffle(order)
        for node in order:
            if node.supervisor is not None and self.time >= node.paused_until:
                for call in node.queue:
                    self._answer(call)
                node.queue.clear()
                node.supervisor.turn()
        self._check(self)

    def run(self, seconds: float) -> None:
        end = self.time + seconds
        while self.time < end:
            self.tick()

    # Docker

    def declare(self, node: Node, make: Callable[[], Supervisor]) -> None:
        """Make and start a container in place of the one that was there."""
        self.kill_container(node)
        node.container, node.stopped_by_hand, node.starts_at = make, False, self.time

    def kill_container(self, node: Node) -> None:
        """SIGKILL of PID 1: the PID namespace ends with it; what is immortal keeps the container from ending."""
        node.supervisor = None
        node.queue.clear()
        for process in list(node.processes):
            self.kill(node, process)
        node.shm.clear()
        node.starts_at = self.time + 1.0

    def power_cut(self, node: Node) -> None:
        node.powered, node.supervisor = False, None
        node.processes.clear()
        node.queue.clear()
        node.shm.clear()
        node.owed_until, node.memory_delay = 0.0, 0.0

    def _docker(self, node: Node) -> None:
        due = node.powered and node.supervisor is None and node.container is not None and not node.stopped_by_hand
        if due and not node.processes and self.time >= (node.starts_at or 0.0) and node.container is not None:
            node.paused_until = 0.0
            node.supervisor = node.container()
            self.say(f"host {node.index}: {node.supervisor.incarnation} starts")

    # Processes

    def spawn(self, node: Node, kind: str, generation: Generation) -> Process:
        process = Process(kind, generation, self.time)
        node.processes.append(process)
        node.shm.add(generation)
        self.say(f"host {node.index}: {kind} of generation {generation.n} of {generation.head_incarnation}")
        self._check(self)
        return process

    def kill(self, node: Node, process: Process) -> None:
        if not process.immortal and process in node.processes:
            node.processes.remove(process)
            node.owed_until = max(node.owed_until, self.time + node.memory_delay)

    def has(self, node: Node, kind: str, generation: Generation) -> Process | None:
        found = (p for p in node.processes if p.kind == kind and p.generation == generation)
        return next(found, None)

    def ranks(self, deployment: str) -> dict[int, Node]:
        """Where the workers of a deployment are."""
        return {
            node.supervisor.rank: node
            for node in self.nodes
            if node.supervisor and node.supervisor.deployment == deployment and node.supervisor.rank > 0
        }

    def is_whole(self, head: Node, generation: Generation) -> bool:
        """Whether a completion could cross all ranks of a generation."""
        if self.has(head, "ray" if self.over_ray else "vllm", generation) is None:
            return False
        workers = [n for n in self.nodes if n is not head and self.takes_part(n, generation)]
        reached = [n for n in workers if self.connected(head, n) and self.connected(n, head)]
        return len(reached) == self.size - 1

    def takes_part(self, node: Node, generation: Generation) -> bool:
        """Whether a worker's part of a generation runs."""
        return self.has(node, "ray" if self.over_ray else "headless", generation) is not None

    def _engine(self, node: Node) -> None:
        # vLLM notices a lost worker at once, after a while, or not at all.
        for process in list(node.processes):
            if process.kind != "vllm" or len(self.joined.get(process.generation, ())) < self.size - 1:
                continue  # a rendezvous that waits for its ranks
            others = [n for n in self.nodes if n is not node and self.takes_part(n, process.generation)]
            if len(others) < self.size - 1 and not process.frozen:
                if self.rng.random() < 0.3:
                    process.frozen = True
                elif self.rng.random() < 0.3:
                    self.kill(node, process)

    # Messages

    def ask(self, asker: Node, asked: Node, request: LeaseRequest) -> Call:
        call = Call(asker, asked, request, self.time, self.time + self.delay())
        if not self.connected(asker, asked) or self.rng.random() < self.loss:
            call.answer, call.returns = "no route", self.time + CALL_TIMEOUT_S
        else:
            self.calls.append(call)
        return call

    def _carry(self, call: Call) -> None:
        if self.time < call.arrives:
            return
        self.calls.remove(call)
        if not call.asked.powered:
            return
        if call.asked.supervisor is None:
            call.answer, call.returns = "connection refused", self.time
        elif self.time < call.asked.paused_until:
            call.asked.queue.append(call)  # the kernel takes it; whoever asked may be gone when it is read
        else:
            self._answer(call)

    def _answer(self, call: Call) -> None:
        head = call.asked.supervisor
        if head is None:
            return
        try:
            reply: LeaseReply | str = head.take(call.request)
            self.accepted[head.incarnation, call.request.incarnation] = call.sent
        except Refused as error:
            reply = str(error)
        if self.connected(call.asked, call.asker) and self.rng.random() >= self.loss:
            call.answer, call.returns = reply, self.time + self.delay()
