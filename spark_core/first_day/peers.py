"""Other Sparks on the cables of those that are known, and in what launchers wrote down; pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spark_core.fabric.facts import Link, NetworkFacts
from spark_core.fabric.ports import function_of, twin_of
from spark_core.first_day.survey import Survey


@dataclass(frozen=True)
class Peer:
    """Somebody who answers on a cable and is none of the known nodes.

    Attributes:
        address: Its address there.
        netdev: The interface that it was seen behind.
        node: The node that saw it.
    """

    address: str
    netdev: str
    node: str


def cabled(network: NetworkFacts) -> list[str]:
    """Interfaces of the adapter with a cable in them, the first half of each port first."""
    found = [
        (function_of(name, link) or (9, 9, 9, 9), name)
        for name, link in network.links.items()
        if (link.hca or function_of(name, link) is not None) and link.up and link.carrier and name != network.management
    ]
    return [name for _, name in sorted(found)]


def wake_addresses(network: NetworkFacts) -> list[str]:
    """Own addresses on the cables, whose neighbours are worth a call."""
    return [
        address
        for name in cabled(network)
        for address in network.links[name].addresses
        if not ipaddress.IPv4Interface(address).is_link_local
    ]


def find_peers(networks: Mapping[str, NetworkFacts]) -> list[Peer]:
    """Neighbours on cables that are none of these nodes; of the two halves of a port only one is told."""
    links: list[Link] = [link for network in networks.values() for link in network.links.values()]
    macs = {link.mac for link in links if link.mac}
    addresses = _addresses(networks)
    found: list[Peer] = []
    for node, network in networks.items():
        told: set[str] = set()
        for name in cabled(network):
            twin = twin_of(network.links, name)
            if twin in told:
                continue
            subnets = [subnet for subnet in network.links[name].networks if not subnet.is_link_local]
            for neighbour in network.neighbours:
                if neighbour.netdev != name or neighbour.mac in macs or neighbour.address in addresses:
                    continue
                if any(_inside(neighbour.address, subnet) for subnet in subnets):
                    found.append(Peer(neighbour.address, name, node))
                    told.add(name)
    return list({peer.address: peer for peer in found}.values())


def written_addresses(surveys: Mapping[str, Survey], networks: Mapping[str, NetworkFacts]) -> list[str]:
    """Addresses that launchers wrote down and that no known node has."""
    known = _addresses(networks) | set(surveys) | {survey.name for survey in surveys.values()}
    told = [
        address
        for survey in surveys.values()
        for address in (
            *(word for launcher in survey.launchers for word in launcher.addresses),
            *(host for cluster in survey.clusters if cluster.chosen for host in cluster.hosts),
        )
    ]
    return [address for address in dict.fromkeys(told) if address not in known]


def management_addresses(network: NetworkFacts, head: NetworkFacts) -> list[str]:
    """Addresses off the cables at which a node that was found on a cable may be reached directly.

    Those in the subnet that the head is reached in come first.
    """
    on_cables = set(cabled(network))
    reached = head.links.get(head.management or "", Link(0)).networks
    found: list[tuple[bool, str]] = []
    for name, link in network.links.items():
        bridge = name == "lo" or name.startswith(("docker", "br-", "veth", "virbr"))
        if bridge or name in on_cables or not (link.up and link.carrier):
            continue
        for address in link.addresses:
            interface = ipaddress.IPv4Interface(address)
            if not interface.is_link_local:
                found.append((not any(interface.ip in subnet for subnet in reached), str(interface.ip)))
    return [address for _, address in sorted(found)]


def _addresses(networks: Mapping[str, NetworkFacts]) -> set[str]:
    return {
        address.split("/")[0]
        for network in networks.values()
        for link in network.links.values()
        for address in link.addresses
    }


def _inside(address: str, subnet: ipaddress.IPv4Network) -> bool:
    try:
        return ipaddress.IPv4Address(address) in subnet
    except ValueError:
        return False  # IPv6, or a neighbour that only LLDP has told of


def unwanted(peer: Peer, declined: Sequence[Peer], networks: Mapping[str, NetworkFacts]) -> bool:
    """Whether a peer is one that was declined, seen behind the same interface or its other half."""
    links = networks[peer.node].links
    return any(
        peer.address == other.address or (peer.node == other.node and peer.netdev == twin_of(links, other.netdev))
        for other in declined
    )
