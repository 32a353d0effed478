"""Whether a node is idle enough to load its link and its GPU, and what it has to measure with. Changes nothing.

A bandwidth run beside a group that serves slows its tokens, and a start of torch on a node at 90 % of its memory can
wedge the whole machine (unified memory; NVIDIA/open-gpu-kernel-modules#1358). So the proofs look first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from spark_core.errors import ObservationError
from spark_core.group import LABEL
from spark_core.transport.base import Command, parse_sections, script

PROBE_LABEL = f"{LABEL}.probe"
LOAD_PER_CPU = 0.5
"""Above this share of its processors over the last minute, a node is busy."""
COLLECTIVE_NEEDS_MIB = 6144
"""Less available memory than this, and the collective is not tried, also where it was asked for."""

_CONTAINER = "|".join(
    (
        "{{.Name}}",
        f'{{{{index .Config.Labels "{LABEL}.stack"}}}}',
        f'{{{{index .Config.Labels "{PROBE_LABEL}"}}}}',
        "{{json .HostConfig.DeviceRequests}}",
        "{{json .HostConfig.Devices}}",
        "{{.HostConfig.Runtime}}",
    )
)
_FREE_PORTS = """
import socket, sys
held = [socket.create_server((sys.argv[1], 0)) for _ in range(int(sys.argv[2]))]
print(*(one.getsockname()[1] for one in held))
"""
_LOOK = """
own=$1 ports=$2 container=$3 free_ports=$4
echo '=== containers'
ids=$(docker ps -q)
# A container that has ended meanwhile is no fault.
[ -z "$ids" ] || docker inspect --format "$container" $ids 2>/dev/null || true
echo '=== compute'
if command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-compute-apps=pid,process_name --format=csv,noheader 2>/dev/null || true
fi
echo '=== load'; cat /proc/loadavg; getconf _NPROCESSORS_ONLN
echo '=== memory'; grep MemAvailable /proc/meminfo
echo '=== tools'; for tool in ib_write_bw python3; do command -v "$tool" >/dev/null && echo "$tool" || true; done
echo '=== ports'; python3 -c "$free_ports" "$own" "$ports" 2>&1 || true
"""


@dataclass(frozen=True)
class Readiness:
    """What a node says before a proof.

    Attributes:
        node: Name of the node.
        busy: Why the node is not idle; empty if it is.
        memory_mib: Available memory.
        tools: Which of ``ib_write_bw`` and ``python3`` there are.
        ports: TCP ports that were free on the node's fabric address a moment ago.
    """

    node: str
    busy: tuple[str, ...]
    memory_mib: int
    tools: frozenset[str]
    ports: tuple[int, ...]


def look_for_readiness(own_address: str, ports: int) -> Command:
    """The command of a look; ``ports`` is how many free ports are wanted on the node's own fabric address."""
    return script(
        _LOOK,
        own_address,
        str(ports),
        _CONTAINER,
        _FREE_PORTS,
        purpose="expected to learn whether the node is idle",
    )


def parse_readiness(node: str, text: str) -> Readiness:
    """Read the answer of a look.

    Raises:
        ObservationError: a part that decides is missing; a node that could not be asked is never taken for idle.
    """
    sections = parse_sections(text)
    load = re.match(r"([\d.]+) [\d.]+ [\d.]+ .*\n(\d+)\s*$", sections.get("load", ""))
    memory = re.search(r"MemAvailable:\s+(\d+) kB", sections.get("memory", ""))
    if load is None or memory is None or "containers" not in sections:
        missing = "load" if load is None else "memory" if memory is None else "containers"
        raise ObservationError(f"expected the node's {missing}, found no answer that could be read", where=node)
    busy = [*_containers(sections["containers"]), *_compute(sections.get("compute", ""))]
    one_minute, processors = float(load.group(1)), int(load.group(2))
    if one_minute > LOAD_PER_CPU * processors:
        busy.append(f"a load of {one_minute:g} on {processors} processors")
    return Readiness(
        node,
        tuple(busy),
        int(memory.group(1)) // 1024,
        frozenset(sections.get("tools", "").split()),
        tuple(int(word) for word in sections.get("ports", "").split() if word.isdigit()),
    )


def _containers(text: str) -> list[str]:
    busy = []
    for line in text.splitlines():
        name, stack, probe, requests, devices, runtime, *_ = [*line.split("|"), *[""] * 5]
        if not name.strip() or probe.strip() not in ("", "<no value>"):
            continue
        name = name.strip().removeprefix("/")
        if stack.strip() not in ("", "<no value>"):
            busy.append(f"container {name} of the stack {stack.strip()}")
        elif requests.strip() not in ("", "null", "[]") or "/dev/nvidia" in devices or runtime.strip() == "nvidia":
            busy.append(f"container {name}, which has the GPU")
    return busy


def _compute(text: str) -> list[str]:
    rows = [match for line in text.splitlines() if (match := re.match(r"\s*(\d+),\s*(.+)", line))]
    return [f"process {row.group(1)} ({row.group(2).strip()}) on the GPU" for row in rows]
