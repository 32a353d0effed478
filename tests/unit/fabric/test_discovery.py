"""What is left out of the settings is filled in from what the nodes show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from spark_core.fabric.discovery import Discovery, discover
from spark_core.fabric.facts import Link, NetworkFacts
from spark_core.settings import Settings
from tests.unit.fabric.networks import (
    MANAGEMENT,
    PORT,
    PORT0,
    TWIN,
    TWIN0,
    changed,
    pair,
    settings_with,
    spark,
)

UNDECLARED = ("nodes[0].fabric", "nodes[1].fabric")
SILENT_FABRIC = {f"nodes[{n}].fabric[{i}].hca": None for n in (0, 1) for i in (0, 1)}


def found(
    networks: Mapping[str, NetworkFacts], change: Mapping[str, Any] | None = None, remove: tuple[str, ...] = UNDECLARED
) -> Discovery:
    return discover(settings_with(change, remove), networks)


def fabrics(settings: Settings) -> dict[str, list[tuple[str, str, str | None]]]:
    return {node.name: [(i.netdev, i.address, i.hca) for i in node.fabric] for node in settings.nodes}


def test_settings_that_say_everything_stay_the_very_same() -> None:
    settings = settings_with()
    assert discover(settings, pair()) == Discovery(settings)
    assert discover(settings, pair()).settings is settings


def test_the_cabled_interfaces_of_a_pair_are_found_with_their_rdma_devices() -> None:
    discovery = found(pair())
    assert fabrics(discovery.settings) == fabrics(settings_with())
    assert discovery.findings == ()
    assert discovery.lines == (
        "spark-a: fabric enp1s0f1np1 192.168.200.12/24 (hca rocep1s0f1), "
        "enP2p1s0f1np1 192.168.201.12/24 (hca roceP2p1s0f1)",
        "spark-b: fabric enp1s0f1np1 192.168.200.13/24 (hca rocep1s0f1), "
        "enP2p1s0f1np1 192.168.201.13/24 (hca roceP2p1s0f1)",
    )


def test_what_is_found_does_not_depend_on_the_order_in_which_it_is_seen() -> None:
    networks = {
        name: replace(network, links=dict(reversed(list(network.links.items()))))
        for name, network in reversed(list(pair().items()))
    }
    assert found(networks).settings == found(pair()).settings


def other_cage(network: NetworkFacts) -> NetworkFacts:
    """The cable in port 0 instead of port 1."""
    links = dict(network.links)
    for here, there in ((PORT, PORT0), (TWIN, TWIN0)):
        links[there] = replace(links[there], addresses=links[here].addresses, carrier=True, mtu_bytes=9000)
        links[here] = replace(links[here], addresses=(), carrier=False)
    return replace(network, links=links)


def test_the_nodes_of_a_pair_may_use_different_cages() -> None:
    networks = pair()
    networks["spark-b"] = other_cage(networks["spark-b"])
    assert fabrics(found(networks).settings)["spark-b"] == [
        (PORT0, "192.168.200.13/24", "rocep1s0f0"),
        (TWIN0, "192.168.201.13/24", "roceP2p1s0f0"),
    ]


def test_the_primary_interfaces_are_on_one_subnet_whatever_their_order_on_a_node() -> None:
    networks = pair()
    b = networks["spark-b"]
    networks["spark-b"] = replace(
        b,
        links={
            **b.links,
            PORT: replace(b.links[PORT], addresses=b.links[TWIN].addresses),
            TWIN: replace(b.links[TWIN], addresses=b.links[PORT].addresses),
        },
    )
    settings = found(networks).settings
    assert [str(node.fabric[0].network) for node in settings.nodes] == ["192.168.200.0/24"] * 2
    assert settings.nodes[1].fabric[0].netdev == TWIN


def test_a_half_without_an_address_is_left_out() -> None:
    networks = {name: changed(network, TWIN, addresses=()) for name, network in pair().items()}
    assert {node: [row[0] for row in rows] for node, rows in fabrics(found(networks).settings).items()} == {
        "spark-a": [PORT],
        "spark-b": [PORT],
    }


def test_a_node_that_declares_its_interfaces_keeps_them_and_the_other_follows() -> None:
    discovery = found(pair(), {"nodes[0].fabric": [{"netdev": TWIN, "address": "192.168.201.12/24"}]}, UNDECLARED[1:])
    assert fabrics(discovery.settings) == {
        "spark-a": [(TWIN, "192.168.201.12/24", "roceP2p1s0f1")],
        "spark-b": [(TWIN, "192.168.201.13/24", "roceP2p1s0f1")],
    }


def test_rdma_devices_that_are_left_out_are_filled_in() -> None:
    discovery = found(pair(), SILENT_FABRIC, ())
    assert fabrics(discovery.settings) == fabrics(settings_with())
    assert discovery.lines[0] == (
        "spark-a: fabric enp1s0f1np1 192.168.200.12/24 (hca rocep1s0f1), "
        "enP2p1s0f1np1 192.168.201.12/24 (hca roceP2p1s0f1)"
    )


@pytest.mark.parametrize("change", [{"hardware": "cpu"}, {"fabric": {"rdma": "off"}}])
def test_without_rdma_no_device_is_filled_in(change: dict[str, Any]) -> None:
    settings = settings_with({**SILENT_FABRIC, **change})
    assert discover(settings, pair()).settings is settings
    assert {row[2] for rows in fabrics(found(pair(), change).settings).values() for row in rows} == {None}


def test_an_interface_without_a_carrier_or_an_address_is_none_of_the_fabric() -> None:
    networks = {name: changed(network, PORT, carrier=False) for name, network in pair().items()}
    assert [row[0] for row in fabrics(found(networks).settings)["spark-a"]] == [TWIN]
    networks = {name: changed(network, PORT, up=False) for name, network in pair().items()}
    assert [row[0] for row in fabrics(found(networks).settings)["spark-a"]] == [TWIN]


def test_the_management_network_is_never_the_fabric() -> None:
    networks = {
        name: replace(
            network, links={**network.links, "eth9": Link(1500, (f"10.1.230.{100 + number}/24",), True)}, hcas={}
        )
        for number, (name, network) in enumerate(pair().items())
    }
    for name, network in networks.items():
        bare = {n: replace(link, hca=None) for n, link in network.links.items() if n not in (PORT, TWIN)}
        networks[name] = replace(network, links=bare)
    discovery = found(networks, {"hardware": "cpu"})
    assert [finding.code for finding in discovery.findings] == ["fabric-undiscovered"] * 2


def cpu_host(number: int) -> NetworkFacts:
    """A host without RDMA, as the lab's are."""
    links = {
        "lo": Link(65536, ("127.0.0.1/8",), True),
        "eth0": Link(1500, (f"10.99.0.{number}/24",), True),
        PORT: Link(9000, (f"192.168.200.{number}/24",), True),
        TWIN: Link(9000, (f"192.168.201.{number}/24",), True),
        "docker0": Link(1500, ("172.17.0.1/16",), True),
        "wlan0": Link(1500, (f"192.168.7.{number}/24",), True),
        "tailscale0": Link(1280, (f"100.64.0.{number}/32",), True),
    }
    return NetworkFacts(links, management="eth0", management_address=f"10.99.0.{number}")


def test_hosts_without_rdma_are_joined_by_the_subnets_that_they_share() -> None:
    discovery = found({"spark-a": cpu_host(12), "spark-b": cpu_host(13)}, {"hardware": "cpu"})
    assert fabrics(discovery.settings)["spark-a"] == [
        (PORT, "192.168.200.12/24", None),
        (TWIN, "192.168.201.12/24", None),
    ]


def test_sparks_whose_rdma_is_not_there_are_joined_all_the_same() -> None:
    discovery = found({"spark-a": cpu_host(12), "spark-b": cpu_host(13)})
    assert [row[0] for row in fabrics(discovery.settings)["spark-b"]] == [PORT, TWIN]


def test_a_node_that_is_reached_over_the_fabric_itself_is_found() -> None:
    networks = pair()
    networks["spark-b"] = replace(
        networks["spark-b"], management=PORT, management_address="192.168.200.13", controller="192.168.200.12"
    )
    assert fabrics(found(networks).settings)["spark-b"][0][0] == PORT


def test_nothing_cabled_is_told_with_what_to_do() -> None:
    bare = {
        name: replace(
            network,
            links={n: link for n, link in network.links.items() if n not in (PORT, TWIN, PORT0, TWIN0)},
            hcas={},
            gids=(),
        )
        for name, network in pair().items()
    }
    discovery = found(bare)
    assert [finding.line for finding in discovery.findings] == [
        f"{node} (nodes[].fabric): expected an interface on a subnet that the other nodes are on too, "
        "found no interface with a cable in it [fabric-undiscovered]\n"
        "  do: plug the cable in (an uncabled port has no interface at all), or declare nodes[].fabric"
        for node in ("spark-a", "spark-b")
    ]
    assert discovery.lines == ()


@pytest.mark.parametrize(
    ("addresses", "shown"),
    [((), "no address"), (("169.254.35.62/16",), "169.254.35.62/16")],
    ids=["none", "link-local"],
)
@pytest.mark.parametrize(
    ("manage", "do"), [(False, "give the interfaces of all nodes static"), (True, "fabric.manage writes the addresses")]
)
def test_addresses_are_never_invented(addresses: tuple[str, ...], shown: str, manage: bool, do: str) -> None:
    networks = {
        name: changed(changed(network, PORT, addresses=addresses), TWIN, addresses=())
        for name, network in pair().items()
    }
    discovery = found(networks, {"fabric": {"manage": manage}})
    assert [finding.code for finding in discovery.findings] == ["fabric-undiscovered"] * 2
    assert f"found enp1s0f1np1 ({shown}), enP2p1s0f1np1 (no address)" in discovery.findings[0].what
    assert discovery.findings[0].do.startswith(do)
    assert fabrics(discovery.settings) == {"spark-a": [], "spark-b": []}


def test_nodes_on_different_subnets_do_not_reach_each_other() -> None:
    networks = pair()
    networks["spark-b"] = changed(
        changed(networks["spark-b"], PORT, addresses=("10.0.1.13/24",)), TWIN, addresses=("10.0.2.13/24",)
    )
    assert [finding.code for finding in found(networks).findings] == ["fabric-undiscovered"] * 2


@pytest.mark.parametrize("seen", [["spark-a"], []])
def test_while_a_node_was_not_seen_nothing_is_guessed(seen: list[str]) -> None:
    discovery = found({name: pair()[name] for name in seen})
    assert discovery.findings == ()
    assert discovery.settings == settings_with(remove=UNDECLARED)


def test_interfaces_that_could_not_be_read_are_not_missing() -> None:
    networks = pair()
    networks["spark-b"] = replace(networks["spark-b"], links={}, unread={"links": "could not read"})
    assert found(networks).findings == ()


def test_a_single_node_needs_no_fabric() -> None:
    change = {"groups.main.nodes": ["spark-a"], "groups.main.serving.tensor_parallel_size": 1}
    settings = settings_with(change, ("nodes[1]", "nodes[0].fabric"))
    assert discover(settings, {"spark-a": spark(12)}) == Discovery(settings)


RING_CABLES = {"spark-a": ("ab", "ca"), "spark-b": ("bc", "ab"), "spark-c": ("ca", "bc")}
"""Which cable is in port 0 and in port 1 of each node."""


def ring_node(name: str, number: int) -> NetworkFacts:
    network = spark(number)
    links = dict(network.links)
    for port, halves in enumerate(((PORT0, TWIN0), (PORT, TWIN))):
        cable = 10 * (1 + ["ab", "bc", "ca"].index(RING_CABLES[name][port]))
        for half, netdev in enumerate(halves):
            links[netdev] = replace(links[netdev], addresses=(f"192.168.{cable + half}.{number}/24",), carrier=True)
    return replace(network, links=links)


RING = {name: ring_node(name, number) for number, name in enumerate(RING_CABLES, 12)}
RING_SETTINGS: dict[str, Any] = {
    "nodes": [
        {"name": name, "management_address": f"10.1.230.{180 + n}", "user": "aurora"}
        for n, name in enumerate(RING_CABLES)
    ],
    "fabric": {"topology": "ring"},
    "groups.main.nodes": list(RING_CABLES),
    "groups.main.serving.tensor_parallel_size": 1,
    "groups.main.serving.pipeline_parallel_size": 3,
}


def test_a_ring_of_three_is_found_with_the_addresses_at_which_its_ranks_meet() -> None:
    discovery = found(RING, RING_SETTINGS, ())
    assert discovery.findings == ()
    assert {node: [row[:2] for row in rows] for node, rows in fabrics(discovery.settings).items()} == {
        "spark-a": [
            (PORT0, "192.168.10.12/24"),
            (PORT, "192.168.30.12/24"),
            (TWIN0, "192.168.11.12/24"),
            (TWIN, "192.168.31.12/24"),
        ],
        "spark-b": [
            (PORT0, "192.168.20.13/24"),
            (PORT, "192.168.10.13/24"),
            (TWIN0, "192.168.21.13/24"),
            (TWIN, "192.168.11.13/24"),
        ],
        "spark-c": [
            (PORT0, "192.168.30.14/24"),
            (PORT, "192.168.20.14/24"),
            (TWIN0, "192.168.31.14/24"),
            (TWIN, "192.168.21.14/24"),
        ],
    }
    assert [(node.control_netdev, node.rank_address) for node in discovery.settings.nodes] == [
        (MANAGEMENT, "10.1.230.180"),
        (MANAGEMENT, "10.1.230.181"),
        (MANAGEMENT, "10.1.230.182"),
    ]
    assert discovery.lines[0].endswith("(hca roceP2p1s0f1), control enP7s7 10.1.230.180")


def test_a_ring_that_is_taken_for_a_switch_shares_no_subnet() -> None:
    discovery = found(RING, {**RING_SETTINGS, "fabric": {"topology": "switch"}}, ())
    assert {finding.code for finding in discovery.findings} == {"fabric-undiscovered"}


def test_a_declared_control_address_stands() -> None:
    settings = found(RING, RING_SETTINGS, ()).settings
    assert discover(settings, RING).settings is settings


def test_a_ring_whose_management_interface_is_not_known_is_told() -> None:
    networks = {name: replace(network, management=None, management_address="") for name, network in RING.items()}
    [finding, *_] = found(networks, RING_SETTINGS, ()).findings
    assert (finding.code, finding.where) == ("fabric-undiscovered", "spark-a (nodes[].control_address)")


def test_a_switch_of_three_has_every_node_on_every_subnet() -> None:
    change = {**RING_SETTINGS, "fabric": {"topology": "switch"}}
    networks = {name: spark(12 + n) for n, name in enumerate(RING_CABLES)}
    discovery = found(networks, change, ())
    assert {len(node.fabric) for node in discovery.settings.nodes} == {2}
    assert discovery.settings.nodes[2].control_address is None


def test_a_node_that_is_given_up_is_not_waited_for() -> None:
    change = {
        "abandoned_nodes": ["spark-b"],
        "groups.main.nodes": ["spark-a"],
        "groups.main.serving.tensor_parallel_size": 1,
    }
    assert found({"spark-a": spark(12)}, change).findings == ()
