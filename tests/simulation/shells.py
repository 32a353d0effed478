"""The thin shells around the protocol, as ``head.py`` and ``worker.py`` are, over simulated hosts."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from spark_runtime.healing import Attempts, kind_of
from spark_runtime.messages import Generation, LeaseReply, LeaseRequest
from spark_runtime.observations import Answer, Failure, Limits, Remains, Seen
from tests.simulation.world import CALL_TIMEOUT_S, TICK_S, Call, Node, Process, Violation, World

CANARY_TIMEOUT_S = 8.0


class Shell:
    """What both kinds of rank do."""

    def __init__(self, world: World, node: Node, deployment: str, rank: int, limits: Limits) -> None:
        self.world, self.node, self.deployment, self.rank = world, node, deployment, rank
        self.limits, self.born = limits, world.time
        world.births += 1
        self.incarnation = f"r{rank}.{world.births}"
        self.stopping: float | None = None
        self.mine: list[Process] = []

    @property
    def now(self) -> float:
        return self.world.clock(self.node)

    def remains(self) -> Remains:
        lacking = max(0.0, self.node.owed_until - self.world.time)
        alive = [process.kind for process in self.node.processes]
        return Remains(alive, bool(alive), int(lacking * 1024**3), self.node.room)

    def died(self) -> Failure | None:
        for process in self.mine:
            if process not in self.node.processes:
                return Failure(f"{process.kind} ended with exit code 1", process.kind, from_log=True)
        return None

    def spawn(self, kind: str, generation: Generation) -> None:
        world, node = self.world, self.node
        if any(process.generation != generation for process in node.processes):
            raise Violation(f"5: host {node.index} starts {kind} while processes of another generation live there")
        if node.shm - {generation}:
            raise Violation(f"5: host {node.index} starts {kind} on what another generation has left in /dev/shm")
        if node.owed_until > world.time and not node.room:
            raise Violation(f"5: host {node.index} starts {kind} before memory has come back")
        self.mine.append(world.spawn(node, kind, generation))

    def end_step(self, step: str) -> None:
        if step == "kill":
            for process in list(self.node.processes):
                self.world.kill(self.node, process)
        elif step == "leave" and self.node.processes and self.world.rng.random() < 0.5:
            self.world.kill(self.node, self.node.processes[-1])
        elif step == "sweep":
            self.node.shm.clear()

    def kill_all(self) -> None:
        for process in list(self.node.processes):
            self.world.kill(self.node, process)

    def exit(self) -> None:
        """SIGTERM has been obeyed: an operator's word, so Docker does not start it again."""
        self.world.kill_container(self.node)
        self.node.stopped_by_hand = True
        self.world.say(f"host {self.node.index}: {self.incarnation} has stopped")

    def ask_to_stop(self) -> None:
        self.stopping = self.world.time


class SimHead(Shell):
    """Rank 0."""

    def __init__(
        self, world: World, node: Node, deployment: str, machine: ModuleType, limits: Limits, heal: str = "restart"
    ) -> None:
        super().__init__(world, node, deployment, 0, limits)
        disk = node.disk
        attempts = Attempts(list(disk.crashes), disk.unfinished)
        self.protocol: Any = machine.HeadProtocol(
            "g",
            deployment,
            world.size,
            self.incarnation,
            limits,
            heal,
            over_ray=world.over_ray,
            number=disk.number,
            attempts=attempts,
        )
        self.protocol.open(self.now)
        self.answer_at: float | None = None
        self.answer_ok = False
        self.phase = ""
        self.line = ""
        self.turned_at = world.time
        self._ran = self.now
        self._stood_still_at: float | None = None
        self.closed_at: float | None = None
        self.backoff_s = 0.0
        self.was_held = False

    @property
    def failures(self) -> list[str]:
        """Kinds of the failures of its own making, as somebody counts them who is not the protocol."""
        return self.world.failures.setdefault(self.deployment, [])

    def take(self, request: LeaseRequest) -> LeaseReply:
        reply: LeaseReply = self.protocol.take(request, self.now)
        return reply

    def turn(self) -> None:
        if self.stopping is not None:
            self._stop()
            return
        if self.now - self._ran > self.limits.lease_timeout_s:
            self._stood_still_at = self.world.time
        self._ran = self.now
        self.protocol.held = self.node.held_since is not None
        step = self.protocol.turn(self.now, self._look())
        self.turned_at = self.world.time
        self._do(step)
        if self.protocol.phase != self.phase:
            self.phase = self.protocol.phase
            self.world.say(f"host {self.node.index}: {self.incarnation} {self.phase}: {self.protocol.detail[:150]}")
            self.was_held = self.was_held or self.phase == "stopped"
            if self.phase == "ending":
                self._check_blame(self.protocol.failure)
        disk = self.node.disk
        disk.crashes, disk.unfinished = list(self.protocol.attempts.crashes), self.protocol.attempts.unfinished

    def _look(self) -> Seen:
        if self.protocol.is_ending:
            return Seen(remains=self.remains())
        world, generation = self.world, self.protocol.generation
        ray = world.has(self.node, "ray", generation)
        vllm = world.has(self.node, "vllm", generation)
        if world.over_ray:
            listens = ray is not None and world.time >= ray.born + self.node.ray_delay
            complete = listens and world.is_whole(self.node, generation)
        else:
            listens, complete = vllm is not None, True
        if listens:
            world.listened.add(generation)
        loaded = vllm is not None and world.time >= vllm.born + self.node.load_delay
        if not world.over_ray:
            loaded = loaded and len(world.joined.get(generation, ())) == world.size - 1
        if loaded and vllm is not None and self.protocol.phase == "loading" and world.failing_loads:
            self.line = world.failing_loads.pop(0)
            world.kill(self.node, vllm)
        answer: Answer | None = None
        if self.answer_at is not None and world.time >= self.answer_at:
            self.answer_at = None
            alive = vllm is not None and not vllm.frozen and world.is_whole(self.node, generation)
            answer = Answer(alive, "" if alive else "the completion did not come back")
        return Seen(listens, complete, "", loaded, "", answer, self.died())

    def _do(self, step: str) -> None:
        world, generation = self.world, self.protocol.generation
        if step == "begin":
            self._begin()
        elif step == "join":
            self.spawn("ray" if world.over_ray else "vllm", generation)
        elif step == "start_vllm":
            if world.joined.get(generation, set()) != set(range(1, world.size)):
                raise Violation("6: vLLM starts before every worker has started Ray")
            self.spawn("vllm", generation)
        elif step == "ask":
            vllm = world.has(self.node, "vllm", generation)
            quick = vllm is not None and not vllm.frozen
            self.answer_at = world.time + (0.5 if quick else CANARY_TIMEOUT_S)
        elif step == "close":
            self._close()
        else:
            self.end_step(step)

    def _begin(self) -> None:
        world = self.world
        asked = self.protocol.restart_wanted or self.was_held
        self.was_held = False
        waited = None if self.closed_at is None else self.now - self.closed_at
        if not asked and waited is not None and waited < self.backoff_s - 1e-6:
            raise Violation(f"8: begins after {waited} s, back-off is {self.backoff_s} s")
        same = max((self.failures.count(kind) for kind in self.failures), default=0)
        if asked:
            self.failures.clear()
        elif same >= self.limits.same_failures:
            raise Violation(f"8: begins again after {same} failures of one kind")
        generation = self.protocol.begin(self.now)
        if generation in world.begun:
            raise Violation(f"7: {generation} begins a second time")
        world.begun.add(generation)
        self.node.disk.number = generation.n
        self.mine, self.answer_at = [], None

    def _check_blame(self, failure: Failure) -> None:
        """Whoever is said to have left or to be silent must not be there and asking."""
        stood = self._stood_still_at is not None and self.world.time - self._stood_still_at < TICK_S
        silent = "was not heard of" in failure.text and failure.source in ("rank 1", "rank 2")
        if stood and (silent or "not all ranks came" in failure.text):
            raise Violation(f"10: the head stood still, and says: {failure.text}")
        for node in self.world.nodes:
            other = node.supervisor
            if isinstance(other, SimWorker) and failure.source == f"rank {other.rank}":
                running = other.protocol.running == self.protocol.generation and not other.protocol.is_ending
                if running and "has left the generation" in failure.text:
                    raise Violation(f"10: {other.incarnation} runs the generation, and the head says: {failure.text}")

    def _close(self) -> None:
        failure, asked = self.protocol.failure, self.protocol.restart_wanted
        line = self.line or (failure.text if failure else "")
        if failure is not None:
            self.world.say(f"host {self.node.index}: {self.incarnation} has ended its generation: {line}")
        served, self.line = self.protocol.failed_in == "serving", ""
        self.protocol.close(line, False, self.now)
        self.closed_at = None
        asked = asked or self.protocol.held
        if failure is not None and not asked and not failure.outside and not served and not failure.waits:
            self.failures.append(kind_of(line))
            count = min(len(self.failures), len(self.limits.backoff_s) - 1)
            self.closed_at, self.backoff_s = self.now, self.limits.backoff_s[count]
        self.mine = []

    def _stop(self) -> None:
        if self.phase != "stopping":
            self.phase = "stopping"
            self.protocol.stop()
            self.world.say(f"host {self.node.index}: {self.incarnation} is being stopped")
        patience = 2 * self.limits.lease_interval_s + 5
        if self.protocol.all_left() or self.world.time - (self.stopping or 0.0) > patience:
            self.node.disk.crashes, self.node.disk.unfinished = [], False
            self.failures.clear()
            self.exit()


class SimWorker(Shell):
    """Ranks 1 and up. A call keeps its main loop waiting, as in the real one."""

    def __init__(
        self, world: World, node: Node, deployment: str, rank: int, head: Node, machine: ModuleType, limits: Limits
    ) -> None:
        super().__init__(world, node, deployment, rank, limits)
        self.head = head
        self.protocol: Any = machine.WorkerProtocol(
            "g", deployment, rank, world.size, node.address, self.incarnation, limits, over_ray=world.over_ray
        )
        self.protocol.open(self.now)
        self.call: Call | None = None
        self.unheard_s = 0.0
        """How long it has run without an answer; a pause does not count."""
        self.phase = ""

    def take(self, request: LeaseRequest) -> LeaseReply:
        raise AssertionError("nobody asks a worker")

    def turn(self) -> None:
        self.unheard_s += TICK_S
        if self.call is not None and not self._returned(self.call):
            return
        if self.stopping is not None:
            self._stop()
            return
        self.protocol.held = self.node.held_since is not None
        remains = self.remains() if self.protocol.is_ending else Remains()
        died = self.died() if self.protocol.running is not None else None
        self._do(self.protocol.turn(self.now, Seen(remains=remains, died=died)))
        if self.call is None and self.now >= self.protocol.call_at:
            self.call = self.world.ask(self.node, self.head, self.protocol.request(self.now))
        if self.protocol.phase != self.phase:
            self.phase = self.protocol.phase
            self.world.say(f"host {self.node.index}: {self.incarnation} {self.phase}: {self.protocol.detail[:150]}")

    def _returned(self, call: Call) -> bool:
        world = self.world
        if call.returns is not None and world.time >= call.returns:
            self.call = None
            if isinstance(call.answer, LeaseReply):
                self.unheard_s = 0.0
                self._do(self.protocol.answered(call.answer, self.now))
            else:
                self.protocol.unanswered(str(call.answer))
            return True
        if world.time >= call.sent + CALL_TIMEOUT_S:
            self.call = None
            self.protocol.unanswered("timed out")
            return True
        return False

    def _do(self, step: str) -> None:
        if step == "join":
            self._join(self.protocol.running)
        elif step == "close":
            self.protocol.close("", self.now)
            self.mine = []
        else:
            self.end_step(step)

    def _join(self, generation: Generation) -> None:
        world = self.world
        if generation.deployment != self.deployment:
            raise Violation(f"3: {self.incarnation} starts something for another deployment")
        if generation not in world.listened:
            raise Violation(f"6: {self.incarnation} starts its part before the head's is there")
        for node in world.nodes:
            head = node.supervisor
            if isinstance(head, SimHead) and head.protocol.generation == generation:
                member = head.protocol.members.get(self.rank)
                if member != self.incarnation:
                    raise Violation(f"3: {self.incarnation} starts its part, the member is {member}")
        self.spawn("ray" if world.over_ray else "headless", generation)
        world.joined.setdefault(generation, set()).add(self.rank)

    def _stop(self) -> None:
        if not self.protocol.leaving:
            self.protocol.leaving = True
            self.call = self.world.ask(self.node, self.head, self.protocol.request(self.now))
            return
        self.exit()
