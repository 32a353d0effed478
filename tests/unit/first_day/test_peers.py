"""Who else is on the cables, and whom launchers have written down."""

from __future__ import annotations

from dataclasses import replace

from spark_core.fabric.facts import Link, Neighbour, NetworkFacts
from spark_core.first_day.peers import (
    Peer,
    cabled,
    find_peers,
    management_addresses,
    unwanted,
    wake_addresses,
    written_addresses,
)
from spark_core.first_day.survey import LauncherFolder, Survey, WrittenCluster
from tests.unit.fabric.networks import MANAGEMENT, PORT, PORT0, TWIN, changed, spark

STRANGER = "02:00:5e:00:99:01"


def with_neighbours(network: NetworkFacts, *neighbours: Neighbour) -> NetworkFacts:
    return replace(network, neighbours=neighbours)


def test_cables_are_those_with_a_carrier_the_first_half_first() -> None:
    assert cabled(spark(12)) == [PORT, TWIN]
    assert cabled(changed(spark(12), TWIN, carrier=False)) == [PORT]
    assert wake_addresses(spark(12)) == ["192.168.200.12/24", "192.168.201.12/24"]
    assert wake_addresses(changed(spark(12), PORT, addresses=("169.254.3.4/16",))) == ["192.168.201.12/24"]


def test_a_stranger_on_the_cable_is_told_once_for_both_halves_of_a_port() -> None:
    network = with_neighbours(
        spark(12),
        Neighbour(PORT, "192.168.200.13", STRANGER),
        Neighbour(TWIN, "192.168.201.13", "02:00:5e:00:99:02"),
        Neighbour(PORT, "fe80::1", STRANGER),
        Neighbour(PORT, "10.9.9.9", STRANGER),
        Neighbour(MANAGEMENT, "10.1.230.1", "02:00:5e:00:99:03"),
    )
    assert find_peers({"a": network}) == [Peer("192.168.200.13", PORT, "a")]


def test_a_known_node_is_no_peer_by_address_or_by_hardware_address() -> None:
    other = spark(13)
    by_mac = Neighbour(PORT, "192.168.200.77", other.links[PORT].mac)
    by_address = Neighbour(TWIN, "192.168.201.13", STRANGER)
    assert find_peers({"a": with_neighbours(spark(12), by_mac, by_address), "b": other}) == []
    assert len(find_peers({"a": with_neighbours(spark(12), by_mac)})) == 1


def test_one_that_was_declined_is_not_asked_for_again_behind_the_other_half() -> None:
    networks = {"a": spark(12)}
    declined = [Peer("192.168.200.13", PORT, "a")]
    assert unwanted(Peer("192.168.200.13", PORT, "a"), declined, networks)
    assert unwanted(Peer("192.168.201.13", TWIN, "a"), declined, networks)
    assert not unwanted(Peer("192.168.200.14", PORT, "a"), declined, networks)
    assert not unwanted(Peer("192.168.210.13", PORT0, "a"), declined, networks)


def test_addresses_in_launchers_files_that_no_node_has_are_told() -> None:
    survey = Survey(
        "spark-a",
        launchers=(LauncherFolder("/x", {"CLUSTER_NODES": "192.168.200.12, 192.168.200.13"}),),
        clusters=(
            WrittenCluster("pair.yaml", ("10.1.230.180", "10.1.230.181"), chosen=True),
            WrittenCluster("other.yaml", ("10.7.7.7",)),
        ),
    )
    assert written_addresses({"10.1.230.180": survey}, {"10.1.230.180": spark(12)}) == [
        "192.168.200.13",
        "10.1.230.181",
    ]
    both = {"10.1.230.180": survey, "10.1.230.181": Survey("spark-b")}
    assert written_addresses(both, {"10.1.230.180": spark(12), "10.1.230.181": spark(13)}) == []


def test_a_peer_s_own_addresses_off_the_cables_the_head_s_subnet_first() -> None:
    peer = spark(13)
    links = {**peer.links, "eth9": Link(1500, ("172.30.0.9/24",), True), "wlP9s9": Link(1500, ("10.4.0.2/24",), False)}
    assert management_addresses(replace(peer, links=links), spark(12)) == ["10.1.230.181", "172.30.0.9"]
