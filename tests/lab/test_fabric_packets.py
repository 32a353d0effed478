"""The packets that prove the fabric, over real links between hosts; and a ring that is found by looking at it.

Only this shows what a kernel answers when a packet is too long for the other end, filtered, or for nobody. It needs
root on Linux and about a minute; it uses labs of its own.

To clean up after an aborted run: ``python -m lab down --instance t-packets`` and ``--instance t-ring``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from spark_core.fabric.checks import fabric_cluster_findings, fabric_findings
from spark_core.fabric.discovery import discover
from spark_core.fabric.packets import probe_nodes
from spark_core.fabric.proof import prove_packets
from spark_core.settings import Settings, read_settings
from tests.config_cases import apply_change, load_base
from tests.lab.fabric_nodes import FabricNodes, fabric_nodes

pytestmark = pytest.mark.lab
PORT0, PORT, TWIN0, TWIN = "enp1s0f0np0", "enp1s0f1np1", "enP2p1s0f0np0", "enP2p1s0f1np1"
PAIR = {"spark-a": 12, "spark-b": 13}
RING = {"spark-a": ("ca", "ab"), "spark-b": ("ab", "bc"), "spark-c": ("bc", "ca")}
"""Which cable is in port 0 and in port 1 of each host, as the lab lays them."""


def settings_with(change: dict[str, Any] | None = None, remove: tuple[str, ...] = ()) -> Settings:
    return read_settings(apply_change(load_base(), {"hardware": "cpu", **(change or {})}, remove))


@pytest.fixture(scope="module")
def pair() -> Iterator[FabricNodes]:
    """Two hosts whose fabric is as the settings say."""
    for nodes in fabric_nodes("t-packets", list(PAIR)):
        for name, number in PAIR.items():
            give(nodes, name, PORT, f"192.168.200.{number}/24")
            give(nodes, name, TWIN, f"192.168.201.{number}/24")
        yield nodes


def give(nodes: FabricNodes, name: str, netdev: str, address: str) -> None:
    nodes.as_root(name, f"ip address add {address} dev {netdev}; ip link set {netdev} mtu 9000 up")


def told(nodes: FabricNodes, settings: Settings) -> list[str]:
    networks, packets = probe_nodes(nodes.transports, settings)
    found = [f for node in settings.nodes for f in fabric_findings(settings, node, networks[node.name])]
    found = [f for f in found if f.code != "address-volatile"]  # these addresses are in no file
    return [f"{f.code} {f.where}: {f.what}" for f in [*found, *fabric_cluster_findings(settings, networks, packets)]]


def test_packets_of_the_declared_mtu_arrive_in_both_directions(pair: FabricNodes) -> None:
    settings = settings_with()
    _, packets = probe_nodes(pair.transports, settings)
    assert [(p.netdev, p.outcome) for found in packets.values() for p in found] == [
        (PORT, "arrived"),
        (TWIN, "arrived"),
    ] * 2
    assert told(pair, settings) == []
    assert {finding.code for finding in prove_packets(pair.transports, settings)} <= {"address-volatile"}


BROKEN = [
    (
        f"ip link set {PORT} mtu 1500",
        f"ip link set {PORT} mtu 9000",
        "mtu-differs spark-b (nodes[].fabric[0]): expected MTU 9000 on enp1s0f1np1, found 1500, while spark-a's "
        "enp1s0f1np1 has 9000; packets of that size from spark-a to spark-b are lost",
    ),
    (
        "nft add table inet t; nft 'add chain inet t i { type filter hook input priority 0; }'; "
        f"nft add rule inet t i iifname {PORT} meta length gt 4000 drop",
        "nft delete table inet t",
        "mtu-not-carried spark-a, spark-b (nodes[].fabric): expected packets of 9000 bytes from spark-a to spark-b "
        "(enp1s0f1np1 to 192.168.200.13) to arrive, found only smaller ones do",
    ),
    (
        "nft add table inet t; nft 'add chain inet t i { type filter hook input priority 0; }'; "
        f"nft add rule inet t i iifname {PORT} ip protocol udp drop",
        "nft delete table inet t",
        "peer-unproven spark-a, spark-b (nodes[].fabric): expected proof that packets from spark-a to spark-b "
        "(enp1s0f1np1 to 192.168.200.13) arrive, found no word of the peer, which is on the link",
    ),
    (
        f"ip link set {PORT} arp off; ip neigh flush dev {PORT}",
        f"ip link set {PORT} arp on",
        "peer-unreachable spark-a, spark-b (nodes[].fabric): expected packets between spark-a and spark-b "
        "(enp1s0f1np1 to 192.168.200.13) to arrive, found nobody at that address",
    ),
    (
        f"ip link set {PORT} down",
        f"ip link set {PORT} up",
        "netdev-down spark-b (nodes[].fabric[0]): expected enp1s0f1np1 to be up, found it down",
    ),
]


@pytest.mark.parametrize(("fault", "cure", "line"), BROKEN, ids=[line.split()[0] for _, _, line in BROKEN])
def test_a_link_that_is_broken_in_one_way_is_told_in_one_line(
    fault: str, cure: str, line: str, pair: FabricNodes
) -> None:
    pair.as_root("spark-a", f"ip neigh flush dev {PORT}")
    pair.as_root("spark-b", fault)
    try:
        found = told(pair, settings_with())
    finally:
        pair.as_root("spark-b", cure)
    assert [text for text in found if not text.startswith("carrier-missing spark-a")] == [line]
    pair.as_root("spark-a", f"ip neigh flush dev {PORT}")


def test_an_address_that_another_machine_took_is_told(pair: FabricNodes) -> None:
    pair.as_root("spark-b", f"ip address del 192.168.200.13/24 dev {PORT}")
    pair.as_root("spark-b", f"ip link add stranger link {PORT} type macvlan mode bridge")
    try:
        pair.as_root(
            "spark-b",
            "ip netns add stranger; ip link set stranger netns stranger; "
            "ip -n stranger address add 192.168.200.13/24 dev stranger; ip -n stranger link set stranger up",
        )
        found = told(pair, settings_with({"fabric": {"manage": True}}))
    finally:
        pair.as_root("spark-b", f"ip netns delete stranger; ip address add 192.168.200.13/24 dev {PORT}")
        pair.as_root("spark-a", f"ip neigh flush dev {PORT}")
    assert [text.partition(": ")[0] for text in found] == ["address-taken spark-b (nodes[].fabric[0].address)"]
    assert f"behind spark-a's {PORT}" in found[0]


@pytest.fixture(scope="module")
def ring() -> Iterator[FabricNodes]:
    """Three hosts in a ring, each cable with a subnet for each of its halves."""
    for nodes in fabric_nodes("t-ring", list(RING), "--topology", "ring"):
        for number, (name, cables) in enumerate(RING.items(), 12):
            for cable, halves in zip(cables, ((PORT0, TWIN0), (PORT, TWIN)), strict=True):
                for half, netdev in enumerate(halves):
                    subnet = 10 * (1 + ["ab", "bc", "ca"].index(cable)) + half
                    give(nodes, name, netdev, f"192.168.{subnet}.{number}/24")
        yield nodes


def test_a_ring_is_found_and_every_cable_of_it_proven(ring: FabricNodes) -> None:
    nodes = [{"name": name, "management_address": name, "user": "spark"} for name in RING]
    settings = settings_with(
        {
            "nodes": nodes,
            "fabric": {"topology": "ring"},
            "groups.main.nodes": list(RING),
            "groups.main.serving": {"pipeline_parallel_size": 3},
        }
    )
    networks, _ = probe_nodes(ring.transports, settings)
    discovery = discover(settings, networks)
    assert discovery.findings == ()
    assert [len(node.fabric) for node in discovery.settings.nodes] == [4, 4, 4]
    assert {node.control_netdev for node in discovery.settings.nodes} == {"eth0"}
    _, packets = probe_nodes(ring.transports, discovery.settings)
    assert [p.outcome for found in packets.values() for p in found] == ["arrived"] * 12
    assert told(ring, discovery.settings) == []
