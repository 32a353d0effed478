"""What is wrong between the ends of the fabric: MTU, packets that do not arrive, addresses held twice, cables; pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from spark_core.fabric.facts import NetworkFacts
from spark_core.fabric.packets import PacketProof, ends_of
from spark_core.fabric.ports import twin_of
from spark_core.findings import Finding
from spark_core.settings import FabricInterface, NodeSettings, Settings

End = tuple[str, str]
"""A node and one of its interfaces."""

_CODES = {
    "too-long": "mtu-not-carried",
    "large-lost": "mtu-not-carried",
    "no-neighbour": "peer-unreachable",
    "no-route": "peer-unreachable",
    "silent": "peer-unproven",
    "unread": "peer-unproven",
}
_DO = {
    "mtu-not-carried": "give every switch and interface between them at least that MTU, or lower fabric.mtu_bytes",
    "peer-unreachable": "check that both are on the same cable or switch, and that no packet filter drops ARP",
    "peer-unproven": "let ICMP answers (port unreachable) pass on the fabric, and python3 be on the nodes; what the "
    "fabric carries is otherwise first seen when ranks start",
}


def end_findings(
    settings: Settings, networks: Mapping[str, NetworkFacts], packets: Mapping[str, Sequence[PacketProof]]
) -> list[Finding]:
    """All findings between nodes.

    Args:
        networks: The nodes that were seen; of the others nothing is said.
        packets: Proofs of each node; none where nothing was sent yet.
    """
    proofs = {(p.node, p.netdev, p.address): p for found in packets.values() for p in found}
    taken = dict(_taken(settings, networks))
    miscabled = dict(_cabling(settings, networks, proofs))
    return [
        *_alone(settings),
        *taken.values(),
        *miscabled.values(),
        *_mtu(settings, networks, proofs),
        *_lost(settings, networks, proofs, {*taken, *miscabled}),
    ]


def _alone(settings: Settings) -> Iterator[Finding]:
    """Interfaces that lead to no other node; NCCL would try to use their RDMA devices all the same."""
    for node in settings.nodes:
        others = [n for n in settings.nodes if n is not node and n.fabric and n.name not in settings.abandoned_nodes]
        if not others or node.name in settings.abandoned_nodes:
            continue
        joined = {own.netdev for own, _, _ in ends_of(settings, node)}
        for place, interface in enumerate(node.fabric):
            if interface.netdev not in joined:
                have = sorted({str(other.network) for peer in others for other in peer.fabric})
                yield Finding(
                    "subnet-alone",
                    f"{node.name} (nodes[].fabric[{place}].address)",
                    f"expected another node on {interface.network}, found them on {', '.join(have)}",
                    "give both ends of a cable addresses on one subnet, with the same prefix length",
                )


def _taken(settings: Settings, networks: Mapping[str, NetworkFacts]) -> Iterator[tuple[End, Finding]]:
    for node in settings.nodes:
        links = networks[node.name].links if node.name in networks else {}
        own = {link.mac for link in links.values()}
        for place, interface in enumerate(node.fabric):
            if interface.netdev not in links:
                continue  # its own hardware address is not known
            holders = [
                f"{name}'s {netdev}"
                for name, network in networks.items()
                for netdev, link in network.links.items()
                if name != node.name and interface.ip in (address.split("/")[0] for address in link.addresses)
            ]
            # Linux answers ARP for any address of its own on any interface, so any of the node's is right.
            holders += [
                f"{seen.mac} behind {other.name}'s {seen.netdev}"
                for other in settings.nodes
                if other.name in networks
                for seen in networks[other.name].neighbours
                if seen.address == interface.ip and seen.mac not in own
                if seen.netdev in {far.netdev for far in other.fabric}
            ]
            if holders:
                yield (
                    (node.name, interface.netdev),
                    Finding(
                        "address-taken",
                        f"{node.name} (nodes[].fabric[{place}].address)",
                        f"expected {interface.ip} to be its own, found it at {holders[0]}",
                        "give one of the two another address",
                    ),
                )


def _mtu(
    settings: Settings, networks: Mapping[str, NetworkFacts], proofs: Mapping[tuple[str, str, str], PacketProof]
) -> Iterator[Finding]:
    wanted = settings.fabric.mtu_bytes
    for node in settings.nodes:
        for place, interface in enumerate(node.fabric):
            link = networks[node.name].links.get(interface.netdev) if node.name in networks else None
            if link is None or link.mtu_bytes == wanted or settings.fabric.manage:
                continue
            text = f"expected MTU {wanted} on {interface.netdev}, found {link.mtu_bytes}"
            for own, peer, far in ends_of(settings, node):
                end = networks[peer.name].links.get(far.netdev) if peer.name in networks else None
                if own is not interface or end is None:
                    continue
                if end.mtu_bytes != link.mtu_bytes:
                    text += f", while {peer.name}'s {far.netdev} has {end.mtu_bytes}"
                lost = proofs.get((peer.name, far.netdev, interface.ip))
                if lost is not None and lost.outcome == "large-lost":
                    text += f"; packets of that size from {peer.name} to {node.name} are lost"
            yield Finding(
                "mtu-differs",
                f"{node.name} (nodes[].fabric[{place}])",
                text,
                "configure it, set fabric.manage to true, or change fabric.mtu_bytes",
            )


def _lost(
    settings: Settings,
    networks: Mapping[str, NetworkFacts],
    proofs: Mapping[tuple[str, str, str], PacketProof],
    explained: set[End],
) -> Iterator[Finding]:
    """Packets that do not arrive; not at ends whose own finding explains that."""
    told: dict[tuple[str, frozenset[End]], list[PacketProof]] = {}
    for node in settings.nodes:
        for own, peer, far in ends_of(settings, node):
            proof = proofs.get((node.name, own.netdev, far.ip))
            code = _CODES.get(proof.outcome) if proof is not None else None
            ends = frozenset({(node.name, own.netdev), (peer.name, far.netdev)})
            if proof is None or code is None or ends & explained:
                continue
            if not (_works(networks, node, own) and _works(networks, peer, far)):
                continue
            mtus = {networks[name].links[netdev].mtu_bytes for name, netdev in ends}
            if code == "mtu-not-carried" and mtus != {settings.fabric.mtu_bytes}:
                continue  # the MTU itself is told
            told.setdefault((code, ends), []).append(proof)
    for (code, ends), lost in told.items():
        if code == "peer-unproven" and ("peer-unreachable", ends) in told:
            continue  # one direction says why the other is silent
        yield Finding(
            code, f"{lost[0].node}, {lost[0].peer} (nodes[].fabric)", _lost_text(settings, code, lost), _DO[code]
        )


def _lost_text(settings: Settings, code: str, lost: Sequence[PacketProof]) -> str:
    first = lost[0]
    both = len(lost) > 1
    way = f"between {first.node} and {first.peer}" if both else f"from {first.node} to {first.peer}"
    place = f"{way} ({first.netdev} to {first.address})"
    if code == "mtu-not-carried":
        return f"expected packets of {settings.fabric.mtu_bytes} bytes {place} to arrive, found only smaller ones do"
    if code == "peer-unreachable":
        why = "no route" if first.outcome == "no-route" else "nobody at that address"
        return f"expected packets {place} to arrive, found {why}"
    why = "the probe gave no answer" if first.outcome == "unread" else "no word of the peer, which is on the link"
    return f"expected proof that packets {place} arrive, found {why}"


def _works(networks: Mapping[str, NetworkFacts], node: NodeSettings, interface: FabricInterface) -> bool:
    """Whether an end is there, so that lost packets are a finding of their own and not what follows from another."""
    link = networks[node.name].links.get(interface.netdev) if node.name in networks else None
    return link is not None and link.up and link.carrier and interface.address in link.addresses


def _cabling(
    settings: Settings, networks: Mapping[str, NetworkFacts], proofs: Mapping[tuple[str, str, str], PacketProof]
) -> Iterator[tuple[End, Finding]]:
    for node in settings.nodes:
        if node.name not in networks:
            continue
        for place, interface in enumerate(node.fabric):
            declared: set[End] = set()
            arrived = False
            for own, peer, far in ends_of(settings, node):
                if own is interface and peer.name in networks:
                    declared.add((peer.name, far.netdev))
                    twin = twin_of(networks[peer.name].links, far.netdev)
                    declared |= {(peer.name, twin)} if twin is not None else set()
                    proof = proofs.get((node.name, own.netdev, far.ip))
                    arrived = arrived or (proof is not None and proof.outcome == "arrived")
            seen = _far_ends(node, interface.netdev, networks)
            if not seen or not declared or arrived or seen & declared:
                continue
            names = " or ".join(f"{name}'s {netdev}" for name, netdev in sorted(seen))
            wanted = " or ".join(f"{name}'s {netdev}" for name, netdev in sorted(declared))
            yield (
                (node.name, interface.netdev),
                Finding(
                    "cabling",
                    f"{node.name} (nodes[].fabric[{place}])",
                    f"expected {wanted} at the other end of {interface.netdev}, found {names}",
                    "move the cable, or correct the interfaces in nodes[].fabric",
                ),
            )


def _far_ends(node: NodeSettings, netdev: str, networks: Mapping[str, NetworkFacts]) -> set[End]:
    """Who was seen at the other end of an interface, as far as it is a node of ours."""
    found = set()
    for seen in networks[node.name].neighbours:
        if seen.netdev != netdev:
            continue
        for name, network in networks.items():
            if name == node.name:
                continue
            holders = [other for other, link in network.links.items() if link.mac and link.mac == seen.mac]
            if seen.far_netdev in network.links and (holders or seen.far_host == name):
                found.add((name, seen.far_netdev))
            else:
                found |= {(name, other) for other in holders}
    return found
