"""What is wrong with the fabric of one node, and of the nodes together, from what was seen; pure.

With ``fabric.manage`` what ``up`` puts right (addresses, MTU, a link that is down) is no failure. One cause is told
once: what only follows from it (no GID without an address, no answer without a carrier) is not.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

from spark_core.fabric.ends import end_findings
from spark_core.fabric.environment import rdma_policy
from spark_core.fabric.facts import Link, NetworkFacts
from spark_core.fabric.foreign import foreign_configuration, persistent
from spark_core.fabric.packets import PacketProof
from spark_core.fabric.ports import functions_left, twin_of
from spark_core.findings import Finding, Severity
from spark_core.settings import FabricInterface, NodeSettings, Settings

FULL_SPEED_MBIT_S = 200_000

_CONFIGURE = "configure it, or set fabric.manage to true"


def fabric_findings(settings: Settings, node: NodeSettings, network: NetworkFacts) -> list[Finding]:
    """What is wrong with the declared (or discovered) interfaces of one node."""
    if not node.fabric:
        return []
    findings = [
        Finding("fact-unreadable", node.name, text, told_as="fail" if part == "links" else None)
        for part, text in network.unread.items()
    ]
    if "links" in network.unread:
        return findings
    for place, interface in enumerate(node.fabric):
        findings += _interface(settings, node, place, interface, network)
    findings += _halves(node, network)
    findings += _rdma_absent(settings, node, network)
    if settings.fabric.manage:
        findings += [
            Finding("netplan-foreign", f"{node.name} (fabric.take_over)", found.what, found.do)
            for found in foreign_configuration(settings.fabric, [i.netdev for i in node.fabric], network)
        ]
    return findings


def fabric_cluster_findings(
    settings: Settings, networks: Mapping[str, NetworkFacts], packets: Mapping[str, Sequence[PacketProof]]
) -> list[Finding]:
    """What is wrong between nodes: MTU at both ends, packets that do not arrive, addresses, cables."""
    readable = {name: network for name, network in networks.items() if "links" not in network.unread}
    return end_findings(settings, readable, packets)


def _interface(
    settings: Settings, node: NodeSettings, place: int, interface: FabricInterface, network: NetworkFacts
) -> Iterator[Finding]:
    where, netdev = f"{node.name} (nodes[].fabric[{place}])", interface.netdev
    link, managed = network.links.get(netdev), settings.fabric.manage
    if link is None:
        yield _missing(where, netdev, network)
        return
    if managed and netdev == network.management:
        yield Finding(
            "netdev-is-management",
            where,
            f"expected a fabric interface, found that {netdev} is the one we are connected by",
            "name the fabric's interface; the management interface is never changed",
        )
    elif not link.up:
        # Only a link that is up knows whether it has a carrier; netplan brings a managed one up.
        down = f"expected {netdev} to be up, found it down"
        if managed:
            yield Finding("netdev-down", where, f"{down}; up brings it up, its cable is not checked before", "", "warn")
        else:
            yield Finding("netdev-down", where, down, "bring it up, or set fabric.manage to true")
    elif not link.carrier:
        yield Finding(
            "carrier-missing",
            where,
            f"expected a carrier on {netdev}, found none",
            "check the cable and the other node; a port whose second half is lost needs a full power cycle",
        )
    elif settings.hardware == "spark" and link.speed_mbit_s is not None and link.speed_mbit_s < FULL_SPEED_MBIT_S:
        yield Finding(
            "speed-low",
            where,
            f"expected {FULL_SPEED_MBIT_S // 1000} Gb/s on {netdev}, found {link.speed_mbit_s // 1000} Gb/s",
            "force the switch's port to 200G, or use a 200G cable",
        )
    # networkd and NetworkManager give an address only to a link with a carrier: without one it follows from that.
    if not managed and link.up and link.carrier and interface.address not in link.addresses:
        have = ", ".join(link.addresses) or "no address"
        yield Finding("address-missing", where, f"expected {interface.address} on {netdev}, found {have}", _CONFIGURE)
    yield from _subnets(node, where, interface, network)
    if not managed and interface.address in link.addresses:
        yield from _volatile(where, interface, network)
    policy = rdma_policy(settings)
    if policy != "off":
        yield from _hca(where, interface, link, network, None if policy == "required" else "warn")


def _missing(where: str, netdev: str, network: NetworkFacts) -> Finding:
    left = functions_left(network.links, netdev)
    if left:
        return Finding(
            "twin-gone",
            where,
            f"expected the interface {netdev}, found it gone while {', '.join(left)} of its adapter are there",
            "power cycle needed: shut the node down, take its power away for half a minute, start it again; a warm "
            "reboot can drop half of a port, and neither a reboot nor a retry brings it back",
        )
    have = ", ".join(sorted(name for name in network.links if name != "lo"))
    return Finding(
        "netdev-missing",
        where,
        f"expected the interface {netdev}, found only {have}",
        "plug the cable in (an uncabled port has no interface at all), or correct the name",
    )


def _subnets(node: NodeSettings, where: str, interface: FabricInterface, network: NetworkFacts) -> Iterator[Finding]:
    ours = {other.netdev for other in node.fabric}
    covers_controller = _holds(interface.network, network.controller) and network.management not in ours
    for name, link in sorted(network.links.items()):
        shared = [address for address in link.addresses if _overlaps(interface, address)]
        if name in (interface.netdev, "lo") or not link.up or not shared:
            continue
        if name == network.management:
            covers_controller = False  # it follows from this
            yield Finding(
                "subnet-of-management",
                where,
                f"expected {interface.address} outside the network that the node is reached by, found {shared[0]} on "
                f"{name}",
                "give the fabric a subnet of its own",
            )
        elif name not in ours:
            yield Finding(
                "subnet-shared",
                where,
                f"expected {interface.network} on {interface.netdev} alone, found {shared[0]} on {name}",
                "two interfaces of one node must be on different subnets: give that one another, or none",
            )
    # Through a jump host the connection comes from the fabric itself; the interface that carries it is then our own.
    if covers_controller:
        yield Finding(
            "subnet-of-management",
            where,
            f"expected {interface.address} outside the network of the machine that deploys, found it at "
            f"{network.controller}",
            "give the fabric a subnet of its own: the node would look for us behind its fabric",
        )


def _volatile(where: str, interface: FabricInterface, network: NetworkFacts) -> Iterator[Finding]:
    if ipaddress.IPv4Address(interface.ip).is_link_local:
        yield Finding(
            "address-volatile",
            where,
            f"expected a static address on {interface.netdev}, found the link-local {interface.address}, which can "
            "change",
            "give it a static one in netplan; the GID that RDMA uses follows it",
        )
    elif not persistent(interface.netdev, interface.address, network):
        yield Finding(
            "address-volatile",
            where,
            f"expected {interface.address} in the boot configuration, found it on {interface.netdev} only",
            "put it into a netplan file, or set fabric.manage to true",
        )


def _hca(
    where: str, interface: FabricInterface, link: Link, network: NetworkFacts, told_as: Severity | None
) -> Iterator[Finding]:
    if interface.hca is None or "rdma" in network.unread:
        return
    hca = network.hcas.get(interface.hca)
    if hca is None or hca.netdev not in (None, interface.netdev):
        found = f"it at {hca.netdev}" if hca is not None else ", ".join(sorted(network.hcas)) or "none"
        yield Finding(
            "hca-missing",
            where,
            f"expected the RDMA device {interface.hca} at {interface.netdev}, found {found}",
            "correct nodes[].fabric[].hca (ibdev2netdev shows the pairs)",
        )
        return
    if not (link.up and link.carrier):
        return
    if hca.state != "ACTIVE":
        yield Finding(
            "hca-inactive",
            where,
            f"expected an active port of {interface.hca}, found it {hca.state.lower()} while {interface.netdev} has a "
            "carrier",
            "`rdma link show` on that node tells more; a power cycle of the node restarts its adapter",
            told_as,
        )
    elif interface.address in link.addresses and "gids" not in network.unread:
        own = [gid.address for gid in network.gids if gid.hca == interface.hca]
        if interface.ip not in own:
            yield Finding(
                "gid-missing",
                where,
                f"expected a RoCE v2 GID of {interface.ip} on {interface.hca}, found {', '.join(own) or 'none'}",
                "take the interface down and up again; the kernel makes the GID from the interface's IPv4 address",
                told_as,
            )


def _halves(node: NodeSettings, network: NetworkFacts) -> Iterator[Finding]:
    declared = {interface.netdev for interface in node.fabric}
    for place, interface in enumerate(node.fabric):
        twin = twin_of(network.links, interface.netdev)
        if twin is None or twin in declared or not network.links[twin].carrier:
            continue
        have = ", ".join(network.links[twin].addresses)
        state = f"{have}, but undeclared" if have else "a carrier and no address"
        yield Finding(
            "twin-unaddressed",
            f"{node.name} (nodes[].fabric[{place}])",
            f"expected both halves of a port, found {interface.netdev} alone; {twin} has {state}",
            "give it an address on a subnet of its own and declare it too: one half moves half of the bandwidth",
        )


def _rdma_absent(settings: Settings, node: NodeSettings, network: NetworkFacts) -> Iterator[Finding]:
    policy = rdma_policy(settings)
    present = [i.netdev for i in node.fabric if i.netdev in network.links]
    if policy == "off" or "rdma" in network.unread or not present or len(settings.nodes) < 2:
        return
    if not any(interface.hca for interface in node.fabric):
        yield Finding(
            "rdma-absent",
            f"{node.name} (fabric.rdma)",
            f"expected an RDMA device for {', '.join(present)}, found {', '.join(sorted(network.hcas)) or 'none'}",
            "check that the mlx5_ib module is loaded, or set fabric.rdma to preferred or off",
            None if policy == "required" else "warn",
        )


def _overlaps(interface: FabricInterface, address: str) -> bool:
    return interface.network.overlaps(ipaddress.IPv4Interface(address).network)


def _holds(network: ipaddress.IPv4Network, address: str) -> bool:
    try:
        return ipaddress.IPv4Address(address) in network
    except ValueError:
        return False  # IPv6
