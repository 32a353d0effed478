"""The preflight of nodes: every kind of finding alone, nothing that is ours, and nodes that do not answer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest

from spark_core.errors import UnreachableError
from spark_core.facts import NodeFacts, Unread
from spark_core.facts.clock import ClockOffset
from spark_core.facts.containers import Container
from spark_core.facts.disks import Disk
from spark_core.facts.docker import Docker, DockerProblem
from spark_core.facts.gpu import Gpu, GpuProcess, NextBoot, NoGpu
from spark_core.facts.listeners import Listener
from spark_core.facts.login import LockedMemory, Login
from spark_core.facts.machine import DgxRelease
from spark_core.facts.memory import Memory
from spark_core.findings import KINDS, Finding, judge
from spark_core.preflight.cluster import cluster_findings
from spark_core.preflight.look import look_at_nodes
from spark_core.preflight.node import facts_spec, node_findings
from spark_core.preflight.reach import reach_nodes
from spark_core.settings import NodeSettings, Settings, read_settings
from spark_core.transport.base import Command, Result, Transport
from tests.config_cases import apply_change, load_base
from tests.scripted_transport import ScriptedTransport
from tests.unit.facts.spark import spark

FACTS = replace(spark(), disks=(Disk("/dev/sda1", "/", 1 << 42, 1 << 41, ("/home/aurora/.spark-vllm",)),))
GIB = 1 << 30


def docker(**changes: Any) -> Docker:
    """The daemon of a Spark that is as it should be, changed."""
    assert isinstance(FACTS.docker, Docker)
    return replace(FACTS.docker, **changes)


def memory(**changes: Any) -> Memory:
    assert isinstance(FACTS.memory, Memory)
    return replace(FACTS.memory, **changes)


def container(name: str, number: int = 1, **changes: Any) -> Container:
    made = Container(f"{number:064x}", name, "image:1", "Up 3 days", age="3 days ago")
    return replace(made, **changes)


OURS = container("spark-vllm-dev-main-rank0", 7, stack="dev")


def settings_with(change: Mapping[str, Any] | None = None) -> Settings:
    return read_settings(apply_change(load_base(), change or {}))


def findings(facts: NodeFacts, change: Mapping[str, Any] | None = None, node: int = 0) -> list[Finding]:
    """What is told of a node."""
    settings = settings_with(change)
    found = node_findings(settings, "dev", settings.nodes[node], facts)
    assert all(finding.code in KINDS and finding.do for finding in found)
    return judge(found, settings.severities)


def told(found: list[Finding]) -> list[str]:
    return [f"{finding.code} {finding.severity} {finding.where}: {finding.what}" for finding in found]


def test_a_node_that_is_as_it_should_be_has_no_finding() -> None:
    assert findings(FACTS) == []
    assert findings(FACTS, node=1) == []
    assert FACTS.unread == ()


CASES: list[tuple[dict[str, Any], Mapping[str, Any], str]] = [
    (
        {"docker": DockerProblem("docker-missing", "no docker command"), "containers": None},
        {},
        "docker-missing fail spark-a, docker: expected a Docker daemon that answers, found: no docker command",
    ),
    (
        {"docker": DockerProblem("docker-permission", "refused"), "containers": None},
        {},
        "docker-permission fail spark-a, docker: expected a Docker daemon that answers, found: refused",
    ),
    (
        {"docker": DockerProblem("docker-down", "silence"), "containers": None},
        {},
        "docker-down fail spark-a, docker: expected a Docker daemon that answers, found: silence",
    ),
    (
        {"docker": docker(runtimes=("runc",), cdi_devices=()), "present": frozenset({"python3", "nvidia-ctk"})},
        {},
        "docker-runtime-missing fail spark-a, docker: expected the nvidia runtime or a CDI device, found the runtimes "
        "runc and no description of a GPU",
    ),
    (
        {"docker": docker(cgroup_driver="systemd")},
        {},
        "docker-cgroup-driver warn spark-a, docker: expected the cgroup driver cgroupfs, found systemd: any `systemctl "
        "daemon-reload` takes the GPU from running containers",
    ),
    (
        {"locked_memory": LockedMemory(8 << 20, may_raise=False)},
        {},
        "memlock-limit fail spark-a, docker: expected a Docker daemon that can give containers unlimited locked "
        "memory, found one that is limited to 8388608 bytes itself and may not go above that",
    ),
    (
        {"containers": (container("spark-vllm-dev-main-rank0", image="ollama/ollama"),)},
        {},
        "foreign-container fail spark-a: expected no foreign container spark-vllm-dev-main-rank0, found one of nobody "
        "of ours (ollama/ollama, made 3 days ago, Up 3 days)",
    ),
    (
        {"containers": (container("spark-vllm-dev-main-rank0", stack="prod", status="Exited (1) 2 hours ago"),)},
        {},
        "foreign-container fail spark-a: expected no foreign container spark-vllm-dev-main-rank0, found one of stack "
        "prod (image:1, made 3 days ago, Exited (1) 2 hours ago)",
    ),
    (
        {"containers": (container("vllm_node", launcher="eugr/spark-vllm-docker"),)},
        {},
        "launcher-running fail spark-a: expected no other launcher, found containers of eugr/spark-vllm-docker "
        "running: vllm_node (image:1, Up 3 days)",
    ),
    (
        {
            "containers": (
                container("vllm_node", launcher="eugr/spark-vllm-docker"),
                container("ray-head", 2, status="Exited (0) 1 hour ago"),
            ),
            "listeners": (Listener(30000, "python3", 0, f"{1:064x}"),),
            "gpu_processes": (GpuProcess(9, "vllm", None, f"{1:064x}"),),
        },
        {"replaces": ["vllm_node", "ray-head"]},
        "launcher-to-replace warn spark-a (replaces): expected the containers that this stack replaces to be stopped, "
        "found running: vllm_node (image:1, Up 3 days)",
    ),
    (
        {"missing_programs": ("netplan",)},
        {"fabric": {"manage": True}},
        "program-missing fail spark-a: expected the program netplan (for what is done as root), found none",
    ),
    (
        {"missing_programs": ("python3",)},
        {},
        "program-missing fail spark-a: expected the program python3 (for weights and the proof of the fabric), found "
        "none",
    ),
    (
        {"architecture": "amd64"},
        {},
        "architecture fail spark-a (hardware): expected a DGX Spark (arm64), found amd64",
    ),
    (
        {"gpus": NoGpu("No devices were found")},
        {},
        "gpu-missing fail spark-a: expected a GPU from nvidia-smi, found none (No devices were found)",
    ),
    (
        {"gpus": NoGpu("no nvidia-smi", installed=False), "gpu_processes": None, "driver": None},
        {},
        "gpu-missing fail spark-a: expected a GPU from nvidia-smi, found none (no nvidia-smi)",
    ),
    (
        {"gpus": NoGpu("NVIDIA-SMI has failed"), "gpu_processes": None, "driver": None},
        {},
        "driver-not-loaded fail spark-a: expected the NVIDIA driver in the running kernel 6.17.0-1014-nvidia, found "
        "none (NVIDIA-SMI has failed)",
    ),
    (
        {"next_boot": NextBoot("6.17.0-1021-nvidia", module=False)},
        {},
        "driver-next-boot warn spark-a: expected an nvidia module for 6.17.0-1021-nvidia, which the next boot starts, "
        "found none",
    ),
    (
        {"gpus": (Gpu("NVIDIA GB10", "590.44.01"),)},
        {},
        "driver-known-bad warn spark-a: expected a driver that is known to work, found 590.44.01",
    ),
    (
        {"gpu_processes": (GpuProcess(114687, "/usr/local/bin/python", 19135 << 20),)},
        {},
        "gpu-memory-held warn spark-a: expected nobody else in the unified memory, found /usr/local/bin/python "
        "(pid 114687, 18.7 GiB)",
    ),
    (
        {
            "gpu_processes": (GpuProcess(9, "ollama", None, f"{1:064x}"),),
            "containers": (container("ollama", image="ollama/ollama"),),
        },
        {},
        "gpu-memory-held warn spark-a: expected nobody else in the unified memory, found ollama (pid 9, container "
        "ollama (ollama/ollama))",
    ),
    (
        {"disks": (Disk("/dev/sda1", "/", 1 << 42, 1_500_000_000, ("/home/aurora/.spark-vllm", "/var/lib/docker")),)},
        {},
        "disk-space fail spark-a (node_root): expected 2 GB of free space on / (for /home/aurora/.spark-vllm, "
        "/var/lib/docker), found 1.5 GB",
    ),
    (
        {"disks": (Disk("/dev/sdb1", "/data", 1 << 42, 0, ("/data/docker",)),)},
        {},
        "disk-space fail spark-a, docker: expected 2 GB of free space on /data (for /data/docker), found 0.0 GB",
    ),
    (
        {"memory": memory(available_bytes=43 * GIB)},
        {"groups.main.serving.gpu_memory_utilization": 0.75},
        "memory-available warn spark-a (serving.gpu_memory_utilization): expected 91.3 GiB of available memory (0.75 "
        "of 121.7 GiB), found 43.0 GiB",
    ),
    (
        {"memory": memory(cma_free_bytes=72 << 20)},
        {},
        "memory-cma warn spark-a: expected CmaFree below CmaTotal (64 MiB), found 72 MiB",
    ),
    (
        {"remove_ipc": True},
        {"groups.main.serving.mounts": [{"source": "/dev/shm/kv", "target": "/kv"}]},
        "remove-ipc warn spark-a (serving.mounts): expected shared memory to outlive logins, found RemoveIPC=yes: what "
        "user has in /dev/shm is removed at its last logout",
    ),
    (
        {"own_addresses": ("127.0.1.1",)},
        {"severities": {"hostname-loopback": "warn"}},
        "hostname-loopback warn spark-a: expected the node's own name to resolve to an address that other nodes reach, "
        "found 127.0.1.1",
    ),
    (
        {"own_addresses": ("::1",)},
        {"severities": {"hostname-loopback": "warn"}},
        "hostname-loopback warn spark-a: expected the node's own name to resolve to an address that other nodes reach, "
        "found ::1",
    ),
    (
        {"listeners": (Listener(30000, "python3", 1000),)},
        {},
        "port-taken fail spark-a (serving.port): expected port 30000 to be free, found it held by python3",
    ),
    (
        {"listeners": (Listener(6379, unit="redis.service", uid=33), Listener(6379, unit="redis.service", uid=33))},
        {},
        "port-taken fail spark-a (serving.ray_port): expected port 6379 to be free, found it held by redis.service",
    ),
    (
        {"listeners": (Listener(30001, uid=33),)},
        {},
        "port-taken fail spark-a (serving.status_port): expected port 30001 to be free, found it held by another "
        "user's program (uid 33)",
    ),
    (
        {"listeners": (Listener(30000, container=f"{2:064x}"),), "containers": (container("web", 2),)},
        {},
        "port-taken fail spark-a (serving.port): expected port 30000 to be free, found it held by the container web "
        "(image:1)",
    ),
    (
        {
            "listeners": (Listener(30000, unit="docker.service"),),
            "containers": (container("web", 2, ports=frozenset({30000})),),
        },
        {},
        "port-taken fail spark-a (serving.port): expected port 30000 to be free, found it held by the container web "
        "(image:1)",
    ),
    (
        {"listeners": (Listener(30000, container="f" * 64),)},
        {},
        "port-taken fail spark-a (serving.port): expected port 30000 to be free, found it held by a program in the "
        "container ffffffffffff, which Docker does not list",
    ),
    (
        {"missing_sysctls": ("net.core.rmem_maxx",)},
        {"host": {"sysctls": {"net.core.rmem_maxx": "1"}}},
        "sysctl-missing fail spark-a (host.sysctls): expected the kernel parameter net.core.rmem_maxx, found none of "
        "that name",
    ),
    (
        {"clock_units": ("sparkrun-clocks.service", "spark-vllm-clock-cap.service")},
        {"host": {"gpu_clock_cap_mhz": 2150}},
        "clock-cap-elsewhere warn spark-a (host.gpu_clock_cap_mhz): expected GPU clocks to be set by nobody else, "
        "found sparkrun-clocks.service",
    ),
    (
        {"memory": Unread("the memory", "/proc/meminfo", "nothing")},
        {},
        "fact-unreadable warn spark-a: could not read the memory from /proc/meminfo, found: nothing",
    ),
]


@pytest.mark.parametrize(("broken", "change", "line"), CASES, ids=[case[2].split(":")[0] for case in CASES])
def test_one_fault_is_exactly_one_finding(broken: dict[str, Any], change: Mapping[str, Any], line: str) -> None:
    assert told(findings(replace(FACTS, **broken), change)) == [line]
    assert findings(FACTS, change) == []


def test_every_kind_about_one_node_has_a_case() -> None:
    start, end = list(KINDS).index("docker-missing"), list(KINDS).index("nodes-differ-architecture")
    kinds = {"fact-unreadable", *list(KINDS)[start:end]} - {
        "clock-skew",
        "setting-contradicted",
        "tuning-refused",
    }
    assert {line.split()[0] for _, _, line in CASES} == kinds


@pytest.mark.parametrize("field", [field.name for field in fields(NodeFacts)])
def test_each_fact_that_cannot_be_read_is_told_once_and_nothing_is_concluded_from_it(field: str) -> None:
    unread = Unread(f"the {field}", "somewhere", "rubbish")
    facts = replace(FACTS, **{field: unread})
    if field == "docker":
        facts = replace(facts, containers=None)
    assert told(findings(facts)) == [
        f"fact-unreadable warn spark-a: could not read the {field} from somewhere, found: rubbish"
    ]


def test_eight_faults_are_eight_findings_of_one_look() -> None:
    broken = replace(
        FACTS,
        architecture="amd64",
        gpus=NoGpu("No devices were found"),
        disks=(Disk("/dev/sda1", "/", 1, 0, ("/home/aurora/.spark-vllm",)),),
        memory=memory(available_bytes=GIB, cma_free_bytes=GIB),
        own_addresses=("127.0.1.1",),
        containers=(container("vllm_node", launcher="eugr/spark-vllm-docker"),),
        listeners=(Listener(30000, "python3", 1000),),
    )
    found = findings(broken, {"severities": {"hostname-loopback": "warn"}})
    assert len(found) == 8
    assert len({finding.code for finding in found}) == 8


@pytest.mark.parametrize(
    ("broken", "change"),
    [
        ({"containers": (OURS,)}, {}),
        ({"containers": (OURS,), "memory": memory(available_bytes=GIB)}, {}),
        ({"containers": (OURS,), "gpu_processes": (GpuProcess(1, "python", 1, OURS.id),)}, {}),
        ({"containers": (OURS,), "listeners": (Listener(30000, container=OURS.id),)}, {}),
        # A host without unified control groups does not show whose a port of root's is.
        ({"containers": (OURS,), "listeners": (Listener(30000), Listener(6379))}, {}),
        # What up sets right is no finding.
        ({"remove_ipc": True}, {"host": {"remove_ipc": False}}),
        ({"docker": docker(cgroup_driver="systemd")}, {"host": {"docker_cgroup_driver": "cgroupfs"}}),
        ({"docker": docker(cgroup_driver="systemd")}, {"host": {"docker_cgroup_driver": "systemd"}}),
        # Containers have a /dev/shm of their own, so that logind takes nothing of theirs.
        ({"remove_ipc": True}, {}),
        # A unit of somebody else is nobody's business while the stack sets no clocks.
        ({"clock_units": ("sparkrun-clocks.service",)}, {}),
        ({"clock_units": ("spark-vllm-clock-cap.service",)}, {"host": {"gpu_clock_cap_mhz": 2150}}),
        # Each of these alone gives containers the GPU.
        ({"docker": docker(cdi_devices=()), "present": frozenset()}, {}),
        ({"docker": docker(runtimes=("runc",)), "present": frozenset()}, {}),
        ({"docker": docker(runtimes=("runc",), cdi_devices=()), "present": frozenset({"nvidia-cdi"})}, {}),
        (
            {
                "docker": docker(runtimes=("runc",), cdi_devices=(), cdi_directories=()),
                "present": frozenset({"nvidia-container-runtime-hook"}),
            },
            {},
        ),
        ({"locked_memory": LockedMemory(65536, may_raise=True)}, {}),
        ({"locked_memory": None}, {}),
        ({"next_boot": None}, {}),
        ({"listeners": (Listener(22, "sshd"),)}, {}),
        ({"own_addresses": None}, {}),
        ({"containers": (container("vllm_node", launcher="x", status="Exited (0) 1 hour ago"),)}, {}),
        ({"containers": (container("spark-vllm-dev-main-rank1"),)}, {}),
        ({"memory": memory(available_bytes=112 * GIB)}, {}),
        ({"memory": memory(cma_total_bytes=None, cma_free_bytes=None)}, {}),
    ],
)
def test_what_is_ours_or_harmless_is_no_finding(broken: dict[str, Any], change: Mapping[str, Any]) -> None:
    assert told(findings(replace(FACTS, **broken), change)) == []


def test_a_launcher_s_memory_and_port_are_not_told_as_if_they_were_anybody_s() -> None:
    theirs = container("vllm_node", launcher="eugr/spark-vllm-docker")
    facts = replace(
        FACTS,
        containers=(theirs,),
        gpu_processes=(GpuProcess(1, "python", GIB, theirs.id),),
        listeners=(Listener(30000, container=theirs.id),),
    )
    found = findings(facts)
    assert [finding.code for finding in found] == ["launcher-running", "port-taken"]
    assert found[1].what.endswith("held by the container vllm_node of eugr/spark-vllm-docker (image:1)")


def test_a_port_that_somebody_else_took_while_our_container_runs_is_told() -> None:
    facts = replace(FACTS, containers=(OURS,), listeners=(Listener(30000, unit="nginx.service"),))
    assert [finding.code for finding in findings(facts)] == ["port-taken"]


def test_while_docker_cannot_be_asked_nothing_is_said_of_who_holds_what() -> None:
    facts = replace(
        FACTS,
        docker=DockerProblem("docker-down", "silence"),
        containers=None,
        listeners=(Listener(30000),),
        memory=memory(available_bytes=GIB),
        gpu_processes=(GpuProcess(1, "python", GIB),),
    )
    assert [finding.code for finding in findings(facts)] == ["docker-down"]


def test_ports_are_those_of_a_head_and_what_is_asked_follows_from_the_settings() -> None:
    settings = settings_with({"host": {"sysctls": {"net.core.rmem_max": "1"}, "panic_reboot_s": 10}})
    head, worker = (facts_spec(settings, "dev", node) for node in settings.nodes)
    assert (head.ports, worker.ports) == ((30000, 6379, 30001), ())
    assert head.paths == ("/home/aurora/.spark-vllm",)
    assert head.sysctls == ("kernel.panic", "kernel.panic_on_oops", "net.core.rmem_max")
    assert head.gpu
    cpu = settings_with({"hardware": "cpu"})
    assert not facts_spec(cpu, "dev", cpu.nodes[0]).gpu


def test_a_host_without_gpu_and_of_another_kind_is_right_for_cpu() -> None:
    facts = replace(
        FACTS,
        architecture="amd64",
        gpus=None,
        gpu_processes=None,
        driver=None,
        next_boot=None,
        locked_memory=None,
        dgx=None,
        product=None,
        docker=docker(runtimes=("runc",), cdi_devices=(), cgroup_driver="systemd"),
        present=frozenset({"python3"}),
        memory=Memory(8 * GIB, GIB),
    )
    assert findings(facts, {"hardware": "cpu"}) == []


def test_one_node_alone_may_call_itself_loopback() -> None:
    change = {"groups.main.nodes": ["spark-a"], "groups.main.serving.tensor_parallel_size": 1}
    raw = apply_change(load_base(), change, ["nodes[1]"])
    settings = read_settings(raw)
    assert node_findings(settings, "dev", settings.nodes[0], replace(FACTS, own_addresses=("127.0.1.1",))) == []


def test_shared_memory_of_root_a_system_user_and_one_that_lingers_stays() -> None:
    change = {"groups.main.serving.mounts": [{"source": "/dev/shm", "target": "/shm"}]}
    facts = replace(FACTS, remove_ipc=True)
    assert [finding.code for finding in findings(facts, change)] == ["remove-ipc"]
    assert findings(replace(facts, login=Login("root", 0, ("root",))), change) == []
    assert findings(replace(facts, present=frozenset({*FACTS.present, "linger"})), change) == []  # type: ignore[misc]


def test_what_cures_a_driver_that_is_not_loaded_depends_on_the_next_kernel() -> None:
    facts = replace(FACTS, gpus=NoGpu("NVIDIA-SMI has failed"), gpu_processes=None, driver=None)
    [with_one] = findings(facts)
    [without, next_boot] = findings(replace(facts, next_boot=NextBoot("6.17.0-1021-nvidia", module=False)))
    assert with_one.do.endswith("a reboot starts 6.17.0-1014-nvidia, which has one")
    assert "reboot starts" not in without.do
    assert next_boot.code == "driver-next-boot"


CLUSTER: list[tuple[dict[str, Any], str, str]] = [
    (
        {"architecture": "amd64"},
        "nodes-differ-architecture fail",
        "expected the same architecture on all nodes, found spark-a arm64, spark-b amd64",
    ),
    (
        {"gpus": (Gpu("NVIDIA GB10", "570.1"),)},
        "nodes-differ-driver fail",
        "expected the same GPU and driver on all nodes, found spark-a NVIDIA GB10, 580.142, spark-b NVIDIA GB10, 570.1",
    ),
    (
        {"kernel": "6.11.0-1016-nvidia"},
        "nodes-differ-kernel warn",
        "expected the same kernel on all nodes, found spark-a 6.17.0-1014-nvidia, spark-b 6.11.0-1016-nvidia",
    ),
    (
        {"docker": docker(version="28.5.1")},
        "nodes-differ-docker warn",
        "expected the same Docker on all nodes, found spark-a 29.2.1, spark-b 28.5.1",
    ),
    (
        {"docker": docker(image_store="containerd")},
        "nodes-differ-image-store fail",
        "expected the same kind of image store on all nodes, found spark-a classic, spark-b containerd",
    ),
    (
        {"dgx": DgxRelease("DGX Spark", "GX10", "7.2.3", "7.6.0")},
        "nodes-differ-release warn",
        "expected the same DGX release on all nodes, found spark-a 7.5.0, spark-b 7.6.0",
    ),
    (
        {"dgx": None},
        "nodes-differ-release warn",
        "expected the same DGX release on all nodes, found spark-a 7.5.0, spark-b none",
    ),
    (
        {"clock": ClockOffset(11.9, 12.4)},
        "clock-skew warn",
        "expected clocks within 2 s of each other, found spark-b at least 11.9 s ahead of spark-a",
    ),
    (
        {"clock": ClockOffset(-3.0, -2.5)},
        "clock-skew warn",
        "expected clocks within 2 s of each other, found spark-a at least 2.5 s ahead of spark-b",
    ),
]


@pytest.mark.parametrize(("change", "kind", "words"), CLUSTER, ids=[case[1] for case in CLUSTER])
def test_nodes_that_differ_are_told(change: dict[str, Any], kind: str, words: str) -> None:
    [finding] = cluster_findings({"spark-a": FACTS, "spark-b": replace(FACTS, **change)})
    assert (f"{finding.code} {finding.severity}", finding.where, finding.what) == (kind, "nodes", words)
    assert finding.do


def test_every_kind_about_several_nodes_has_a_case() -> None:
    kinds = {code for code in KINDS if code.startswith("nodes-differ")} | {"clock-skew"}
    assert {kind.split()[0] for _, kind, _ in CLUSTER} == kinds


def test_nodes_that_are_alike_or_alone_or_not_known_do_not_differ() -> None:
    assert cluster_findings({}) == []
    assert cluster_findings({"spark-a": FACTS}) == []
    assert cluster_findings({"spark-a": FACTS, "spark-b": replace(FACTS, boot_id="another")}) == []
    unread = Unread("it", "somewhere", "nothing")
    unknown = replace(FACTS, **dict.fromkeys(("architecture", "kernel", "dgx", "clock", "gpus", "docker"), unread))
    assert cluster_findings({"spark-a": FACTS, "spark-b": unknown}) == []
    silent = replace(FACTS, gpus=NoGpu("none"), docker=DockerProblem("docker-down", "silence"))
    assert cluster_findings({"spark-a": FACTS, "spark-b": silent}) == []


def test_a_slow_round_trip_is_no_skew_and_of_many_clocks_the_two_that_are_furthest_apart_are_told() -> None:
    slow = replace(FACTS, clock=ClockOffset(-9.0, 8.0))
    assert cluster_findings({"spark-a": FACTS, "spark-b": slow}) == []
    behind, ahead = replace(FACTS, clock=ClockOffset(-5.0, -4.0)), replace(FACTS, clock=ClockOffset(4.0, 5.0))
    [finding] = cluster_findings({"spark-a": FACTS, "spark-b": behind, "spark-c": ahead})
    assert finding.what.endswith("found spark-c at least 8.0 s ahead of spark-b")


def test_a_finding_is_a_line_with_its_kind_and_what_to_do() -> None:
    finding = Finding("port-taken", "spark-a", "expected x, found y", "do z")
    assert finding.line == "spark-a: expected x, found y [port-taken]\n  do: do z"
    assert Finding("port-taken", "spark-a", "x").line == "spark-a: x [port-taken]"


def dead(node: NodeSettings) -> Transport:
    def silent(_: Command) -> Result:
        raise UnreachableError("connection refused", node=node.name, step="connect (TCP)", do="start sshd")

    return ScriptedTransport(node.name, silent)


def test_two_dead_nodes_are_told_in_one_run() -> None:
    found = look_at_nodes(settings_with(), "dev", dead).findings
    assert [finding.where for finding in found if "refused" in finding.what] == [
        "spark-a, connect (TCP)",
        "spark-b, connect (TCP)",
    ]
    assert [error.where for error in reach_nodes(settings_with().nodes, dead)] == [
        "spark-a, connect (TCP)",
        "spark-b, connect (TCP)",
    ]


def test_a_node_that_cannot_be_opened_is_a_finding_too() -> None:
    def unpinned(node: NodeSettings) -> Transport:
        raise UnreachableError("no pin", node=node.name, step="host key")

    found = look_at_nodes(settings_with(), "dev", unpinned).findings
    assert [finding.where for finding in found if finding.what == "no pin"] == [
        "spark-a, host key",
        "spark-b, host key",
    ]


def test_nodes_are_looked_at_side_by_side() -> None:
    both = threading.Barrier(2, timeout=30)

    def meet(_: Command) -> Result:
        both.wait()
        raise UnreachableError("met", node="x", step="y")

    found = look_at_nodes(settings_with(), "dev", lambda node: ScriptedTransport(node.name, meet)).findings
    assert [finding.what for finding in found if finding.what == "met"] == ["met", "met"]


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("29.2.1 arm64", None),
        ("permission denied while trying to connect", "the deploy user may not use the Docker socket"),
        ("missing", "no docker command on the PATH"),
    ],
)
def test_reaching_a_node_is_reaching_its_docker(said: str, what: str | None) -> None:
    carrier = ScriptedTransport("spark-a", lambda _: f"=== docker\n{said}\n")
    errors = reach_nodes(settings_with().nodes[:1], lambda _: carrier)
    assert carrier.logins == (2 if "denied" in said else 1)  # the user's groups are those of the login
    if what is None:
        assert errors == []
    else:
        assert [(error.where, what in error.what) for error in errors] == [("spark-a, docker", True)]


@pytest.mark.parametrize(
    ("sudo", "password", "managed", "told_at"),
    [
        ("asks", False, True, "that sudo asks for a password"),
        (None, True, True, "no sudo"),
        ("tty", True, True, "that sudo wants a terminal (requiretty)"),
        ("asks", True, True, None),
        ("free", False, True, None),
        ("asks", False, False, None),
    ],
    ids=["asks", "no sudo", "a terminal", "a password", "free", "root is not needed"],
)
def test_root_that_cannot_be_had_is_told_where_settings_need_it(
    sudo: Any, password: bool, managed: bool, told_at: str | None
) -> None:
    settings = settings_with({"fabric": {"manage": managed}})
    found = node_findings(settings, "dev", settings.nodes[0], replace(FACTS, sudo=sudo), sudo_password=password)
    refused = [finding for finding in found if finding.code == "sudo-refused"]
    assert [finding.where for finding in refused] == ([] if told_at is None else ["spark-a (sudo_password)"])
    assert all(finding.what.endswith(f"found {told_at}") for finding in refused)


def test_a_node_is_asked_for_the_programs_that_its_settings_need() -> None:
    def programs(change: Mapping[str, Any]) -> tuple[str, ...]:
        settings = settings_with(change)
        return facts_spec(settings, "dev", settings.nodes[0]).programs

    plain = {"host": {}, "fabric": {"manage": False}}
    assert programs(plain) == ("flock", "python3")
    assert set(programs({**plain, "host": {"remove_ipc": False}})) > {"systemctl", "install", "flock"}
    assert set(programs({**plain, "fabric": {"manage": True}})) > {"netplan", "systemd-run", "ip", "sysctl"}
