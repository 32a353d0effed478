"""The protocol under any order of events, with a clock of our own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from spark_runtime.protocol import (
    BadMessage,
    Gang,
    Generation,
    LeaseReply,
    LeaseRequest,
    Refused,
    next_step,
)

TIMEOUT_S = 10.0
NODES = 3
TEXT = st.text(max_size=20)
GENERATIONS = st.builds(Generation, TEXT, TEXT, st.integers(1, 2**53))
REQUESTS = st.builds(
    LeaseRequest,
    **dict.fromkeys(("group", "deployment", "address", "incarnation", "phase", "detail"), TEXT),
    rank=st.integers(0, 10_000),
    nodes=st.integers(1, 10_000),
    running=st.none() | GENERATIONS,
    failed=st.none() | GENERATIONS,
    failure_source=TEXT,
    failure_line=TEXT,
    leaving=st.booleans(),
    restart=st.booleans(),
)


def changed(base: LeaseRequest, by: dict[str, object]) -> LeaseRequest:
    """The same lease with some fields replaced."""
    return replace(base, **by)  # type: ignore[arg-type]


def request(rank: int, incarnation: str = "a", **more: object) -> LeaseRequest:
    """A lease of a rank of the group under test."""
    base = LeaseRequest("g", "d", rank, NODES, f"10.0.0.{rank}", incarnation, "starting")
    return changed(base, more)


def gang() -> Gang:
    """A head of three nodes in its first generation."""
    made = Gang("g", "d", NODES, "h", TIMEOUT_S)
    made.begin(1)
    return made


def running_gang(now: float = 0.0) -> Gang:
    """The same with both workers in the generation."""
    made = gang()
    for rank in (1, 2):
        made.take(request(rank), now)
    assert made.fix_members(now)
    made.may_join = True
    for rank in (1, 2):
        assert made.take(request(rank, running=made.generation), now).order == "join"
    assert made.may_serve(now)
    return made


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
    parts = (one.deployment, one.head_incarnation, one.n) == (
        other.deployment,
        other.head_incarnation,
        other.n,
    )
    assert (one == other) == parts
    assert Generation.from_json(one.as_json()) == one


def test_an_order_to_join_without_a_generation_is_an_order_to_be_idle() -> None:
    reply = LeaseReply("g", "d", None, "join", "loading").as_json()
    assert LeaseReply.from_json(reply).order == "idle"


@given(st.none() | GENERATIONS, st.none() | GENERATIONS, st.none() | GENERATIONS, st.booleans())
def test_a_worker_runs_one_generation_and_none_that_it_has_ended(
    running: Generation | None, ended: Generation | None, offered: Generation | None, joins: bool
) -> None:
    reply = LeaseReply("g", "d", offered, "join" if joins and offered else "idle", "")
    step = next_step(running, ended, reply)
    if step == "start":
        assert running is None and reply.order == "join" and offered not in (None, ended)
    if step == "keep" and running is not None:
        assert reply.order == "join" and offered == running
    if running is not None and (reply.order == "idle" or offered != running):
        assert step == "end"


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
    head = running_gang()
    with pytest.raises(Refused, match=said):
        head.take(changed(request(1, "z"), wrong), 1.0)
    assert head.breach(1.0) is None and head.may_serve(1.0)
    assert len(head.refusals) == 1 and said in head.refusals[0]


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"incarnation": "b"}, "rank 1 (10.0.0.1) was restarted while the generation ran"),
        ({"leaving": True}, "rank 1 (10.0.0.1) was stopped by hand or by its deployment (SIGTERM)"),
        ({"running": None}, "rank 1 (10.0.0.1) has left the generation"),
    ],
)
def test_what_a_member_says_breaks_the_generation_for_good(said: dict[str, object], text: str) -> None:
    head = running_gang()
    reply = head.take(changed(request(1), {"running": head.generation, **said}), 1.0)
    assert (reply.order == "idle") == ("incarnation" in said)
    head.take(request(1, running=head.generation), 1.1)  # back as if nothing had been
    breach = head.breach(1.2)
    assert breach is not None and breach.text == text
    assert not head.may_serve(1.2)


def test_a_failure_of_an_older_generation_breaks_nothing() -> None:
    head = running_gang()
    old = Generation("d", "h", 99)
    head.take(request(1, running=head.generation, failed=old, failure_line="old"), 1.0)
    assert head.breach(1.0) is None
    head.take(request(1, failed=head.generation, failure_source="ray", failure_line="boom"), 1.0)
    breach = head.breach(1.0)
    assert breach is not None and (breach.text, breach.source) == ("rank 1 (10.0.0.1): boom", "rank 1 ray")


def test_a_lapsed_lease_cannot_be_renewed() -> None:
    head = running_gang()
    for step in range(1, 12):
        head.take(request(2, running=head.generation), float(step))
    head.take(request(1, running=head.generation), 11.5)
    breach = head.breach(11.5)
    assert breach is not None and "rank 1 (10.0.0.1) was not heard of for" in breach.text


def test_a_head_that_was_paused_blames_nobody() -> None:
    head = running_gang()
    assert head.breach(1.0) is None
    assert head.breach(500.0) is None
    assert head.may_serve(500.0)
    for step in range(1, 12):
        head.breach(500.0 + step)
    assert head.breach(512.0) is not None


def test_a_rank_that_still_ends_its_last_generation_is_waited_for() -> None:
    head = gang()
    head.take(request(1), 0.0)
    head.take(request(2, running=Generation("d", "old", 7)), 0.0)
    assert not head.fix_members(0.0)
    assert head.missing(0.0) == ["rank 2 (10.0.0.2) is still ending its last generation"]


def test_two_ranks_on_one_address_are_waited_out() -> None:
    head = gang()
    head.take(request(1), 0.0)
    head.take(request(2, address="10.0.0.1"), 0.0)
    assert head.missing(0.0) == ["address 10.0.0.1 is claimed by two ranks"]


def test_numbers_only_grow() -> None:
    head = gang()
    with pytest.raises(ValueError, match="generation 1 after 1"):
        head.begin(1)


class Model(RuleBasedStateMachine):
    """A head and two workers that crash, return, pause, fail, stop and lose messages, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.head = gang()
        self.births = 0
        self.incarnation = {1: "w0", 2: "w1"}
        self.running: dict[int, Generation | None] = {1: None, 2: None}
        self.ended: dict[int, Generation | None] = {1: None, 2: None}
        self.fixed: dict[int, str] = {}
        self.spoilt: set[int] = set()  # members of this generation that have crashed since

    @rule(seconds=st.floats(0.1, 4))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.head.breach(self.now)

    @rule(rank=st.sampled_from([1, 2]), lost=st.booleans())
    def lease(self, rank: int, lost: bool) -> None:
        said = request(rank, self.incarnation[rank], running=self.running[rank])
        reply = self.head.take(said, self.now)
        if lost:
            return
        step = next_step(self.running[rank], self.ended[rank], reply)
        if step == "start":
            assert reply.generation == self.head.generation and rank not in self.spoilt
            self.running[rank] = reply.generation
        elif step == "end":
            self.ended[rank], self.running[rank] = self.running[rank], None

    @rule(rank=st.sampled_from([1, 2]))
    def crash(self, rank: int) -> None:
        self.births += 1
        self.incarnation[rank] = f"again{self.births}"
        self.running[rank] = self.ended[rank] = None
        if rank in self.fixed:
            self.spoilt.add(rank)

    @rule()
    def fix(self) -> None:
        if not self.head.members and not self.head.ended and self.head.fix_members(self.now):
            self.fixed, self.spoilt = dict(self.head.members), set()
            self.spoilt = {rank for rank in self.fixed if self.fixed[rank] != self.incarnation[rank]}
            self.head.may_join = True

    @rule()
    def end_if_breached_and_begin_again(self) -> None:
        if self.head.breach(self.now):
            assert self.head.generation is not None
            self.head.end("breach")
            self.head.begin(self.head.generation.n + 1)
            self.fixed, self.spoilt = {}, set()

    @invariant()
    def members_never_change(self) -> None:
        assert self.head.members == self.fixed

    @invariant()
    def serving_takes_all_ranks_of_this_very_generation(self) -> None:
        if self.head.may_serve(self.now):
            for rank in (1, 2):
                lease = self.head.leases[rank]
                assert lease.request.running == self.head.generation
                assert self.now - lease.seen <= TIMEOUT_S
                assert lease.request.incarnation == self.fixed[rank]

    @invariant()
    def nobody_runs_a_generation_of_the_future(self) -> None:
        assert self.head.generation is not None
        assert all(g is None or g.n <= self.head.generation.n for g in self.running.values())


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
