"""Filling in what the settings leave out of the fabric, from what the nodes show; the same answer every time.

Explicit settings win: a node that declares its interfaces keeps them, and gets at most the RDMA devices of these.
A node that declares none gets the interfaces that reach its peers: with a carrier, not the one that ssh comes in by,
with an address on a subnet that the other nodes are on too, and with an RDMA device if any of them has one. Addresses
are never invented.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spark_core.fabric.environment import rdma_policy
from spark_core.fabric.facts import Link, NetworkFacts
from spark_core.fabric.ports import function_of
from spark_core.findings import Finding
from spark_core.settings import FabricInterface, NodeSettings, Settings

Subnet = ipaddress.IPv4Network
_WIRELESS = ("wl", "ww")


@dataclass(frozen=True)
class Discovery:
    """What discovery gave.

    Attributes:
        settings: The settings with the gaps filled in; the very same object if there were none.
        findings: Gaps that could not be filled.
        lines: What was filled in, one line for each node.
    """

    settings: Settings
    findings: tuple[Finding, ...] = ()
    lines: tuple[str, ...] = ()


def discover(settings: Settings, networks: Mapping[str, NetworkFacts]) -> Discovery:
    """Fill in ``nodes[].fabric``, the RDMA devices of its interfaces, and the control addresses of a ring.

    Args:
        networks: The nodes that were seen; the others are left as they are, since their silence is told elsewhere.
    """
    seen = {name: network for name, network in networks.items() if "links" not in network.unread}
    wanted = [node for node in settings.nodes if node.name not in settings.abandoned_nodes]
    nodes = [node for node in wanted if node.name in seen]
    fabrics = {node.name: node.fabric for node in nodes}
    findings: list[Finding] = []
    if len(wanted) > 1 and nodes == wanted and not all(node.fabric for node in nodes):
        fabrics = _interfaces(settings, nodes, seen)
        findings += [_undiscovered(settings, node, seen[node.name]) for node in nodes if not fabrics[node.name]]
    filled, lines = {}, []
    for node in nodes:
        fabric = _with_hcas(settings, fabrics[node.name], seen[node.name])
        changed, told = node, ""
        if fabric != node.fabric:
            changed, told = changed.model_copy(update={"fabric": fabric}), "fabric " + ", ".join(map(_told, fabric))
        if settings.fabric.topology == "ring" and node.control_address is None:
            network = seen[node.name]
            if not network.management or not network.management_address:
                findings.append(_no_control(node))
            else:
                control = {"control_address": network.management_address, "control_netdev": network.management}
                changed = changed.model_copy(update=control)
                told += f"{', ' if told else ''}control {network.management} {network.management_address}"
        if told:
            filled[node.name] = changed
            lines.append(f"{node.name}: {told}")
    if not filled:
        return Discovery(settings, tuple(findings))
    complete = settings.model_copy(update={"nodes": tuple(filled.get(node.name, node) for node in settings.nodes)})
    return Discovery(complete, tuple(findings), tuple(lines))


def _interfaces(
    settings: Settings, nodes: Sequence[NodeSettings], networks: Mapping[str, NetworkFacts]
) -> dict[str, tuple[FabricInterface, ...]]:
    """The interfaces of each node that declares none, the primary one first."""
    found = {node.name: _by_subnet(settings, node, networks[node.name]) for node in nodes}
    sides = {
        subnet: [name for name, subnets in found.items() if subnet in subnets]
        for subnets in found.values()
        for subnet in subnets
    }
    ring = settings.fabric.topology == "ring"
    shared = [
        subnet
        for subnet, names in sides.items()
        if len(names) == (2 if ring else len(nodes)) and len({found[name][subnet].ip for name in names}) == len(names)
    ]
    # One order for all nodes, so that the primary interfaces are on one subnet: that of the node whose owner gave one,
    # else the first node's. On a ring every node has its own.
    first = next((node.name for node in nodes if node.fabric), nodes[0].name)
    return {
        node.name: node.fabric
        or tuple(found[node.name][subnet] for subnet in found[node.name if ring else first] if subnet in shared)
        for node in nodes
    }


def _by_subnet(settings: Settings, node: NodeSettings, network: NetworkFacts) -> dict[Subnet, FabricInterface]:
    """Interfaces that may be the fabric, by their subnet, in the order of the adapter's functions."""
    if node.fabric:
        return {interface.network: interface for interface in node.fabric}
    found: dict[Subnet, FabricInterface] = {}
    candidates = [
        (netdev, link, _addresses(netdev, link, network)) for netdev, link in sorted(network.links.items(), key=_order)
    ]
    with_hca = [row for row in candidates if row[1].hca and row[2]] if settings.hardware == "spark" else []
    for netdev, _, addresses in with_hca or candidates:
        for address in addresses[:1]:
            found.setdefault(ipaddress.IPv4Interface(address).network, FabricInterface(netdev=netdev, address=address))
    return found


def _addresses(netdev: str, link: Link, network: NetworkFacts) -> list[str]:
    """Addresses of an interface that may be its fabric's; none if it is none of the fabric's."""
    management = network.links.get(network.management or "")
    if management is not None and management.hca:
        management = None  # a node that is reached over the fabric itself, through its head
    if netdev == "lo" or netdev.startswith(_WIRELESS) or link is management or not (link.up and link.carrier):
        return []
    reserved = management.networks if management is not None else ()
    return [
        address
        for address, subnet in zip(link.addresses, link.networks, strict=True)
        # A link-local address can change at any time, and a single address is no network.
        if not subnet.is_link_local and subnet.prefixlen < 32 and not any(subnet.overlaps(other) for other in reserved)
    ]


def _order(item: tuple[str, Link]) -> tuple[bool, tuple[int, ...], str]:
    """The first PCI domain first, so that twins stand behind; what has no function stands last."""
    function = function_of(*item)
    return function is None, function or (), item[0]


def _with_hcas(
    settings: Settings, fabric: tuple[FabricInterface, ...], network: NetworkFacts
) -> tuple[FabricInterface, ...]:
    if settings.hardware != "spark" or rdma_policy(settings) == "off":
        return fabric
    devices = {netdev: link.hca for netdev, link in network.links.items()}
    return tuple(
        interface.model_copy(update={"hca": devices[interface.netdev]})
        if interface.hca is None and devices.get(interface.netdev) is not None
        else interface
        for interface in fabric
    )


def _told(interface: FabricInterface) -> str:
    return f"{interface.netdev} {interface.address}" + (f" (hca {interface.hca})" if interface.hca else "")


def _undiscovered(settings: Settings, node: NodeSettings, network: NetworkFacts) -> Finding:
    cabled = [
        f"{netdev} ({', '.join(link.addresses) or 'no address'})"
        for netdev, link in sorted(network.links.items(), key=_order)
        if link.carrier and netdev not in ("lo", network.management) and function_of(netdev, link) is not None
    ]
    found = f"found {', '.join(cabled)}" if cabled else "found no interface with a cable in it"
    if settings.fabric.manage and cabled:
        do = (
            "fabric.manage writes the addresses that the settings give, and there are none to take over: declare "
            "nodes[].fabric with netdev and address on every node"
        )
    elif cabled:
        do = (
            "give the interfaces of all nodes static addresses on one subnet for each half of a port, or declare "
            "nodes[].fabric and set fabric.manage to true"
        )
    else:
        do = "plug the cable in (an uncabled port has no interface at all), or declare nodes[].fabric"
    return Finding(
        "fabric-undiscovered",
        f"{node.name} (nodes[].fabric)",
        f"expected an interface on a subnet that the other nodes are on too, {found}",
        do,
    )


def _no_control(node: NodeSettings) -> Finding:
    return Finding(
        "fabric-undiscovered",
        f"{node.name} (nodes[].control_address)",
        "expected the interface that ssh comes in by, at which the ranks of a ring meet, found none",
        "declare control_address and control_netdev",
    )
