"""Every part of a node's network, read from recorded outputs and from what nobody would expect."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_core.fabric.facts import (
    Gid,
    Hca,
    Link,
    Neighbour,
    observe_network,
    parse_gids,
    parse_hcas,
    parse_lldp,
    parse_netplan_files,
    parse_network,
    parse_profiles,
)
from spark_core.fabric.ports import function_of
from spark_core.transport.base import parse_sections
from tests.fake_host import FakeHost
from tests.unit.fabric.networks import PORT, SPARK, TWIN, ibdev2netdev, ip_address_show, recorded

EMPTY = {
    "net-links": "[]",
    "net-ssh": "",
    "net-default": "",
    "net-devices": "",
    "net-rdma": "",
    "net-gids": "",
    "net-neighbours": "[]",
    "net-lldp": "",
    "net-profiles": "",
    "net-netplan": "",
}
GX10_GIDS = (Gid("rocep1s0f0", 5, "192.168.100.10"),)


def row(name: str, mtu: int = 1500, *addresses: str, **values: Any) -> dict[str, Any]:
    """An interface as ``ip -j address show`` tells it."""
    info = [{"family": "inet", "local": a.split("/")[0], "prefixlen": int(a.split("/")[1])} for a in addresses]
    return {
        "ifname": name,
        "mtu": mtu,
        "flags": ["UP", "LOWER_UP"],
        "addr_info": [*info, {"family": "inet6", "local": "fe80::1", "prefixlen": 64}],
        **values,
    }


def sections(**changes: str) -> dict[str, str]:
    return EMPTY | {f"net-{name.replace('_', '-')}": text for name, text in changes.items()}


def test_an_answer_with_nothing_in_it_is_a_network_of_nothing() -> None:
    facts = parse_network(EMPTY)
    assert (dict(facts.links), dict(facts.hcas), facts.gids, facts.neighbours, dict(facts.unread)) == (
        {},
        {},
        (),
        (),
        {},
    )
    assert facts.management is None


@pytest.mark.parametrize(
    ("name", "links"),
    [
        (
            "ip-addr-show/enp1s0f1np1-link-local-169.txt",
            {PORT: Link(1500, ("169.254.35.62/16",), carrier=True, mac="02:00:5e:98:ce:ae")},
        ),
        (
            "ip-addr-show/enp1s0f1np1-static.txt",
            {PORT: Link(1500, ("192.168.100.10/24",), carrier=True, mac="02:00:5e:98:ce:ae")},
        ),
        ("ip-addr-show/enP7s7-ipv4-line.txt", {"enP7s7": Link(1500, ("192.168.1.56/24",))}),
        ("ip-br-addr/port1-static-spark-a-one-line.txt", {PORT: Link(1500, ("192.168.100.10/24",), carrier=True)}),
        ("ip-br-addr/port1-static-spark-b-one-line.txt", {PORT: Link(1500, ("192.168.100.11/24",), carrier=True)}),
    ],
)
def test_recorded_interfaces_have_these_addresses(name: str, links: dict[str, Link]) -> None:
    facts = parse_network(sections(links=ip_address_show(name)))
    assert dict(facts.links) == links
    assert dict(facts.unread) == {}


@pytest.mark.parametrize(
    ("name", "carriers", "addresses"),
    [
        (
            "ip-br-addr/port1-link-local-ipv4.txt",
            {"enP7s7", PORT, TWIN},
            {"enP7s7": "192.168.1.163/24", PORT: "169.254.127.30/16", "docker0": "172.17.0.1/16", "lo": "127.0.0.1/8"},
        ),
        ("ip-br-link/port1-up.txt", {"lo", "enP7s7", PORT, TWIN}, {}),
        ("ip-br-link/no-cx7-interfaces-at-all.txt", {"lo", "enP7s7", "wlP9s9", "tailscale0"}, {}),
        ("ip-link/s-statistics-cx7-no-carrier.txt", {"lo", "enP7s7", "wlP9s9", "br-32d29ded7ce4", "veth5b4ba42"}, {}),
    ],
)
def test_recorded_machines_have_these_carriers_and_addresses(
    name: str, carriers: set[str], addresses: dict[str, str]
) -> None:
    facts = parse_network(sections(links=ip_address_show(name)))
    assert {netdev for netdev, link in facts.links.items() if link.carrier} == carriers
    assert {netdev: link.addresses[0] for netdev, link in facts.links.items() if link.addresses} == addresses


def test_a_spark_without_a_cable_has_no_fabric_interface() -> None:
    facts = parse_network(sections(links=ip_address_show("ip-br-link/no-cx7-interfaces-at-all.txt")))
    assert not any(netdev.startswith(("enp1", "enP2")) for netdev in facts.links)
    assert facts.hcas == {}


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("rdma-link/all-four-active.txt", {"rocep1s0f0", "rocep1s0f1", "roceP2p1s0f0", "roceP2p1s0f1"}),
        ("rdma-link/port0-active.txt", {"rocep1s0f0", "roceP2p1s0f0"}),
    ],
)
def test_recorded_rdma_links_are_read(name: str, active: set[str]) -> None:
    hcas = parse_hcas(recorded(name))
    assert len(hcas) == 4
    assert {device for device, hca in hcas.items() if hca.state == "ACTIVE"} == active
    assert hcas["roceP2p1s0f0"].netdev == "enP2p1s0f0np0"
    assert {hca.state for hca in hcas.values()} <= {"ACTIVE", "DOWN"}


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("ibdev2netdev/port0-up.txt", {"rocep1s0f0": "enp1s0f0np0", "roceP2p1s0f0": "enP2p1s0f0np0"}),
        ("ibdev2netdev/port1-up-p1-first.txt", {"rocep1s0f1": PORT, "roceP2p1s0f1": TWIN}),
        ("ibdev2netdev/port1-up-p2-first.txt", {"rocep1s0f1": PORT, "roceP2p1s0f1": TWIN}),
    ],
)
def test_recorded_pairs_of_rdma_device_and_interface_are_read_in_any_order(name: str, active: dict[str, str]) -> None:
    devices, hcas = ibdev2netdev(name)
    links = json.dumps([row(netdev) for netdev in re.findall(r"netdev=(\S+)", devices)])
    facts = parse_network(sections(links=links, devices=devices, rdma=hcas))
    assert {device: hca.netdev for device, hca in facts.hcas.items() if hca.state == "ACTIVE"} == active
    assert {str(link.hca): netdev for netdev, link in facts.links.items() if link.carrier} == active
    assert {link.speed_mbit_s for link in facts.links.values()} == {200_000, None}


def test_recorded_states_and_rates_of_sysfs_are_read() -> None:
    lines = recorded("sys-infiniband/rate-and-state-four-devices.txt").splitlines()
    text = "\n".join(
        f"link {line.split()[0]}/1 state {line.rpartition(': ')[2]} physical_state x rate {line.split(maxsplit=1)[1]}"
        for line in lines
    )
    assert parse_hcas(text) == {
        "rocep1s0f0": Hca("DOWN", None, 40),
        "rocep1s0f1": Hca("ACTIVE", None, 200),
        "roceP2p1s0f0": Hca("DOWN", None, 40),
        "roceP2p1s0f1": Hca("ACTIVE", None, 200),
    }


@pytest.mark.parametrize("form", ["rocep1s0f0-port1-rate-2x-ndr.txt", "rocep1s0f1-port1-rate-4x-hdr.txt"])
def test_a_rate_has_the_same_speed_in_either_form(form: str) -> None:
    rate = recorded(f"sys-infiniband/{form}").strip()
    assert parse_hcas(f"link a/1 state ACTIVE physical_state LinkUp netdev x rate {rate}")["a"].rate_gbit_s == 200


@pytest.mark.parametrize(
    ("name", "gids"),
    [
        (
            "show_gids/two-rails-index3-ll-redacted.txt",
            (Gid("rocep1s0f0", 3, "192.168.100.10"), Gid("roceP2p1s0f0", 3, "192.168.100.14")),
        ),
        ("show_gids/tab-separated-rows-excerpt.txt", (Gid("rocep1s0f0", 3, "192.168.100.10"),)),
    ],
)
def test_recorded_gid_tables_have_these_entries_for_rdma_over_ipv4(name: str, gids: tuple[Gid, ...]) -> None:
    assert parse_gids(recorded(name)) == gids


def test_a_populated_link_local_entry_is_not_the_one_that_is_looked_for() -> None:
    rows = []
    for line in recorded("gid-table/gx10-roce-v2-at-index-5.txt").splitlines():
        match = re.match(r"^ +gid (\d+) +([0-9a-f:]{39}) +(?:IB/)?(RoCE v[12]|-)", line)
        if match is not None and match[3] != "-":
            rows.append(f"rocep1s0f0\t1\t{match[1]}\t{match[2]}\t\t{match[3].split()[1]}\tenp1s0f0np0")
    assert len(rows) == 6
    assert parse_gids("\n".join(rows)) == GX10_GIDS


def test_recorded_functions_have_these_ports() -> None:
    text = recorded("sys-net/phys-port-name-four-functions.txt")
    rows = re.findall(r"^(\S+) +port=(\S+) +pci=(\S+)", text, re.MULTILINE)
    devices = "\n".join(f"netdev={name} carrier=1 phys_port_name={port} pci={pci}" for name, port, pci in rows)
    facts = parse_network(sections(links=json.dumps([row(name) for name, _, _ in rows]), devices=devices))
    assert {name: (link.port, link.pci) for name, link in facts.links.items()} == {
        "enp1s0f0np0": ("p0", "0000:01:00.0"),
        "enp1s0f1np1": ("p1", "0000:01:00.1"),
        "enP2p1s0f0np0": ("p0", "0002:01:00.0"),
    }


def test_a_recorded_function_has_a_carrier_and_a_pci_address() -> None:
    pci = recorded("sys-net/enp1s0f0np0-device-uevent-pci-slot.txt").partition("=")[2].strip()
    devices = f"netdev=enp1s0f0np0 carrier={recorded('sys-net/enp1s0f0np0-carrier.txt').strip()} pci={pci}"
    link = parse_network(sections(links=json.dumps([row("enp1s0f0np0")]), devices=devices)).links["enp1s0f0np0"]
    assert (link.carrier, function_of("enp1s0f0np0", link)) == (True, (0, 1, 0, 0))


@pytest.mark.parametrize(
    ("name", "mbit_s"),
    [
        ("ethtool/cx7-200g-four-lines.txt", 200_000),
        ("ethtool/enP7s7-10g-three-lines.txt", 10_000),
        ("ethtool/speed-line-100g-switch-not-set.txt", 100_000),
        ("ethtool/speed-line-200g.txt", 200_000),
    ],
)
def test_the_speed_that_the_kernel_shows_is_the_one_that_ethtool_tells(name: str, mbit_s: int) -> None:
    said = re.search(r"Speed: (\d+)Mb/s", recorded(name))
    assert said is not None
    facts = parse_network(sections(links=json.dumps([row(PORT)]), devices=f"netdev={PORT} carrier=1 speed={said[1]}"))
    assert facts.links[PORT].speed_mbit_s == mbit_s


@pytest.mark.parametrize("speed", ["-1", "", "4294967295x"])
def test_a_speed_that_is_none_is_not_known(speed: str) -> None:
    facts = parse_network(sections(links=json.dumps([row(PORT)]), devices=f"netdev={PORT} carrier=1 speed={speed}"))
    assert facts.links[PORT].speed_mbit_s is None


def test_the_interface_that_ssh_comes_in_by_is_known_by_its_address() -> None:
    links = json.dumps([row("enP7s7", 1500, "192.168.1.56/24"), row(PORT, 9000, "192.168.200.12/24")])
    facts = parse_network(sections(links=links, ssh="192.168.1.7 50000 192.168.1.56 22"))
    assert (facts.management, facts.management_address, facts.controller) == ("enP7s7", "192.168.1.56", "192.168.1.7")


def test_without_ssh_s_word_the_recorded_default_route_tells_the_management_interface() -> None:
    links = json.dumps([row("enP7s7", 1500, "192.168.1.56/24")])
    facts = parse_network(sections(links=links, default=recorded("ip-route/default-on-enP7s7.txt")))
    assert (facts.management, facts.management_address) == ("enP7s7", "")


def test_an_address_that_no_interface_has_names_no_management_interface() -> None:
    route = recorded("ip-route/default-on-enP7s7.txt")
    assert parse_network(sections(ssh="10.0.0.1 1 10.0.0.2 22", default=route)).management is None


def test_neighbours_that_did_not_answer_are_none() -> None:
    rows = [
        {"dst": "192.168.200.13", "dev": PORT, "lladdr": "02:00:5E:00:0D:02", "state": ["REACHABLE"]},
        {"dst": "192.168.200.14", "dev": PORT, "state": ["FAILED"]},
        {"dst": "192.168.200.15", "dev": PORT, "lladdr": "02:00:5e:00:0d:03", "state": ["INCOMPLETE"]},
        {"dst": "fe80::1", "dev": TWIN, "lladdr": "02:00:5e:00:0d:04", "state": ["STALE"]},
    ]
    facts = parse_network(sections(neighbours=json.dumps(rows)))
    assert facts.neighbours == (
        Neighbour(PORT, "192.168.200.13", "02:00:5e:00:0d:02"),
        Neighbour(TWIN, "fe80::1", "02:00:5e:00:0d:04"),
    )


def test_the_table_of_after_the_packets_counts() -> None:
    before = [{"dst": "192.168.200.13", "dev": PORT, "lladdr": "02:00:5e:00:00:99", "state": ["STALE"]}]
    after = [{"dst": "192.168.200.13", "dev": PORT, "lladdr": "02:00:5e:00:0d:02", "state": ["REACHABLE"]}]
    facts = parse_network(sections(neighbours=json.dumps(before), neighbours_after=json.dumps(after)))
    assert [seen.mac for seen in facts.neighbours] == ["02:00:5e:00:0d:02"]


def test_the_other_end_is_read_from_lldp() -> None:
    text = (
        "lldp.enp1s0f1np1.via=LLDP\nlldp.enp1s0f1np1.chassis.mac=02:00:5E:00:0D:00\n"
        "lldp.enp1s0f1np1.chassis.name=spark-b\nlldp.enp1s0f1np1.port.mac=02:00:5e:00:0d:02\n"
        "lldp.enp1s0f1np1.port.ifname=enp1s0f0np0\nrubbish\nlldp.eth0.5.chassis.name=switch\n"
    )
    assert parse_lldp(text) == (
        Neighbour(PORT, "", "02:00:5e:00:0d:02", "enp1s0f0np0", "spark-b"),
        Neighbour("eth0.5", "", "", "", "switch"),
    )


def test_active_profiles_of_networkmanager_are_read_with_their_files() -> None:
    text = (
        "Wired connection 1:enp1s0f1np1:/run/NetworkManager/system-connections/Wired connection 1.nmconnection\n"
        "cx7\\: left:enP2p1s0f1np1:/etc/NetworkManager/system-connections/cx7\\: left.nmconnection\n"
        "unused::/etc/NetworkManager/system-connections/unused.nmconnection\nrubbish\n"
    )
    assert parse_profiles(text) == {
        "/run/NetworkManager/system-connections/Wired connection 1.nmconnection": PORT,
        "/etc/NetworkManager/system-connections/cx7: left.nmconnection": TWIN,
    }


@pytest.mark.parametrize("path", sorted((SPARK / "netplan").glob("*.yaml")), ids=lambda path: path.stem)
def test_recorded_netplan_files_arrive_as_they_are(path: Path, host: FakeHost) -> None:
    (host.base / "etc/netplan/40-cx7.yaml").write_bytes(path.read_bytes())
    (host.base / "run/netplan/60-x.yaml").write_text("a: 1")
    network = host.base / "etc/systemd/network/10-x.network"
    network.parent.mkdir(parents=True)
    network.write_text("[Match]\n")
    found = {name: text for name, text in observe_network(host.node).netplan.items() if not name.startswith("/usr")}
    assert found == {
        "/etc/netplan/40-cx7.yaml": path.read_text().rstrip("\n") + "\n",
        "/run/netplan/60-x.yaml": "a: 1\n",
        "/etc/systemd/network/10-x.network": network.read_text(),
    }


def test_a_closed_file_is_no_empty_one() -> None:
    assert parse_netplan_files("closed etc/netplan/a.yaml\nopen run/netplan/b.yaml\nclosed usr/lib/netplan/c.yaml") == {
        "/etc/netplan/a.yaml": None,
        "/run/netplan/b.yaml": "",
        "/usr/lib/netplan/c.yaml": None,
    }


def test_the_script_reads_a_host_with_rdma_devices(host: FakeHost) -> None:
    sys = host.base / "sys/class"
    for netdev, device, pci in ((PORT, "rocep1s0f1", "0000:01:00.1"), (TWIN, "roceP2p1s0f1", "0002:01:00.1")):
        function = sys / f"functions/{pci}"
        (function / f"infiniband/{device}").mkdir(parents=True)
        (function / f"net/{netdev}").mkdir(parents=True)
        (sys / f"net/{netdev}/device").symlink_to(function)
        for name, text in {
            "speed": "200000",
            "phys_port_name": "p1",
            "phys_switch_id": "abc",
        }.items():
            (sys / f"net/{netdev}/{name}").write_text(text + "\n")
        port = sys / f"infiniband/{device}/ports/1"
        for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
            (port / folder).mkdir(parents=True)
        (sys / f"infiniband/{device}/device").symlink_to(function)
        for name, text in {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "200 Gb/sec (4X HDR)"}.items():
            (port / name).write_text(text + "\n")
        for index, gid, kind in (
            (0, "fe80:0000:0000:0000:0000:5eff:fe76:e98b", "IB/RoCE v1"),
            (3, "0000:0000:0000:0000:0000:ffff:c0a8:c80c", "RoCE v2"),
            (4, "0000:0000:0000:0000:0000:0000:0000:0000", ""),
        ):
            (port / f"gids/{index}").write_text(gid + "\n")
            if kind:
                (port / f"gid_attrs/types/{index}").write_text(kind + "\n")
                (port / f"gid_attrs/ndevs/{index}").write_text(netdev + "\n")
    facts = observe_network(host.node)
    assert dict(facts.unread) == {}
    assert facts.hcas == {
        "rocep1s0f1": Hca("ACTIVE", PORT, 200),
        "roceP2p1s0f1": Hca("ACTIVE", TWIN, 200),
    }
    assert set(facts.gids) == {
        Gid("rocep1s0f1", 3, "192.168.200.12"),
        Gid("roceP2p1s0f1", 3, "192.168.200.12"),
    }
    link = facts.links[PORT]
    assert (link.pci, link.hca, link.port, link.switch) == ("0000:01:00.1", "rocep1s0f1", "p1", "abc")
    assert (link.carrier, link.speed_mbit_s) == (True, 200_000)


TOLD = {
    "links": "could not read the interfaces from `ip -j address show`",
    "devices": "could not read the interfaces from /sys/class/net",
    "rdma": "could not read the RDMA devices from /sys/class/infiniband",
    "neighbours": "could not read the neighbours from `ip -j neigh show`",
    "netplan": "could not read the netplan files",
}


@pytest.mark.parametrize("part", TOLD)
@pytest.mark.parametrize("text", ["Gerät nicht gefunden", "ip ended with 1", '[{"ifname": "x"', "\x00\ufffd", "[[[["])
def test_a_part_that_is_not_understood_is_named_and_takes_nothing_else_away(part: str, text: str) -> None:
    whole = sections(
        links=json.dumps([row(PORT, 9000, "192.168.200.12/24")]),
        devices=f"netdev={PORT} carrier=1",
        rdma=recorded("rdma-link/all-four-active.txt"),
        gids=recorded("show_gids/two-rails-index3-ll-redacted.txt"),
    )
    facts = parse_network(whole | {f"net-{part}": text})
    assert list(facts.unread) == [part]
    assert facts.unread[part].startswith(f"{TOLD[part]}: found ")
    assert len(facts.gids) == 2
    if part != "links":
        assert facts.links[PORT].addresses == ("192.168.200.12/24",)
    if part != "rdma":
        assert len(facts.hcas) == 4


@pytest.mark.parametrize("part", [*TOLD, "gids"])
def test_a_part_that_is_missing_is_not_absent(part: str) -> None:
    facts = parse_network({name: text for name, text in EMPTY.items() if name != f"net-{part}"})
    assert list(facts.unread) == [part]
    assert facts.unread[part].endswith(": found nothing")


@pytest.mark.parametrize(
    "items",
    [{}, [1], [{}], [{"ifname": PORT}], [{"ifname": PORT, "mtu": "big"}], [row(PORT, addr_info=[{"family": "inet"}])]],
)
def test_interfaces_of_another_shape_are_not_understood(items: Any) -> None:
    facts = parse_network(sections(links=json.dumps(items)))
    assert "links" in facts.unread or facts.links == {}


def test_a_tool_that_is_missing_is_named(host: FakeHost) -> None:
    (host.programs / "ip").write_text("#!/bin/sh\nexit 127\n")
    facts = observe_network(host.node)
    assert set(facts.unread) == {"links", "neighbours"}
    assert facts.unread["links"].endswith("found 'ip ended with 127'")


@given(text=st.text(max_size=300), name=st.sampled_from(sorted(EMPTY)))
def test_no_output_breaks_the_parser(text: str, name: str) -> None:
    facts = parse_network(EMPTY | {name: text})
    assert set(facts.unread) <= {name.removeprefix("net-")}


@given(cut=st.integers(0, 4000))
def test_an_answer_that_was_cut_is_read_as_far_as_it_goes(cut: int) -> None:
    whole = "".join(
        f"=== {name}\n{text}\n"
        for name, text in sections(
            links=ip_address_show("ip-link/s-statistics-cx7-no-carrier.txt"),
            rdma=recorded("rdma-link/port0-active.txt"),
            gids=recorded("show_gids/two-rails-index3-ll-redacted.txt"),
        ).items()
    )
    facts = parse_network(parse_sections(whole[:cut]))
    assert set(facts.unread) <= {"links", "devices", "rdma", "gids", "neighbours", "netplan"}
    assert facts.links == {} or len(facts.links) == 10


def test_a_netplan_file_with_odd_letters_and_line_ends_is_read_whole() -> None:
    host_says = "=== net-netplan\nopen etc/netplan/90-odd.yaml\n|# a\x85b\u2028=== c\n|network:\r\n|  version: 2\rx\n"
    read = parse_netplan_files(parse_sections(host_says)["net-netplan"])
    assert read == {"/etc/netplan/90-odd.yaml": "# a\x85b\u2028=== c\nnetwork:\r\n  version: 2\rx\n"}
