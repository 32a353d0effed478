"""The transport that NCCL really chose, read from the log of one rank (``NCCL_DEBUG=INFO``).

A wrong ``NCCL_IB_HCA``, a missing ``/dev/infiniband`` or a missing capability make NCCL fall back to TCP without an
error; serving then works at a tenth of the speed (vllm-project/vllm PR 42075). Its log is where this shows. RDMA is
called ``IB``, or ``IBext_v10`` and the like where a plugin does it; "GPU Direct RDMA Disabled" is normal on GB10.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_CHANNEL = re.compile(r"\bvia NET/([\w.-]+)/\d+")
_USING = re.compile(r"\bUsing network ([\w.-]+)")
_ASSIGNED = re.compile(r"\bAssigned NET plugin ([\w.-]+) to comm")
_INITIALISED = re.compile(r"\bInitialized NET plugin ([\w.-]+)")
_DEVICES = re.compile(r"\bNET/IB ?: Using ((?:\[\d+\]\S+ ?)*)")
_DEVICE = re.compile(r"\[\d+\]([\w.-]+):\d+/")
_VIRTUAL = re.compile(r"\bNET/IB ?: Made virtual device \[\d+\] name=(\S+)")
_PLUGIN = re.compile(r"\bP2P plugin v\d+ (IBext\w*)")
_SOCKETS = re.compile(r"\bNET/Socket ?: Using ((?:\[\d+\]\S+ ?)+)")
_NETDEV = re.compile(r"\[\d+\]([\w.-]+):")
_REASONS = re.compile(
    r"NET/IB : No device found|NCCL_IB_DISABLE set\b.*|Failed to initialize NET plugin IB\w*|"
    r"(?:Call to )?ibv_\w+ failed.*|NCCL WARN .*"
)


@dataclass(frozen=True)
class NcclTransport:
    """What one rank's log says.

    Attributes:
        network: Name of the transport between nodes, such as ``IB``, ``IBext_v11`` or ``Socket``; None if the log does
            not say. What channels were opened over counts before what was announced.
        hcas: RDMA devices that NCCL found, in its order.
        netdevs: Interfaces of the socket transport.
        reason: The first line that says why RDMA was not taken, or what failed; empty if there is none.
    """

    network: str | None
    hcas: tuple[str, ...] = ()
    netdevs: tuple[str, ...] = ()
    reason: str = ""

    @property
    def rdma(self) -> bool:
        """Whether the transport is RDMA."""
        return self.network is not None and self.network.startswith("IB")

    def __str__(self) -> str:
        over = self.hcas if self.rdma else self.netdevs
        return (f"NET/{self.network}" if self.network else "unknown") + (f" over {', '.join(over)}" if over else "")


def parse_nccl_log(text: str) -> NcclTransport:
    """Read the log of one rank; lines of others than NCCL, cut lines and prefixes of Ray do no harm."""
    channels = _CHANNEL.findall(text)
    # One channel over sockets is enough to slow the whole ring down.
    slow = [name for name in channels if not name.startswith("IB")]
    announced = [found for pattern in (_USING, _ASSIGNED, _INITIALISED) if (found := pattern.findall(text))]
    network = (slow or channels or (announced[0][-1:] if announced else []) or [None])[0]
    devices = [name for names in _DEVICES.findall(text) for name in _DEVICE.findall(names)]
    # A device that NCCL makes of two is named by both.
    devices = devices or [name for names in _VIRTUAL.findall(text) for name in names.split("+")]
    netdevs = [name for names in _SOCKETS.findall(text) for name in _NETDEV.findall(names)]
    if network is None and devices:
        network = next(iter(_PLUGIN.findall(text)), "IB")
    reason = _REASONS.search(text)
    return NcclTransport(
        network,
        tuple(dict.fromkeys(devices)),
        tuple(dict.fromkeys(netdevs)),
        reason.group(0).strip() if reason and (network is None or not network.startswith("IB")) else "",
    )
