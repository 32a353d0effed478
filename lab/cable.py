"""Which fabric port is cabled to which, and whether the cable is in.

A Spark's network adapter has two ports, and each port shows as two interfaces: one on each of the adapter's
two PCIe connections (`enp1s0f1np1` and its twin `enP2p1s0f1np1`). One cable carries both.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from lab.instance import Instance, write_whole

INTERFACES = {
    (0, 0): "enp1s0f0np0",
    (0, 1): "enP2p1s0f0np0",
    (1, 0): "enp1s0f1np1",
    (1, 1): "enP2p1s0f1np1",
}
"""Interface name by (port, half); half 1 is the twin."""

FABRIC_PORT = 1
"""The port that the fabric uses unless the topology needs both."""


@dataclass(frozen=True)
class Segment:
    """Ports that hear each other: the two ends of one cable, or everything on one switch."""

    number: int
    ends: tuple[tuple[int, int], ...]
    """(host index, port) of each end."""
    switched: bool
    """Whether a switch is between the ends: then a host that is off takes away only its own link."""


def segments(instance: Instance) -> list[Segment]:
    """How the hosts of a lab are cabled."""
    count = instance.host_count
    if count == 1:
        return []
    if count == 2:
        return [Segment(0, ((0, FABRIC_PORT), (1, FABRIC_PORT)), switched=False)]
    if instance.topology == "switch":
        return [Segment(0, tuple((index, FABRIC_PORT) for index in range(count)), switched=True)]
    return [Segment(index, ((index, 1), ((index + 1) % count, 0)), switched=False) for index in range(count)]


def segment_of(instance: Instance, index: int, port: int) -> Segment | None:
    """The segment a port is cabled to, or None for an empty port."""
    for segment in segments(instance):
        if (index, port) in segment.ends:
            return segment
    return None


def mac_address(instance: Instance, index: int, interface: str) -> str:
    """A locally administered hardware address that stays the same over reboots."""
    digest = hashlib.sha256(f"{instance.folder}/{index}/{interface}".encode()).digest()
    return ":".join(f"{byte:02x}" for byte in (0x02, *digest[:5]))


def unplugged(instance: Instance) -> set[tuple[int, int, int]]:
    """(host index, port, half) of every link that somebody pulled."""
    try:
        stored = json.loads((instance.folder / "unplugged.json").read_text())
    except FileNotFoundError:
        return set()
    return {(index, port, half) for index, port, half in stored}


def remember_unplugged(instance: Instance, links: set[tuple[int, int, int]]) -> None:
    """Keep which links are pulled, so that a host that boots finds them pulled."""
    write_whole(instance.folder / "unplugged.json", json.dumps(sorted(links)) + "\n")


def links_up(instance: Instance, powered: set[int]) -> dict[tuple[int, int, int], bool]:
    """For every fabric interface of every powered host: whether it has a carrier now.

    A direct cable gives a carrier only while both ends are in and both hosts have power. A switch gives
    each host its own.
    """
    pulled = unplugged(instance)
    state: dict[tuple[int, int, int], bool] = {}
    for index in sorted(powered):
        for port, half in INTERFACES:
            segment = segment_of(instance, index, port)
            up = segment is not None
            if segment is not None:
                ends = ((index, port),) if segment.switched else segment.ends
                up = all(end in powered and (end, end_port, half) not in pulled for end, end_port in ends)
            state[index, port, half] = up
    return state
