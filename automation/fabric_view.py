"""The fabric of a stack as its state knows it: interfaces, subnets, and what was measured. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from automation.deployment_report import InterfacePart, MeasuredPart, SubnetPart
from automation.state_outputs import outputs_of_type
from spark_core.settings import NodeSettings
from spark_core.settings.fabric import FabricInterface

Resources = Sequence[Mapping[str, Any]]
"""The resources of an exported state."""


def interfaces_of(node: NodeSettings, resources: Resources) -> list[InterfacePart]:
    """As the state has them, which also knows what was discovered; as the settings have them where it has none."""
    hcas = {interface.netdev: interface.hca or "" for interface in node.fabric}
    for resource in resources:
        outputs = resource.get("outputs") or {}
        if str(resource.get("type", "")).endswith("spark:FabricLink") and outputs.get("node") == node.name:
            return [
                InterfacePart(
                    netdev=str(one["netdev"]),
                    address=str(one["address"]),
                    hca=str(one.get("hca") or hcas.get(one["netdev"], "")),
                    mtu_bytes=int(one["mtu_bytes"]) if one.get("mtu_bytes") else None,
                )
                for one in outputs.get("interfaces") or []
            ]
    return [InterfacePart(netdev=one.netdev, address=one.address, hca=one.hca or "") for one in node.fabric]


def subnets_of(nodes: Sequence[NodeSettings], resources: Resources) -> list[SubnetPart]:
    """The subnets of the fabric, with who is on each."""
    found: dict[str, dict[str, str]] = {}
    for node in nodes:
        for interface in interfaces_of(node, resources):
            try:
                network = str(FabricInterface(netdev=interface.netdev, address=interface.address).network)
            except ValueError:
                continue  # an interface that lost its address is drift, told there
            found.setdefault(network, {})[node.name] = interface.netdev
    return [SubnetPart(network=network, interfaces=interfaces) for network, interfaces in found.items()]


def measured(resources: Resources) -> list[MeasuredPart]:
    """What was measured when the fabric was proven."""
    pairs = outputs_of_type(resources, "FabricProof").get("bandwidth") or []
    return [
        MeasuredPart(
            pair=str(pair["pair"]),
            method=str(pair["method"]),
            links=int(pair["links"]),
            gbps=[float(value) for value in pair["gbps"]],
            round_trip_us=float(pair["round_trip_us"]),
        )
        for pair in pairs
    ]


def not_proven(resources: Resources) -> list[str]:
    """What could not be proven then."""
    return [str(line) for line in outputs_of_type(resources, "FabricProof").get("not_proven") or []]
