"""``RoceFabric``: the 200G link between the nodes; addresses and MTU on every declared interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi

from components.spark_node import SparkNode
from providers.connections import connection_facts
from providers.fabric_link import FabricLink
from spark_core.fabric.netplan import render_netplan
from spark_core.settings import Settings


@dataclass(frozen=True, kw_only=True)
class RoceFabricArgs:
    """What the fabric is made of."""

    settings: Settings
    """The settings of the stack."""
    stack: str
    """Name of the stack."""
    nodes: Sequence[SparkNode]
    """The nodes that it joins."""


class RoceFabric(pulumi.ComponentResource):
    """The fabric. Managed, it owns one netplan file on each node; otherwise it is only checked.

    A change of an address or of the MTU is made in place; the ranks of a running group notice it.
    """

    def __init__(self, name: str, args: RoceFabricArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spark:fabric:RoceFabric", name, None, opts)
        fabric = args.settings.fabric
        self.links = [
            FabricLink(
                f"{name}-{node.args.node.name}",
                node=node.args.node.name,
                connection=connection_facts(node.args.node),
                stack=args.stack,
                root=node.folder.root,
                managed=fabric.manage,
                interfaces=[
                    {"netdev": interface.netdev, "address": interface.address, "mtu_bytes": fabric.mtu_bytes}
                    for interface in node.args.node.fabric
                ],
                netplan_file=fabric.netplan_file,
                netplan=render_netplan(node.args.node.fabric, fabric.mtu_bytes) if fabric.manage else "",
                take_over=list(fabric.take_over) if fabric.manage else [],
                opts=pulumi.ResourceOptions(parent=self, depends_on=[node.host]),
            )
            for node in args.nodes
            if node.args.node.fabric
        ]
        self.register_outputs({"mtu_bytes": fabric.mtu_bytes})
