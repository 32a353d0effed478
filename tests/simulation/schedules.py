"""Schedules of faults: random by seed, or all short ones. Each ends in calm, in which the group must serve again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

from spark_runtime.observations import Limits
from tests.simulation.invariants import check
from tests.simulation.shells import SimHead, SimWorker
from tests.simulation.world import TICK_S, Node, Violation, World

LIMITS = Limits(
    lease_interval_s=1.0,
    lease_timeout_s=8.0,
    join_timeout_s=40.0,
    start_timeout_s=60.0,
    canary_interval_s=15.0,
    canary_retry_s=2.0,
    last_words_s=5.0,
    grace_s=4.0,
    kill_s=6.0,
    memory_s=8.0,
    forget_s=1e9,
    backoff_s=(1.0, 2.0, 4.0, 8.0, 16.0),
)
"""The proportions of the real ones, in a short life."""
START_TICKS = 30
"""A start without faults takes 24 of them."""
CALM_S = 240.0
"""Within this time after the last fault the group serves or has a verdict: a lapsed lease, what will not die, a
failing start, its back-off, another start, and a rank that has to be waited for."""


class Scenario:
    """A group in a world, and the faults that can happen to it."""

    def __init__(
        self,
        nodes: int,
        rng: random.Random,
        machine: ModuleType,
        limits: Limits = LIMITS,
        heal: str = "restart",
        over_ray: bool = True,
    ) -> None:
        self.rng, self.machine, self.limits, self.heal = rng, machine, limits, heal
        self.world = World(nodes, rng, check, over_ray)
        self.deployment, self.moved = "d1", False
        self.behind: set[int] = set()
        self.head = self.world.nodes[0]
        self._deploy(self.head, "d1")

    def _deploy(self, head: Node, deployment: str) -> None:
        world = self.world
        world.declare(head, lambda: SimHead(world, head, deployment, self.machine, self.limits, self.heal))
        for rank in range(1, world.size):
            self._declare_worker(world.nodes[rank], rank, head, deployment)

    def _declare_worker(self, node: Node, rank: int, head: Node, deployment: str) -> None:
        world, machine, limits = self.world, self.machine, self.limits
        world.declare(node, lambda: SimWorker(world, node, deployment, rank, head, machine, limits))

    # Faults, each of one host

    def kill(self, node: Node) -> None:
        """SIGKILL of PID 1, or out of memory; Docker starts it again."""
        self.world.kill_container(node)

    def stop(self, node: Node) -> None:
        """docker stop."""
        if node.supervisor is not None:
            node.supervisor.ask_to_stop()

    def kill_by_hand(self, node: Node) -> None:
        """docker kill: Docker does not start it again."""
        self.world.kill_container(node)
        node.stopped_by_hand = True

    def start(self, node: Node) -> None:
        """docker start, power on."""
        node.powered, node.stopped_by_hand = True, False

    def power_cut(self, node: Node) -> None:
        self.world.power_cut(node)

    def cut_out(self, node: Node) -> None:
        """The host's answers do not arrive: one direction of its link."""
        self.world.cut |= {(node.index, other.index) for other in self.world.nodes if other is not node}

    def cut_in(self, node: Node) -> None:
        """Nothing arrives at the host."""
        self.world.cut |= {(other.index, node.index) for other in self.world.nodes if other is not node}

    def cut_both(self, node: Node) -> None:
        self.cut_in(node)
        self.cut_out(node)

    def mend(self, node: Node) -> None:
        """All links of a host are back."""
        self.world.cut = {pair for pair in self.world.cut if node.index not in pair}

    def pause(self, node: Node) -> None:
        """The supervisor does not run: SIGSTOP, or a starved host."""
        node.paused_until = self.world.time + self.rng.choice([2.0, 5.0, 7.0, 12.0, 40.0])

    def jump(self, node: Node) -> None:
        """Its clock leaps ahead."""
        node.clock_ahead += self.rng.choice([3.0, 6.0, 20.0, 10_000.0])

    def kill_process(self, node: Node) -> None:
        if node.processes:
            self.world.kill(node, self.rng.choice(node.processes))

    def freeze(self, node: Node) -> None:
        """SIGSTOP of the engine: /health goes on answering 200."""
        for process in node.processes:
            process.frozen = process.frozen or process.kind == "vllm"

    def immortal(self, node: Node) -> None:
        """A process in the D state."""
        for process in node.processes:
            process.immortal = True

    def mortal(self, node: Node) -> None:
        if isinstance(node.supervisor, SimWorker):
            node.supervisor.unheard_s = 0.0
        if node.held_since is not None:
            node.held_since = self.world.time  # from now on it can be ended
        for process in list(node.processes):
            process.immortal = False
            if node.supervisor is None:  # killed long ago
                self.world.kill(node, process)

    def memory(self, node: Node) -> None:
        """Something dies, and it gives its memory back late, or not before calm."""
        node.memory_delay, node.room = self.rng.choice([(3.0, False), (30.0, False), (1e6, False), (30.0, True)])
        self.kill_process(node)

    def slow(self, node: Node) -> None:
        node.ray_delay, node.load_delay = self.rng.choice([(5.0, 20.0), (30.0, 2.0), (1.0, 55.0)])

    def failing_load(self, node: Node) -> None:
        """The next loads fail; now in the same way, now in another."""
        lines = ["ValueError: no room 1", "ValueError: no room 22", "RuntimeError: other", "KeyError: third"]
        self.world.failing_loads += self.rng.choices(lines, k=self.rng.choice([1, 2, 4, 40]))

    def ask_anew(self, node: Node) -> None:
        """Somebody asks, on any rank, for a new generation."""
        if isinstance(node.supervisor, SimHead | SimWorker):
            node.supervisor.protocol.restart_wanted = True

    def move_head(self, node: Node) -> None:
        """Another deployment with its head on the spare host, while the old head still runs; once."""
        if self.world.size > 1 and not self.moved:
            self.moved, self.deployment, self.head = True, "d2", self.world.nodes[-1]
            self._deploy(self.head, "d2")
            self.behind.clear()

    def left_behind(self, node: Node) -> None:
        """A worker of the first deployment still runs, and asks the present head."""
        if node is not self.head and node.index > 0 and node.index < self.world.size:
            self._declare_worker(node, node.index, self.head, "d0")
            self.behind.add(node.index)

    def put_right(self, node: Node) -> None:
        """The worker of the present deployment, where another one was left."""
        if node.index in self.behind:
            self._declare_worker(node, node.index, self.head, self.deployment)
            self.behind.discard(node.index)

    def hold(self, node: Node) -> None:
        """Somebody wants the group, or this rank, stopped."""
        node.held_since = self.world.time if node.held_since is None else node.held_since

    def release(self, node: Node) -> None:
        node.held_since = None

    # Calm

    def calm(self) -> None:
        """Every fault ends: power, links, memory, and people start what they have stopped."""
        world = self.world
        world.cut.clear()
        world.loss, world.delay = 0.0, lambda: 0.0
        world.failing_loads.clear()
        for node in world.nodes:
            self.mortal(node)
            if isinstance(node.supervisor, SimHead | SimWorker) and node.supervisor.stopping is not None:
                node.supervisor.exit()
            self.start(node)
            self.put_right(node)
            self.release(node)
            node.paused_until, node.memory_delay, node.room = 0.0, 0.0, True
            node.owed_until = min(node.owed_until, world.time)
            node.ray_delay, node.load_delay = 1.0, 2.0
        if self.moved:
            self.kill_by_hand(world.nodes[0])
        world.say("calm")

    def must_serve(self) -> None:
        """9: it serves, or it has a verdict and serves when asked anew."""
        self.calm()
        if self._waits_for_serving():
            return
        head = self.head.supervisor
        if not (isinstance(head, SimHead) and head.protocol.phase == "failed" and not head.protocol.is_ending):
            raise Violation(f"9: neither serving nor a verdict {CALM_S:.0f} s after the last fault")
        if self.heal == "restart" and "crash loop" not in head.protocol.detail:
            raise Violation(f"9: the verdict is no reason to stay down: {head.protocol.detail}")
        self.ask_anew(self.head)
        if not self._waits_for_serving():
            raise Violation(f"9: asked anew, and not serving {CALM_S:.0f} s later")

    def _waits_for_serving(self) -> bool:
        """Serving, and still serving with a living engine a little later."""
        good, end = 0.0, self.world.time + CALM_S
        while self.world.time < end:
            self.world.tick()
            head = self.head.supervisor
            engine = next((p for p in self.head.processes if p.kind == "vllm" and not p.frozen), None)
            serves = isinstance(head, SimHead) and head.protocol.phase == "serving" and engine is not None
            good = good + 0.5 if serves and engine and self.world.is_whole(self.head, engine.generation) else 0.0
            if good >= 12.0:
                return True
        return False


FAULTS: dict[str, float] = {
    "kill": 3,
    "stop": 1,
    "kill_by_hand": 1,
    "start": 2,
    "power_cut": 1,
    "cut_out": 1,
    "cut_in": 1,
    "cut_both": 2,
    "mend": 4,
    "hold": 1,
    "release": 1,
    "pause": 2,
    "jump": 1,
    "kill_process": 3,
    "freeze": 1,
    "immortal": 0.7,
    "mortal": 1,
    "memory": 0.7,
    "slow": 0.5,
    "failing_load": 1,
    "ask_anew": 1,
    "move_head": 0.3,
    "left_behind": 0.3,
    "put_right": 0.5,
}
"""Each fault, and how often it comes."""
SHORT: Sequence[str] = (
    "kill",
    "stop",
    "kill_by_hand",
    "start",
    "cut_out",
    "cut_in",
    "mend",
    "kill_process",
    "immortal",
)
"""Those of the exhaustive schedules."""


@dataclass(frozen=True)
class Step:
    """Wait, then a fault of a host."""

    wait_s: float
    fault: str
    host: int


def play(scenario: Scenario, steps: Sequence[Step], start_s: float = 0.0) -> float:
    """A whole schedule; the virtual seconds that it took. Raises Violation with what led to it."""
    try:
        scenario.world.run(start_s)
        for step in steps:
            scenario.world.run(step.wait_s)
            scenario.world.say(f"-- {step.fault} of host {step.host}")
            getattr(scenario, step.fault)(scenario.world.nodes[step.host])
            check(scenario.world)
        scenario.must_serve()
    except Violation as violation:
        trace = "\n".join(scenario.world.trace[-80:])
        raise Violation(f"{violation}\n{trace}") from None
    return scenario.world.time


def random_schedule(seed: int, machine: ModuleType) -> float:
    """One to three nodes, up to twelve faults at any distance, lossy or slow links or none; odd seeds without Ray."""
    rng = random.Random(seed)  # noqa: S311 (to be repeated, not to be secret)
    nodes, heal = rng.choice([1, 2, 2, 2, 3]), "restart" if rng.random() < 0.9 else "report"
    scenario = Scenario(nodes, rng, machine, heal=heal, over_ray=seed % 2 == 0)
    world = scenario.world
    world.loss = rng.choice([0.0, 0.0, 0.1, 0.4])
    slowest, straggler = rng.choice([(0.0, 0.0), (0.0, 0.0), (1.0, 0.0), (4.0, 0.0), (0.5, 0.15)])
    world.delay = lambda: rng.uniform(4.0, 12.0) if rng.random() < straggler else rng.uniform(0.0, slowest)
    names, weights = list(FAULTS), list(FAULTS.values())
    steps = [
        Step(rng.choice([0.0, 0.5, 1.0, 2.0, 5.0, 12.0, 30.0, 90.0]), name, rng.randrange(world.size))
        for name in rng.choices(names, weights, k=rng.randint(1, 12))
    ]
    return play(scenario, steps, start_s=rng.choice([0.0, 3.0, 6.0, 9.0, 40.0, 40.0]))


def short_schedules(depth: int) -> Iterator[list[Step]]:
    """Every schedule of two nodes with this many faults: the first at each moment of a start, the others soon after."""
    faults = [(fault, host) for fault in SHORT for host in (0, 1)]
    first = [Step(tick * TICK_S, *fault) for tick in range(START_TICKS) for fault in faults]
    later = [Step(wait, *fault) for wait in (0.5, 3.0, 9.0) for fault in faults]
    yield from (list(steps) for steps in itertools.product(first, *[later] * (depth - 1)))


def play_short(steps: Sequence[Step], machine: ModuleType, over_ray: bool = True) -> float:
    """One of the exhaustive schedules: nothing in it is random but what vLLM does when it loses a worker."""
    return play(Scenario(2, random.Random(1), machine, over_ray=over_ray), steps)  # noqa: S311 (the same for all)
