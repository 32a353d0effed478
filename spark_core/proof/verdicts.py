"""What the measurements mean: findings from rates, and from the transport that each rank chose.

Rates of healthy Sparks are about 111 Gb/s for one half of a port and about 200 for both (eugr/spark-vllm-docker,
docs/NETWORKING.md); published runs of ``ib_write_bw`` show 92 to 97 for each half. A ConnectX that started degraded
moves about 13 by TCP, RDMA and NCCL alike while every register says 200 (NVIDIA/dgx-spark-playbooks PR 108), so that a
rate is the only way to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spark_core.findings import Finding, Severity
from spark_core.proof.nccl_log import NcclTransport

Method = Literal["ib_write_bw", "tcp", "all-reduce"]
Rdma = Literal["required", "preferred", "off"]

HEALTHY_GBPS = 80.0
"""For each half of a port; below it a write of RDMA is slower than on any healthy pair that was published."""
DEGRADED_GBPS = (8.0, 20.0)
"""For each half of a port: the band of the degraded start. What is slower still has another cause."""

TRANSPORT_REMEDY = (
    "check /dev/infiniband, the RDMA devices named in nodes[].fabric[].hca and their ports; "
    "or set fabric.rdma to preferred or off"
)
_POWER_CYCLE = (
    "shut both nodes down, take the power plugs out for a minute with the cable left in, and start them; "
    "a warm reboot does not cure it"
)
_LOOK_AT_PATH = "look at the switch (MTU, flow control, 200G forced), the cable and other traffic on the link"


@dataclass(frozen=True)
class Rate:
    """What two nodes move.

    Attributes:
        pair: Names of the two nodes.
        method: How it was measured.
        links: How many links were used at the same time; both halves of one port are two.
        gbps: The slower direction's rate over all links together, in Gb/s.
    """

    pair: tuple[str, str]
    method: Method
    links: int
    gbps: float


def bandwidth_findings(hardware: str, rate: Rate, minimum_gbps: float | None = None) -> list[Finding]:
    """Judge a rate.

    Only RDMA writes are held against what healthy Sparks move: TCP and collectives have limits of their own, and for
    them only the degraded band is known. Without Spark hardware, only a declared floor counts.
    """
    where = f"{rate.pair[0]} - {rate.pair[1]} (fabric)"
    found = f"found {rate.gbps:.1f} Gb/s by {rate.method} over {rate.links} link{'s' if rate.links != 1 else ''}"
    # By TCP the two halves of a degraded port have been seen to share the rate of one.
    each = rate.gbps if rate.method == "tcp" else rate.gbps / max(1, rate.links)
    healthy = f"expected about {111 if rate.links == 1 else 100 * rate.links} Gb/s"
    if hardware == "spark":
        if DEGRADED_GBPS[0] <= each < DEGRADED_GBPS[1]:
            # A collective has other reasons to be slow, such as a GPU that has not woken up.
            milder: Severity | None = "warn" if rate.method == "all-reduce" else None
            return [Finding("bandwidth-degraded", where, f"{healthy}, {found}", _POWER_CYCLE, told_as=milder)]
        if each < DEGRADED_GBPS[0]:
            return [Finding("bandwidth-low", where, f"{healthy}, {found}", _LOOK_AT_PATH)]
    if minimum_gbps is not None:
        if rate.gbps >= minimum_gbps or rate.method == "all-reduce":
            return []
        what = f"expected at least {minimum_gbps:g} Gb/s (fabric.minimum_gbps), {found}"
        # A floor that somebody declared is a demand, not a hint.
        return [Finding("bandwidth-low", where, what, _LOOK_AT_PATH, told_as="fail")]
    if hardware == "spark" and rate.method == "ib_write_bw" and each < HEALTHY_GBPS:
        return [Finding("bandwidth-low", where, f"{healthy}, {found}", _LOOK_AT_PATH)]
    return []


def transport_findings(
    rdma: Rdma, node: str, rank: int, transport: NcclTransport, hcas: tuple[str, ...]
) -> list[Finding]:
    """Judge what NCCL chose on one rank.

    Args:
        rdma: What the settings ask for.
        hcas: The RDMA devices that the rank was given.
    """
    if rdma == "off":
        return []
    where = f"{node}, rank {rank} (fabric.rdma)"
    milder: Severity | None = None if rdma == "required" else "warn"
    if transport.network is None:
        what = f"expected NCCL's log to name RDMA (rdma: {rdma}), found no word of a transport"
        do = "remove NCCL_DEBUG_FILE and other NCCL settings from /etc/nccl.conf of the image"
        return [Finding("transport-unproven", where, what, do, told_as=milder)]
    if not transport.rdma:
        over = f" over {', '.join(transport.netdevs)}" if transport.netdevs else ""
        what = f"expected RDMA (rdma: {rdma}), found that NCCL chose {transport.network}{over}"
        what += f": {transport.reason}" if transport.reason else ""
        return [Finding("transport-sockets", where, what, TRANSPORT_REMEDY, told_as=milder)]
    unused = [hca for hca in hcas if hca not in transport.hcas]
    if transport.hcas and unused:
        what = f"expected NCCL to use {', '.join(hcas)}, found that it uses only {', '.join(transport.hcas)}"
        return [Finding("hca-unused", where, what, "half of the bandwidth is lost: check that port and its address")]
    return []
