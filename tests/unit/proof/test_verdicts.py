"""What rates and transports mean."""

from __future__ import annotations

import re

import pytest

from spark_core.findings import KINDS, Finding
from spark_core.proof.nccl_log import NcclTransport, parse_nccl_log
from spark_core.proof.perftest import parse_write_bandwidth
from spark_core.proof.verdicts import Method, Rate, Rdma, bandwidth_findings, transport_findings
from tests.unit.proof.nodes import RECORDED

BOTH = ("rocep1s0f1", "roceP2p1s0f1")


def judged(
    gbps: float, links: int = 2, method: Method = "ib_write_bw", hardware: str = "spark", floor: float | None = None
) -> list[tuple[str, str]]:
    found = bandwidth_findings(hardware, Rate(("spark-a", "spark-b"), method, links, gbps), floor)
    return [(one.code, one.severity) for one in found]


@pytest.mark.parametrize(
    ("gbps", "links", "verdict"),
    [
        (199.6, 2, []),
        (189.85, 2, []),
        (111.0, 1, []),
        (92.57, 1, []),
        (111.0, 2, [("bandwidth-low", "warn")]),
        (60.0, 1, [("bandwidth-low", "warn")]),
        (26.5, 2, [("bandwidth-degraded", "fail")]),
        (13.33, 1, [("bandwidth-degraded", "fail")]),
        (19.9, 1, [("bandwidth-degraded", "fail")]),
        (20.1, 1, [("bandwidth-low", "warn")]),
        (2.5, 1, [("bandwidth-low", "warn")]),
        (0.0, 2, [("bandwidth-low", "warn")]),
    ],
)
def test_writes_of_rdma_are_held_against_healthy_sparks(
    gbps: float, links: int, verdict: list[tuple[str, str]]
) -> None:
    assert judged(gbps, links) == verdict


@pytest.mark.parametrize("gbps", [13.1, 12.0])
def test_a_degraded_start_is_told_with_its_cure(gbps: float) -> None:
    (found,) = bandwidth_findings("spark", Rate(("spark-a", "spark-b"), "tcp", 2, gbps))
    assert found.code == "bandwidth-degraded"
    assert found.what == f"expected about 200 Gb/s, found {gbps} Gb/s by tcp over 2 links"
    assert found.do.startswith("shut both nodes down") and "warm reboot does not cure it" in found.do


@pytest.mark.parametrize(
    ("gbps", "verdict"), [(13.3, "bandwidth-degraded"), (21.0, None), (45.0, None), (3.0, "bandwidth-low")]
)
def test_by_tcp_only_the_degraded_band_is_known(gbps: float, verdict: str | None) -> None:
    assert [code for code, _ in judged(gbps, method="tcp")] == ([verdict] if verdict else [])


@pytest.mark.parametrize("gbps", [0.1, 13.0, 50.0])
def test_without_spark_hardware_only_a_declared_floor_counts(gbps: float) -> None:
    assert judged(gbps, method="tcp", hardware="cpu") == []
    assert judged(gbps, method="tcp", hardware="cpu", floor=60.0) == [("bandwidth-low", "fail")]
    assert judged(gbps, method="tcp", hardware="cpu", floor=0.05) == []


def test_a_declared_floor_stands_in_place_of_the_default_but_not_of_the_degraded_band() -> None:
    assert judged(100.0, floor=90.0) == []
    assert judged(185.0, floor=190.0) == [("bandwidth-low", "fail")]
    assert judged(13.0, links=1, floor=10.0) == [("bandwidth-degraded", "fail")]


def recorded_bus_gbps(folder: str, column: int) -> dict[str, float]:
    """Best bus bandwidth of each recorded benchmark, in Gb/s."""
    found = {}
    for path in (RECORDED / folder).glob("*.txt"):
        rows = [line.split() for line in path.read_text().splitlines() if re.match(r"\s+\d", line)]
        assert rows, path
        found[path.stem] = max(float(row[column]) for row in rows) * 8
    return found


def test_recorded_collectives_fall_into_the_right_bands() -> None:
    gathers = recorded_bus_gbps("nccl-tests", 7)
    reduces = recorded_bus_gbps("torch-allreduce-table", 3)
    assert set(gathers) == {"all_gather_perf-degraded-2.8gbs", "all_gather_perf-healthy-21gbs"}
    assert judged(gathers["all_gather_perf-degraded-2.8gbs"], method="all-reduce") == [("bandwidth-degraded", "warn")]
    assert judged(gathers["all_gather_perf-healthy-21gbs"], method="all-reduce") == []
    assert [judged(rate, method="all-reduce") for rate in reduces.values()] == [[]]


def test_recorded_writes_fall_into_the_right_bands() -> None:
    verdicts = {}
    for path in (RECORDED / "ib_write_bw").glob("*gbps*.txt"):
        verdicts[path.stem] = judged(parse_write_bandwidth(path.read_text()).gbps, links=1)
    assert verdicts.pop("result-rows-degraded-13gbps") == [("bandwidth-degraded", "fail")]
    assert verdicts and all(found == [] for found in verdicts.values())


def transport(rdma: Rdma, name: str, hcas: tuple[str, ...] = BOTH) -> list[Finding]:
    log = (RECORDED / "nccl-log" / f"{name}.txt").read_text()
    return transport_findings(rdma, "spark-b", 1, parse_nccl_log(log), hcas)


@pytest.mark.parametrize(
    "name",
    [
        "socket-fallback-complete-not-spark",
        "socket-fallback-no-dev-infiniband-spark-pair",
        "socket-fallback-plugin-none-spark-pair",
        "socket-fallback-vf-no-device-spark",
    ],
)
@pytest.mark.parametrize(("rdma", "severity"), [("required", "fail"), ("preferred", "warn"), ("off", None)])
def test_sockets_fail_warn_or_are_accepted_as_the_settings_say(name: str, rdma: Rdma, severity: str | None) -> None:
    found = transport(rdma, name)
    assert [(one.code, one.severity) for one in found] == ([("transport-sockets", severity)] if severity else [])
    if found:
        assert found[0].where == "spark-b, rank 1 (fabric.rdma)"
        assert "found that NCCL chose Socket over" in found[0].what


@pytest.mark.parametrize("rdma", ["required", "preferred", "off"])
@pytest.mark.parametrize("name", ["gdr-disabled-2.30.7-no-host-prefix", "two-sparks-dual-rail-ib-2.28.9-excerpt"])
def test_rdma_over_both_halves_is_fine_also_without_gpu_direct(name: str, rdma: Rdma) -> None:
    assert transport(rdma, name) == []


def test_a_plugin_s_rdma_is_rdma() -> None:
    assert transport("required", "ib-ibext-v11-ngc-26.03-excerpt", ("rocep1s0f0", "roceP2p1s0f0")) == []
    assert transport("required", "vllm-ray-worker-channels-ibext-v10-excerpt") == []


def test_one_half_of_two_is_a_warning() -> None:
    (found,) = transport("required", "ib-single-rail-link-local", ("rocep1s0f0", "roceP2p1s0f0"))
    assert (found.code, found.severity) == ("hca-unused", "warn")
    assert "uses only rocep1s0f0" in found.what


@pytest.mark.parametrize(("rdma", "severity"), [("required", "fail"), ("preferred", "warn"), ("off", None)])
def test_a_log_that_names_no_transport_proves_nothing(rdma: Rdma, severity: str | None) -> None:
    found = transport_findings(rdma, "spark-a", 0, NcclTransport(None), BOTH)
    assert [(one.code, one.severity) for one in found] == ([("transport-unproven", severity)] if severity else [])


def test_every_code_of_the_proofs_is_in_the_catalogue() -> None:
    codes = {"bandwidth-unmeasured", "rdma-write-failed", "traffic-off-fabric", "collective-failed", "proof-not-run"}
    assert codes <= set(KINDS)
    assert KINDS["proof-not-run"].severity == "unknown"
