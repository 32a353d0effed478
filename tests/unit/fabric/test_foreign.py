"""Whose files configure an interface at boot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spark_core.fabric.foreign import foreign_configuration, persistent, speaks_of
from spark_core.fabric.netplan import render_netplan
from spark_core.settings import FabricInterface, FabricSettings
from tests.unit.fabric.networks import MANAGEMENT, PORT, TWIN, recorded, spark

OURS = "/etc/netplan/60-spark-vllm.yaml"
THEIRS = "/etc/netplan/40-cx7.yaml"
NETWORK = spark(12)


@pytest.mark.parametrize(
    ("name", "spoken"),
    [
        ("gx10-four-interfaces-one-slash16-spark-a", {PORT, TWIN}),
        ("gx10-four-interfaces-one-slash16-spark-b", {PORT, TWIN}),
        ("gx10-management-static", {MANAGEMENT}),
        ("nvidia-dhcp-switch", {PORT, TWIN}),
        ("nvidia-link-local-older", {PORT}),
        ("nvidia-link-local-switch", {PORT, TWIN}),
        ("nvidia-perf-guide-networkmanager-port0-spark-a", set()),
        ("nvidia-perf-guide-networkmanager-port0-spark-b", set()),
        ("nvidia-static-port1-spark-a", {PORT, TWIN}),
        ("nvidia-static-port1-spark-b", {PORT, TWIN}),
        ("nvidia-three-sparks-both-rails-one-subnet", {PORT, TWIN}),
        ("owner-99-connectx-optional-networkmanager", set()),
        ("owner-mtu9000-no-link-local-spark-a-port1", {PORT, TWIN}),
        ("owner-mtu9000-no-link-local-spark-b-port0", set()),
    ],
)
def test_recorded_files_speak_of_these_interfaces(name: str, spoken: set[str]) -> None:
    text = recorded(f"netplan/{name}.yaml")
    assert {netdev for netdev in (PORT, TWIN, MANAGEMENT) if speaks_of(text, netdev)} == spoken


@pytest.mark.parametrize(
    ("text", "speaks"),
    [
        ('ethernets: {all: {match: {name: "enp1*"}, dhcp4: true}}', True),
        ("ethernets:\n  x:\n    match:\n      macaddress: 02:00:5E:00:0C:02\n", True),
        ("bonds:\n  bond0:\n    interfaces: [enp1s0f0np0, enp1s0f1np1]\n", True),
        ('ethernets: {all: {match: {name: "enp1s0f[01]np?"}}}', True),
        ("ethernets:\n  all:\n    match:\n      name: enp[1-3]s0f1np[0-9]\n", True),
        ('ethernets: {all: {match: {name: "enp1s0f[02]np*"}}}', False),
        ("ethernets: {x: {match: {driver: mlx5_core}}}", True),
        ('ethernets: {x: {match: {driver: ["r8127", "mlx5*"]}}}', True),
        ("ethernets: {x: {match: {driver: r8127}}}", False),
        ("ethernets: {enp9s0: {addresses: [192.168.1.1/24]}}", False),
        ("[Match]\nName=enp9s0 enp1s0f1*\n", True),
        ("[Match]\nDriver=mlx5_core\n", True),
        ("[Match]\nName=enp9s0\n# Name=enp1s0f1np1\n", False),
        ("# enp1s0f1np1 is configured elsewhere\nethernets: {}\n", False),
        ("ethernets:\n  enp1s0f1np10: {dhcp4: true}\n", False),
        ('ethernets: {all: {match: {name: "wl*"}}}', False),
        ("renderer: NetworkManager\n", False),
        ("[[[ no yaml {{{ : -", False),
        ("", False),
    ],
)
def test_a_file_speaks_of_an_interface_by_name_pattern_or_hardware_address(text: str, speaks: bool) -> None:
    assert speaks_of(text, PORT, "02:00:5e:00:0c:02", "mlx5_core") is speaks


def found(fabric: FabricSettings, **files: str | None) -> list[str]:
    paths = {"ours": OURS, "theirs": THEIRS, "run": "/run/netplan/40-cx7.yaml", "lib": "/usr/lib/netplan/40-cx7.yaml"}
    network = replace(NETWORK, netplan={paths[name]: text for name, text in files.items()})
    return [foreign.what for foreign in foreign_configuration(fabric, [PORT, TWIN], network)]


def test_a_file_of_others_is_foreign_until_it_is_named() -> None:
    text = recorded("netplan/nvidia-static-port1-spark-a.yaml")
    assert found(FabricSettings(manage=True), theirs=text) == [
        f"expected no other file that configures {PORT}, found {THEIRS}"
    ]
    assert found(FabricSettings(manage=True, take_over=(THEIRS,)), theirs=text) == []
    assert found(FabricSettings(manage=True, netplan_file=THEIRS), theirs=text) == []


def test_our_own_file_is_not_foreign() -> None:
    text = render_netplan([FabricInterface(netdev=PORT, address="192.168.200.12/24")], 9000)
    assert found(FabricSettings(manage=True), ours=text) == []


def test_a_file_that_configures_the_management_too_is_never_taken_over() -> None:
    text = recorded("netplan/nvidia-static-port1-spark-a.yaml") + f"    {MANAGEMENT}:\n      dhcp4: true\n"
    assert found(FabricSettings(manage=True, take_over=(THEIRS,)), theirs=text) == [
        f"expected that {THEIRS} configures nothing but the fabric, found {MANAGEMENT} in it"
    ]


def test_files_that_are_closed_or_hidden_are_not_foreign() -> None:
    text = recorded("netplan/nvidia-static-port1-spark-a.yaml")
    fabric = FabricSettings(manage=True)
    assert found(fabric, theirs=None) == []
    assert found(fabric, theirs=text, run="network: {}\n") == []
    assert found(fabric, lib=text, theirs="network: {}\n") == []
    assert len(found(fabric, lib=text)) == 1


def test_a_kept_profile_of_networkmanager_is_foreign_and_one_that_it_made_itself_is_not() -> None:
    folder = "NetworkManager/system-connections"
    profiles = {f"/etc/{folder}/cx7.nmconnection": PORT, f"/run/{folder}/Wired connection 1.nmconnection": TWIN}
    network = replace(NETWORK, profiles=profiles)
    [foreign] = foreign_configuration(FabricSettings(manage=True), [PORT, TWIN], network)
    assert foreign.what == (
        f"expected no NetworkManager profile of {PORT}, found /etc/NetworkManager/system-connections/cx7.nmconnection"
    )


@pytest.mark.parametrize(
    ("text", "address", "stays"),
    [
        (recorded("netplan/nvidia-static-port1-spark-a.yaml"), "192.168.100.10/24", True),
        (recorded("netplan/owner-mtu9000-no-link-local-spark-a-port1.yaml"), "192.168.100.11/24", True),
        (recorded("netplan/nvidia-static-port1-spark-a.yaml"), "192.168.100.99/24", False),
        (recorded("netplan/nvidia-dhcp-switch.yaml"), "10.0.0.7/24", True),
        (recorded("netplan/gx10-management-static.yaml"), "192.168.68.60/22", False),
        (None, "192.168.100.10/24", True),
    ],
    ids=["listed", "flow style", "another", "dhcp", "of another interface", "closed"],
)
def test_an_address_stays_if_a_file_may_say_so(text: str | None, address: str, stays: bool) -> None:
    assert persistent(PORT, address, replace(NETWORK, netplan={THEIRS: text})) is stays


def test_an_address_without_any_file_does_not_stay() -> None:
    bare = replace(NETWORK, netplan={})
    assert persistent(PORT, "192.168.200.12/24", bare) is False
    assert persistent(PORT, "192.168.200.12/24", replace(bare, unread={"netplan": "could not"})) is True
    assert persistent(PORT, "192.168.200.12/24", replace(bare, profiles={"/etc/x.nmconnection": PORT})) is True


@pytest.mark.parametrize("match", [f"Name={PORT}", "Name=enp1s0f?np*", "Driver=mlx5*"])
def test_a_file_of_networkd_is_foreign_and_keeps_addresses(match: str) -> None:
    path = "/etc/systemd/network/05-cx7.network"
    text = f"[Match]\n{match}\n\n[Network]\nAddress=192.168.200.12/24\n"
    network = replace(NETWORK, netplan={path: text})
    [foreign] = foreign_configuration(FabricSettings(manage=True), [PORT], network)
    assert foreign.what == f"expected no other file that configures {PORT}, found {path}"
    assert "manage to false" in foreign.do
    assert persistent(PORT, "192.168.200.12/24", network)
    assert not persistent(PORT, "192.168.200.99/24", network)


def test_a_file_of_networkd_about_another_interface_is_let_be() -> None:
    network = replace(NETWORK, netplan={"/etc/systemd/network/10-lan.network": f"[Match]\nName={MANAGEMENT}\n"})
    assert list(foreign_configuration(FabricSettings(manage=True), [PORT, TWIN], network)) == []
