"""What would fail, found before anything changes: every node is looked at, and all findings are told together.

A finding is a failure, a warning, or "not yet known". Nothing is pulled, left or started here. What our own group
already uses (its ports, its containers) is no finding.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from spark_core.errors import SparkError
from spark_core.fabric import FabricFacts, fabric_findings, observe_fabric
from spark_core.group import container_name
from spark_core.host import HostFacts, observe_host
from spark_core.settings import NodeSettings, Settings
from spark_core.transport.base import Transport, parse_sections, run_checked, script

Severity = Literal["fail", "warn"]
Opener = Callable[[NodeSettings], Transport]

_PORTS = """
port_of() { ss -Hltnp "sport = :$1" 2>/dev/null | head -3; }
for p in "$@"; do echo "=== $p"; port_of "$p"; done
"""
_OURS = """
echo '=== containers'
docker ps -aq --filter "label=spark-vllm.stack=$2" | sed 's/^/ours /'
docker ps -a --filter "name=^/$1$" --format '{{.Names}}|{{.Label "spark-vllm.stack"}}|{{.Image}}|{{.Status}}'
"""
_MINIMUM_FREE_BYTES = 2_000_000_000


@dataclass(frozen=True)
class Finding:
    """One thing that a person should know before ``up``.

    Args:
        severity: ``fail`` stops preview and up; ``warn`` is shown.
        where: Node, and setting if there is one.
        what: Expected and found, in one line.
        do: What to do.
    """

    severity: Severity
    where: str
    what: str
    do: str = ""

    @property
    def line(self) -> str:
        return f"{self.where}: {self.what}" + (f"\n  do: {self.do}" if self.do else "")


@dataclass(frozen=True)
class NodeLook:
    """What the preflight saw of one node."""

    host: HostFacts
    fabric: FabricFacts
    busy_ports: Mapping[int, str]
    same_name: str | None


def look_at_nodes(settings: Settings, stack: str, open_node: Opener) -> list[Finding]:
    """Look at all nodes at the same time; all findings, the nodes that do not answer first.

    A node that cannot be reached is a finding like any other, so that two dead nodes are told in one run.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(4, min(16, len(settings.nodes)))) as pool:
        futures = [pool.submit(_look, settings, stack, node, open_node) for node in settings.nodes]
        looks: list[NodeLook | SparkError] = [future.result() for future in futures]
    # A node that does not answer comes first: that its peers have lost their carrier is what follows from it.
    silent = [
        Finding("fail", look.where or node.name, look.what, look.do)
        for node, look in zip(settings.nodes, looks, strict=True)
        if isinstance(look, SparkError)
    ]
    seen = {node.name: look for node, look in zip(settings.nodes, looks, strict=True) if isinstance(look, NodeLook)}
    findings = [
        finding
        for node in settings.nodes
        if node.name in seen
        for finding in node_findings(settings, stack, node, seen[node.name])
    ]
    return silent + findings + cluster_findings(seen)


def reach_nodes(nodes: Sequence[NodeSettings], open_node: Opener) -> list[SparkError]:
    """Whether every node answers and its Docker daemon does; the errors of those that do not."""

    def reach(node: NodeSettings) -> SparkError | None:
        try:
            transport = open_node(node)
            host = observe_host(transport, "/")
        except SparkError as error:
            return error
        return SparkError(**_docker_problem(node.name, host)) if host.docker_problem else None

    with concurrent.futures.ThreadPoolExecutor(max_workers=max(4, min(16, len(nodes)))) as pool:
        return [error for error in pool.map(reach, nodes) if error is not None]


def node_findings(settings: Settings, stack: str, node: NodeSettings, look: NodeLook) -> list[Finding]:
    """What is wrong with one node, from what was seen; pure."""
    findings = []
    host = look.host
    if host.docker_problem:
        problem = _docker_problem(node.name, host)
        findings.append(Finding("fail", problem["where"], problem["what"], problem["do"]))
    if settings.hardware == "spark" and host.architecture != "arm64":
        findings.append(
            Finding(
                "fail",
                f"{node.name} (hardware)",
                f"expected a DGX Spark (arm64), found {host.architecture}",
                "correct management_address, or set hardware: cpu for hosts without GPU",
            )
        )
    if settings.hardware == "spark" and host.gpu is None:
        findings.append(
            Finding(
                "fail",
                f"{node.name}",
                "expected a GPU from nvidia-smi, found none (driver not loaded?)",
                "check that the running kernel has the nvidia module (one phased upgrade leaves a node without)",
            )
        )
    if host.disk_free_bytes < _MINIMUM_FREE_BYTES:
        findings.append(
            Finding(
                "fail",
                f"{node.name} (node_root)",
                f"expected {_MINIMUM_FREE_BYTES / 1e9:.0f} GB of free space, found {host.disk_free_bytes / 1e9:.1f} GB",
                "free some space on that disk",
            )
        )
    findings += _fabric(settings, node, look.fabric)
    findings += _ports(settings, node, look.busy_ports)
    if look.same_name is not None:
        name, owner, image, status = ([*look.same_name.split("|"), "", "", ""])[:4]
        if owner != stack:
            whose = f"stack {owner}" if owner else "nobody of ours"
            findings.append(
                Finding(
                    "fail",
                    node.name,
                    f"expected no foreign container {name}, found one of {whose} ({image}, {status})",
                    "remove it or rename it yourself; it is never removed by this program",
                )
            )
    return findings


def cluster_findings(looks: Mapping[str, NodeLook]) -> list[Finding]:
    """Differences between nodes that matter; pure."""
    findings: list[Finding] = []
    attributes: list[tuple[str, Severity, Callable[[NodeLook], str]]] = [
        ("architecture", "fail", lambda look: look.host.architecture),
        ("GPU and driver", "fail", lambda look: look.host.gpu or "none"),
        ("kernel", "warn", lambda look: look.host.kernel),
        ("Docker", "warn", lambda look: look.host.docker or "unknown"),
    ]
    for title, severity, value in attributes:
        values = {node: value(look) for node, look in looks.items()}
        if len(set(values.values())) > 1:
            text = ", ".join(f"{node} {found}" for node, found in values.items())
            findings.append(
                Finding(
                    severity,
                    "nodes",
                    f"expected the same {title} on all nodes, found {text}",
                    "bring the nodes to the same state, then run again",
                )
            )
    return findings


def _fabric(settings: Settings, node: NodeSettings, facts: FabricFacts) -> list[Finding]:
    findings = []
    for place, interface in enumerate(node.fabric):
        where = f"{node.name} (nodes[].fabric[{place}])"
        link = facts.links.get(interface.netdev)
        if link is None:
            have = ", ".join(sorted(name for name in facts.links if name != "lo"))
            findings.append(
                Finding(
                    "fail",
                    where,
                    f"expected the interface {interface.netdev}, found only {have}",
                    "plug the cable in (an uncabled port has no interface at all), or correct the name",
                )
            )
            continue
        if settings.fabric.manage and interface.netdev == facts.management:
            findings.append(
                Finding(
                    "fail",
                    where,
                    f"expected a fabric interface, found that {interface.netdev} is the one we are connected by",
                    "name the fabric's interface; the management interface is never changed",
                )
            )
        elif not link.up:
            # Only a link that is up knows whether it has a carrier; netplan brings a managed one up.
            down = f"expected {interface.netdev} to be up, found it down"
            if settings.fabric.manage:
                findings.append(Finding("warn", where, f"{down}; up brings it up, its cable is not checked before", ""))
            else:
                findings.append(Finding("fail", where, down, "bring it up, or set fabric.manage to true"))
        elif not link.carrier:
            findings.append(
                Finding(
                    "fail",
                    where,
                    f"expected a carrier on {interface.netdev}, found none",
                    "check the cable and the other node; a port whose second half is lost needs a full power cycle",
                )
            )
        if interface.hca and interface.hca not in facts.hcas:
            findings.append(
                Finding(
                    "fail",
                    where,
                    f"expected the RDMA device {interface.hca}, found {', '.join(facts.hcas) or 'none'}",
                    "correct nodes[].fabric[].hca (ibdev2netdev shows the pairs)",
                )
            )
    if not settings.fabric.manage:
        for text in fabric_findings(node.name, facts, node.fabric, settings.fabric.mtu_bytes):
            where, _, what = text.partition(": ")
            if "expected the interface" not in what:
                findings.append(Finding("fail", where, what, "configure it, or set fabric.manage to true"))
    return findings


def _ports(settings: Settings, node: NodeSettings, busy: Mapping[int, str]) -> list[Finding]:
    names = {port: name for _, name, port in _head_ports(settings, node)}
    return [
        Finding(
            "fail",
            f"{node.name} (serving.{names.get(port, 'port')})",
            f"expected port {port} to be free, found {holder}",
            "stop that program, or choose another port",
        )
        for port, holder in busy.items()
    ]


def _head_ports(settings: Settings, node: NodeSettings) -> list[tuple[str, str, int]]:
    return [
        (name, field, getattr(group.serving, field))
        for name, group in settings.groups.items()
        if group.nodes[0] == node.name
        for field in ("port", "ray_port", "status_port")
    ]


def _look(settings: Settings, stack: str, node: NodeSettings, open_node: Opener) -> NodeLook | SparkError:
    try:
        transport = open_node(node)
        host = observe_host(transport, settings.root_of(node))
        fabric = observe_fabric(transport)
        if host.docker_problem:
            return NodeLook(host, fabric, {}, None)
        ranks = [
            (name, group.nodes.index(node.name)) for name, group in settings.groups.items() if node.name in group.nodes
        ]
        same_name: str | None = None
        ours_runs = False
        for group_name, rank in ranks:
            name = container_name(stack, group_name, rank)
            text = run_checked(transport, script(_OURS, name, stack), purpose="expected to list the containers")
            lines = parse_sections(text).get("containers", "").splitlines()
            same_name = next((line.strip() for line in lines if "|" in line), same_name)
            ours_runs = ours_runs or any(line.startswith("ours ") for line in lines)
        busy: dict[int, str] = {}
        ports = [] if ours_runs else [str(port) for _, _, port in _head_ports(settings, node)]
        if ports:
            text = run_checked(transport, script(_PORTS, *ports), purpose="expected to list the listening ports")
            busy = {int(p): _holder(lines) for p, lines in parse_sections(text).items() if lines.strip()}
        return NodeLook(host, fabric, busy, same_name)
    except SparkError as error:
        return error


def _holder(ss_lines: str) -> str:
    """The program that holds a port, from a line of ``ss``; other users' programs have no name there."""
    name = ss_lines.partition('users:(("')[2].partition('"')[0]
    return f"it held by {name}" if name else "it held by another user's program"


def _docker_problem(node: str, host: HostFacts) -> dict[str, str]:
    return {
        "where": f"{node}, docker",
        "what": f"expected a Docker daemon that answers, found: {host.docker_problem}",
        "do": "`systemctl status docker` and `id` on that node tell more",
    }
