"""The one netplan file of a managed fabric: what it says, how it comes onto a host, and the way back."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spark_core.errors import CommandError, ForeignObjectError, SparkError
from spark_core.fabric.facts import Link, NetworkFacts
from spark_core.fabric.netplan import (
    apply_fabric,
    fabric_claims,
    live_interfaces,
    observe_managed,
    render_netplan,
    undo_fabric,
    unlike,
)
from spark_core.fabric.privileges import fabric_root_commands
from spark_core.journal import StackFolder, open_journal, read_journal
from spark_core.privilege import allowed_by, sudo_rule
from spark_core.settings import FabricInterface, FabricSettings
from tests.fake_host import FakeHost
from tests.unit.fabric.networks import settings_with

pytestmark = pytest.mark.slow

SPARK = Path(__file__).resolve().parents[2] / "fixtures" / "spark"
PORT = FabricInterface(netdev="enp1s0f1np1", address="192.168.200.12/24", hca="rocep1s0f1")
TWIN = FabricInterface(netdev="enP2p1s0f1np1", address="192.168.201.12/24", hca="roceP2p1s0f1")
MANAGED = FabricSettings(manage=True)
OURS = MANAGED.netplan_file
THEIRS = "/etc/netplan/40-cx7.yaml"
FACTS = NetworkFacts(
    {
        "lo": Link(65536, ("127.0.0.1/8",), True),
        "enP7s7": Link(1500, ("10.1.230.180/24",), True),
        "enp1s0f1np1": Link(9000, ("192.168.200.12/24",), True),
        "enP2p1s0f1np1": Link(9000, ("192.168.201.12/24",), True),
    }
)


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


def test_interfaces_that_are_as_declared_are_unlike_in_nothing() -> None:
    assert unlike(FACTS, [PORT, TWIN], 9000) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"enp1s0f1np1": None}, (0, "expected the interface enp1s0f1np1, found none of that name")),
        (
            {"enp1s0f1np1": Link(9000, (), True)},
            (0, "expected 192.168.200.12/24 on enp1s0f1np1, found no address"),
        ),
        (
            {"enp1s0f1np1": Link(9000, ("192.168.200.12/16",), True)},
            (0, "expected 192.168.200.12/24 on enp1s0f1np1, found 192.168.200.12/16"),
        ),
        (
            {"enP2p1s0f1np1": Link(1500, ("192.168.201.12/24",), True)},
            (1, "expected MTU 9000 on enP2p1s0f1np1, found 1500"),
        ),
    ],
    ids=["no interface", "no address", "prefix", "MTU"],
)
def test_in_what_an_interface_is_unlike_is_told_in_one_line(
    change: dict[str, Link | None], told: tuple[int, str]
) -> None:
    links = {name: link for name, link in (dict(FACTS.links) | change).items() if link is not None}
    assert unlike(NetworkFacts(links), [PORT, TWIN], 9000) == [told]


def test_interfaces_as_they_are_have_the_shape_of_the_declared_ones() -> None:
    wanted = {"enp1s0f1np1": "192.168.200.12/24", "enP2p1s0f1np1": "192.168.201.99/24", "gone": "10.0.0.1/24"}
    assert live_interfaces(FACTS, wanted) == [
        {"netdev": "enp1s0f1np1", "address": "192.168.200.12/24", "mtu_bytes": 9000},
        {"netdev": "enP2p1s0f1np1", "address": "192.168.201.12/24", "mtu_bytes": 9000},
        {"netdev": "gone", "address": "none", "mtu_bytes": 0},
    ]


def test_a_managed_fabric_gets_its_file_addresses_and_mtu(host: FakeHost, folder: StackFolder) -> None:
    apply_fabric(host.node, folder, [PORT, TWIN], MANAGED)
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
    apply_fabric(host.node, folder, [PORT, TWIN], MANAGED)
    apply_fabric(host.node, folder, [PORT, TWIN], FabricSettings(manage=True, mtu_bytes=4200))
    assert {entry.old for entry in read_journal(host.node, folder)} == {None, "1500"}
    assert host.link("enp1s0f1np1")["mtu"] == 4200


def test_undoing_takes_file_addresses_and_mtu_back(host: FakeHost, folder: StackFolder) -> None:
    before = host.links()
    apply_fabric(host.node, folder, [PORT, TWIN], MANAGED)
    undo_fabric(host.node, folder, [PORT.netdev, TWIN.netdev], [OURS])
    assert not host.netplan_path.exists()
    assert host.links() == before
    assert read_journal(host.node, folder) == []


def test_a_file_that_was_there_comes_back_with_its_addresses(host: FakeHost, folder: StackFolder) -> None:
    theirs = render_netplan([PORT], 1500).replace("# Written by spark-vllm", "# Written by the owner")
    host.netplan_path.write_text(theirs)
    host.set_link("enp1s0f1np1", 1500, "192.168.200.12/24")
    apply_fabric(host.node, folder, [PORT, TWIN], MANAGED)
    undo_fabric(host.node, folder, [PORT.netdev, TWIN.netdev], [OURS])
    assert host.netplan_path.read_text() == theirs
    assert host.addresses("enp1s0f1np1") == ["192.168.200.12/24"]
    assert host.addresses("enP2p1s0f1np1") == []


def test_undoing_twice_is_fine(host: FakeHost, folder: StackFolder) -> None:
    apply_fabric(host.node, folder, [PORT], MANAGED)
    for _ in range(2):
        undo_fabric(host.node, folder, [PORT.netdev], [OURS])
    assert host.addresses("enp1s0f1np1") == ["169.254.35.62/16"]


def test_undoing_leaves_an_address_that_somebody_else_added(host: FakeHost, folder: StackFolder) -> None:
    apply_fabric(host.node, folder, [PORT], MANAGED)
    host.set_link("enp1s0f1np1", 9000, "192.168.200.12/24", "172.16.0.1/24")
    undo_fabric(host.node, folder, [PORT.netdev], [OURS])
    assert host.addresses("enp1s0f1np1") == ["172.16.0.1/24", "169.254.35.62/16"]  # and what was there before


def test_kernel_parameters_that_networkd_changed_with_the_link_go_back(host: FakeHost, folder: StackFolder) -> None:
    parameter = host.base / "proc/sys/net/ipv4/conf/enp1s0f1np1/promote_secondaries"
    parameter.parent.mkdir(parents=True)
    parameter.write_text("0\n")
    apply_fabric(host.node, folder, [PORT], MANAGED)
    parameter.write_text("1\n")
    undo_fabric(host.node, folder, [PORT.netdev], [OURS])
    assert parameter.read_text() == "0\n"


def test_an_interface_whose_cable_was_pulled_needs_no_putting_back(host: FakeHost, folder: StackFolder) -> None:
    apply_fabric(host.node, folder, [PORT, TWIN], MANAGED)
    host.pull_cable("enp1s0f1np1")
    undo_fabric(host.node, folder, [PORT.netdev, TWIN.netdev], [OURS])
    assert host.addresses("enP2p1s0f1np1") == []
    assert read_journal(host.node, folder) == []


def test_undoing_what_was_never_made_removes_nothing(host: FakeHost, folder: StackFolder) -> None:
    host.netplan_path.write_text("theirs\n")
    undo_fabric(host.node, folder, [PORT.netdev], [OURS])
    assert host.netplan_path.read_text() == "theirs\n"


def test_an_interface_that_is_not_there_changes_nothing(host: FakeHost, folder: StackFolder) -> None:
    gone = FabricInterface(netdev="enp1s0f0np0", address="192.168.210.1/24")
    with pytest.raises(CommandError) as failed:
        apply_fabric(host.node, folder, [PORT, gone], MANAGED)
    assert failed.value.line == "spark-a (nodes[].fabric): expected the interface enp1s0f0np0, found none of that name"
    assert not host.netplan_path.exists()
    assert read_journal(host.node, folder) == []


def test_a_file_that_netplan_refuses_is_told_and_can_be_undone(host: FakeHost, folder: StackFolder) -> None:
    host.netplan_refuses("Error in network definition: invalid MTU")
    with pytest.raises(CommandError) as failed:
        apply_fabric(host.node, folder, [PORT], MANAGED)
    assert failed.value.line == (
        "spark-a (fabric.manage): expected netplan to apply the fabric's file: expected exit "
        "status 0, found 1 "
        "(Error in network definition: invalid MTU); the earlier network was put back"
    )
    host.netplan_accepts()
    undo_fabric(host.node, folder, [PORT.netdev], [OURS])
    assert not host.netplan_path.exists()


def test_an_address_that_did_not_come_is_told_after_the_apply(host: FakeHost, folder: StackFolder) -> None:
    host.netplan_does_nothing()
    with pytest.raises(SparkError) as failed:
        apply_fabric(host.node, folder, [PORT], MANAGED)
    assert failed.value.line == (
        "spark-a (nodes[].fabric[0]): expected 192.168.200.12/24 on enp1s0f1np1, found 169.254.35.62/16 "
        "after netplan apply; the earlier network was put back"
    )


def test_a_netplan_file_that_is_not_there_is_none(host: FakeHost) -> None:
    assert observe_managed(host.node, host.netplan_file)[1] is None


@pytest.mark.parametrize("text", ["", "a\n", "a\nb\n", "\n"])
def test_a_netplan_file_is_read_as_it_was_written(text: str, host: FakeHost) -> None:
    host.netplan_path.write_text(text)
    assert observe_managed(host.node, host.netplan_file)[1] == text


def test_a_link_that_was_down_with_an_address_goes_back_to_that(host: FakeHost, folder: StackFolder) -> None:
    host.set_link("enp1s0f1np1", 1500, "10.0.0.1/24")
    state = host.read()
    state["links"]["enp1s0f1np1"]["down"] = True
    host.change(links=state["links"])
    apply_fabric(host.node, folder, [PORT], MANAGED)
    host.set_link("enp1s0f1np1", 9000, "192.168.200.12/24")  # networkd drops what others had put on it
    undo_fabric(host.node, folder, [PORT.netdev], [OURS])
    assert host.addresses("enp1s0f1np1") == ["10.0.0.1/24"]
    assert host.read()["links"]["enp1s0f1np1"]["down"] is True


def test_an_address_of_the_owner_stays_after_a_second_apply(host: FakeHost, folder: StackFolder) -> None:
    host.set_link("enp1s0f1np1", 1500, PORT.address)
    apply_fabric(host.node, folder, [PORT], MANAGED)
    apply_fabric(host.node, folder, [PORT], MANAGED)
    undo_fabric(host.node, folder, [PORT.netdev], [OURS])
    assert host.addresses("enp1s0f1np1") == [PORT.address]


THEIR_TEXT = """network:
  version: 2
  ethernets:
    enp1s0f1np1:
      addresses:
        - 192.168.100.10/24
      mtu: 4200
"""


@pytest.fixture
def theirs(host: FakeHost) -> Path:
    """A file of somebody else's that configures an interface, in force."""
    path = Path(f"{host.base}{THEIRS}")
    path.write_text(THEIR_TEXT)
    path.chmod(0o640)
    host.set_link("enp1s0f1np1", 4200, "192.168.100.10/24")
    return path


def test_a_file_of_others_is_refused_unless_it_is_named(host: FakeHost, folder: StackFolder, theirs: Path) -> None:
    before = host.links()
    with pytest.raises(ForeignObjectError) as refused:
        apply_fabric(host.node, folder, [PORT, TWIN], MANAGED)
    assert refused.value.render() == (
        "spark-a (fabric.take_over): expected no other file that configures enp1s0f1np1, "
        "found /etc/netplan/40-cx7.yaml\n"
        "  do: add /etc/netplan/40-cx7.yaml to fabric.take_over (destroy puts it back as it was), "
        "or set fabric.manage to false to use it as it is"
    )
    assert host.links() == before
    assert read_journal(host.node, folder) == []


def test_a_file_that_is_taken_over_goes_and_comes_back_byte_for_byte(
    host: FakeHost, folder: StackFolder, theirs: Path
) -> None:
    taking = FabricSettings(manage=True, take_over=(THEIRS,))
    before = host.links()
    for _ in range(2):
        apply_fabric(host.node, folder, [PORT, TWIN], taking)
    assert not theirs.exists()
    assert host.netplan_path.read_text() == render_netplan([PORT, TWIN], 9000)
    assert list((host.base / "run/netplan").iterdir()) == []
    undo_fabric(host.node, folder, [PORT.netdev, TWIN.netdev], [OURS, THEIRS])
    assert theirs.read_text() == THEIR_TEXT
    assert theirs.stat().st_mode & 0o777 == 0o640
    assert not host.netplan_path.exists()
    assert host.links() == before


def test_a_file_that_configures_more_than_the_fabric_is_not_taken_over(
    host: FakeHost, folder: StackFolder, theirs: Path
) -> None:
    theirs.write_text(THEIR_TEXT + "    enP7s7:\n      dhcp4: true\n")
    with pytest.raises(ForeignObjectError) as refused:
        apply_fabric(host.node, folder, [PORT], FabricSettings(manage=True, take_over=(THEIRS,)))
    assert refused.value.line == (
        "spark-a (fabric.take_over): expected that /etc/netplan/40-cx7.yaml configures nothing but the fabric, "
        "found enP7s7 in it"
    )


def test_what_is_there_already_is_recorded_and_nothing_is_changed(host: FakeHost, folder: StackFolder) -> None:
    apply_fabric(host.node, folder, [PORT], MANAGED)
    asked = len(host.node.asked)
    other = StackFolder(folder.root, "second")
    open_journal(host.node, other)
    apply_fabric(host.node, other, [PORT], MANAGED)
    assert [cmd.argv[0] for cmd in host.node.asked[asked:] if cmd.sudo] == []
    assert {entry.key for entry in read_journal(host.node, other)} == {("file", OURS), ("link", PORT.netdev)}
    undo_fabric(host.node, folder, [PORT.netdev], [OURS])
    assert host.addresses(PORT.netdev) == ["169.254.35.62/16", PORT.address]  # the second stack still has it
    undo_fabric(host.node, other, [PORT.netdev], [OURS])
    assert host.addresses(PORT.netdev) == ["169.254.35.62/16"]


def test_another_stack_that_declares_another_address_is_refused(host: FakeHost, folder: StackFolder) -> None:
    apply_fabric(host.node, folder, [PORT], MANAGED)
    other = StackFolder(folder.root, "second")
    open_journal(host.node, other)
    moved = FabricInterface(netdev=PORT.netdev, address="192.168.200.99/24")
    with pytest.raises(CommandError, match="the stack dev declares"):
        apply_fabric(host.node, other, [moved], MANAGED)
    assert PORT.address in host.addresses(PORT.netdev)


def test_what_a_stack_claims_is_what_its_journal_says(host: FakeHost, folder: StackFolder, theirs: Path) -> None:
    taking = FabricSettings(manage=True, take_over=(THEIRS,))
    apply_fabric(host.node, folder, [PORT], taking)
    assert {entry.key: entry.wanted for entry in read_journal(host.node, folder)} == fabric_claims([PORT], taking)
    assert fabric_claims([PORT], FabricSettings()) == {}


def test_the_interface_that_we_are_connected_by_is_never_a_fabric(
    host: FakeHost, folder: StackFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.1.230.7 50000 10.1.230.180 22")
    with pytest.raises(CommandError, match="enP7s7 is the one we are connected by"):
        apply_fabric(host.node, folder, [FabricInterface(netdev="enP7s7", address="192.168.200.12/24")], MANAGED)
    assert not host.netplan_path.exists()


def test_interfaces_that_cannot_be_read_are_no_missing_ones(host: FakeHost, folder: StackFolder) -> None:
    (host.programs / "ip").write_text("#!/bin/sh\necho rubbish\n")
    with pytest.raises(SparkError) as failed:
        apply_fabric(host.node, folder, [PORT], MANAGED)
    assert failed.value.line == "spark-a: could not read the interfaces from `ip -j address show`: found 'rubbish'"


def test_every_command_of_root_is_in_the_list_of_them(host: FakeHost, folder: StackFolder, theirs: Path) -> None:
    taking = FabricSettings(manage=True, take_over=(THEIRS,))
    apply_fabric(host.node, folder, [PORT, TWIN], taking)
    undo_fabric(host.node, folder, [PORT.netdev, TWIN.netdev], [OURS, THEIRS])
    settings = settings_with({"node_root": folder.root, "fabric": {"manage": True, "take_over": [THEIRS]}})
    listed = fabric_root_commands(settings, folder.stack, settings.nodes[0])
    rules = [sudo_rule(cmd) for cmd in listed if cmd.sudo]
    used = [cmd for cmd in host.node.asked if cmd.sudo]
    assert len({cmd.argv for cmd in used}) > 20
    assert [cmd.argv for cmd in used if not allowed_by(rules, cmd)] == []


def test_a_fabric_that_is_not_managed_needs_no_root() -> None:
    settings = settings_with()
    assert fabric_root_commands(settings, "dev", settings.nodes[0]) == []
