"""Which functions of a ConnectX-7 are halves of one port, and which one is gone.

A Spark's adapter shows each QSFP port as two functions, the twins. Sources disagree on which: eugr/spark-vllm-docker
and NVIDIA/dgx-spark-playbooks pair the same function number in two PCI domains (``enp1s0f1np1`` and
``enP2p1s0f1np1``), TechPreacher/dgx-spark-vllm-cluster pairs f0 with f1 in one domain. So the pairing is read from the
host: functions in two PCI domains whose driver names the same physical port (recorded on a Spark in NVIDIA/daqiri#108:
p0 for both f0) are twins; where the driver names none, the same function number in two domains decides. The PCI address
is the host's own word, or what the interface's name says of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from spark_core.fabric.facts import Link

_PCI = re.compile(r"^([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])$", re.IGNORECASE)
_NAME = re.compile(r"^en(?:P(\d+))?p(\d+)s(\d+)f([01])(?:np\d+)?$")

Function = tuple[int, int, int, int]
"""PCI domain, bus, slot, function."""


def function_of(netdev: str, link: Link | None = None) -> Function | None:
    """The PCI function of an interface, from the host or else from its name; None if it has none."""
    match = _PCI.match(link.pci) if link is not None else None
    if match is not None:
        return int(match[1], 16), int(match[2], 16), int(match[3], 16), int(match[4])
    match = _NAME.match(netdev)
    return None if match is None else (int(match[1] or 0), int(match[2]), int(match[3]), int(match[4]))


def twin_of(links: Mapping[str, Link], netdev: str) -> str | None:
    """The other half of an interface's port, if it is there."""
    mine, link = function_of(netdev, links.get(netdev)), links.get(netdev)
    if mine is None or link is None:
        return None
    others = {
        name: (other, function)
        for name, other in links.items()
        if (function := function_of(name, other)) is not None and function[0] != mine[0] and function[1:3] == mine[1:3]
    }
    if link.port:
        named = [n for n, (other, _) in others.items() if (other.port, other.switch) == (link.port, link.switch)]
        return min(named, default=None)
    return min((name for name, (_, function) in others.items() if function[3] == mine[3]), default=None)


def functions_left(links: Mapping[str, Link], netdev: str) -> list[str]:
    """Functions of the same adapter that are there while this interface is not.

    A warm reboot can drop the f1 half of each port, which only a power cycle brings back (TechPreacher); an adapter
    without any cable shows no function at all. So one missing among others that are there is the former.
    """
    mine = _NAME.match(netdev)
    if netdev in links or mine is None:
        return []
    return sorted(
        name for name in links if (other := _NAME.match(name)) is not None and other.group(2, 3) == mine.group(2, 3)
    )
