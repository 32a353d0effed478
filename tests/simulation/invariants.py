"""What must hold at every moment. The numbers are those of ``spark_runtime/protocol.py``; 3, 5, 6, 7 and the spacing of
8 are checked where a shell acts, 9 at the end of a schedule."""

from __future__ import annotations

from tests.simulation.shells import CANARY_TIMEOUT_S, SimHead, SimWorker
from tests.simulation.world import CALL_TIMEOUT_S, TICK_S, Node, Violation, World

SLACK_S = 3.0
"""Turns of half a second, and a message on its way."""


def heads(world: World) -> list[tuple[Node, SimHead]]:
    """Every head that is alive."""
    return [(node, node.supervisor) for node in world.nodes if isinstance(node.supervisor, SimHead)]


def check(world: World) -> None:
    """Raises Violation."""
    one_group_is_served_once(world)
    nothing_runs_where_it_is_to_be_stopped(world)
    a_silent_head_is_left(world)
    for node, head in heads(world):
        nobody_else_runs_another_generation(world, node, head)
        serving_takes_every_lease(world, head)
        a_dead_engine_is_found(world, node, head)
        failures_are_bounded(head)


def one_group_is_served_once(world: World) -> None:
    """1: no two generations that could answer a completion."""
    engines = [(node, process) for node in world.nodes for process in node.processes if process.kind == "vllm"]
    whole = [process.generation for node, process in engines if world.is_whole(node, process.generation)]
    if len(whole) > 1:
        raise Violation(f"1: two generations can serve: {whole}")


def nothing_runs_where_it_is_to_be_stopped(world: World) -> None:
    """A rank that is held has ended everything within the time that an end may take, unless it cannot die."""
    for node in world.nodes:
        rank = node.supervisor
        if node.held_since is None or rank is None or any(process.immortal for process in node.processes):
            continue
        since = max(node.held_since, node.paused_until, rank.born)
        if node.processes and world.time - since > rank.limits.grace_s + 3 * CALL_TIMEOUT_S + SLACK_S:
            raise Violation(f"host {node.index} has processes {world.time - since:.1f} s after it was to be stopped")


def nobody_else_runs_another_generation(world: World, node: Node, head: SimHead) -> None:
    """2: while a head has processes, no rank of its deployment has any of another generation."""
    own = {process.generation for process in head.mine if process in node.processes}
    if not own:
        return
    for rank, other in world.ranks(head.deployment).items():
        strangers = {process.generation for process in other.processes} - own
        if strangers:
            raise Violation(f"2: rank {rank} has processes of {strangers} while the head runs {own}")


def serving_takes_every_lease(world: World, head: SimHead) -> None:
    """4: every member has asked within the lease time, and runs this generation."""
    if head.protocol.phase != "serving" or not just_turned(world, head):
        return
    # A pause of the head below a lease time, a question that waited for its end, a pause again.
    bound = 3 * head.limits.lease_timeout_s + CALL_TIMEOUT_S + SLACK_S
    for rank in range(1, world.size):
        member = head.protocol.members.get(rank)
        if member is None:
            raise Violation(f"4: serving without a member of rank {rank}")
        lease = head.protocol.leases[rank]
        strays = lease.request.incarnation == member and lease.request.running != head.protocol.generation
        if strays and head.protocol._breach is None:  # one that came after this turn counts in the next
            raise Violation(f"4: serving though rank {rank} runs {lease.request.running}")
        asked = world.accepted.get((head.incarnation, member), 0.0)
        if world.time - asked > bound:
            raise Violation(f"4: serving though rank {rank} has not asked for {world.time - asked:.1f} s")


def a_dead_engine_is_found(world: World, node: Node, head: SimHead) -> None:
    """Nothing keeps saying that it serves while no completion could come back for longer than the bound."""
    limits = head.limits
    generation = head.protocol.generation
    engine = world.has(node, "vllm", generation)
    lives = engine is not None and not engine.frozen and world.is_whole(node, generation)
    serves = head.protocol.phase == "serving" and just_turned(world, head)
    if lives or not serves:
        world.dead_since.pop(head.incarnation, None)
        return
    since = world.dead_since.setdefault(head.incarnation, world.time)
    bound = limits.canary_interval_s + limits.canary_retry_s + 2 * CANARY_TIMEOUT_S + limits.last_words_s + 2 * SLACK_S
    if world.time - since > bound:
        raise Violation(f"4: serving though no completion has come back for {world.time - since:.1f} s")


def just_turned(world: World, head: SimHead) -> bool:
    """Whether a head has had the chance to notice; one that is paused has not."""
    return world.time - head.turned_at <= TICK_S


def failures_are_bounded(head: SimHead) -> None:
    """8: an endless loop of starts becomes a verdict."""
    if head.phase == "serving":
        head.failures.clear()
    if len(head.failures) > head.limits.all_failures:
        raise Violation(f"8: {len(head.failures)} failures before serving, and no verdict")


def a_silent_head_is_left(world: World) -> None:
    """A worker that has had no answer for the lease time ends its generation, whatever became of its head."""
    for node in world.nodes:
        worker = node.supervisor
        if not isinstance(worker, SimWorker):
            continue
        bound = worker.limits.lease_timeout_s + worker.limits.grace_s + CALL_TIMEOUT_S + SLACK_S
        if worker.unheard_s > bound and any(not process.immortal for process in node.processes):
            raise Violation(f"2: {worker.incarnation} has processes after {worker.unheard_s:.1f} s without an answer")
