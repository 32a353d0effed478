"""The fabric: what the interfaces are, the one netplan file, and the way back."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spark_core.errors import CommandError, ObservationError, SparkError
from spark_core.fabric import (
    FabricFacts,
    Link,
    apply_fabric,
    fabric_findings,
    live_interfaces,
    observe_fabric,
    observe_netplan_file,
    parse_fabric,
    render_netplan,
    undo_fabric,
)
from spark_core.journal import StackFolder, open_journal, read_journal
from spark_core.settings import FabricInterface
from tests.fake_host import FakeHost
from tests.scripted_transport import ScriptedTransport

SPARK = Path(__file__).resolve().parents[1] / "fixtures" / "spark"
PORT = FabricInterface(netdev="enp1s0f1np1", address="192.168.200.12/24", hca="rocep1s0f1")
TWIN = FabricInterface(netdev="enP2p1s0f1np1", address="192.168.201.12/24", hca="roceP2p1s0f1")


def item(name: str, mtu: int, *addresses: str) -> dict[str, Any]:
    """An interface as ``ip -j address show`` tells it."""
    info = [{"family": "inet", "local": a.split("/")[0], "prefixlen": int(a.split("/")[1])} for a in addresses]
    return {
        "ifname": name,
        "mtu": mtu,
        "addr_info": [*info, {"family": "inet6", "local": "fe80::1", "prefixlen": 64}],
    }


def observation(*items: dict[str, Any], carrier: str = "", hcas: str = "") -> str:
    return f"=== links\n{json.dumps(items)}\n=== carrier\n{carrier}\n=== hcas\n{hcas}\n"


FACTS = FabricFacts(
    {
        "lo": Link(65536, ("127.0.0.1/8",), True),
        "enP7s7": Link(1500, ("10.1.230.180/24",), True),
        "enp1s0f1np1": Link(9000, ("192.168.200.12/24",), True),
        "enP2p1s0f1np1": Link(9000, ("192.168.201.12/24",), True),
    },
    {"rocep1s0f1": "ACTIVE", "roceP2p1s0f1": "ACTIVE"},
)


def test_links_addresses_carrier_and_rdma_devices_are_read() -> None:
    states = "\n".join(
        f"{line.split()[0]} {line.split(')')[1].strip()}"
        for line in (SPARK / "sys-infiniband/rate-and-state-four-devices.txt").read_text().splitlines()
    )
    facts = parse_fabric(
        observation(
            item("enp1s0f1np1", 9000, "192.168.200.12/24", "169.254.35.62/16"),
            item("veth0@if12", 1500),
            carrier="enp1s0f1np1 1\nveth0 0\nlo 1",
            hcas=states,
        )
    )
    assert facts.links["enp1s0f1np1"] == Link(9000, ("192.168.200.12/24", "169.254.35.62/16"), True)
    assert facts.links["veth0"] == Link(1500, (), False)
    assert facts.hcas == {
        "rocep1s0f0": "DOWN",
        "rocep1s0f1": "ACTIVE",
        "roceP2p1s0f0": "DOWN",
        "roceP2p1s0f1": "ACTIVE",
    }


def test_an_rdma_device_whose_state_cannot_be_read_is_unknown() -> None:
    assert parse_fabric(observation(hcas="rocep1s0f1 unknown")).hcas == {"rocep1s0f1": "unknown"}


def test_a_spark_without_a_cable_has_no_fabric_interface_and_no_rdma_device() -> None:
    facts = parse_fabric(observation(item("lo", 65536, "127.0.0.1/8"), item("enP7s7", 1500, "10.1.230.180/24")))
    assert sorted(facts.links) == ["enP7s7", "lo"]
    assert facts.hcas == {}


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "=== links\nrubbish\n=== carrier\n",
        "=== links\n{}",
        "=== links\n[{}]\n=== carrier\n",
        "=== links\n[1]\n=== carrier\n",
    ],
)
def test_an_answer_that_is_no_list_of_interfaces_is_not_understood(answer: str) -> None:
    with pytest.raises(ObservationError):
        observe_fabric(ScriptedTransport("spark-a", lambda _: answer))


def test_the_netplan_file_of_two_twins_reads_like_this() -> None:
    assert render_netplan([PORT, TWIN], 9000) == (
        "# Written by spark-vllm; removed by its destroy. Changes made here are put back.\n"
        "network:\n  version: 2\n  ethernets:\n"
        "    enp1s0f1np1:\n      dhcp4: false\n      dhcp6: false\n      link-local: []\n      "
        "optional: true\n"
        "      mtu: 9000\n      addresses:\n        - 192.168.200.12/24\n"
        "    enP2p1s0f1np1:\n      dhcp4: false\n      dhcp6: false\n      link-local: []\n     "
        " optional: true\n"
        "      mtu: 9000\n      addresses:\n        - 192.168.201.12/24\n"
    )


def test_the_file_says_what_an_owner_of_such_a_pair_wrote_by_hand() -> None:
    theirs = yaml.safe_load((SPARK / "netplan/owner-mtu9000-no-link-local-spark-a-port1.yaml").read_text())
    [(netdev, entry)] = [pair for pair in theirs["network"]["ethernets"].items() if pair[1].get("addresses")][:1]
    ours = yaml.safe_load(render_netplan([FabricInterface(netdev=netdev, address=entry["addresses"][0])], entry["mtu"]))
    mine = ours["network"]["ethernets"][netdev]
    for key in ("addresses", "mtu", "link-local", "dhcp4"):
        if key in entry:
            assert mine[key] == entry[key], key


ADDRESSES = st.builds(
    lambda number, prefix: f"{ipaddress.IPv4Address(number)}/{prefix}",
    st.integers(1 << 24, (1 << 32) - 1),
    st.just(32),
)
INTERFACES = st.lists(
    st.builds(FabricInterface, netdev=st.from_regex(r"[A-Za-z0-9_.-]{1,15}", fullmatch=True), address=ADDRESSES),
    min_size=1,
    max_size=4,
    unique_by=lambda interface: interface.netdev,
)


@given(interfaces=INTERFACES, mtu=st.integers(1280, 9978))
def test_the_netplan_file_is_yaml_that_says_exactly_what_was_declared(
    interfaces: list[FabricInterface], mtu: int
) -> None:
    read = yaml.load(render_netplan(interfaces, mtu), Loader=yaml.BaseLoader)  # noqa: S506 - plain text keeps names like 1e5
    entries = read["network"]["ethernets"]
    assert {name: entry["addresses"] for name, entry in entries.items()} == {i.netdev: [i.address] for i in interfaces}
    assert {entry["mtu"] for entry in entries.values()} == {str(mtu)}
    assert read["network"].keys() == {"version", "ethernets"}


def test_a_fabric_that_is_as_declared_has_no_finding() -> None:
    assert fabric_findings("spark-a", FACTS, [PORT, TWIN], 9000) == []


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (
            {"enp1s0f1np1": None},
            "spark-a (nodes[].fabric[0]): expected the interface enp1s0f1np1, "
            "found only enP2p1s0f1np1, enP7s7 (an uncabled port has none)",
        ),
        (
            {"enp1s0f1np1": Link(9000, (), True)},
            "spark-a (nodes[].fabric[0]): expected 192.168.200.12/24 on enp1s0f1np1, found no address",
        ),
        (
            {"enp1s0f1np1": Link(9000, ("169.254.35.62/16",), True)},
            "spark-a (nodes[].fabric[0]): expected 192.168.200.12/24 on enp1s0f1np1, found 169.254.35.62/16",
        ),
        (
            {"enP2p1s0f1np1": Link(1500, ("192.168.201.12/24",), True)},
            "spark-a (nodes[].fabric[1]): expected MTU 9000 on enP2p1s0f1np1, found 1500",
        ),
        (
            {"enp1s0f1np1": Link(9000, ("192.168.200.12/16",), True)},
            "spark-a (nodes[].fabric[0]): expected 192.168.200.12/24 on enp1s0f1np1, found 192.168.200.12/16",
        ),
    ],
    ids=["no interface", "no address", "link-local only", "MTU", "prefix"],
)
def test_what_is_wrong_with_a_fabric_is_told_in_one_line(change: dict[str, Link | None], finding: str) -> None:
    links = {name: link for name, link in (FACTS.links | change).items() if link is not None}
    assert fabric_findings("spark-a", FabricFacts(links, {}), [PORT, TWIN], 9000) == [finding]


def test_interfaces_as_they_are_have_the_shape_of_the_declared_ones() -> None:
    wanted = {"enp1s0f1np1": "192.168.200.12/24", "enP2p1s0f1np1": "192.168.201.99/24", "gone": "10.0.0.1/24"}
    assert live_interfaces(FACTS, wanted) == [
        {"netdev": "enp1s0f1np1", "address": "192.168.200.12/24", "mtu_bytes": 9000},
        {"netdev": "enP2p1s0f1np1", "address": "192.168.201.12/24", "mtu_bytes": 9000},
        {"netdev": "gone", "address": "none", "mtu_bytes": 0},
    ]


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    host = FakeHost(tmp_path / "host")
    host.set_link("enP7s7", 1500, "10.1.230.180/24")
    host.set_link("enp1s0f1np1", 1500, "169.254.35.62/16")
    host.set_link("enP2p1s0f1np1", 1500)
    return host


@pytest.fixture
def folder(host: FakeHost) -> StackFolder:
    folder = StackFolder(f"{host.base}/root", "dev")
    open_journal(host.node, folder)
    return folder


def test_a_managed_fabric_gets_its_file_addresses_and_mtu(host: FakeHost, folder: StackFolder) -> None:
    apply_fabric(host.node, folder, [PORT, TWIN], 9000, host.netplan_file)
    assert host.netplan_path.read_text() == render_netplan([PORT, TWIN], 9000)
    assert host.netplan_path.stat().st_mode & 0o777 == 0o600
    assert host.link("enp1s0f1np1")["mtu"] == 9000
    assert "192.168.201.12/24" in host.addresses("enP2p1s0f1np1")
    assert host.link("enP7s7") == {"mtu": 1500, "addresses": ["10.1.230.180/24"]}
    assert {(entry.kind, entry.target, entry.old) for entry in read_journal(host.node, folder)} == {
        ("file", host.netplan_file, None),
        ("link", "enp1s0f1np1", "1500"),
        ("link", "enP2p1s0f1np1", "1500"),
    }


def test_applying_again_keeps_the_first_record(host: FakeHost, folder: StackFolder) -> None:
    apply_fabric(host.node, folder, [PORT, TWIN], 9000, host.netplan_file)
    apply_fabric(host.node, folder, [PORT, TWIN], 4200, host.netplan_file)
    assert {entry.old for entry in read_journal(host.node, folder)} == {None, "1500"}
    assert host.link("enp1s0f1np1")["mtu"] == 4200


def test_undoing_takes_file_addresses_and_mtu_back(host: FakeHost, folder: StackFolder) -> None:
    before = host.links()
    apply_fabric(host.node, folder, [PORT, TWIN], 9000, host.netplan_file)
    undo_fabric(host.node, folder, [PORT.netdev, TWIN.netdev], host.netplan_file)
    assert not host.netplan_path.exists()
    assert host.links() == before
    assert read_journal(host.node, folder) == []


def test_a_file_that_was_there_comes_back_with_its_addresses(host: FakeHost, folder: StackFolder) -> None:
    theirs = render_netplan([PORT], 1500).replace("# Written by spark-vllm", "# Written by the owner")
    host.netplan_path.write_text(theirs)
    host.set_link("enp1s0f1np1", 1500, "192.168.200.12/24")
    apply_fabric(host.node, folder, [PORT, TWIN], 9000, host.netplan_file)
    undo_fabric(host.node, folder, [PORT.netdev, TWIN.netdev], host.netplan_file)
    assert host.netplan_path.read_text() == theirs
    assert host.addresses("enp1s0f1np1") == ["192.168.200.12/24"]
    assert host.addresses("enP2p1s0f1np1") == []


def test_undoing_twice_is_fine(host: FakeHost, folder: StackFolder) -> None:
    apply_fabric(host.node, folder, [PORT], 9000, host.netplan_file)
    for _ in range(2):
        undo_fabric(host.node, folder, [PORT.netdev], host.netplan_file)
    assert host.addresses("enp1s0f1np1") == ["169.254.35.62/16"]


def test_undoing_leaves_an_address_that_somebody_else_added(host: FakeHost, folder: StackFolder) -> None:
    apply_fabric(host.node, folder, [PORT], 9000, host.netplan_file)
    host.set_link("enp1s0f1np1", 9000, "192.168.200.12/24", "172.16.0.1/24")
    undo_fabric(host.node, folder, [PORT.netdev], host.netplan_file)
    assert host.addresses("enp1s0f1np1") == ["172.16.0.1/24", "169.254.35.62/16"]  # and what was there before


def test_kernel_parameters_that_networkd_changed_with_the_link_go_back(host: FakeHost, folder: StackFolder) -> None:
    parameter = host.base / "proc/sys/net/ipv4/conf/enp1s0f1np1/promote_secondaries"
    parameter.parent.mkdir(parents=True)
    parameter.write_text("0\n")
    apply_fabric(host.node, folder, [PORT], 9000, host.netplan_file)
    parameter.write_text("1\n")
    undo_fabric(host.node, folder, [PORT.netdev], host.netplan_file)
    assert parameter.read_text() == "0\n"


def test_an_interface_whose_cable_was_pulled_needs_no_putting_back(host: FakeHost, folder: StackFolder) -> None:
    apply_fabric(host.node, folder, [PORT, TWIN], 9000, host.netplan_file)
    host.pull_cable("enp1s0f1np1")
    undo_fabric(host.node, folder, [PORT.netdev, TWIN.netdev], host.netplan_file)
    assert host.addresses("enP2p1s0f1np1") == []
    assert read_journal(host.node, folder) == []


def test_undoing_what_was_never_made_removes_nothing(host: FakeHost, folder: StackFolder) -> None:
    host.netplan_path.write_text("theirs\n")
    undo_fabric(host.node, folder, [PORT.netdev], host.netplan_file)
    assert host.netplan_path.read_text() == "theirs\n"


def test_an_interface_that_is_not_there_changes_nothing(host: FakeHost, folder: StackFolder) -> None:
    gone = FabricInterface(netdev="enp1s0f0np0", address="192.168.210.1/24")
    with pytest.raises(CommandError) as failed:
        apply_fabric(host.node, folder, [PORT, gone], 9000, host.netplan_file)
    assert failed.value.line == "spark-a (nodes[].fabric): expected the interface enp1s0f0np0, found none of that name"
    assert not host.netplan_path.exists()
    assert read_journal(host.node, folder) == []


def test_a_file_that_netplan_refuses_is_told_and_can_be_undone(host: FakeHost, folder: StackFolder) -> None:
    host.netplan_refuses("Error in network definition: invalid MTU")
    with pytest.raises(CommandError) as failed:
        apply_fabric(host.node, folder, [PORT], 9000, host.netplan_file)
    assert failed.value.line == (
        "spark-a (fabric.manage): expected netplan to apply the fabric's file: expected exit "
        "status 0, found 1 "
        "(Error in network definition: invalid MTU)"
    )
    host.netplan_accepts()
    undo_fabric(host.node, folder, [PORT.netdev], host.netplan_file)
    assert not host.netplan_path.exists()


def test_an_address_that_did_not_come_is_told_after_the_apply(host: FakeHost, folder: StackFolder) -> None:
    host.netplan_does_nothing()
    with pytest.raises(SparkError) as failed:
        apply_fabric(host.node, folder, [PORT], 9000, host.netplan_file)
    assert failed.value.line == (
        "spark-a (fabric): expected 192.168.200.12/24 on enp1s0f1np1, found 169.254.35.62/16 after netplan apply"
    )


def test_a_netplan_file_that_is_not_there_is_none(host: FakeHost) -> None:
    assert observe_netplan_file(host.node, host.netplan_file) is None


@pytest.mark.parametrize("text", ["", "a\n", "a\nb\n", "\n"])
def test_a_netplan_file_is_read_as_it_was_written(text: str, host: FakeHost) -> None:
    host.netplan_path.write_text(text)
    assert observe_netplan_file(host.node, host.netplan_file) == (text or "\n")


def test_a_link_that_was_down_with_an_address_goes_back_to_that(host: FakeHost, folder: StackFolder) -> None:
    host.set_link("enp1s0f1np1", 1500, "10.0.0.1/24")
    state = host.read()
    state["links"]["enp1s0f1np1"]["down"] = True
    host.change(links=state["links"])
    apply_fabric(host.node, folder, [PORT], 9000, host.netplan_file)
    host.set_link("enp1s0f1np1", 9000, "192.168.200.12/24")  # networkd drops what others had put on it
    undo_fabric(host.node, folder, [PORT.netdev], host.netplan_file)
    assert host.addresses("enp1s0f1np1") == ["10.0.0.1/24"]
    assert host.read()["links"]["enp1s0f1np1"]["down"] is True


def test_an_address_of_the_owner_stays_after_a_second_apply(host: FakeHost, folder: StackFolder) -> None:
    host.set_link("enp1s0f1np1", 1500, PORT.address)
    apply_fabric(host.node, folder, [PORT], 9000, host.netplan_file)
    apply_fabric(host.node, folder, [PORT], 9000, host.netplan_file)
    undo_fabric(host.node, folder, [PORT.netdev], host.netplan_file)
    assert host.addresses("enp1s0f1np1") == [PORT.address]


def test_the_interface_that_we_are_connected_by_is_never_a_fabric(host: FakeHost, folder: StackFolder) -> None:
    facts = parse_fabric(
        '=== links\n[{"ifname": "eth0", "mtu": 1500, "flags": ["UP"], "addr_info": []}]\n'
        "=== management\n2: eth0    inet 10.99.0.12/24 scope global eth0\n=== carrier\neth0 1\n=== hcas\n"
    )
    assert facts.management == "eth0"
    node = ScriptedTransport(
        "spark-a",
        lambda _: (
            '=== links\n[{"ifname": "eth0", "mtu": 1500, "flags": ["UP"], "addr_info": []}]\n'
            "=== management\n2: eth0    inet 10.99.0.12/24 scope global eth0\n=== carrier\neth0 1\n=== hcas\n"
        ),
    )
    with pytest.raises(CommandError, match="eth0 is the one we are connected by"):
        apply_fabric(
            node, folder, [FabricInterface(netdev="eth0", address="192.168.200.12/24")], 9000, "/etc/netplan/x.yaml"
        )
    assert len(node.asked) == 1
