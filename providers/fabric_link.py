"""``FabricLink``: addresses and MTU of the fabric interfaces of one node.

It owns one netplan file, and only if the fabric is managed. Management interface, routes and firmware are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, ReadResult, Resource, UpdateResult

from providers._adapter import SparkProvider, folder_of, told
from spark_core.errors import CommandError
from spark_core.fabric import (
    apply_fabric,
    fabric_findings,
    live_interfaces,
    observe_fabric,
    observe_netplan_file,
    undo_fabric,
)
from spark_core.settings import FabricInterface
from spark_core.transport.base import Transport

INPUTS = ("node", "connection", "stack", "root", "managed", "interfaces", "netplan_file", "netplan")


class FabricLinkProvider(SparkProvider):
    """Life cycle of a node's fabric: written and applied if it is managed, else checked."""

    compared = ("connection", "managed", "interfaces", "netplan")
    replaced_by = ("node", "stack", "root", "netplan_file")

    @told
    def create(self, props: Mapping[str, Any]) -> CreateResult:
        self._converge(props)
        return CreateResult(f"{props['node']}/fabric", dict(props))

    @told
    def update(self, _id: str, olds: Mapping[str, Any], news: Mapping[str, Any]) -> UpdateResult:
        no_longer = {i["netdev"] for i in olds["interfaces"]} - {i["netdev"] for i in news["interfaces"]}
        if olds["managed"] and (no_longer or not news["managed"]):
            undo_fabric(
                self.run.transport(news["node"], news["connection"]),
                folder_of(olds),
                [i["netdev"] for i in olds["interfaces"]],
                str(olds["netplan_file"]),
            )
        self._converge(news)
        return UpdateResult(dict(news))

    @told
    def read(self, id_: str, props: Mapping[str, Any]) -> ReadResult:
        transport = self.run.transport(props["node"], props["connection"])
        # State may hold what an earlier refresh found; what is wanted is what the settings say.
        declared = [node for node in self.run.settings.nodes if node.name == props["node"]]
        wanted = {i["netdev"]: str(i["address"]) for i in props["interfaces"]}
        wanted |= {i.netdev: i.address for node in declared for i in node.fabric if i.netdev in wanted}
        live: dict[str, Any] = {"interfaces": live_interfaces(observe_fabric(transport), wanted)}
        if props["managed"]:
            live["netplan"] = observe_netplan_file(transport, str(props["netplan_file"])) or "absent"
        return ReadResult(id_, {**props, **live}, {**{key: props[key] for key in INPUTS}, **live})

    @told
    def delete(self, _id: str, props: Mapping[str, Any]) -> None:
        self.run.require_all_nodes()
        if props["managed"]:
            undo_fabric(
                self.run.transport(props["node"], props["connection"]),
                folder_of(props),
                [i["netdev"] for i in props["interfaces"]],
                str(props["netplan_file"]),
            )

    def _converge(self, props: Mapping[str, Any]) -> None:
        transport: Transport = self.run.transport(props["node"], props["connection"])
        interfaces, mtu_bytes = _interfaces(props)
        if not interfaces:
            return
        if props["managed"]:
            apply_fabric(transport, folder_of(props), interfaces, mtu_bytes, str(props["netplan_file"]))
            return
        findings = fabric_findings(str(props["node"]), observe_fabric(transport), interfaces, mtu_bytes)
        if findings:
            where, _, what = findings[0].partition(": ")
            raise CommandError(
                what, where=where, do="configure it, or set fabric.manage to true", evidence=findings[1:]
            )


def _interfaces(props: Mapping[str, Any]) -> tuple[list[FabricInterface], int]:
    declared = props["interfaces"]
    mtu = int(declared[0]["mtu_bytes"]) if declared else 1500
    return [FabricInterface(netdev=i["netdev"], address=i["address"]) for i in declared], mtu


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
        }
        super().__init__(FabricLinkProvider(), resource_name, props, opts)
