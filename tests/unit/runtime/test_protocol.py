"""Messages on the wire, and single decisions of the protocol. Their interplay is what tests/simulation is for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_runtime.healing import Attempts, kind_of
from spark_runtime.messages import BadMessage, Generation, LeaseReply, LeaseRequest, Refused
from spark_runtime.observations import Answer, Failure, Limits, Remains, Seen
from spark_runtime.protocol import Ending, HeadProtocol, WorkerProtocol

NODES = 3
LIMITS = Limits(lease_timeout_s=10.0, join_timeout_s=40.0)
TEXT = st.text(max_size=20)
GENERATIONS = st.builds(Generation, TEXT, TEXT, st.integers(0, 2**53))
REQUESTS = st.builds(
    LeaseRequest,
    **dict.fromkeys(("group", "deployment", "address", "incarnation", "phase", "detail"), TEXT),
    rank=st.integers(0, 10_000),
    nodes=st.integers(1, 10_000),
    sequence=st.integers(0, 2**53),
    idle=st.booleans(),
    running=st.none() | GENERATIONS,
    known=st.none() | GENERATIONS,
    failed=st.none() | GENERATIONS,
    failure_source=TEXT,
    failure_line=TEXT,
    leaving=st.booleans(),
    restart=st.booleans(),
)


def phase_of(rank: HeadProtocol | WorkerProtocol) -> str:
    """Read anew each time, where a type checker would remember it."""
    return rank.phase


def changed(base: LeaseRequest, by: dict[str, object]) -> LeaseRequest:
    """The same lease with some fields replaced."""
    return replace(base, **by)  # type: ignore[arg-type]


class Asker:
    """Workers that ask one question after another."""

    def __init__(self, head: HeadProtocol) -> None:
        self.head = head
        self.sequence = 0

    def ask(self, rank: int, now: float, incarnation: str = "a", **more: object) -> LeaseReply:
        """A lease of a rank; idle and informed unless something else is said."""
        self.sequence += 1
        said = {"idle": "running" not in more, "known": self.head.generation, **more}
        base = LeaseRequest("g", "d", rank, NODES, f"10.0.0.{rank}", incarnation, self.sequence, "starting")
        return self.head.take(changed(base, said), now)


def clean(head: HeadProtocol, now: float) -> None:
    """Let a head find its node idle."""
    head.open(now)
    assert head.turn(now, Seen()) == "sweep"
    assert head.turn(now, Seen()) == "close"
    head.close("", False, now)


def new_head(**more: object) -> tuple[HeadProtocol, Asker]:
    """A head of three nodes in its first generation."""
    head = HeadProtocol("g", "d", NODES, "h", LIMITS, **more)  # type: ignore[arg-type]
    clean(head, 0.0)
    assert head.turn(0.0, Seen()) == "begin"
    head.begin(0.0)
    return head, Asker(head)


def serving_head(**more: object) -> tuple[HeadProtocol, Asker]:
    """The same with both workers in the generation, at 6 s."""
    head, workers = new_head(**more)
    for rank in (1, 2):
        assert workers.ask(rank, 0.0).order == "idle"
    assert head.turn(0.0, Seen()) == "join"
    assert head.turn(0.1, Seen(joinable=True)) == "wait"
    for rank in (1, 2):
        assert workers.ask(rank, 0.2).order == "join"
        assert workers.ask(rank, 0.3, running=head.generation).order == "join"
    steps = [head.turn(now, Seen(complete=True)) for now in (1.0, 3.0, 5.0, 5.1)]
    assert steps == ["wait", "wait", "wait", "start_vllm"]
    for rank in (1, 2):
        workers.ask(rank, 5.2, running=head.generation)
    assert head.turn(5.3, Seen(healthy=True)) == "ask"
    assert head.turn(6.0, Seen(answer=Answer(True))) == "wait"
    assert phase_of(head) == "serving" and head.may_serve(6.0)
    return head, workers


def test_the_token_of_a_generation_is_told_to_its_members_only() -> None:
    head, workers = new_head()
    head.token = "secret-of-this-generation"
    for rank in (1, 2):
        assert workers.ask(rank, 0.0).token == ""
    head.turn(0.0, Seen())
    head.turn(0.1, Seen(joinable=True))
    reply = workers.ask(1, 0.2)
    assert (reply.order, reply.token) == ("join", "secret-of-this-generation")
    assert LeaseReply.from_json(reply.as_json()) == reply
    assert "secret" not in repr(reply) and "secret" not in repr(head)
    assert workers.ask(1, 0.3, incarnation="b").token == ""


def test_an_engine_that_stands_still_is_ended_at_once_and_a_bad_answer_only_when_it_comes_again() -> None:
    head, workers = serving_head()
    for rank in (1, 2):
        workers.ask(rank, 7.0, running=head.generation)
    head.turn(7.0, Seen(answer=Answer(False, "HTTP 500")))
    assert phase_of(head) == "serving"
    head.turn(7.1, Seen(answer=Answer(False, "the completion did not come back within 9 s", stalled=True)))
    assert phase_of(head) == "ending"
    assert head.detail == (
        "the engine stands still: the completion did not come back within 9 s, and no request made any progress"
    )


def test_a_group_that_is_to_be_stopped_ends_and_begins_again_when_it_may() -> None:
    head, _ = serving_head()
    head.held = True
    assert head.turn(6.5, Seen()) == "wait" and phase_of(head) == "ending"
    for now in (6.6, 6.7, 6.8):
        if head.turn(now, Seen()) == "close":
            head.close("", False, now)
    assert head.turn(7.0, Seen()) == "wait"
    assert (phase_of(head), head.attempts.crashes) == ("stopped", [])
    assert head.turn(9999.0, Seen()) == "wait"
    head.held = False
    assert head.turn(10_000.0, Seen()) == "begin"


def test_a_worker_that_is_to_be_stopped_says_so_and_is_waited_for() -> None:
    head, workers = serving_head()
    workers.ask(1, 6.5, running=None, leaving=True, phase="stopped")
    head.turn(6.6, Seen())
    assert phase_of(head) == "ending" and head.detail == "rank 1 (10.0.0.1) is stopped on request"
    assert head.failure is not None and head.failure.waits
    worker = WorkerProtocol("g", "d", 1, 2, "10.0.0.1", "i", LIMITS, held=True)
    worker.open(0.0)
    worker.turn(0.1, Seen())
    worker.turn(0.2, Seen())
    worker.close("", 0.3)
    worker.turn(0.4, Seen())
    said = worker.request(0.5)
    assert (said.phase, said.leaving) == ("stopped", True)
    assert worker.answered(LeaseReply("g", "d", Generation("d", "h", 1), "join", "ray_starting"), 0.6) == "wait"
    worker.held = False
    worker.turn(0.7, Seen())
    assert worker.answered(LeaseReply("g", "d", Generation("d", "h", 1), "join", "ray_starting"), 0.8) == "join"


@given(REQUESTS)
def test_a_lease_survives_its_way_over_the_wire(sent: LeaseRequest) -> None:
    assert LeaseRequest.from_json(sent.as_json()) == sent


@given(st.recursive(st.none() | st.booleans() | st.integers() | TEXT, lambda x: st.lists(x) | st.dictionaries(TEXT, x)))
def test_anything_else_is_a_bad_message_and_nothing_worse(value: object) -> None:
    for read in (LeaseRequest.from_json, LeaseReply.from_json):
        with pytest.raises(BadMessage):
            read(value)


@given(GENERATIONS, GENERATIONS)
def test_generations_are_the_same_only_if_all_of_them_is(one: Generation, other: Generation) -> None:
    parts = (one.deployment, one.head_incarnation, one.n) == (other.deployment, other.head_incarnation, other.n)
    assert (one == other) == parts
    assert Generation.from_json(one.as_json()) == one


def test_an_order_to_join_without_a_generation_is_an_order_to_be_idle() -> None:
    reply = LeaseReply("g", "d", None, "join", "loading").as_json()
    assert LeaseReply.from_json(reply).order == "idle"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"group": "x"}, "group 'x'"),
        ({"deployment": "x"}, "deployment 'x'"),
        ({"nodes": 2}, "2 nodes"),
        ({"rank": 3}, "rank 3"),
        ({"rank": 0}, "rank 0"),
    ],
)
def test_strangers_are_refused_and_change_nothing(wrong: dict[str, object], said: str) -> None:
    head, _ = serving_head()
    with pytest.raises(Refused, match=said):
        head.take(changed(head.leases[1].request, {"incarnation": "z", **wrong}), 7.0)
    assert head.breach(7.0) is None and head.may_serve(7.0)
    assert len(head.refusals) == 1 and said in head.refusals[0]


@pytest.mark.parametrize(
    ("said", "text", "waits"),
    [
        ({"incarnation": "b"}, "rank 1 (10.0.0.1) was restarted while the generation ran", False),
        ({"leaving": True}, "rank 1 (10.0.0.1) was stopped by hand or by its deployment (SIGTERM)", True),
        ({"running": None}, "rank 1 (10.0.0.1) has left the generation", False),
    ],
)
def test_what_a_member_says_breaks_the_generation_for_good(said: dict[str, object], text: str, waits: bool) -> None:
    head, workers = serving_head()
    reply = workers.ask(1, 7.0, **{"running": head.generation, **said})  # type: ignore[arg-type]
    assert reply.order == "idle"
    workers.ask(1, 7.1, running=head.generation)  # back as if nothing had been
    assert head.breach(7.2) == Failure(text, "rank 1", outside=True, waits=waits)
    assert not head.may_serve(7.2)


def test_a_failure_of_an_older_generation_breaks_nothing() -> None:
    head, workers = serving_head()
    old = Generation("d", "h", 99)
    workers.ask(1, 7.0, running=head.generation, failed=old, failure_line="old")
    assert head.breach(7.0) is None
    workers.ask(1, 7.0, running=head.generation, failed=head.generation, failure_source="ray", failure_line="boom")
    assert head.breach(7.0) == Failure("rank 1 (10.0.0.1): boom", "rank 1 ray")


def test_ranks_are_told_with_the_names_of_their_nodes() -> None:
    head, workers = serving_head(names=["spark-a", "spark-b", "spark-c"])
    workers.ask(2, 7.0, leaving=True, running=head.generation)
    breach = head.breach(7.0)
    assert breach is not None and breach.text.startswith("rank 2 on spark-c (10.0.0.2) was stopped by hand")


def test_a_lapsed_lease_cannot_be_renewed() -> None:
    head, workers = serving_head()
    for second in range(7, 17):
        workers.ask(2, float(second), running=head.generation)
    workers.ask(1, 16.5, running=head.generation)
    breach = head.breach(16.5)
    assert breach is not None and "rank 1 (10.0.0.1) was not heard of for 11 s" in breach.text


def test_a_short_pause_of_the_head_is_nobodys_silence() -> None:
    head, _ = serving_head()
    assert head.breach(15.5) is None  # 9.5 s without a turn
    for second in range(16, 26):
        head.breach(float(second))
    breach = head.breach(26.0)
    assert breach is not None and "was not heard of" in breach.text  # the patience ends


def test_a_head_that_stood_still_for_longer_than_a_lease_is_to_blame_itself() -> None:
    head, _ = serving_head()
    assert head.breach(500.0) == Failure(
        "the head stood still for 494 s (paused, or starved of CPU)", "rank 0", outside=True
    )


def test_an_old_question_that_comes_late_counts_for_nothing() -> None:
    head, workers = serving_head()
    late = changed(head.leases[1].request, {"running": None, "sequence": 1})
    workers.ask(1, 7.0, running=head.generation)
    head.take(late, 7.5)
    assert head.breach(7.5) is None and head.leases[1].seen == 7.0


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"idle": False, "detail": "killing"}, "rank 2 (10.0.0.2) is not ready: killing"),
        ({"known": Generation("d", "old", 1)}, "rank 2 (10.0.0.2) has not heard of this generation yet"),
        ({"address": "10.0.0.1"}, "address 10.0.0.1 is claimed by two ranks"),
        ({"leaving": True}, "rank 2 (10.0.0.2) was stopped by hand or by its deployment (SIGTERM)"),
    ],
)
def test_nothing_starts_while_a_rank_is_not_there_idle_and_informed(said: dict[str, object], text: str) -> None:
    head, workers = new_head()
    workers.ask(1, 0.0)
    workers.ask(2, 0.0, **said)  # type: ignore[arg-type]
    assert head.turn(0.1, Seen()) == "wait" and head.detail == text


def test_a_silent_rank_whose_node_answers_was_probably_killed_by_hand() -> None:
    head, workers = new_head()
    workers.ask(1, 0.0)
    head.reachable = {1}
    head.turn(4.0, Seen())
    head.turn(8.0, Seen())
    assert head.missing(11.0)[0] == (
        "rank 1 (10.0.0.1) does not report any more; its node answers: killed by hand, or its container cannot start"
    )


def test_vllm_that_dies_because_a_node_has_gone_is_not_to_blame() -> None:
    head, workers = serving_head()
    died = Failure("vllm ended with exit code 1", "vllm", from_log=True)
    for now in (7.0, 9.0, 11.0, 12.9):
        workers.ask(2, now, running=head.generation)
        assert head.turn(now, Seen(died=died)) == "wait" and phase_of(head) == "serving"
    head.turn(13.1, Seen(died=died))
    assert head.failure is not None
    assert head.failure.text == "rank 1 (10.0.0.1) fell silent, then vllm ended with exit code 1"


def test_vllm_that_dies_by_itself_is() -> None:
    head, workers = serving_head()
    died = Failure("vllm ended with exit code 1", "vllm", from_log=True)
    for now in (7.0, 9.0, 11.0, 13.1):
        for rank in (1, 2):
            workers.ask(rank, now, running=head.generation)
        head.turn(now, Seen(died=died))
    assert head.failure == died


def test_one_bad_answer_is_a_moment_and_two_are_an_end() -> None:
    head, workers = serving_head()
    moments = iter(range(7, 200))

    def turn(**seen: object) -> str:
        now = float(next(moments))
        for rank in (1, 2):
            workers.ask(rank, now, running=head.generation)
        return head.turn(now, Seen(**seen))  # type: ignore[arg-type]

    bad = Answer(False, "timed out")
    while turn() != "ask":
        pass
    turn(answer=bad)
    asked_again = [turn() for _ in range(8)]
    assert "ask" in asked_again and phase_of(head) == "serving"
    turn(answer=bad)
    while phase_of(head) == "serving":
        turn()
    assert head.failure == Failure("vllm stopped serving: timed out", "vllm")


def test_an_ending_kills_then_sweeps_then_waits_for_memory() -> None:
    ending = Ending(0.0)
    assert ending.step(0.0, Remains(processes=["7 vllm (S)"]), LIMITS) == "kill"
    assert ending.step(31.0, Remains(processes=["7 vllm (D)"]), LIMITS) == "kill"
    assert ending.stuck == "reboot the node, these will not die: 7 vllm (D)"
    assert ending.step(32.0, Remains(lacking_bytes=5), LIMITS) == "sweep" and ending.stuck == ""
    assert ending.step(33.0, Remains(lacking_bytes=5, room=False), LIMITS) == "wait"
    assert ending.step(93.0, Remains(lacking_bytes=3 * 1024**3, room=False), LIMITS) == "wait"
    assert ending.stuck == "memory has not come back: 3.0 GiB are missing; find who has them, or reboot"
    assert ending.step(94.0, Remains(lacking_bytes=5), LIMITS) is None and ending.stuck == ""


def test_an_ending_in_good_order_lets_the_main_process_leave_first() -> None:
    ending = Ending(0.0, grace_s=5.0)
    alive = Remains(processes=["7 ray (S)"], asked=True)
    assert [ending.step(now, alive, LIMITS) for now in (0.0, 1.0, 5.1)] == ["leave", "wait", "kill"]
    assert ending.step(6.0, Remains(processes=["8 raylet (S)"]), LIMITS) == "kill"


def new_worker() -> WorkerProtocol:
    """A worker whose node is idle."""
    worker = WorkerProtocol("g", "d", 1, NODES, "10.0.0.1", "w", LIMITS, head="10.0.0.0:1")
    worker.open(0.0)
    assert not worker.request(0.0).idle  # not before it has looked
    assert worker.turn(0.0, Seen()) == "sweep" and worker.turn(0.0, Seen()) == "close"
    worker.close("", 0.0)
    assert worker.request(0.0).idle
    return worker


def reply(n: int, order: str = "join", **more: str) -> LeaseReply:
    """An answer of the head."""
    values = {"group": "g", "deployment": "d", "phase": "loading", **more}
    return LeaseReply(generation=Generation("d", "h", n), order=order, **values)  # type: ignore[arg-type]


def finish(worker: WorkerProtocol, now: float) -> None:
    """Let a worker end everything."""
    assert worker.turn(now, Seen(remains=Remains(processes=["ray"]))) == "kill"
    assert worker.turn(now, Seen()) == "sweep" and worker.turn(now, Seen()) == "close"
    worker.close("line", now)


def test_a_worker_runs_one_generation_and_none_that_it_has_ended() -> None:
    worker = new_worker()
    assert worker.answered(reply(1), 1.0) == "join"
    assert worker.answered(reply(1), 2.0) == "wait" and phase_of(worker) == "loading"
    worker.fail(Failure("Ray ended", "ray"), 3.0)
    told = worker.request(3.0, "the cause")
    assert (told.idle, told.running, told.failed) == (False, Generation("d", "h", 1), Generation("d", "h", 1))
    assert (told.failure_source, told.failure_line) == ("ray", "the cause")
    finish(worker, 4.0)
    assert phase_of(worker) == "failed" and worker.request(4.0).idle
    assert worker.answered(reply(1), 5.0) == "wait"
    assert worker.answered(reply(2), 6.0) == "join"


@pytest.mark.parametrize("answer", [reply(1, "idle"), reply(2), reply(2, "idle")])
def test_any_other_order_ends_what_a_worker_runs(answer: LeaseReply) -> None:
    worker = new_worker()
    worker.answered(reply(1), 1.0)
    assert worker.answered(answer, 2.0) == "wait" and phase_of(worker) == "ending"
    assert worker.answered(reply(1), 2.5) == "wait"  # the first word stands
    finish(worker, 9.0)
    assert phase_of(worker) == "waiting_for_ranks" and worker.failed is None


def test_a_worker_leaves_a_head_that_is_silent_and_goes_on_asking() -> None:
    worker = new_worker()
    worker.answered(reply(1), 1.0)
    worker.unanswered("Connection refused")
    worker.turn(11.0, Seen())
    assert phase_of(worker) == "ray_starting"
    worker.turn(11.1, Seen())
    assert worker.detail == "the head at 10.0.0.0:1 was not heard of for 10 s: Connection refused"
    finish(worker, 12.0)
    worker.turn(50.0, Seen())
    assert phase_of(worker) == "failed"
    assert worker.detail == "no lease from the head at 10.0.0.0:1 within 40 s: Connection refused"
    assert worker.answered(reply(5), 60.0) == "join"


def test_a_head_of_another_deployment_is_not_followed() -> None:
    worker = new_worker()
    assert worker.answered(reply(1, deployment="other"), 1.0) == "wait"
    assert worker.running is None and worker.request(1.0).known is None


def test_failures_that_differ_in_numbers_only_are_of_one_kind() -> None:
    one = kind_of("ValueError: Free memory on device cuda:0 (49.56/121.69 GiB) at 0x7f3a")
    assert one == kind_of("ValueError: Free memory on device cuda:1 (9.1/121.70 GiB) at 0x8bcd")
    assert one != kind_of("ValueError: Free memory on device cuda:0")


def failing(attempts: Attempts, *lines: str, outside: bool = False, now: float = 0.0) -> str:
    for line in lines:
        attempts.failed(line, Failure(line, "vllm", outside=outside), now)
    return attempts.verdict(now, LIMITS)


def test_the_same_failure_three_times_is_a_verdict_also_with_others_between() -> None:
    attempts = Attempts()
    assert failing(attempts, "a 1", "b", "a 2") == ""
    assert [attempts.backoff_s(LIMITS), len(attempts.crashes)] == [60.0, 3]
    assert "3 generations failed in the same way" in failing(attempts, "a 3")
    attempts.forget()
    assert attempts.verdict(0.0, LIMITS) == "" and attempts.backoff_s(LIMITS) == 1.0


def test_ranks_that_went_away_make_no_crash_loop_and_no_back_off_until_it_never_ends() -> None:
    attempts = Attempts()
    assert failing(attempts, *["rank 1 was restarted"] * 9, outside=True) == ""
    assert attempts.backoff_s(LIMITS) == 1.0
    assert "10 generations failed" in failing(attempts, "rank 1 was restarted", outside=True)


def test_old_failures_are_forgotten() -> None:
    attempts = Attempts()
    failing(attempts, "a", "a")
    assert failing(attempts, "a", now=LIMITS.forget_s + 1.0) == ""


def test_a_hopeless_failure_is_a_verdict_at_once() -> None:
    head, _ = serving_head()
    head.end(Failure("vllm: error: unrecognized arguments: --x", "vllm"), 7.0)
    assert head.turn(7.0, Seen()) == "sweep" and head.turn(7.0, Seen()) == "close"
    head.close("vllm: error: unrecognized arguments: --x", True, 7.0)
    assert phase_of(head) == "failed" and head.turn(10_000.0, Seen()) == "wait"
    workers = Asker(head)
    workers.sequence = 1000
    workers.ask(1, 10_000.1, restart=True)
    assert head.turn(10_000.2, Seen()) == "begin"
