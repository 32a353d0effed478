"""The protocol holds under every short schedule of faults and many long ones, and its mutants do not."""

from __future__ import annotations

import random

import pytest

from spark_runtime import protocol
from spark_runtime.observations import Limits
from tests.simulation.mutants import FURTHER, REQUIRED, Mutant, load
from tests.simulation.schedules import LIMITS, Scenario, play_short, random_schedule, short_schedules
from tests.simulation.shells import SimHead, SimWorker
from tests.simulation.world import Violation

SEEDS = 150
MUTANT_SEEDS = 1500


BACKENDS = pytest.mark.parametrize("over_ray", [True, False], ids=["ray", "mp"])


def scenario(nodes: int = 2, limits: Limits = LIMITS, heal: str = "restart", over_ray: bool = True) -> Scenario:
    """A group that serves."""
    made = Scenario(nodes, random.Random(7), protocol, limits, heal, over_ray)  # noqa: S311 (to be repeated)
    made.world.run(60.0)
    assert head_of(made).protocol.phase == "serving"
    return made


def head_of(made: Scenario) -> SimHead:
    head = made.head.supervisor
    assert isinstance(head, SimHead)
    return head


def until(made: Scenario, phase: str, within_s: float) -> float:
    """Wait for a phase of the head; the virtual seconds that it took."""
    start = made.world.time
    while made.world.time - start < within_s:
        made.world.tick()
        if head_of(made).protocol.phase == phase and made.head.supervisor is not None:
            return made.world.time - start
    raise AssertionError(f"not {phase} after {within_s} s:\n" + "\n".join(made.world.trace[-40:]))


def test_random_schedules() -> None:
    failed = {}
    for seed in range(SEEDS):
        try:
            random_schedule(seed, protocol)
        except Violation as violation:
            failed[seed] = str(violation)
    shown = next(iter(failed.items()), None)
    assert not failed, f"seeds {list(failed)}; python -m tests.simulation --first SEED --seeds 1 repeats one\n{shown}"


@BACKENDS
def test_every_fault_at_every_moment_of_a_start(over_ray: bool) -> None:
    failed = []
    for steps in short_schedules(1):
        try:
            play_short(steps, protocol, over_ray)
        except Violation as violation:
            failed.append(f"{steps}: {violation}")
    assert not failed, f"{len(failed)} schedules, the first: {failed[0]}"


@pytest.mark.parametrize("mutant", [*REQUIRED, *FURTHER], ids=lambda mutant: mutant.name)
def test_a_mutant_is_noticed(mutant: Mutant) -> None:
    machine = load(mutant)
    for seed in range(MUTANT_SEEDS):
        try:
            random_schedule(seed, machine)
        except Violation:
            return
    pytest.fail(f"{MUTANT_SEEDS} schedules have not noticed {mutant.name!r}")


def test_a_patch_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"expected its line once in protocol\.py, found it 0 times"):
        load(Mutant("stale", "no such line", ""))


@BACKENDS
def test_a_cable_pulled_for_ten_seconds_is_ridden_out(over_ray: bool) -> None:
    made = scenario(limits=Limits(), over_ray=over_ray)
    before = head_of(made).protocol.generation
    for pause_s in (0.0, 0.5, 1.0, 1.5):  # wherever in the rhythm of the leases
        made.world.run(30.0 + pause_s)
        engine = made.head.processes[-1]
        made.cut_both(made.world.nodes[1])
        made.world.run(10.0)
        made.mend(made.world.nodes[1])
        engine.frozen = False  # NCCL goes on where it was
        made.world.run(20.0)
        assert head_of(made).protocol.generation == before and head_of(made).protocol.phase == "serving"


@BACKENDS
def test_a_cable_pulled_for_three_minutes_is_healed(over_ray: bool) -> None:
    made = scenario(limits=Limits(), over_ray=over_ray)
    made.cut_both(made.world.nodes[1])
    made.world.run(180.0)
    assert head_of(made).protocol.phase == "waiting_for_ranks" and not made.world.nodes[1].processes
    assert "rank 1 (10.0.0.1) does not report any more" in head_of(made).protocol.detail
    made.mend(made.world.nodes[1])
    until(made, "serving", 30.0)


@BACKENDS
@pytest.mark.parametrize("host", [0, 1])
def test_a_dead_rank_is_found_within_half_a_minute_and_replaced(host: int, over_ray: bool) -> None:
    made = scenario(limits=Limits(), over_ray=over_ray)
    made.power_cut(made.world.nodes[host])
    made.world.run(30.0)
    assert not made.world.nodes[1 - host].processes
    made.start(made.world.nodes[host])
    until(made, "serving", 30.0)


def test_a_head_that_stood_still_says_so_and_its_deadlines_did_too() -> None:
    made = scenario()
    made.head.paused_until = made.world.time + 60.0
    made.world.run(60.0)
    until(made, "ending", 5.0)
    assert "the head stood still for 60 s" in head_of(made).protocol.detail
    made.power_cut(made.world.nodes[1])
    until(made, "waiting_for_ranks", 20.0)
    made.head.paused_until = made.world.time + 60.0  # longer than ranks are waited for
    made.world.run(62.0)
    made.start(made.world.nodes[1])
    until(made, "serving", 30.0)
    assert head_of(made).phase != "failed" and "not all ranks came" not in "\n".join(made.world.trace)


@BACKENDS
def test_both_hosts_that_lose_power_serve_again(over_ray: bool) -> None:
    made = scenario(over_ray=over_ray)
    for node in made.world.nodes[:2]:
        made.power_cut(node)
    made.world.run(5.0)
    for node in made.world.nodes[:2]:
        made.start(node)
    made.world.tick()
    until(made, "serving", 40.0)


@BACKENDS
def test_a_node_that_returns_after_hours_is_taken_in(over_ray: bool) -> None:
    made = scenario(over_ray=over_ray)
    made.power_cut(made.world.nodes[1])
    until(made, "failed", 100.0)
    assert "not all ranks came within 40 s: rank 1" in head_of(made).protocol.detail
    number = head_of(made).protocol.number
    made.world.run(2 * 3600.0)
    assert (head_of(made).protocol.phase, head_of(made).protocol.number) == ("failed", number)
    made.start(made.world.nodes[1])
    until(made, "serving", 40.0)


@BACKENDS
def test_a_rank_stopped_by_hand_is_named_and_its_return_is_enough(over_ray: bool) -> None:
    made = scenario(over_ray=over_ray)
    made.stop(made.world.nodes[1])
    until(made, "failed", 20.0)
    assert head_of(made).protocol.detail == "rank 1 (10.0.0.1) was stopped by hand or by its deployment (SIGTERM)"
    made.world.run(100.0)
    assert head_of(made).protocol.phase == "failed"
    made.start(made.world.nodes[1])
    until(made, "serving", 40.0)


@BACKENDS
def test_a_head_stopped_by_hand_is_named_by_the_others(over_ray: bool) -> None:
    made = scenario(over_ray=over_ray)
    made.stop(made.world.nodes[0])
    made.world.run(3.0)
    worker = made.world.nodes[1].supervisor
    assert isinstance(worker, SimWorker) and not made.world.nodes[1].processes
    assert "rank 0 was stopped by hand or by its deployment (SIGTERM)" in "\n".join(made.world.trace)


def test_a_crash_loop_ends_in_a_verdict_with_its_first_error() -> None:
    made = scenario(nodes=1)
    made.world.failing_loads += [f"ValueError: {n} GiB are missing" for n in range(40)]
    made.kill(made.head)
    made.world.run(5.0)
    until(made, "failed", 200.0)
    assert head_of(made).protocol.detail == (
        "crash loop: 3 generations failed in the same way before they served: ValueError: 2 GiB are missing"
    )
    number = head_of(made).protocol.number
    made.kill(made.head)  # a new life knows of it
    made.world.run(3600.0)
    assert (head_of(made).protocol.phase, head_of(made).protocol.number) == ("failed", number)
    made.world.failing_loads.clear()
    made.ask_anew(made.head)
    until(made, "serving", 40.0)


def test_failures_that_differ_every_time_end_too() -> None:
    made = scenario(nodes=1)
    made.world.failing_loads += [f"Error{'abcdefghijklmnopqrst'[n]}x" for n in range(20)]
    made.kill(made.head)
    made.world.run(5.0)
    until(made, "failed", 600.0)
    assert "crash loop: 10 generations failed before they served" in head_of(made).protocol.detail


def test_a_host_that_dies_of_each_start_comes_to_a_verdict() -> None:
    made = scenario(nodes=1)
    for _ in range(LIMITS.all_failures):
        made.kill(made.head)
        made.world.run(1.5)
        until(made, "loading", 40.0)
    made.kill(made.head)
    made.world.run(5.0)
    assert "crash loop: 10 generations failed" in head_of(made).protocol.detail


def test_a_group_that_only_reports_stays_down_until_it_is_asked() -> None:
    made = scenario(heal="report")
    made.kill(made.world.nodes[1])
    made.world.run(300.0)
    assert head_of(made).protocol.phase == "failed"
    assert head_of(made).protocol.detail == "rank 1 (10.0.0.1) was restarted while the generation ran"
    made.ask_anew(made.world.nodes[1])  # on any rank
    until(made, "serving", 40.0)


@BACKENDS
def test_a_frozen_engine_that_answers_200_is_found(over_ray: bool) -> None:
    made = scenario(over_ray=over_ray)
    made.freeze(made.head)
    found_s = until(made, "ending", 60.0)
    assert found_s <= LIMITS.canary_interval_s + LIMITS.canary_retry_s + 2 * 8.0 + LIMITS.last_words_s + 2.0
    until(made, "serving", 40.0)


@BACKENDS
def test_what_will_not_die_is_told_and_keeps_the_next_generation_away(over_ray: bool) -> None:
    made = scenario(over_ray=over_ray)
    worker = made.world.nodes[1]
    made.immortal(worker)
    made.kill_process(made.head)
    made.world.run(60.0)
    assert head_of(made).protocol.phase in ("waiting_for_ranks", "failed")
    assert "rank 1 (10.0.0.1) is not ready: reboot the node, these will not die: " in head_of(made).protocol.detail
    made.mortal(worker)
    until(made, "serving", 60.0)


def test_memory_that_does_not_come_back_is_told_and_waited_for() -> None:
    made = scenario()
    worker = made.world.nodes[1]
    worker.memory_delay, worker.room = 1e6, False
    made.kill_process(worker)
    made.world.run(30.0)
    assert "memory has not come back" in head_of(made).protocol.detail
    worker.owed_until = worker.memory_delay = 0.0
    until(made, "serving", 40.0)


def test_memory_that_somebody_else_took_is_no_reason_to_stay_down_if_there_is_room() -> None:
    made = scenario()
    worker = made.world.nodes[1]
    worker.memory_delay, worker.room = 1e6, True
    made.kill_process(worker)
    made.world.run(3.0)
    until(made, "serving", 40.0)
