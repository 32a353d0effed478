"""Who already uses a node: its ports, its memory, the names of our containers. Pure.

What our own group uses is no finding; where it cannot be told whose it is because Docker does not answer, nothing is
said, since that Docker does not answer is a finding already.
"""

from __future__ import annotations

from collections.abc import Mapping

from spark_core.facts import NodeFacts, known
from spark_core.facts.containers import Container
from spark_core.facts.listeners import Listener
from spark_core.findings import Finding
from spark_core.fit import DEFAULT_UTILIZATION, GIB
from spark_core.group import container_name
from spark_core.monitoring.containers import monitoring_ports
from spark_core.settings import NodeSettings, Settings

_DAEMON = "docker.service"
"""Holds the ports that containers publish."""


def ports_of(settings: Settings, node: NodeSettings) -> dict[int, str]:
    """The fixed ports that are needed on a node, and the setting of each; of a group only the head needs any."""
    return monitoring_ports(settings, node.name) | {
        getattr(group.serving, field): f"serving.{field}"
        for group in settings.groups.values()
        if group.nodes[0] == node.name
        for field in group.serving.port_fields
    }


def in_use_findings(settings: Settings, stack: str, node: NodeSettings, facts: NodeFacts) -> list[Finding]:
    """What others use of a node that the stack needs."""
    containers = known(facts.containers)
    if containers is None:
        return []
    ours = [container for container in containers if container.stack == stack and container.running]
    ranks = {container_name(stack, name, rank) for name, g in settings.groups.items() for rank in range(len(g.nodes))}
    serves = any(container.name in ranks for container in ours)
    return [
        *_names(settings, stack, node, containers),
        *_launchers(settings, node, containers),
        *_ports(settings, node, facts, {container.id: container for container in containers}, ours),
        *(_gpu_memory(settings, node, facts, containers, ours) if settings.hardware == "spark" else ()),
        *(_memory(settings, node, facts) if settings.hardware == "spark" and not serves else ()),
    ]


def _names(settings: Settings, stack: str, node: NodeSettings, containers: tuple[Container, ...]) -> list[Finding]:
    wanted = {
        container_name(stack, name, group.nodes.index(node.name))
        for name, group in settings.groups.items()
        if node.name in group.nodes
    }
    return [
        Finding(
            "foreign-container",
            node.name,
            f"expected no foreign container {container.name}, found one of "
            f"{f'stack {container.stack}' if container.stack else 'nobody of ours'} "
            f"({container.image}, made {container.age}, {container.status})",
            "remove it or rename it yourself; it is never removed by this program",
        )
        for container in containers
        if container.name in wanted and container.stack != stack
    ]


def _launchers(settings: Settings, node: NodeSettings, containers: tuple[Container, ...]) -> list[Finding]:
    found: dict[str, list[Container]] = {}
    going = []
    for container in containers:
        if is_replaced(settings, container):
            going.append(container)
        elif container.running and container.launcher:
            found.setdefault(container.launcher, []).append(container)
    findings = [
        Finding(
            "launcher-running",
            node.name,
            f"expected no other launcher, found containers of {launcher} running: {_told_of(its)}",
            "stop them with that launcher, or name them in `replaces`; up never touches them",
        )
        for launcher, its in found.items()
    ]
    if going:
        findings.append(
            Finding(
                "launcher-to-replace",
                f"{node.name} (replaces)",
                f"expected the containers that this stack replaces to be stopped, found running: {_told_of(going)}",
                "`python -m automation cutover` brings image and weights, stops them on a yes, and starts this stack",
            )
        )
    return findings


def is_replaced(settings: Settings, container: Container) -> bool:
    """Whether a running container is one that the stack is to replace."""
    return container.running and not container.stack and container.name in settings.replaces


def _told_of(containers: list[Container]) -> str:
    return ", ".join(f"{container.name} ({container.image}, {container.status})" for container in containers)


def _ports(
    settings: Settings,
    node: NodeSettings,
    facts: NodeFacts,
    containers: Mapping[str, Container],
    ours: list[Container],
) -> list[Finding]:
    fields = ports_of(settings, node)
    findings: dict[int, Finding] = {}
    for listener in known(facts.listeners) or ():
        if listener.port not in fields:
            continue
        holder = _holding_container(listener, containers)
        if holder in ours or (ours and holder is None and not _told(listener)):
            continue
        if holder is not None and is_replaced(settings, holder):
            continue  # it is free once that one is stopped
        field = fields[listener.port]
        findings.setdefault(
            listener.port,
            Finding(
                "port-taken",
                f"{node.name} ({field})",
                f"expected port {listener.port} to be free, found it held by {_holder(listener, holder)}",
                "stop that program, or choose another port",
            ),
        )
    return list(findings.values())


def _holding_container(listener: Listener, containers: Mapping[str, Container]) -> Container | None:
    if listener.container:
        return containers.get(listener.container)
    if listener.unit in (None, _DAEMON):
        return next((c for c in containers.values() if c.running and listener.port in c.ports), None)
    return None


def _told(listener: Listener) -> bool:
    """Whether anything is known of a holder; without unified cgroups nothing is of another user's."""
    return bool(listener.program or listener.container or listener.unit)


def _holder(listener: Listener, container: Container | None) -> str:
    program = listener.program or listener.unit
    if container is not None:
        made = f" of {container.launcher}" if container.launcher else ""
        return f"the container {container.name}{made} ({container.image})"
    if listener.container:
        return f"{program or 'a program'} in the container {listener.container[:12]}, which Docker does not list"
    return program or (f"another user's program (uid {listener.uid})" if listener.uid else "another user's program")


def _gpu_memory(
    settings: Settings,
    node: NodeSettings,
    facts: NodeFacts,
    containers: tuple[Container, ...],
    ours: list[Container],
) -> list[Finding]:
    names = {container.id: container for container in containers}
    told = {container.id for container in ours} | {
        c.id for c in containers if (c.running and c.launcher) or is_replaced(settings, c)
    }
    held = []
    for process in known(facts.gpu_processes) or ():
        if process.container in told:
            continue
        size = "" if process.memory_bytes is None else f", {process.memory_bytes / GIB:.1f} GiB"
        container = names.get(process.container or "")
        inside = f", container {container.name} ({container.image})" if container else ""
        held.append(f"{process.name} (pid {process.pid}{size}{inside})")
    if not held:
        return []
    return [
        Finding(
            "gpu-memory-held",
            node.name,
            f"expected nobody else in the unified memory, found {', '.join(held)}",
            "stop it, or lower serving.gpu_memory_utilization by what it holds",
        )
    ]


def _memory(settings: Settings, node: NodeSettings, facts: NodeFacts) -> list[Finding]:
    memory = known(facts.memory)
    shares = [
        group.serving.gpu_memory_utilization or DEFAULT_UTILIZATION
        for group in settings.groups.values()
        if node.name in group.nodes
    ]
    if memory is None or not shares or memory.available_bytes >= max(shares) * memory.total_bytes:
        return []
    return [
        Finding(
            "memory-available",
            f"{node.name} (serving.gpu_memory_utilization)",
            f"expected {max(shares) * memory.total_bytes / GIB:.1f} GiB of available memory "
            f"({max(shares):g} of {memory.total_bytes / GIB:.1f} GiB), found {memory.available_bytes / GIB:.1f} GiB",
            "stop what uses it, or lower the share; memory that no process holds comes back with a reboot",
        )
    ]
