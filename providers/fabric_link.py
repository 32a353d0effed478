"""``FabricLink``: addresses and MTU of the fabric interfaces of one node.

It owns one netplan file, and only if the fabric is managed. Management interface, routes and firmware are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, ReadResult, Resource, UpdateResult

from providers._adapter import SparkProvider, folder_of, inputs_of, told
from spark_core.fabric.facts import observe_network
from spark_core.fabric.netplan import (
    apply_fabric,
    live_interfaces,
    observe_managed,
    require_fabric,
    undo_fabric,
)
from spark_core.settings import FabricInterface, FabricSettings
from spark_core.transport.base import Transport

INPUTS = ("node", "connection", "stack", "root", "managed", "interfaces", "netplan_file", "netplan", "take_over")


class FabricLinkProvider(SparkProvider):
    """Life cycle of a node's fabric: written and applied if it is managed, else checked."""

    compared = ("connection", "managed", "interfaces", "netplan", "take_over")
    replaced_by = ("node", "stack", "root", "netplan_file")

    @told
    def create(self, props: Mapping[str, Any]) -> CreateResult:
        self._converge(props)
        return CreateResult(f"{props['node']}/fabric", dict(props))

    @told
    def update(self, _id: str, olds: Mapping[str, Any], news: Mapping[str, Any]) -> UpdateResult:
        no_longer = {i["netdev"] for i in olds["interfaces"]} - {i["netdev"] for i in news["interfaces"]}
        no_longer |= set(_taken(olds)) - set(_taken(news))
        if olds["managed"] and (no_longer or not news["managed"]) and not self.abandoned(news["node"]):
            self._undo(olds, self.run.transport(news["node"], news["connection"]))
        self._converge(news)
        return UpdateResult(dict(news))

    @told
    def read(self, id_: str, props: Mapping[str, Any]) -> ReadResult:
        if self.abandoned(props["node"]):
            return ReadResult(id_, dict(props))
        transport = self.run.transport(props["node"], props["connection"])
        # State may hold what an earlier refresh found; what is wanted is what the settings say.
        declared = [node for node in self.run.settings.nodes if node.name == props["node"]]
        wanted = {i["netdev"]: str(i["address"]) for i in props["interfaces"]}
        wanted |= {i.netdev: i.address for node in declared for i in node.fabric if i.netdev in wanted}
        live: dict[str, Any] = {}
        if props["managed"]:
            network, netplan = observe_managed(transport, str(props["netplan_file"]))
            live["netplan"] = netplan or "absent"
        else:
            network = observe_network(transport)
        live["interfaces"] = live_interfaces(network, wanted)
        kept = inputs_of(props, INPUTS)
        return ReadResult(id_, {**props, **live}, {**kept, **live})

    @told
    def delete(self, _id: str, props: Mapping[str, Any]) -> None:
        if self.abandoned(props["node"]):
            return
        self.run.require_all_nodes()
        if props["managed"]:
            self._undo(props, self.run.transport(props["node"], props["connection"]))

    def _converge(self, props: Mapping[str, Any]) -> None:
        interfaces = [FabricInterface(netdev=i["netdev"], address=i["address"]) for i in props["interfaces"]]
        if not interfaces or self.abandoned(props["node"]):
            return
        transport: Transport = self.run.transport(props["node"], props["connection"])
        fabric = FabricSettings(
            manage=bool(props["managed"]),
            mtu_bytes=int(props["interfaces"][0]["mtu_bytes"]),
            netplan_file=str(props["netplan_file"]),
            take_over=_taken(props),
            rollback_after_s=self.run.settings.fabric.rollback_after_s,
        )
        if fabric.manage:
            apply_fabric(transport, folder_of(props), interfaces, fabric)
        else:
            require_fabric(transport, interfaces, fabric.mtu_bytes, do="configure it, or set fabric.manage to true")

    def _undo(self, props: Mapping[str, Any], transport: Transport) -> None:
        netdevs = [str(i["netdev"]) for i in props["interfaces"]]
        undo_fabric(transport, folder_of(props), netdevs, [str(props["netplan_file"]), *_taken(props)])


def _taken(props: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(path) for path in props.get("take_over") or ())


class FabricLink(Resource, module="spark", name="FabricLink"):
    """The fabric interfaces of a node.

    Args:
        node: Name of the node.
        connection: How the node is reached, for the day the settings no longer name it.
        stack: Name of the stack.
        root: Our folder on the node.
        managed: Whether the netplan file is written.
        interfaces: For each interface ``netdev``, ``address`` with prefix length and ``mtu_bytes``.
        netplan_file: Path of the netplan file.
        netplan: Its text; empty if not managed.
        take_over: Netplan files of others that give way to ours.
    """

    def __init__(
        self,
        resource_name: str,
        *,
        node: str,
        connection: dict[str, Any],
        stack: str,
        root: str,
        managed: bool,
        interfaces: list[dict[str, Any]],
        netplan_file: str,
        netplan: str,
        take_over: list[str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        props = {
            "node": node,
            "connection": connection,
            "stack": stack,
            "root": root,
            "managed": managed,
            "interfaces": interfaces,
            "netplan_file": netplan_file,
            "netplan": netplan,
            "take_over": take_over,
        }
        super().__init__(FabricLinkProvider(), resource_name, props, opts)
