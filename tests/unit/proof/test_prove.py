"""All proofs in order: what is proven, what is left out and said, and where it stops."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from spark_core.errors import SparkError
from spark_core.findings import Finding
from spark_core.proof import FabricReport, ProofRun, bandwidth, idle, prove, prove_fabric
from tests.unit.proof.conftest import FILES, IMAGE, NODES, Pair
from tests.unit.proof.nodes import RECORDED

pytestmark = pytest.mark.slow

LOOPBACK = {f"nodes[{n}].fabric[{i}].address": f"127.0.{i + 1}.{n + 1}/24" for n in (0, 1) for i in (0, 1)}
NO_HCAS = {f"nodes[{n}].fabric[{i}].hca": None for n in (0, 1) for i in (0, 1)}
OURS = "/spark-vllm-dev-main-rank0|dev||null|[]|runc"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is never busy of itself, a brief measurement, and packets that arrive."""
    monkeypatch.setattr(idle, "LOAD_PER_CPU", 1e6)
    monkeypatch.setattr(prove, "COLLECTIVE_NEEDS_MIB", 1)
    monkeypatch.setattr(bandwidth, "TCP_SECONDS", 0.1)
    monkeypatch.setattr(prove, "prove_packets", lambda transports, settings: [])


def proven(pair: Pair, change: Mapping[str, Any] | None = None, **fabric: Any) -> tuple[FabricReport, list[str]]:
    """The report, and what was told meanwhile."""
    loopback = {**LOOPBACK, **NO_HCAS, "fabric": fabric, "severities": {"traffic-off-fabric": "ignore"}}
    said: list[str] = []
    run = ProofRun(
        settings=pair.with_settings({**loopback, **dict(change or {})}).settings,
        stack="dev",
        group="main",
        image_id=IMAGE,
        files=FILES,
        transports=pair.nodes,
        say=said.append,
        pause=time.sleep,
    )
    return prove_fabric(run), said


def codes(report: FabricReport) -> list[tuple[str, str]]:
    return [(found.code, found.severity) for found in report.findings]


def test_a_fabric_is_proven_by_packets_bandwidth_and_a_collective(pair: Pair) -> None:
    report, said = proven(pair)
    assert codes(report) == [] and not report.failed
    report.raise_failure()
    (measured,) = report.pairs
    assert (measured.method, measured.links) == ("tcp", 2)
    assert report.transports == dict.fromkeys(NODES, "gloo over enp1s0f1np1")
    assert said[0] == str(measured)
    assert said[1] == "proving a collective between 2 ranks in the serving image"
    assert said[2] == "ranks talk over gloo over enp1s0f1np1 (spark-a); gloo over enp1s0f1np1 (spark-b)"
    assert pair.left() == []


def test_packets_that_do_not_arrive_end_it_before_anything_is_loaded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Finding("mtu-not-carried", "spark-a (fabric)", "expected 9000 bytes to arrive, found them lost", "fix it")
    monkeypatch.setattr(prove, "prove_packets", lambda transports, settings: [lost])
    report, said = proven(pair)
    assert codes(report) == [("mtu-not-carried", "fail")] and said == [] and pair.ran() == []
    with pytest.raises(SparkError) as failed:
        report.raise_failure()
    assert failed.value.line == "spark-a (fabric): expected 9000 bytes to arrive, found them lost [mtu-not-carried]"


def test_off_proves_the_packets_only(pair: Pair) -> None:
    report, said = proven(pair, proof="off")
    assert codes(report) == [] and said == [] and report.pairs == [] and pair.ran() == []
    assert all(node.asked == [] for node in pair.nodes.values())


def test_a_busy_node_is_never_loaded_and_that_is_said(pair: Pair) -> None:
    pair.put("spark-b", "running", OURS)
    report, said = proven(pair)
    assert codes(report) == [("proof-not-run", "unknown")] and not report.failed
    assert said[0].splitlines()[0] == (
        "fabric (bandwidth and collective): not checked: node busy (spark-b: container spark-vllm-dev-main-rank0 "
        "of the stack dev) [proof-not-run]"
    )
    assert report.pairs == [] and pair.ran() == []
    assert len(pair.nodes["spark-a"].asked) == 1


def test_always_proves_beside_a_group_that_serves(pair: Pair) -> None:
    pair.put("spark-b", "running", OURS)
    report, _ = proven(pair, proof="always")
    assert codes(report) == [] and len(report.pairs) == 1 and report.transports


@pytest.mark.parametrize("proof", ["idle", "always"])
def test_too_little_memory_keeps_the_collective_out_also_where_it_was_asked_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, proof: str
) -> None:
    monkeypatch.setattr(prove, "COLLECTIVE_NEEDS_MIB", 1 << 30)
    report, _ = proven(pair, proof=proof)
    assert codes(report) == [("proof-not-run", "unknown")]
    assert "not checked: too little memory" in report.findings[0].what
    assert len(report.pairs) == 1 and pair.ran() == []


def test_a_rate_below_the_declared_floor_fails_before_the_collective(pair: Pair) -> None:
    report, said = proven(pair, minimum_gbps=100_000)
    assert codes(report) == [("bandwidth-low", "fail")] and pair.ran() == []
    with pytest.raises(SparkError) as failed:
        report.raise_failure()
    assert failed.value.line.startswith("spark-a - spark-b (fabric): expected at least 100000 Gb/s")
    assert len(said) == 1  # what was measured is told all the same


def test_a_severity_of_the_settings_lets_it_go_on(pair: Pair) -> None:
    severities = {"severities": {"bandwidth-low": "warn", "traffic-off-fabric": "ignore"}}
    report, said = proven(pair, severities, minimum_gbps=100_000)
    assert codes(report) == [("bandwidth-low", "warn")] and pair.ran() == list(NODES)
    assert any("[bandwidth-low]" in line for line in said)


def test_what_cannot_be_measured_is_a_warning_and_the_collective_decides(pair: Pair) -> None:
    pair.nodes["spark-b"].install("python3", "#!/bin/sh\nexit 1\n")
    report, _ = proven(pair)
    assert codes(report)[0] == ("bandwidth-unmeasured", "warn")


def test_a_collective_that_fails_is_one_line_with_every_rank_s_words_beneath(pair: Pair) -> None:
    pair.put("spark-b", "mode", "no-import")
    report, _ = proven(pair)
    assert report.failed and report.transports == {}
    with pytest.raises(SparkError) as failed:
        report.raise_failure()
    assert failed.value.line == (
        "fabric (collective in the serving image): expected an all-reduce between 2 ranks in the serving image, found: "
        "rank 1 on spark-b failed in 'importing torch': ImportError: libcudart.so.13: cannot open shared object file "
        "[collective-failed]"
    )
    assert any(line.startswith("rank 0 on spark-a: ") for line in failed.value.evidence)
    assert any(line.startswith("rank 1 on spark-b: importing torch") for line in failed.value.evidence)


@pytest.mark.parametrize(
    ("log", "rdma", "expected"),
    [
        ("two-sparks-dual-rail-ib-2.28.9-excerpt", "required", []),
        ("socket-fallback-no-dev-infiniband-spark-pair", "required", [("transport-sockets", "fail")] * 2),
        ("socket-fallback-no-dev-infiniband-spark-pair", "preferred", [("transport-sockets", "warn")] * 2),
        ("socket-fallback-no-dev-infiniband-spark-pair", "off", []),
        ("error-unhandled-system-error-wrong-gid", "required", [("transport-unproven", "fail")] * 2),
    ],
)
def test_on_sparks_the_transport_that_nccl_chose_is_judged(
    pair: Pair, log: str, rdma: str, expected: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prove, "pairs_to_measure", lambda nodes: [])
    (pair.base / "meeting" / "nccl.log").write_text((RECORDED / "nccl-log" / f"{log}.txt").read_text())
    for node in NODES:
        pair.put(node, "mode", "gpu")
    quiet = {"traffic-off-fabric": "ignore", "bandwidth-degraded": "ignore"}
    report, _ = proven(pair, {"hardware": "spark", "severities": quiet}, rdma=rdma)
    assert codes(report) == expected
    failed = any(severity == "fail" for _, severity in expected)
    assert sorted(report.transports) == ([] if failed else list(NODES))
    assert all(text.startswith("NET/") for text in report.transports.values())


def test_an_interruption_between_two_parts_ends_it(pair: Pair) -> None:
    def pause(seconds: float) -> None:
        raise SparkError("interrupted")

    settings = pair.with_settings({**LOOPBACK, **NO_HCAS}).settings
    run = ProofRun(settings, "dev", "main", IMAGE, FILES, pair.nodes, lambda line: None, pause)
    with pytest.raises(SparkError) as failed:
        prove_fabric(run)
    assert failed.value.what == "interrupted" and pair.ran() == []
