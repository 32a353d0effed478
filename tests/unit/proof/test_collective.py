"""A collective in throw-away containers: the same as the ranks', bounded, told rank by rank, and nothing left."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from spark_core.errors import SparkError, UnreachableError
from spark_core.group import GroupFiles, RankContainer, model_target, plan_group
from spark_core.proof.collective import environment_digest, probe_arguments, run_collective
from spark_core.proof.rank_proof import MARK, RankProof, collective_findings, parse_probe, transport_of
from spark_core.settings import Settings, read_settings
from spark_core.transport.base import Command, Result, Transport
from spark_runtime import collective_probe
from tests.config_cases import apply_change, load_base
from tests.scripted_transport import ScriptedTransport
from tests.unit.proof.conftest import IMAGE, NODES, Pair
from tests.unit.proof.nodes import RECORDED

pytestmark = pytest.mark.slow


def settings_with(change: Mapping[str, Any] | None = None) -> Settings:
    return read_settings(apply_change(load_base(), change or {}))


def containers_of(settings: Settings, runtime: str = "hash/runtime.pyz") -> tuple[RankContainer, ...]:
    files = GroupFiles(
        runtime, ("hash/fix.py",) * len(settings.groups["main"].serving.patches), dict.fromkeys(NODES, "/")
    )
    return plan_group(settings, "main", "dev", IMAGE, files).containers


def words_of(settings: Settings) -> list[list[str]]:
    weights = model_target(settings.groups["main"])
    return [probe_arguments(one, IMAGE, weights, ["probe"]) for one in containers_of(settings)]


def values(words: list[str], flag: str) -> list[str]:
    return [value for name, value in itertools.pairwise(words) if name == flag]


# What the containers are.


def test_a_probe_has_everything_of_its_rank_but_weights_key_and_state() -> None:
    settings = settings_with(
        {
            "groups.main.serving.environment": {"NCCL_ALGO": "Ring"},
            "groups.main.serving.mounts": [{"source": "/opt/lib,x", "target": "/opt/lib", "read_only": False}],
            "groups.main.serving.patches": [{"source": "fix.py", "target": "/opt/fix.py"}],
        }
    )
    for container, words in zip(containers_of(settings), words_of(settings), strict=True):
        assert values(words, "--env") == list(container.environment)
        assert values(words, "--device") == ["/dev/infiniband"] == list(container.devices)
        assert values(words, "--cap-add") == ["IPC_LOCK"] == list(container.capabilities)
        assert values(words, "--ulimit") == ["memlock=-1:-1"]
        assert values(words, "--gpus") == ["all"]
        assert values(words, "--network") == ["host"] and values(words, "--ipc") == ["private"]
        assert values(words, "--shm-size") == [f"{container.shm_size_mib}m"]
        assert values(words, "--memory") == values(words, "--memory-swap") == ["4096m"]
        assert "--rm" in words and values(words, "--restart") == ["no"]
        targets = [mount.split("target=")[1].split(",")[0] for mount in values(words, "--mount")]
        assert targets == ["/opt/spark-vllm/runtime.pyz", "/opt/fix.py", "/opt/lib"]
        assert all(mount.endswith(",readonly") for mount in values(words, "--mount"))
        assert 'type=bind,"source=/opt/lib,x",target=/opt/lib,readonly' in values(words, "--mount")
        assert words[words.index("--entrypoint") :] == [
            *("--entrypoint", container.entrypoint[0], IMAGE, container.entrypoint[1], "probe"),
        ]


def test_a_probe_without_spark_hardware_asks_for_none_of_it() -> None:
    for words in words_of(settings_with({"hardware": "cpu"})):
        assert not {"--gpus", "--device", "--cap-add", "--ulimit"} & set(words)


def test_what_decides_how_ranks_talk_makes_the_proof_anew_and_nothing_else_does() -> None:
    base = environment_digest(containers_of(settings_with()))
    for same in (
        {"groups.main.serving.environment": {"VLLM_LOGGING_LEVEL": "DEBUG", "OMP_NUM_THREADS": "4"}},
        {"groups.main.serving.nccl_debug": "INFO"},
        {"groups.main.serving.max_model_len": 4096},
        {"groups.main.serving.mounts": [{"source": "/opt/a", "target": "/opt/b"}]},
    ):
        assert environment_digest(containers_of(settings_with(same))) == base, same
    for other in (
        {"groups.main.serving.environment": {"NCCL_ALGO": "Ring"}},
        {"groups.main.serving.environment": {"LD_PRELOAD": "/opt/nccl/libnccl.so"}},
        {"nodes[1].fabric[1].hca": None},
        {"nodes[0].fabric[0].address": "192.168.200.77/24"},
        {"hardware": "cpu"},
    ):
        assert environment_digest(containers_of(settings_with(other))) != base, other


# How they run, for real: processes in place of containers, a stand-in for torch.


def run(
    pair: Pair,
    pause: Callable[[float], None] = time.sleep,
    deadline_s: float = 20,
    instead: Mapping[str, Transport] | None = None,
) -> list[RankProof]:
    weights = model_target(pair.settings.groups["main"])
    arguments = {}
    for one in pair.containers:
        command = ["probe", "--rank", str(one.rank), "--world", "2", "--address", "127.0.0.1", "--port", "1"]
        command += ["--backend", "gloo", "--rdma", "off", "--deadline-s", str(deadline_s)]
        arguments[one.node] = probe_arguments(one, IMAGE, weights, command)
    return run_collective(pair.containers, arguments, {**pair.nodes, **(instead or {})}, pause)


def test_the_ranks_meet_and_what_they_say_is_read(pair: Pair) -> None:
    proofs = run(pair)
    assert [(one.node, one.rank, one.done, one.error) for one in proofs] == [
        ("spark-a", 0, True, ""),
        ("spark-b", 1, True, ""),
    ]
    assert all(one.found["torch"] == "2.fake" for one in proofs)
    assert pair.left() == []
    for node in NODES:
        (words,) = [json.loads(line) for line in (pair.base / node / "runs").read_text().splitlines()]
        assert values(words, "--label") == ["spark-vllm.probe=dev", "spark-vllm.stack=dev"]
        rank = NODES.index(node)
        assert values(words, "--name") == [f"spark-vllm-dev-main-rank{rank}-probe"]


def test_a_container_that_a_killed_run_left_is_removed_first(pair: Pair) -> None:
    stray = pair.base / "spark-b" / "containers" / "spark-vllm-dev-main-rank1-probe"
    stray.parent.mkdir()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        stray.write_text(json.dumps({"pid": process.pid, "label": "spark-vllm.probe=dev"}))
        assert all(one.done for one in run(pair))
        assert process.wait(timeout=10) == -9


def told(pair: Pair, proofs: list[RankProof]) -> tuple[str, list[str]]:
    """The one line of a failure, and its evidence."""
    findings, evidence = collective_findings(pair.settings, pair.settings.nodes, proofs)
    (found,) = findings
    assert (found.code, found.severity) == ("collective-failed", "fail")
    return found.what.partition(", found: ")[2], evidence


def test_once_a_rank_cannot_start_the_others_are_ended_and_it_is_named(pair: Pair) -> None:
    refusal = 'docker: could not select device driver "" with capabilities: [[gpu]].'
    pair.put("spark-b", "run-error", refusal)
    begin = time.monotonic()
    proofs = run(pair, deadline_s=60)
    assert time.monotonic() - begin < 20
    line, evidence = told(pair, proofs)
    assert line == f"rank 1 on spark-b never started: {refusal}"
    assert evidence[0].startswith("rank 0 on spark-a: ")
    assert evidence[0].endswith(": ended, since another rank had failed")
    assert pair.left() == []


@pytest.mark.parametrize(
    ("mode", "line"),
    [
        ("no-import", "failed in 'importing torch': ImportError: libcudart.so.13: cannot open shared object file"),
        ("wrong", "failed in 'first all-reduce': RuntimeError: an all-reduce of 1024 values came back with 7 wrong"),
    ],
)
def test_the_rank_that_failed_by_itself_is_the_one_that_is_named(pair: Pair, mode: str, line: str) -> None:
    pair.put("spark-b", "mode", mode)
    assert told(pair, run(pair))[0].startswith(f"rank 1 on spark-b {line}")
    assert pair.left() == []


def test_a_rank_that_never_came_is_named_at_the_deadline_with_what_it_was_in(pair: Pair) -> None:
    (pair.base / "meeting" / "here-0").touch()
    late = {"rank": 1, "stage": "importing torch", "error": "not done within 2 s", "missing": []}
    words = [f"{MARK}{json.dumps(late)}", "=== status 3"]

    def speak(_: Command) -> str:
        while not pair.ran() or not pair.left():  # rank 0 has begun
            time.sleep(0.05)
        while pair.left():  # and has given up
            time.sleep(0.05)
        return "\n".join(words)

    line, evidence = told(pair, run(pair, deadline_s=2, instead={"spark-b": ScriptedTransport("spark-b", speak)}))
    assert line == "rank 1 on spark-b never came (it was in 'importing torch')"
    assert "rank 0 on spark-a: waiting for the other ranks: not done within 2 s" in evidence


@pytest.mark.parametrize(("status", "told_as"), [(137, " (killed, as over its bound of memory)"), (1, "")])
def test_a_rank_that_died_without_a_word_is_named_before_those_that_lost_it(status: int, told_as: str) -> None:
    last = {"stage": "large all-reduce", "error": "DistBackendError: connection closed by remote peer"}
    lost = parse_probe("spark-a", 0, said(**last))
    dead = parse_probe("spark-b", 1, f"{MARK}{json.dumps({'stage': 'large all-reduce'})}\n=== status {status}")
    settings = settings_with()
    (found,), _ = collective_findings(settings, settings.nodes, [lost, dead])
    assert found.what.partition(", found: ")[2] == (
        f"rank 1 on spark-b died in 'large all-reduce' with exit status {status}{told_as}"
    )


def test_a_container_that_starts_late_is_ended_all_the_same(pair: Pair) -> None:
    """The first removal finds nothing where Docker is still busy; it is asked again."""
    pair.put("spark-a", "start-late", "1.5")
    pair.put("spark-b", "run-error", "no GPU")
    begin = time.monotonic()
    line, _ = told(pair, run(pair, deadline_s=60))
    assert time.monotonic() - begin < 30
    assert line == "rank 1 on spark-b never started: no GPU"
    assert pair.left() == []


def test_a_hang_of_all_ranks_is_told_with_where_each_is(pair: Pair) -> None:
    for node in NODES:
        pair.put(node, "mode", "hang")
    assert told(pair, run(pair, deadline_s=2))[0] == (
        "no end: rank 0 on spark-a in 'initialising gloo', rank 1 on spark-b in 'initialising gloo'"
    )


def test_an_interrupted_proof_leaves_no_container(pair: Pair) -> None:
    for node in NODES:
        pair.put(node, "mode", "hang")

    def pause(seconds: float) -> None:
        time.sleep(seconds)
        if len(pair.left()) == 2:
            raise SparkError("interrupted; nothing of the proof is left running")

    begin = time.monotonic()
    with pytest.raises(SparkError) as failed:
        run(pair, pause, deadline_s=60)
    assert failed.value.what.startswith("interrupted")
    assert time.monotonic() - begin < 20
    assert pair.left() == []


def test_a_node_that_is_lost_ends_the_others_and_is_told_as_lost(pair: Pair) -> None:
    def lost(_: Command) -> Result:
        raise UnreachableError("expected an answer, found: the connection was lost", node="spark-b", step="session")

    with pytest.raises(UnreachableError):
        run(pair, deadline_s=60, instead={"spark-b": ScriptedTransport("spark-b", lost)})
    assert pair.left() == []


# What their words mean.


def said(**last: Any) -> str:
    return "\n".join(["NCCL INFO Bootstrap", f"{MARK}{json.dumps({'rank': 0, 'stage': 'x', **last})}", "=== status 0"])


def test_the_mark_is_the_one_that_the_probe_prints() -> None:
    assert MARK == collective_probe.MARK


@pytest.mark.parametrize(
    "text",
    ["", "=== status 125", MARK, f"{MARK}[]", f'{MARK}{{"done": true', f'{MARK}{{"done": 1}}', "\x00\ufffd ✗"],
)
def test_a_rank_that_said_nothing_whole_is_not_done(text: str) -> None:
    found = parse_probe("spark-a", 0, text)
    assert not found.done and found.missing == ()


def test_a_cut_answer_is_done_only_with_its_last_line() -> None:
    text = said(done=True, missing=[])
    for end in range(len(text)):
        assert not parse_probe("spark-a", 0, text[:end]).done or end > text.index("=== status") - 2


def proofs_of(log: str, hcas: tuple[str, ...], bus_gbps: float = 162.0, **more: Any) -> list[RankProof]:
    text = (RECORDED / "nccl-log" / f"{log}.txt").read_text()
    last = {"done": True, "bus_gbps": bus_gbps, "hcas": {"used": list(hcas), "dropped": {}}, **more}
    return [parse_probe(node, rank, f"{text}\n{said(**last)}") for rank, node in enumerate(NODES)]


def codes(proofs: list[RankProof], change: Mapping[str, Any] | None = None) -> list[tuple[str, str, str]]:
    settings = settings_with(change)
    found, evidence = collective_findings(settings, settings.nodes, proofs)
    assert evidence == []
    return [(one.where.split(",")[0], one.code, one.severity) for one in found]


BOTH = ("rocep1s0f1", "roceP2p1s0f1")


def test_ranks_over_rdma_are_proven() -> None:
    proofs = proofs_of("two-sparks-dual-rail-ib-2.28.9-excerpt", BOTH)
    assert codes(proofs) == []
    assert transport_of(proofs[0], "spark", "enp1s0f1np1") == "NET/IB over rocep1s0f1, roceP2p1s0f1"


@pytest.mark.parametrize(("rdma", "severity"), [("required", "fail"), ("preferred", "warn")])
def test_ranks_over_sockets_are_told_for_each_rank(rdma: str, severity: str) -> None:
    sent: dict[str, Any] = {"sent_bytes": {"enp1s0f1np1": 400 << 20}, "moved_bytes": 320 << 20}
    proofs = proofs_of("socket-fallback-no-dev-infiniband-spark-pair", BOTH, **sent)
    assert codes(proofs, {"fabric": {"rdma": rdma}}) == [(node, "transport-sockets", severity) for node in NODES]


def test_sockets_are_accepted_where_rdma_is_off_if_they_use_the_fabric() -> None:
    log = "socket-fallback-no-dev-infiniband-spark-pair"
    off = {"fabric": {"rdma": "off"}}
    right: dict[str, Any] = {"sent_bytes": {"enp1s0f1np1": 400 << 20, "eth0": 9000}, "moved_bytes": 320 << 20}
    assert codes(proofs_of(log, (), **right), off) == []
    wrong: dict[str, Any] = {"sent_bytes": {"enP7s7": 400 << 20, "enp1s0f1np1": 9000}, "moved_bytes": 320 << 20}
    assert codes(proofs_of(log, (), **wrong), off) == [(node, "traffic-off-fabric", "fail") for node in NODES]


@pytest.mark.parametrize("sent", [{}, None, {"lo": 900 << 20}])
def test_on_hosts_without_rdma_the_bytes_must_have_passed_the_fabric(sent: dict[str, int] | None) -> None:
    proofs = [
        parse_probe(node, rank, said(done=True, moved_bytes=320 << 20, sent_bytes=sent))
        for rank, node in enumerate(NODES)
    ]
    assert [code for _, code, _ in codes(proofs, {"hardware": "cpu"})] == ["traffic-off-fabric"] * 2
    proven = [
        parse_probe(node, rank, said(done=True, moved_bytes=320 << 20, sent_bytes={"enp1s0f1np1": 330 << 20}))
        for rank, node in enumerate(NODES)
    ]
    assert codes(proven, {"hardware": "cpu"}) == []
    assert transport_of(proven[0], "cpu", "enp1s0f1np1") == "gloo over enp1s0f1np1"


def test_a_collective_as_slow_as_a_degraded_link_says_so_also_without_ib_write_bw() -> None:
    slow = proofs_of("two-sparks-dual-rail-ib-2.28.9-excerpt", BOTH, bus_gbps=2.82 * 8)
    assert [(code, severity) for _, code, severity in codes(slow)] == [("bandwidth-degraded", "warn")]
    odd = proofs_of("two-sparks-dual-rail-ib-2.28.9-excerpt", BOTH, bus_gbps=3.0)
    assert codes(odd) == []  # slower than a degraded start: a busy GPU, not the link


REAL = Path(__file__).parents[2] / "fixtures" / "nccl-probe"
"""Printed by the probe itself, with a real NCCL."""


def real_proofs(name: str) -> list[RankProof]:
    text = (REAL / f"{name}.txt").read_text()
    return [parse_probe(node, rank, text) for rank, node in enumerate(NODES)]


def test_a_real_run_over_sockets_is_read() -> None:
    proofs = real_proofs("sockets-two-ranks-one-h200")
    assert all(one.done and one.found["nccl"] == "2.28.9" for one in proofs)
    assert str(proofs[0].transport) == "NET/Socket over lo"
    assert [code for _, code, _ in codes(proofs)] == ["transport-sockets", "traffic-off-fabric"] * 2


def test_where_rdma_is_required_nccl_s_own_refusal_is_told_as_what_it_means() -> None:
    settings = settings_with()
    found, evidence = collective_findings(settings, settings.nodes, real_proofs("no-rdma-device-nccl-net-ib-one-h200"))
    assert [(one.code, one.severity) for one in found] == [("transport-sockets", "fail")] * 2
    assert found[0].line.splitlines()[0] == (
        "spark-a, rank 0 (fabric.rdma): expected RDMA (rdma: required), found that NCCL has no device for it: "
        "NET/IB : No device found [transport-sockets]"
    )
    assert "Failed to initialize any NET plugin" in evidence[0] and "\n" not in evidence[0]


def test_a_cut_real_output_is_never_done_early() -> None:
    text = (REAL / "sockets-two-ranks-one-h200.txt").read_text()
    for end in range(0, text.rindex("}"), 13):
        assert not parse_probe("spark-a", 0, text[:end]).done
