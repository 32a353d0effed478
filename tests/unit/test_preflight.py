"""The preflight: everything that would fail, told at once, and nothing that is ours."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spark_core.errors import UnreachableError
from spark_core.fabric import FabricFacts, Link
from spark_core.host import HostFacts
from spark_core.preflight import (
    Finding,
    NodeLook,
    cluster_findings,
    look_at_nodes,
    node_findings,
    reach_nodes,
)
from spark_core.settings import NodeSettings, Settings, read_settings
from spark_core.transport.base import Command, Result, Transport
from tests.config_cases import apply_change, load_base
from tests.fake_host import FakeHost
from tests.scripted_transport import ScriptedTransport

HOST = HostFacts(
    architecture="arm64",
    kernel="6.14.0-1013-nvidia",
    os="Ubuntu 24.04.4 LTS",
    dgx_release="7.2.3",
    memory_total_bytes=130 << 30,
    memory_available_bytes=120 << 30,
    disk_free_bytes=1 << 40,
    docker="29.2.1",
    docker_problem=None,
    gpu="NVIDIA GB10, 580.142",
)
FABRIC = FabricFacts(
    {
        "lo": Link(65536, ("127.0.0.1/8",), True),
        "enp1s0f1np1": Link(9000, ("192.168.200.12/24",), True),
        "enP2p1s0f1np1": Link(9000, ("192.168.201.12/24",), True),
    },
    {"rocep1s0f1": "ACTIVE", "roceP2p1s0f1": "ACTIVE"},
)
LOOK = NodeLook(HOST, FABRIC, {}, None)


def settings_with(change: Mapping[str, Any] | None = None) -> Settings:
    return read_settings(apply_change(load_base(), change or {}))


def lines(look: NodeLook, change: Mapping[str, Any] | None = None, node: int = 0) -> list[str]:
    settings = settings_with(change)
    return [f"{f.severity} {f.where}: {f.what}" for f in node_findings(settings, "dev", settings.nodes[node], look)]


def test_a_node_that_is_as_declared_has_no_finding() -> None:
    assert lines(LOOK) == []


@pytest.mark.parametrize(
    ("look", "told"),
    [
        (
            replace(LOOK, host=replace(HOST, architecture="amd64")),
            "fail spark-a (hardware): expected a DGX Spark (arm64), found amd64",
        ),
        (
            replace(LOOK, host=replace(HOST, gpu=None)),
            "fail spark-a: expected a GPU from nvidia-smi, found none (driver not loaded?)",
        ),
        (
            replace(LOOK, host=replace(HOST, disk_free_bytes=1_500_000_000)),
            "fail spark-a (node_root): expected 2 GB of free space, found 1.5 GB",
        ),
        (
            replace(LOOK, host=replace(HOST, docker=None, docker_problem="no docker command")),
            "fail spark-a, docker: expected a Docker daemon that answers, found: no docker command",
        ),
        (
            replace(LOOK, busy_ports={30000: "it held by python3"}),
            "fail spark-a (serving.port): expected port 30000 to be free, found it held by python3",
        ),
        (
            replace(LOOK, busy_ports={6379: "it held by redis-server"}),
            "fail spark-a (serving.ray_port): expected port 6379 to be free, found it held by redis-server",
        ),
        (
            replace(LOOK, same_name="spark-vllm-dev-main-rank0||ollama/ollama|Up 3 days"),
            "fail spark-a: expected no foreign container spark-vllm-dev-main-rank0, "
            "found one of nobody of ours (ollama/ollama, Up 3 days)",
        ),
        (
            replace(LOOK, same_name="spark-vllm-dev-main-rank0|prod|vllm|Up"),
            "fail spark-a: expected no foreign container spark-vllm-dev-main-rank0, found one of stack prod (vllm, Up)",
        ),
        (
            replace(LOOK, fabric=FabricFacts({"lo": FABRIC.links["lo"], "enP7s7": Link(1500, (), True)}, {})),
            "fail spark-a (nodes[].fabric[0]): expected the interface enp1s0f1np1, found only enP7s7",
        ),
        (
            replace(
                LOOK,
                fabric=replace(FABRIC, links=FABRIC.links | {"enp1s0f1np1": Link(9000, ("192.168.200.12/24",), False)}),
            ),
            "fail spark-a (nodes[].fabric[0]): expected a carrier on enp1s0f1np1, found none",
        ),
        (
            replace(LOOK, fabric=replace(FABRIC, hcas={"rocep1s0f0": "ACTIVE"})),
            "fail spark-a (nodes[].fabric[0]): expected the RDMA device rocep1s0f1, found rocep1s0f0",
        ),
        (
            replace(
                LOOK,
                fabric=replace(FABRIC, links=FABRIC.links | {"enp1s0f1np1": Link(1500, ("192.168.200.12/24",), True)}),
            ),
            "fail spark-a (nodes[].fabric[0]): expected MTU 9000 on enp1s0f1np1, found 1500",
        ),
    ],
)
def test_what_would_fail_on_a_node_is_told_first(look: NodeLook, told: str) -> None:
    assert lines(look)[0] == told


def test_a_container_of_our_own_is_no_finding() -> None:
    assert lines(replace(LOOK, same_name="spark-vllm-dev-main-rank0|dev|vllm|Up 2 hours")) == []


def test_an_address_that_is_yet_to_be_written_is_no_finding_of_a_managed_fabric() -> None:
    bare = replace(LOOK, fabric=replace(FABRIC, links=FABRIC.links | {"enp1s0f1np1": Link(1500, (), True)}))
    assert lines(bare, {"fabric": {"manage": True}}) == []
    assert len(lines(bare)) == 2


def test_a_host_without_gpu_and_of_another_kind_is_right_for_cpu() -> None:
    look = replace(LOOK, host=replace(HOST, architecture="amd64", gpu=None))
    assert lines(look, {"hardware": "cpu"}) == []


def test_every_failure_says_what_to_do() -> None:
    broken = NodeLook(
        replace(HOST, architecture="amd64", gpu=None, disk_free_bytes=0),
        FabricFacts({}, {}),
        {30000: "x"},
        "c||i|s",
    )
    findings = node_findings(settings_with(), "dev", settings_with().nodes[0], broken)
    assert len(findings) == 7
    assert all(finding.do for finding in findings)


@pytest.mark.parametrize(
    ("change", "severity", "words"),
    [
        (
            {"architecture": "amd64"},
            "fail",
            "expected the same architecture on all nodes, found spark-a arm64, spark-b amd64",
        ),
        (
            {"gpu": "NVIDIA GB10, 570.1"},
            "fail",
            "expected the same GPU and driver on all nodes, found "
            "spark-a NVIDIA GB10, 580.142, spark-b NVIDIA GB10, 570.1",
        ),
        (
            {"kernel": "6.17"},
            "warn",
            "expected the same kernel on all nodes, found spark-a 6.14.0-1013-nvidia, spark-b 6.17",
        ),
        (
            {"docker": None},
            "warn",
            "expected the same Docker on all nodes, found spark-a 29.2.1, spark-b unknown",
        ),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_nodes_that_differ_are_told(change: dict[str, Any], severity: str, words: str) -> None:
    [finding] = cluster_findings({"spark-a": LOOK, "spark-b": replace(LOOK, host=replace(HOST, **change))})
    assert (finding.severity, finding.where, finding.what) == (severity, "nodes", words)


def test_one_node_alone_cannot_differ() -> None:
    assert cluster_findings({"spark-a": LOOK}) == []
    assert cluster_findings({}) == []


def test_a_finding_is_a_line_and_what_to_do() -> None:
    assert Finding("fail", "spark-a", "expected x, found y", "do z").line == "spark-a: expected x, found y\n  do: do z"
    assert Finding("warn", "spark-a", "x").line == "spark-a: x"


@pytest.fixture
def hosts(tmp_path: Path) -> dict[str, FakeHost]:
    found = {name: FakeHost(tmp_path / name, name) for name in ("spark-a", "spark-b")}
    for place, host in enumerate(found.values()):
        host.set_link("enp1s0f1np1", 9000, f"192.168.200.{12 + place}/24")
        host.set_link("enP2p1s0f1np1", 9000, f"192.168.201.{12 + place}/24")
    return found


CPU = {"hardware": "cpu", **{f"nodes[{n}].fabric[{i}].hca": None for n in (0, 1) for i in (0, 1)}}


def first_lines(findings: list[Finding]) -> list[str]:
    """Each finding without what to do."""
    return [finding.line.split("\n")[0] for finding in findings]


def test_all_nodes_are_looked_at_and_nothing_is_changed(hosts: dict[str, FakeHost], tmp_path: Path) -> None:
    settings = settings_with({**CPU, "node_root": str(tmp_path / "root")})
    assert first_lines(look_at_nodes(settings, "dev", lambda node: hosts[node.name].node)) == []
    assert not (tmp_path / "root").exists()
    for host in hosts.values():
        assert [cmd for cmd in host.node.asked if cmd.sudo] == []
        assert {call[0] for call in host.calls("docker")} <= {"version", "ps"}


def test_a_busy_port_is_told_with_its_holder_unless_it_is_our_own_group(hosts: dict[str, FakeHost]) -> None:
    head = hosts["spark-a"]
    head.change(listening={"30000": 'LISTEN 0 128 0.0.0.0:30000 0.0.0.0:* users:(("python3",pid=7,fd=3))\n'})
    found = first_lines(look_at_nodes(settings_with(CPU), "dev", lambda node: hosts[node.name].node))
    assert found == ["spark-a (serving.port): expected port 30000 to be free, found it held by python3"]
    head.set_container("spark-vllm-dev-main-rank0", Labels={"spark-vllm.stack": "dev"})
    assert first_lines(look_at_nodes(settings_with(CPU), "dev", lambda node: hosts[node.name].node)) == []


def test_a_dead_daemon_is_one_finding(hosts: dict[str, FakeHost]) -> None:
    hosts["spark-b"].change(
        docker_error="Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?"
    )
    found = first_lines(look_at_nodes(settings_with(CPU), "dev", lambda node: hosts[node.name].node))
    assert found[0] == (
        "spark-b, docker: expected a Docker daemon that answers, "
        "found: the Docker daemon does not answer (is docker.service running?)"
    )


def dead(node: NodeSettings) -> Transport:
    def silent(_: Command) -> Result:
        raise UnreachableError("connection refused", node=node.name, step="connect (TCP)", do="start sshd")

    return ScriptedTransport(node.name, silent)


def test_two_dead_nodes_are_told_in_one_run() -> None:
    assert [finding.line for finding in look_at_nodes(settings_with(), "dev", dead)] == [
        "spark-a, connect (TCP): connection refused\n  do: start sshd",
        "spark-b, connect (TCP): connection refused\n  do: start sshd",
    ]
    assert [error.where for error in reach_nodes(settings_with().nodes, dead)] == [
        "spark-a, connect (TCP)",
        "spark-b, connect (TCP)",
    ]


def test_a_dead_node_is_told_before_the_carriers_that_its_peer_has_lost_with_it(hosts: dict[str, FakeHost]) -> None:
    hosts["spark-a"].change(docker_error="permission denied")

    def one_dead(node: NodeSettings) -> Transport:
        return dead(node) if node.name == "spark-b" else hosts[node.name].node

    found = first_lines(look_at_nodes(settings_with(CPU), "dev", one_dead))
    assert found[0] == "spark-b, connect (TCP): connection refused"
    assert found[1].startswith("spark-a, docker:")


def test_a_node_that_cannot_be_opened_is_a_finding_too() -> None:
    def unpinned(node: NodeSettings) -> Transport:
        raise UnreachableError("no pin", node=node.name, step="host key")

    assert [finding.line for finding in look_at_nodes(settings_with(), "dev", unpinned)] == [
        "spark-a, host key: no pin",
        "spark-b, host key: no pin",
    ]


def test_nodes_are_looked_at_side_by_side() -> None:
    both = threading.Barrier(2, timeout=30)

    def meet(_: Command) -> Result:
        both.wait()
        raise UnreachableError("met", node="x", step="y")

    settings = settings_with()
    found = look_at_nodes(settings, "dev", lambda node: ScriptedTransport(node.name, meet))
    assert [finding.what for finding in found] == ["met", "met"]


def test_reaching_finds_nothing_wrong_with_nodes_that_answer(hosts: dict[str, FakeHost]) -> None:
    assert reach_nodes(settings_with(CPU).nodes, lambda node: hosts[node.name].node) == []
    hosts["spark-b"].change(docker_error="permission denied")
    [error] = reach_nodes(settings_with(CPU).nodes, lambda node: hosts[node.name].node)
    assert error.where == "spark-b, docker"
