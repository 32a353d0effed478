"""Each kind of finding alone, on a pair that is otherwise as declared."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spark_core.fabric.checks import fabric_cluster_findings, fabric_findings
from spark_core.fabric.facts import Hca, Link, Neighbour, NetworkFacts
from spark_core.fabric.packets import Outcome
from spark_core.findings import KINDS, Finding
from tests.unit.fabric.networks import MANAGEMENT, PORT, PORT0, TWIN, changed, pair, proofs, settings_with, spark

Networks = dict[str, NetworkFacts]
MANAGED = {"fabric": {"manage": True}}


def of_b(change: Callable[[NetworkFacts], NetworkFacts]) -> Networks:
    """The clean pair with a change at spark-b."""
    networks = pair()
    return {**networks, "spark-b": change(networks["spark-b"])}


def findings(
    networks: Networks, change: Mapping[str, Any] | None = None, *, packets: bool = True, **outcomes: Outcome
) -> list[Finding]:
    settings = settings_with(change)
    found = [f for node in settings.nodes for f in fabric_findings(settings, node, networks[node.name])]
    return found + fabric_cluster_findings(settings, networks, proofs(settings, **outcomes) if packets else {})


def told(found: list[Finding]) -> list[str]:
    return [f"{finding.severity} {finding.line.splitlines()[0]}" for finding in found]


@pytest.mark.parametrize("change", [None, MANAGED, {"fabric": {"rdma": "off"}}, {"fabric": {"rdma": "preferred"}}])
def test_a_pair_that_is_as_declared_has_no_finding(change: Mapping[str, Any] | None) -> None:
    assert findings(pair(), change) == []
    assert findings(pair(), change, packets=False) == []


def without(*netdevs: str) -> Callable[[NetworkFacts], NetworkFacts]:
    return lambda network: replace(
        network, links={name: link for name, link in network.links.items() if name not in netdevs}
    )


def with_link(name: str, link: Link) -> Callable[[NetworkFacts], NetworkFacts]:
    return lambda network: replace(network, links={**network.links, name: link})


def with_hca(name: str, hca: Hca | None) -> Callable[[NetworkFacts], NetworkFacts]:
    return lambda network: replace(
        network, hcas={n: h for n, h in {**network.hcas, name: hca}.items() if h is not None}
    )


B0, B1 = "spark-b (nodes[].fabric[0])", "spark-b (nodes[].fabric[1])"
ALONE: list[tuple[Callable[[NetworkFacts], NetworkFacts], str]] = [
    (
        without(PORT, TWIN, PORT0, "enP2p1s0f0np0"),
        f"fail {B0}: expected the interface enp1s0f1np1, found only docker0, enP7s7, wlP9s9 [netdev-missing]",
    ),
    (
        without(PORT),
        f"fail {B0}: expected the interface enp1s0f1np1, found it gone while enP2p1s0f0np0, enP2p1s0f1np1, enp1s0f0np0 "
        "of its adapter are there [twin-gone]",
    ),
    (
        lambda n: changed(n, PORT, up=False, carrier=False),
        f"fail {B0}: expected enp1s0f1np1 to be up, found it down [netdev-down]",
    ),
    (
        lambda n: changed(n, PORT, carrier=False),
        f"fail {B0}: expected a carrier on enp1s0f1np1, found none [carrier-missing]",
    ),
    (
        lambda n: changed(n, PORT, speed_mbit_s=100_000),
        f"warn {B0}: expected 200 Gb/s on enp1s0f1np1, found 100 Gb/s [speed-low]",
    ),
    (
        with_hca("rocep1s0f1", None),
        f"fail {B0}: expected the RDMA device rocep1s0f1 at enp1s0f1np1, "
        "found roceP2p1s0f0, roceP2p1s0f1, rocep1s0f0 [hca-missing]",
    ),
    (
        with_hca("rocep1s0f1", Hca("ACTIVE", PORT0)),
        f"fail {B0}: expected the RDMA device rocep1s0f1 at enp1s0f1np1, found it at enp1s0f0np0 [hca-missing]",
    ),
    (
        with_hca("rocep1s0f1", Hca("DOWN", PORT)),
        f"fail {B0}: expected an active port of rocep1s0f1, found it down while enp1s0f1np1 has a carrier "
        "[hca-inactive]",
    ),
    (
        lambda n: replace(n, gids=n.gids[1:]),
        f"fail {B0}: expected a RoCE v2 GID of 192.168.200.13 on rocep1s0f1, found none [gid-missing]",
    ),
    (
        lambda n: changed(n, PORT, addresses=("169.254.35.62/16",)),
        f"fail {B0}: expected 192.168.200.13/24 on enp1s0f1np1, found 169.254.35.62/16 [address-missing]",
    ),
    (
        lambda n: replace(n, netplan={}),
        f"warn {B0}: expected 192.168.200.13/24 in the boot configuration, found it on enp1s0f1np1 only "
        "[address-volatile]",
    ),
    (
        with_link("bond0", Link(1500, ("192.168.200.77/24",), True)),
        f"fail {B0}: expected 192.168.200.0/24 on enp1s0f1np1 alone, found 192.168.200.77/24 on bond0 [subnet-shared]",
    ),
    (
        lambda n: changed(n, MANAGEMENT, addresses=("192.168.200.113/16",)),
        f"fail {B0}: expected 192.168.200.13/24 outside the network that the node is reached by, "
        "found 192.168.200.113/16 on enP7s7 [subnet-of-management]",
    ),
    (
        lambda n: replace(n, controller="192.168.200.5"),
        f"fail {B0}: expected 192.168.200.13/24 outside the network of the machine that deploys, "
        "found it at 192.168.200.5 [subnet-of-management]",
    ),
    (
        lambda n: changed(n, PORT, mtu_bytes=1500),
        f"fail {B0}: expected MTU 9000 on enp1s0f1np1, found 1500, while spark-a's enp1s0f1np1 has 9000 [mtu-differs]",
    ),
    (
        lambda n: replace(
            n, unread={"gids": "could not read the GID tables from /sys/class/infiniband: found nothing"}
        ),
        "warn spark-b: could not read the GID tables from /sys/class/infiniband: found nothing [fact-unreadable]",
    ),
]


@pytest.mark.parametrize(("change", "line"), ALONE, ids=lambda value: value[-20:] if isinstance(value, str) else "")
def test_one_fault_is_one_finding(change: Callable[[NetworkFacts], NetworkFacts], line: str) -> None:
    found = told(findings(of_b(change)))
    # Two links of one node share an adapter; what is said of the second one is the same fault at its other half.
    assert found[:1] == [line]
    assert {text.rpartition("[")[2] for text in found} == {line.rpartition("[")[2]}


def test_a_link_that_cannot_be_read_is_the_only_word_on_a_node() -> None:
    unread = {"links": "could not read the interfaces from `ip -j address show`: found 'x'", "rdma": "could not"}
    found = findings(of_b(lambda n: replace(n, links={}, unread=unread)))
    assert told(found) == [
        "fail spark-b: could not read the interfaces from `ip -j address show`: found 'x' [fact-unreadable]",
        "warn spark-b: could not [fact-unreadable]",
    ]


def test_a_half_that_is_gone_after_a_warm_reboot_is_answered_with_a_power_cycle() -> None:
    [first, second] = findings(of_b(without(PORT, TWIN)))
    assert (first.code, second.code) == ("twin-gone", "twin-gone")
    assert first.do.startswith("power cycle needed")


def test_a_port_that_is_neither_declared_nor_cabled_is_no_finding() -> None:
    assert findings(of_b(without(PORT0, "enP2p1s0f0np0"))) == []


def test_an_undeclared_half_with_a_cable_is_half_of_the_bandwidth() -> None:
    change = {f"nodes[{n}].fabric": [{"netdev": PORT, "address": f"192.168.200.1{n + 2}/24"}] for n in (0, 1)}
    for n in (0, 1):
        change[f"nodes[{n}].fabric"][0]["hca"] = "rocep1s0f1"
    networks = pair()
    networks["spark-b"] = changed(networks["spark-b"], TWIN, addresses=())
    assert told(findings(networks, change)) == [
        "warn spark-a (nodes[].fabric[0]): expected both halves of a port, found enp1s0f1np1 alone; "
        "enP2p1s0f1np1 has 192.168.201.12/24, but undeclared [twin-unaddressed]",
        "warn spark-b (nodes[].fabric[0]): expected both halves of a port, found enp1s0f1np1 alone; "
        "enP2p1s0f1np1 has a carrier and no address [twin-unaddressed]",
    ]
    networks["spark-b"] = changed(networks["spark-b"], TWIN, carrier=False)
    assert [finding.where for finding in findings(networks, change)] == ["spark-a (nodes[].fabric[0])"]


@pytest.mark.parametrize(("rdma", "severity"), [(None, "fail"), ("required", "fail"), ("preferred", "warn")])
def test_a_node_without_rdma_fails_only_where_it_is_required(rdma: str | None, severity: str) -> None:
    change = {f"nodes[{n}].fabric[{i}].hca": None for n in (0, 1) for i in (0, 1)}
    networks = {
        name: replace(
            network, hcas={}, gids=(), links={n: replace(link, hca=None) for n, link in network.links.items()}
        )
        for name, network in pair().items()
    }
    found = findings(networks, {**change, "fabric": {"rdma": rdma}})
    assert told(found) == [
        f"{severity} {node} (fabric.rdma): expected an RDMA device for enp1s0f1np1, enP2p1s0f1np1, found none "
        "[rdma-absent]"
        for node in ("spark-a", "spark-b")
    ]
    assert findings(networks, {**change, "fabric": {"rdma": "off"}}) == []
    assert findings(networks, {**change, "hardware": "cpu"}) == []


@pytest.mark.parametrize(
    "change",
    [with_hca("rocep1s0f1", Hca("DOWN", PORT)), lambda n: replace(n, gids=n.gids[1:])],
    ids=["inactive", "no GID"],
)
def test_a_device_that_carries_nothing_warns_where_rdma_is_only_preferred(
    change: Callable[[NetworkFacts], NetworkFacts],
) -> None:
    assert [f.severity for f in findings(of_b(change), {"fabric": {"rdma": "preferred"}})] == ["warn"]
    assert findings(of_b(change), {"fabric": {"rdma": "off"}}) == []


def test_the_interface_that_we_are_connected_by_is_refused_only_where_it_would_be_changed() -> None:
    def reached_over_the_fabric(network: NetworkFacts) -> NetworkFacts:
        return replace(network, management=PORT, management_address="192.168.200.13", controller="192.168.200.12")

    networks = of_b(reached_over_the_fabric)
    assert findings(networks) == []
    assert told(findings(networks, MANAGED)) == [
        f"fail {B0}: expected a fabric interface, found that enp1s0f1np1 is the one we are connected by "
        "[netdev-is-management]"
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda n: changed(n, PORT, addresses=()),
        lambda n: changed(n, PORT, mtu_bytes=1500),
        lambda n: changed(n, TWIN, addresses=("169.254.35.62/16",), mtu_bytes=1500),
        lambda n: replace(n, netplan={}),
    ],
    ids=["no address", "MTU", "link-local twin", "not kept"],
)
def test_what_up_will_put_right_is_no_finding_of_a_managed_fabric(
    change: Callable[[NetworkFacts], NetworkFacts],
) -> None:
    networks = of_b(change)
    assert findings(networks)
    assert findings(networks, MANAGED) == []


def test_a_managed_link_that_is_down_is_a_warning_and_its_cable_is_not_judged() -> None:
    networks = of_b(lambda n: changed(n, PORT, up=False, carrier=False, addresses=()))
    assert told(findings(networks, MANAGED)) == [
        f"warn {B0}: expected enp1s0f1np1 to be up, found it down; up brings it up, its cable is not checked before "
        "[netdev-down]"
    ]


def test_a_managed_link_without_a_carrier_fails() -> None:
    [found] = findings(of_b(lambda n: changed(n, PORT, carrier=False, addresses=())), MANAGED)
    assert found.code == "carrier-missing"


def test_a_foreign_netplan_file_fails_a_managed_fabric_only() -> None:
    networks = of_b(lambda n: replace(n, netplan={"/etc/netplan/40-cx7.yaml": f"ethernets: {{{PORT}: {{mtu: 9000}}}}"}))
    change = {"fabric": {"manage": True}}
    assert told(findings(networks, change)) == [
        "fail spark-b (fabric.take_over): expected no other file that configures enp1s0f1np1, "
        "found /etc/netplan/40-cx7.yaml [netplan-foreign]"
    ]
    taking = {"fabric": {"manage": True, "take_over": ["/etc/netplan/40-cx7.yaml"]}}
    assert findings(networks, taking) == []
    assert "netplan-foreign" not in {found.code for found in findings(networks)}


def test_a_link_local_address_is_told_to_be_one_that_can_change() -> None:
    networks = of_b(lambda n: changed(n, PORT, addresses=("169.254.35.62/16",)))
    change = {"nodes[1].fabric[0].address": "169.254.35.62/16", "nodes[0].fabric[0].address": "169.254.35.61/16"}
    networks["spark-a"] = changed(networks["spark-a"], PORT, addresses=("169.254.35.61/16",))
    networks = {name: replace(network, neighbours=(), gids=()) for name, network in networks.items()}
    found = findings(networks, {**change, "fabric": {"rdma": "off"}})
    assert {finding.code for finding in found} == {"address-volatile"}
    assert "link-local" in found[0].what


def test_a_single_node_needs_no_fabric() -> None:
    change = {"groups.main.nodes": ["spark-a"], "groups.main.serving.tensor_parallel_size": 1}
    settings = settings_with(change, ["nodes[1]", "nodes[0].fabric"])
    bare = NetworkFacts({"lo": Link(65536)}, unread={"rdma": "could not read"})
    assert fabric_findings(settings, settings.nodes[0], bare) == []
    assert fabric_cluster_findings(settings, {"spark-a": bare}, {}) == []


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (
            "large-lost",
            "fail spark-a, spark-b (nodes[].fabric): expected packets of 9000 bytes from spark-a to spark-b "
            "(enp1s0f1np1 to 192.168.200.13) to arrive, found only smaller ones do [mtu-not-carried]",
        ),
        (
            "too-long",
            "fail spark-a, spark-b (nodes[].fabric): expected packets of 9000 bytes from spark-a to spark-b "
            "(enp1s0f1np1 to 192.168.200.13) to arrive, found only smaller ones do [mtu-not-carried]",
        ),
        (
            "no-neighbour",
            "fail spark-a, spark-b (nodes[].fabric): expected packets from spark-a to spark-b "
            "(enp1s0f1np1 to 192.168.200.13) to arrive, found nobody at that address [peer-unreachable]",
        ),
        (
            "no-route",
            "fail spark-a, spark-b (nodes[].fabric): expected packets from spark-a to spark-b "
            "(enp1s0f1np1 to 192.168.200.13) to arrive, found no route [peer-unreachable]",
        ),
        (
            "silent",
            "warn spark-a, spark-b (nodes[].fabric): expected proof that packets from spark-a to spark-b "
            "(enp1s0f1np1 to 192.168.200.13) arrive, found no word of the peer, which is on the link [peer-unproven]",
        ),
        (
            "unread",
            "warn spark-a, spark-b (nodes[].fabric): expected proof that packets from spark-a to spark-b "
            "(enp1s0f1np1 to 192.168.200.13) arrive, found the probe gave no answer [peer-unproven]",
        ),
    ],
)
def test_packets_that_do_not_arrive_are_told_with_their_direction(outcome: Outcome, line: str) -> None:
    assert told(findings(pair(), spark_a=outcome)) == [line]


def test_what_is_lost_in_both_directions_is_told_once() -> None:
    assert told(findings(pair(), spark_a="no-neighbour", spark_b="no-neighbour")) == [
        "fail spark-a, spark-b (nodes[].fabric): expected packets between spark-a and spark-b "
        "(enp1s0f1np1 to 192.168.200.13) to arrive, found nobody at that address [peer-unreachable]"
    ]


def test_two_mtus_are_told_with_both_values_and_the_direction_that_loses() -> None:
    networks = of_b(lambda n: changed(n, PORT, mtu_bytes=1500))
    assert told(findings(networks, spark_a="large-lost", spark_b="too-long")) == [
        f"fail {B0}: expected MTU 9000 on enp1s0f1np1, found 1500, while spark-a's enp1s0f1np1 has 9000; "
        "packets of that size from spark-a to spark-b are lost [mtu-differs]"
    ]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda n: changed(n, PORT, carrier=False), "carrier-missing"),
        (lambda n: changed(n, PORT, up=False, carrier=False), "netdev-down"),
        (lambda n: changed(n, PORT, addresses=()), "address-missing"),
        (without(PORT), "twin-gone"),
    ],
)
def test_packets_that_are_lost_for_a_known_reason_are_no_second_finding(
    change: Callable[[NetworkFacts], NetworkFacts], code: str
) -> None:
    found = findings(of_b(change), spark_a="no-neighbour", spark_b="absent")
    assert [finding.code for finding in found] == [code]


def test_nothing_is_said_of_a_node_that_was_not_seen() -> None:
    settings = settings_with()
    seen = {"spark-a": spark(12)}
    packets = {"spark-a": proofs(settings, spark_a="no-neighbour")["spark-a"]}
    assert fabric_cluster_findings(settings, seen, packets) == []


def test_an_address_that_another_machine_holds_is_told() -> None:
    networks = pair()
    networks["spark-a"] = replace(
        networks["spark-a"], neighbours=(Neighbour(PORT, "192.168.200.13", "02:00:5e:00:00:99"),)
    )
    assert told(findings(networks)) == [
        "fail spark-b (nodes[].fabric[0].address): expected 192.168.200.13 to be its own, "
        "found it at 02:00:5e:00:00:99 behind spark-a's enp1s0f1np1 [address-taken]"
    ]


def test_an_address_that_waits_for_up_and_is_taken_already_is_told() -> None:
    networks = of_b(lambda n: changed(n, PORT, addresses=()))
    networks["spark-b"] = replace(
        networks["spark-b"], neighbours=(Neighbour(PORT, "192.168.200.13", "02:00:5e:00:00:99"),)
    )
    [found] = findings(networks, MANAGED)
    assert (found.code, found.where) == ("address-taken", "spark-b (nodes[].fabric[0].address)")


def test_an_address_that_two_nodes_have_is_told() -> None:
    networks = of_b(with_link("bond0", Link(1500, ("192.168.200.12/32",), True)))
    codes = [(found.code, found.where) for found in findings(networks)]
    assert ("address-taken", "spark-a (nodes[].fabric[0].address)") in codes


def test_an_address_behind_the_other_half_of_the_node_is_its_own() -> None:
    networks = pair()
    twin = networks["spark-b"].links[TWIN].mac
    networks["spark-a"] = replace(networks["spark-a"], neighbours=(Neighbour(PORT, "192.168.200.13", twin),))
    assert findings(networks) == []


def crossed(*neighbours: Neighbour) -> Networks:
    networks = pair()
    return {**networks, "spark-a": replace(networks["spark-a"], neighbours=neighbours)}


def test_a_cable_in_the_wrong_port_is_told_by_who_is_seen_behind_it() -> None:
    mac = spark(13).links[PORT0].mac
    for seen in (Neighbour(PORT, "fe80::1", mac), Neighbour(PORT, "", mac, PORT0, "b.example")):
        assert told(findings(crossed(seen), spark_a="no-neighbour", spark_b="no-neighbour")) == [
            "fail spark-a (nodes[].fabric[0]): expected spark-b's enP2p1s0f1np1 or spark-b's enp1s0f1np1 at the other "
            "end of enp1s0f1np1, found spark-b's enp1s0f0np0 [cabling]"
        ]


@pytest.mark.parametrize(
    ("seen", "outcome"),
    [
        (Neighbour(PORT, "fe80::1", spark(13).links[PORT0].mac), "arrived"),
        (Neighbour(PORT, "fe80::1", spark(13).links[TWIN].mac), "no-neighbour"),
        (Neighbour(PORT, "fe80::1", "02:00:5e:00:00:99"), "no-neighbour"),
        (Neighbour(PORT0, "fe80::1", spark(13).links[PORT0].mac), "no-neighbour"),
    ],
    ids=["packets arrive", "the other half", "no node of ours", "another port"],
)
def test_what_is_seen_behind_a_port_is_no_fault_by_itself(seen: Neighbour, outcome: Outcome) -> None:
    found = findings(crossed(seen), spark_a=outcome)
    assert "cabling" not in {finding.code for finding in found}


def test_eight_faults_are_eight_findings() -> None:
    a, b = spark(12), without(TWIN)(spark(13))
    networks = {
        "spark-a": replace(
            changed(changed(a, PORT, speed_mbit_s=100_000), TWIN, mtu_bytes=1500),
            hcas={**a.hcas, "roceP2p1s0f1": Hca("DOWN", TWIN)},
        ),
        "spark-b": replace(
            with_link("bond0", Link(1500, ("192.168.200.77/24",), True))(
                changed(b, PORT, addresses=("192.168.200.99/24",))
            ),
            controller="192.168.200.7",
            neighbours=(Neighbour(PORT, "192.168.200.12", "02:00:5e:00:00:99"),),
        ),
    }
    found = findings(networks, spark_a="no-neighbour", spark_b="absent")
    assert sorted(finding.code for finding in found) == [
        "address-missing",
        "address-taken",
        "hca-inactive",
        "mtu-differs",
        "speed-low",
        "subnet-of-management",
        "subnet-shared",
        "twin-gone",
    ]


def test_every_kind_of_the_fabric_is_found_by_a_test_here() -> None:
    source = Path(__file__).read_text()
    from_proofs = {"bandwidth-degraded", "bandwidth-low", "transport-sockets", "fabric-undiscovered"}
    codes = list(KINDS)
    fabric = codes[codes.index("netdev-missing") : codes.index("netplan-foreign") + 1]
    assert [code for code in fabric if code not in source and code not in from_proofs] == []


@pytest.mark.parametrize("address", ["192.168.202.13/24", "192.168.201.13/25"])
def test_an_interface_whose_subnet_no_other_node_is_on_is_told_at_both_ends(address: str) -> None:
    nodes = [node.model_dump(mode="json") for node in settings_with().nodes]
    nodes[1]["fabric"][1]["address"] = address
    networks = of_b(with_link(TWIN, replace(spark(13).links[TWIN], addresses=(address,))))
    alone = [finding for finding in findings(networks, {"nodes": nodes}) if finding.code == "subnet-alone"]
    network = str(ipaddress.IPv4Interface(address).network)
    assert [f"{finding.severity} {finding.where}: {finding.what}" for finding in alone] == [
        "fail spark-a (nodes[].fabric[1].address): expected another node on 192.168.201.0/24, found them on "
        f"192.168.200.0/24, {network}",
        f"fail spark-b (nodes[].fabric[1].address): expected another node on {network}, found them on "
        "192.168.200.0/24, 192.168.201.0/24",
    ]


def test_a_node_whose_peers_are_given_up_is_alone_without_a_finding() -> None:
    settings = settings_with({"abandoned_nodes": ["spark-b"]})
    assert fabric_cluster_findings(settings, {"spark-a": spark(12)}, {}) == []
