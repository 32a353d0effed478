"""The fabric of a node as an input of resources: what the program used, discovered parts filled in."""

from __future__ import annotations

from typing import Any

from spark_core.settings import NodeSettings


def interfaces_of(node: NodeSettings) -> dict[str, Any]:
    """Its interfaces, and where ranks meet if that is elsewhere."""
    found: dict[str, Any] = {"fabric": [interface.model_dump() for interface in node.fabric]}
    if node.control_address is not None:
        found |= {"control_address": node.control_address, "control_netdev": node.control_netdev}
    return found
