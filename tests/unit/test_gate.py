"""The gate: a group serves only if everything says so, and what failed first is what a person reads."""

from __future__ import annotations

import json
import socket
import subprocess
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_core.errors import CommandError, GateError, UnreachableError
from spark_core.gate import (
    _OBSERVE,
    SILENT_S,
    Rank,
    RankState,
    ask_new_generation,
    complete,
    drift_of,
    failure_of,
    observe_rank,
    parse_rank_state,
    wait_until_serving,
)
from spark_core.transport.base import Command, Result
from tests.chat_endpoint import ChatEndpoint, chat_endpoint
from tests.fake_host import FakeHost
from tests.scripted_transport import ScriptedTransport

MARKER = "sk-marker-a1b2c3d4"
STARTED = "2026-01-01T00:00:00.123456789Z"
STARTED_AT = 1767225600.0
HEAD, WORKER = ("spark-a", 0), ("spark-b", 1)
GENERATION = {"deployment": "d", "head_incarnation": "abc", "n": 3}


def state(place: tuple[str, int], phase: str, generation: dict[str, Any] | None = None, **status: Any) -> RankState:
    """A rank in a phase; ``no container`` and ``container stopped`` are phases too."""
    node, rank = place
    if phase == "no container":
        return RankState(node, rank, None, False, None, False, "", None)
    if phase == "container stopped":
        return RankState(node, rank, "id", False, 137, status.get("oom", False), STARTED, None)
    return RankState(
        node,
        rank,
        "id",
        True,
        0,
        False,
        STARTED,
        {"phase": phase, "generation": generation or GENERATION, **status},
    )


def text_of(container: dict[str, Any] | None, status: Any, identity: str = "id-1") -> str:
    return f"=== container\n{json.dumps(container)}\n=== id\n{identity}\n=== status\n{json.dumps(status)}\n"


RUNNING = {"Running": True, "ExitCode": 0, "OOMKilled": False, "StartedAt": STARTED}


def test_a_rank_that_serves_is_read_with_its_generation() -> None:
    found = parse_rank_state(
        "spark-a",
        0,
        text_of(RUNNING, {"phase": "serving", "generation": GENERATION, "updated": STARTED_AT + 5}),
    )
    assert (found.phase, found.generation, found.container_id) == ("serving", ("abc", 3), "id-1")


def test_no_container_is_told_as_such() -> None:
    assert parse_rank_state("spark-a", 0, text_of(None, {"phase": "serving"}, "")).phase == "no container"


@pytest.mark.parametrize(
    "updated",
    [STARTED_AT - 1, 0, None, "soon", True],
    ids=["before the start", "never", "none", "rubbish", "a truth"],
)
def test_a_status_of_an_earlier_container_does_not_count(updated: Any) -> None:
    found = parse_rank_state(
        "spark-a", 0, text_of(RUNNING, {"phase": "serving", "generation": GENERATION, "updated": updated})
    )
    assert (found.phase, found.generation) == ("starting", None)


@pytest.mark.parametrize("status", ["", "null", "[]", '"x"', '{"phase": "ser'])
def test_a_status_that_is_cut_or_rubbish_is_a_rank_that_starts(status: str) -> None:
    text = f"=== container\n{json.dumps(RUNNING)}\n=== id\nid-1\n=== status\n{status}\n"
    assert parse_rank_state("spark-a", 0, text).phase == "starting"


@given(
    status=st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(["phase", "generation", "updated", "first_error", "n", "progress"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=6,
    )
)
def test_whatever_a_status_holds_a_rank_is_judged(status: Any) -> None:
    if isinstance(status, dict):
        status = {**status, "updated": STARTED_AT + 1}
    found = parse_rank_state("spark-a", 0, text_of(RUNNING, status))
    assert isinstance(found.phase, str)
    assert isinstance(drift_of([found]), str)


def test_a_rank_is_observed_in_one_round_trip(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "host")
    host.set_container("c", **RUNNING)
    (tmp_path / "status.json").write_text(
        json.dumps({"phase": "loading", "updated": STARTED_AT + 1, "generation": None})
    )
    found = observe_rank(Rank(host.node, 0, "c", str(tmp_path)))
    assert (found.phase, found.container_id, found.running) == ("loading", "id-of-c", True)
    assert len(host.node.asked) == 1


def test_a_daemon_that_could_not_be_asked_is_not_a_missing_container(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "host")
    host.change(docker_error="Cannot connect to the Docker daemon at unix:///var/run/docker.sock.")
    with pytest.raises(CommandError) as failed:
        observe_rank(Rank(host.node, 0, "c", str(tmp_path)))
    assert "Cannot connect to the Docker daemon" in failed.value.line


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ([state(HEAD, "serving"), state(WORKER, "ray_ready")], "serving"),
        ([state(HEAD, "serving"), state(WORKER, "serving")], "serving"),
        ([state(HEAD, "serving")], "serving"),
        ([state(HEAD, "serving"), state(WORKER, "no container")], "spark-b: no container"),
        ([state(HEAD, "container stopped"), state(WORKER, "serving")], "spark-a: container stopped"),
        ([state(HEAD, "loading"), state(WORKER, "ray_ready")], "spark-a: loading"),
        (
            [state(HEAD, "stopped", desired="stopped"), state(WORKER, "waiting_for_ranks")],
            "spark-a: stopped on request",
        ),
        ([state(HEAD, "failed"), state(WORKER, "ray_ready")], "spark-a: failed"),
        (
            [state(HEAD, "serving"), state(WORKER, "ray_ready", {"head_incarnation": "abc", "n": 2})],
            "spark-b: not in the head's generation",
        ),
        (
            [state(HEAD, "serving"), state(WORKER, "ray_ready", {"head_incarnation": "xyz", "n": 3})],
            "spark-b: not in the head's generation",
        ),
        ([state(HEAD, "serving"), state(WORKER, "ending")], "spark-b: ending"),
    ],
)
def test_drift_in_words_short_enough_for_a_diff(states: list[RankState], told: str) -> None:
    assert drift_of(states) == told


def scripted(logs: str = "") -> Rank:
    return Rank(ScriptedTransport("spark-a", lambda _: logs), 0, "spark-vllm-dev-main-rank0", "/state")


def failure(states: list[RankState], logs: str = "") -> GateError | None:
    return failure_of(states, [scripted(logs) for _ in states])


def first_error(at: float, line: str) -> dict[str, Any]:
    return {"first_error": {"at": at, "line": line, "lines": [f"log of {line}"]}}


def test_the_earliest_account_of_a_failure_wins() -> None:
    found = failure(
        [
            state(HEAD, "failed", **first_error(20, "peer went away")),
            state(WORKER, "failed", **first_error(10, "out of memory")),
        ]
    )
    assert str(found) == (
        "spark-b, rank 1: out of memory\n  do: correct the cause and run up again\n  seen: log of out of memory"
    )


def test_an_account_is_preferred_to_a_container_that_stopped() -> None:
    found = failure([state(HEAD, "container stopped"), state(WORKER, "failed", **first_error(10, "flag unknown"))])
    assert found is not None
    assert found.line == "spark-b, rank 1: flag unknown"


def test_an_account_of_an_earlier_generation_counts_no_more() -> None:
    old = {"phase": "failed", "generation": {"head_incarnation": "a", "n": 1}, "first_error": {"at": 10, "line": "old"}}
    new = {"phase": "ray_starting", "generation": {"head_incarnation": "a", "n": 2}}
    states = [replace(state(HEAD, "ray_starting"), status=new), replace(state(WORKER, "failed"), status=old)]
    assert failure(states) is None


HEALING = {"healing": {"policy": "restart"}}


def test_a_failure_that_a_group_heals_from_is_not_the_end_of_the_wait() -> None:
    worker = state(WORKER, "failed", **first_error(10, "Ray ended"))
    for phase in ("ending", "backing_off", "waiting_for_ranks"):
        assert failure([state(HEAD, phase, **HEALING), worker]) is None
    found = failure([state(HEAD, "failed", **HEALING, **first_error(20, "crash loop")), worker])
    assert found is not None and found.line == "spark-b, rank 1: Ray ended"


def test_a_group_that_only_reports_has_failed_with_its_first_rank() -> None:
    reporting = state(HEAD, "ending", healing={"policy": "report"})
    found = failure([reporting, state(WORKER, "failed", **first_error(10, "Ray ended"))])
    assert found is not None and found.line == "spark-b, rank 1: Ray ended"


def test_a_container_that_cannot_start_at_all_is_told_and_not_waited_for() -> None:
    looping = replace(state(HEAD, "starting"), status=None, restarts=4)
    found = failure([looping, state(WORKER, "starting")], "no module\n")
    assert found is not None
    assert "found that it ended 4 times at once" in found.line
    assert found.evidence == ("no module",)


def test_a_container_that_was_killed_for_memory_is_told_so_with_its_last_lines() -> None:
    found = failure([state(HEAD, "container stopped", oom=True), state(WORKER, "loading")], "one\ntwo\n")
    assert found is not None
    assert found.line == (
        "spark-a, rank 0: expected the container spark-vllm-dev-main-rank0 to run, "
        "found it stopped (exit code 137, killed by the kernel for memory)"
    )
    assert found.evidence == ("one", "two")


@pytest.mark.parametrize("phases", [["serving", "ray_ready"], ["loading", "starting"], ["waiting", "ending"]])
def test_a_group_on_its_way_has_not_failed(phases: list[str]) -> None:
    assert failure([state(HEAD, phases[0]), state(WORKER, phases[1])]) is None


@pytest.mark.parametrize("account", [None, {}, "text", [], {"at": "noon", "line": "x"}, {"at": None, "line": None}])
def test_a_failure_without_a_readable_account_is_still_a_failure(account: Any) -> None:
    found = failure([state(HEAD, "failed", first_error=account), state(WORKER, "ray_ready")])
    assert found is not None
    assert found.where == "spark-a, rank 0"


class Clock:
    """Time that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def follow(script: Callable[[int], dict[str, Any]], clock: Clock, **options: Any) -> tuple[list[RankState], list[str]]:
    """Wait for a single rank whose status at each second is given by a function."""
    said: list[str] = []

    def answer(cmd: Command) -> Result | str:
        if "logs" in cmd.argv:
            return "last line of the log"
        return text_of(RUNNING, {"updated": STARTED_AT + 1, "generation": GENERATION, **script(int(clock.now))})

    rank = Rank(ScriptedTransport("spark-a", answer), 0, "c", "/state")
    states = wait_until_serving(
        [rank], progress=said.append, clock=clock, sleep=clock.sleep, **{"stall_s": 60, **options}
    )
    return states, said


def test_waiting_ends_with_serving_and_says_each_change_once() -> None:
    phases = ["starting", "loading", "loading", "loading", "serving"]
    states, said = follow(
        lambda now: {"phase": phases[now], "progress": "3 of 9 shards" if now in (1, 2) else ""}, Clock()
    )
    assert states[0].phase == "serving"
    assert said == [
        "spark-a rank 0: starting",
        "spark-a rank 0: loading (3 of 9 shards)",
        "spark-a rank 0: loading",
        "spark-a rank 0: serving",
    ]


def test_progress_renews_the_deadline() -> None:
    clock = Clock()
    follow(
        lambda now: {"phase": "serving"} if now > 1000 else {"phase": "loading", "progress": f"{now // 50}"},
        clock,
    )
    assert clock.now > 1000


def test_standing_still_ends_the_wait_with_the_phase_and_the_log() -> None:
    clock = Clock()
    with pytest.raises(GateError) as failed:
        follow(lambda _: {"phase": "loading", "progress": "3 of 9 shards"}, clock)
    assert failed.value.line == (
        "spark-a: expected the group to serve, found no progress for 60 s (spark-a rank 0: loading (3 of 9 shards))"
    )
    assert failed.value.evidence == ("last line of the log",)
    assert clock.now < 70


def test_an_old_generation_neither_passes_nor_fails_the_gate() -> None:
    def script(now: int) -> dict[str, Any]:
        if now < 5:
            return {"phase": "failed" if now < 3 else "serving", **first_error(1, "old")}
        return {"phase": "serving", "generation": {"head_incarnation": "abc", "n": 4}}

    clock = Clock()
    states, _ = follow(script, clock, newer_than=("abc", 3))
    assert states[0].generation == ("abc", 4)
    assert clock.now >= 5


def test_a_failed_rank_ends_the_wait_at_once() -> None:
    clock = Clock()
    with pytest.raises(GateError) as failed:
        follow(
            lambda now: {"phase": "failed", **first_error(1, "no GPU")} if now else {"phase": "loading"},
            clock,
        )
    assert failed.value.line == "spark-a, rank 0: no GPU"
    assert clock.now <= 2


def test_a_node_that_goes_silent_is_told_as_unreachable() -> None:
    def silent(_: Command) -> Result:
        raise UnreachableError("no answer", node="spark-a", step="login")

    clock = Clock()
    with pytest.raises(UnreachableError):
        wait_until_serving(
            [Rank(ScriptedTransport("spark-a", silent), 0, "c", "/s")],
            stall_s=9,
            progress=lambda _: None,
            clock=clock,
            sleep=clock.sleep,
        )


def test_a_new_generation_is_asked_of_the_supervisor_itself() -> None:
    node = ScriptedTransport("spark-a", lambda _: "")
    ask_new_generation(Rank(node, 0, "c", "/s"), "/opt/vllm/bin/python3")
    assert node.asked[0].argv == (
        "docker",
        "exec",
        "c",
        "/opt/vllm/bin/python3",
        "/opt/spark-vllm/runtime.pyz",
        "restart",
    )


@pytest.fixture
def endpoint() -> Iterator[ChatEndpoint]:
    with chat_endpoint() as served:
        yield served


@pytest.mark.parametrize(
    "message",
    [
        {"content": "hello"},
        {"content": None, "reasoning": "hello"},
        {"content": "", "reasoning_content": "hello"},
    ],
)
def test_content_or_reasoning_is_a_completion(message: dict[str, Any], endpoint: ChatEndpoint) -> None:
    endpoint.say(message)
    assert complete(endpoint.url, "qwen", MARKER, timeout_s=20).text == "hello"
    [(path, authorization, body)] = endpoint.asked
    assert (path, authorization) == ("/v1/chat/completions", f"Bearer {MARKER}")
    assert (body["model"], body["max_tokens"]) == ("qwen", 16)


def test_an_open_endpoint_gets_no_key(endpoint: ChatEndpoint) -> None:
    complete(endpoint.url, "qwen", None, timeout_s=20)
    assert endpoint.asked[0][1] is None


def test_a_proxy_of_the_environment_is_not_used(endpoint: ChatEndpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert complete(endpoint.url, "qwen", None, timeout_s=20).seconds >= 0


@pytest.mark.parametrize("status", [401, 404, 500, 503])
def test_an_error_answer_is_told_with_its_status_and_without_the_key(status: int, endpoint: ChatEndpoint) -> None:
    endpoint.status, endpoint.body = status, b'{"error": "engine is dead"}'
    with pytest.raises(GateError) as failed:
        complete(endpoint.url, "qwen", MARKER, timeout_s=20)
    assert failed.value.line == f"{endpoint.url}: expected a completion, found HTTP {status}"
    assert failed.value.evidence == ('{"error": "engine is dead"}',)
    assert MARKER not in "".join(traceback.format_exception(failed.value))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"rubbish",
        b"[]",
        b"{}",
        b"null",
        b'{"choices": []}',
        b'{"choices": [{"message": {"content": ""}}]}',
        b'{"choices": "x"}',
        b'{"choices": [{"message": null}]}',
        b'{"choices": [null]}',
    ],
)
def test_an_answer_that_is_no_completion_is_a_failed_gate(body: bytes, endpoint: ChatEndpoint) -> None:
    endpoint.body = body
    with pytest.raises(GateError):
        complete(endpoint.url, "qwen", MARKER, timeout_s=20)


def test_a_refused_connection_is_told_with_what_to_check() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(GateError) as failed:
            complete(url, "qwen", MARKER, timeout_s=20)
    assert "Connection refused" in failed.value.line
    assert "blocks the port" in failed.value.do


def test_a_supervisor_that_has_long_said_nothing_is_not_serving() -> None:
    states = [serving_state("spark-a", 0), replace(serving_state("spark-b", 1), silent_s=SILENT_S + 1)]
    assert drift_of(states) == "spark-b: supervisor silent"
    assert drift_of([serving_state("spark-a", 0), serving_state("spark-b", 1)]) == "serving"


def test_silence_is_measured_by_the_nodes_own_clock() -> None:
    status = json.dumps({"phase": "serving", "updated": 1_700_000_000})
    text = (
        '=== container\n{"Running": true, "StartedAt": "2023-11-14T00:00:00Z"}\n=== id\nabc\n'
        f"=== now\n1700000200\n=== status\n{status}\n"
    )
    state = parse_rank_state("spark-a", 0, text)
    assert state.silent_s == 200 and state.silent


def serving_state(node: str, rank: int) -> RankState:
    status = {"phase": "serving", "generation": {"head_incarnation": "abc", "n": 1}}
    return RankState(node, rank, "id", True, 0, False, "2026-01-01T00:00:00Z", status)


@pytest.mark.parametrize(
    ("docker", "seen"),
    [
        ("echo 'WARNING: Error loading config file' >&2; printf '=== container\\n{}\\n=== id\\nabc\\n'", "abc"),
        ('[ "$1" = ps ] || { echo; echo "Error: No such container: x" >&2; return 1; }', None),
        ("echo 'Cannot connect to the Docker daemon' >&2; return 1", "Cannot connect to the Docker daemon\n"),
    ],
    ids=["a warning of the client beside the answer", "no container", "no daemon"],
)
def test_what_docker_says_beside_its_answer_is_no_part_of_it(docker: str, seen: str | None) -> None:
    words = [
        "bash",
        "--norc",
        "-peuo",
        "pipefail",
        "-c",
        f"docker() {{ {docker}; }}\n{_OBSERVE}",
        "sh",
        "x",
        "/nowhere",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        assert done.stderr == seen
    else:
        assert parse_rank_state("spark-a", 0, done.stdout).container_id == seen
