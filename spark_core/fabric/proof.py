"""Proof after ``up``: the fabric is as declared on every node, and packets of its MTU arrive in both directions."""

from __future__ import annotations

import time
from collections.abc import Mapping

from spark_core.fabric.checks import fabric_cluster_findings, fabric_findings
from spark_core.fabric.packets import probe_nodes
from spark_core.findings import Finding
from spark_core.settings import Settings
from spark_core.transport.base import Transport

SETTLE_S = 15.0
"""How long a fabric that was just configured may take: a link of mlx5 restarts when its MTU changes."""

_PAUSE_S = 1.0


def prove_packets(
    transports: Mapping[str, Transport], settings: Settings, *, settle_s: float = SETTLE_S
) -> list[Finding]:
    """What is wrong with the fabric once ``up`` has done its part; asked again until nothing fails or time is up.

    Args:
        transports: Of every node that is to be looked at.
        settings: With the fabric declared or discovered.

    Raises:
        SparkError: a node could not be asked.
    """
    # What up was to put right must now be right.
    strict = settings.model_copy(update={"fabric": settings.fabric.model_copy(update={"manage": False})})
    until = time.monotonic() + settle_s
    while True:
        networks, packets = probe_nodes(transports, strict)
        findings = [
            finding
            for node in strict.nodes
            if node.name in networks
            for finding in fabric_findings(strict, node, networks[node.name])
        ] + fabric_cluster_findings(strict, networks, packets)
        if time.monotonic() > until or not any(found.severity == "fail" for found in findings):
            return findings
        time.sleep(_PAUSE_S)
