"""The network of a node as it is: interfaces, RDMA devices, GIDs, neighbours, and what configures them at boot.

One fragment of the node's one observation script, read-only and without root. Each part is read by itself: a part that
cannot be understood is named in :attr:`NetworkFacts.unread`, and nothing is concluded from it.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_core.transport.base import Fragment, Transport, compose, parse_sections, run_checked

NETPLAN_FILES = r"""
show_files() {
  folder=$1; shift
  for f in "$@"; do
    if [ ! -e "$f" ]; then continue; fi
    if [ ! -r "$f" ]; then echo "closed $folder/${f##*/}"; continue; fi
    echo "open $folder/${f##*/}"
    while IFS= read -r line || [ -n "$line" ]; do printf '|%s\n' "$line"; done < "$f"
  done
}
echo '=== net-netplan'
show_files etc/netplan /etc/netplan/*.yaml
show_files run/netplan /run/netplan/*.yaml
show_files usr/lib/netplan /usr/lib/netplan/*.yaml
show_files etc/systemd/network /etc/systemd/network/*.network
"""
"""Prints what configures interfaces at boot; netplan files have mode 600, so that without root most are closed."""

# Many files are read, so without a process for each. The kernel answers EINVAL where a file has no value: a link that
# is down has no carrier to tell, an empty GID entry no type.
NETWORK = Fragment(
    r"""
take() { v=; { IFS= read -r v < "$1"; } 2>/dev/null || [ -n "$v" ] || v=${2:-}; }
echo '=== net-links'; ip -j address show || echo "ip ended with $?"
echo '=== net-ssh'; echo "${SSH_CONNECTION:-}"
echo '=== net-default'; ip -4 route show default || true
echo '=== net-devices'
for d in /sys/class/net/*; do
  if [ ! -d "$d" ]; then continue; fi
  row="netdev=${d##*/}"
  for name in carrier speed phys_port_name phys_switch_id; do take "$d/$name"; row+=" $name=$v"; done
  if [ -e "$d/device" ]; then pci=$(readlink "$d/device") || pci=; row+=" pci=${pci##*/}"; fi
  for h in "$d"/device/infiniband/*; do if [ -e "$h" ]; then row+=" hca=${h##*/}"; fi; done
  echo "$row"
done
echo '=== net-rdma'
for d in /sys/class/infiniband/*; do
  if [ ! -d "$d" ]; then continue; fi
  row="link ${d##*/}/1"
  take "$d/ports/1/state" unknown; row+=" state ${v##*: }"
  take "$d/ports/1/phys_state" unknown; row+=" physical_state ${v##*: }"
  for n in "$d"/device/net/*; do if [ -e "$n" ]; then row+=" netdev ${n##*/}"; fi; done
  take "$d/ports/1/rate"; row+=" rate $v"
  echo "$row"
done
echo '=== net-gids'
for g in /sys/class/infiniband/*/ports/1/gids/*; do
  take "$g"; gid=$v
  case $gid in ''|0000:0000:0000:0000:0000:0000:0000:0000) continue ;; esac
  port=${g%/gids/*}; hca=${port%/ports/1}
  take "$port/gid_attrs/types/${g##*/}"; if [ "${v##* }" = v2 ]; then kind=v2; else kind=v1; fi
  take "$port/gid_attrs/ndevs/${g##*/}"
  printf '%s\t1\t%s\t%s\t\t%s\t%s\n' "${hca##*/}" "${g##*/}" "$gid" "$kind" "$v"
done
echo '=== net-neighbours'; ip -j neigh show || echo "ip ended with $?"
echo '=== net-lldp'
if command -v lldpctl >/dev/null; then lldpctl -f keyvalue 2>/dev/null || true; fi
echo '=== net-profiles'
if command -v nmcli >/dev/null; then nmcli -t -f NAME,DEVICE,FILENAME connection show 2>/dev/null || true; fi
"""
    + NETPLAN_FILES
)
_GID_ROW = re.compile(r"^(\S+)\s+\d+\s+(\d+)\s+([0-9a-fA-Fx:]+)(?:\s+[0-9.]+)?\s+(v[12])\s+(\S+)\s*$")
_RDMA_ROW = re.compile(r"^link (\S+)/\d+ state (\S+) physical_state \S+(?: netdev (\S+))?(?: rate ?(.*))?$")
_PEER_ROW = re.compile(r"^lldp\.(.+?)\.(chassis|port)\.([\w.-]+)=(.*)$")
_NO_MAC = "00:00:00:00:00:00"


@dataclass(frozen=True)
class Link:
    """A network interface.

    Attributes:
        mtu_bytes: Its MTU.
        addresses: IPv4 addresses with prefix length.
        carrier: Whether a cable with a live peer is plugged in; a link that is down cannot tell.
        up: Whether it is administratively up.
        mac: Hardware address.
        pci: PCI address of its function, such as ``0000:01:00.1``; empty where it has none.
        hca: RDMA device of the same function.
        speed_mbit_s: Negotiated speed, or None where the driver does not say.
        port: Name of the physical port, such as ``p1``, where the driver says.
        switch: Id of the adapter's embedded switch, where the driver says.
    """

    mtu_bytes: int
    addresses: tuple[str, ...] = ()
    carrier: bool = False
    up: bool = True
    mac: str = ""
    pci: str = ""
    hca: str | None = None
    speed_mbit_s: int | None = None
    port: str = ""
    switch: str = ""

    @property
    def networks(self) -> tuple[ipaddress.IPv4Network, ...]:
        return tuple(ipaddress.IPv4Interface(address).network for address in self.addresses)


@dataclass(frozen=True)
class Hca:
    """An RDMA device: the state of its one port (``ACTIVE``), its interface, its rate in Gb/s."""

    state: str
    netdev: str | None = None
    rate_gbit_s: int | None = None


@dataclass(frozen=True)
class Gid:
    """A RoCE v2 entry of a GID table whose GID is an IPv4 address. Its index differs per node and drifts."""

    hca: str
    index: int
    address: str


@dataclass(frozen=True)
class Neighbour:
    """Who was seen behind an interface: an address (empty from LLDP), a hardware address, a name of the far port."""

    netdev: str
    address: str
    mac: str
    far_netdev: str = ""
    far_host: str = ""


@dataclass(frozen=True)
class NetworkFacts:
    """The network of a node.

    Attributes:
        links: All interfaces.
        hcas: RDMA devices.
        gids: RoCE v2 entries of IPv4 addresses.
        neighbours: Who was seen behind which interface.
        management: Interface that our own connection comes in by, or None if that cannot be told.
        management_address: The address that it comes in at.
        controller: The address that it comes from.
        netplan: Path of each file that configures interfaces at boot, to its text or None if it is closed to us.
        profiles: File of each NetworkManager profile that is active, to its interface.
        unread: Part of the facts to why it could not be read.
    """

    links: Mapping[str, Link]
    hcas: Mapping[str, Hca] = field(default_factory=dict)
    gids: tuple[Gid, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    management: str | None = None
    management_address: str = ""
    controller: str = ""
    netplan: Mapping[str, str | None] = field(default_factory=dict)
    profiles: Mapping[str, str] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)


def observe_network(transport: Transport) -> NetworkFacts:
    """Read the network of a node in one round trip; changes nothing."""
    text = run_checked(transport, compose(NETWORK), purpose="expected to read the network interfaces")
    return parse_network(parse_sections(text))


def parse_network(sections: Mapping[str, str]) -> NetworkFacts:
    """Facts from the sections that :data:`NETWORK` printed; what cannot be read is named in ``unread``."""
    unread: dict[str, str] = {}

    def part(name: str, told: str, parse: Callable[[str], Any], otherwise: Any) -> Any:
        text = sections.get(f"net-{name}")
        if text is None:
            unread[name] = f"could not read {told}: found nothing"
            return otherwise
        try:
            return parse(text)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            shown = " ".join(text.split())[:60]
            unread[name] = (
                f"could not read {told}: found {shown!r}" if shown else f"could not read {told}: found nothing"
            )
            return otherwise

    devices = part("devices", "the interfaces from /sys/class/net", _devices, {})
    hcas = part("rdma", "the RDMA devices from /sys/class/infiniband", parse_hcas, {})
    links = part("links", "the interfaces from `ip -j address show`", lambda text: _links(text, devices, hcas), {})
    # After packets were sent, the table knows better who is there.
    table = "neighbours-after" if "net-neighbours-after" in sections else "neighbours"
    seen = part(table, "the neighbours from `ip -j neigh show`", _neighbours, ())
    words = sections.get("net-ssh", "").split()
    address, controller = (words[2], words[0]) if len(words) == 4 else ("", "")
    holders = [name for name, link in links.items() if any(a.split("/")[0] == address for a in link.addresses)]
    route = re.search(r"^default\b.*? dev (\S+)", sections.get("net-default", ""), re.MULTILINE)
    return NetworkFacts(
        links=links,
        hcas=hcas,
        gids=part("gids", "the GID tables from /sys/class/infiniband", parse_gids, ()),
        neighbours=(*seen, *parse_lldp(sections.get("net-lldp", ""))),
        management=holders[0] if holders else route[1] if route and not address else None,
        management_address=address if holders else "",
        controller=controller,
        netplan=part("netplan", "the netplan files", parse_netplan_files, {}),
        profiles=parse_profiles(sections.get("net-profiles", "")),
        unread=unread,
    )


def parse_hcas(text: str) -> dict[str, Hca]:
    """RDMA devices from lines such as those of ``rdma link show``, the rate behind them."""
    found = {}
    for line in text.splitlines():
        match = _RDMA_ROW.match(line.strip())
        if match is not None:
            rate = re.match(r"(\d+)(?:\.\d+)? Gb/sec", match[4] or "")
            found[match[1]] = Hca(match[2].upper(), match[3], int(rate[1]) if rate else None)
        elif line.strip():
            raise ValueError(line)
    return found


def parse_gids(text: str) -> tuple[Gid, ...]:
    """RoCE v2 entries with an IPv4-mapped GID, from lines such as those of ``show_gids``."""
    found = []
    for line in text.splitlines():
        match = _GID_ROW.match(line)
        if match is None or match[4] != "v2" or "x" in match[3].lower():
            continue
        mapped = ipaddress.IPv6Address(match[3]).ipv4_mapped
        if mapped is not None:
            found.append(Gid(match[1], int(match[2]), str(mapped)))
    return tuple(found)


def parse_lldp(text: str) -> tuple[Neighbour, ...]:
    """Neighbours from ``lldpctl -f keyvalue``; what is not understood is left out, since LLDP is rarely there."""
    seen: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        match = _PEER_ROW.match(line.strip())
        if match is not None:
            seen.setdefault(match[1], {}).setdefault(f"{match[2]}.{match[3]}", match[4].strip())
    return tuple(
        Neighbour(
            netdev,
            "",
            (values.get("port.mac") or values.get("chassis.mac") or "").lower(),
            values.get("port.ifname", ""),
            values.get("chassis.name", ""),
        )
        for netdev, values in seen.items()
    )


def parse_netplan_files(text: str) -> dict[str, str | None]:
    """Path of each file to its text, or to None where it may not be read."""
    found: dict[str, list[str] | None] = {}
    lines: list[str] | None = None
    for line in text.split("\n"):  # a line of YAML may end otherwise, but only here does one of ours begin
        state, _, path = line.partition(" ")
        if line.startswith("|") and lines is not None:
            lines.append(line[1:])
        elif state in ("open", "closed") and "/" in path:
            lines = [] if state == "open" else None
            found[f"/{path}"] = lines
        elif line:
            raise ValueError(line)
    return {path: None if body is None else "".join(f"{row}\n" for row in body) for path, body in found.items()}


def parse_profiles(text: str) -> dict[str, str]:
    """File of each active NetworkManager profile to its interface; ``nmcli -t`` escapes colons by a backslash."""
    found = {}
    for line in text.splitlines():
        words = re.split(r"(?<!\\):", line)
        if len(words) == 3 and words[1] not in ("", "--") and words[2].startswith("/"):
            found[words[2].replace("\\:", ":")] = words[1]
    return found


def _devices(text: str) -> dict[str, dict[str, str]]:
    rows = [dict(word.partition("=")[::2] for word in line.split()) for line in text.splitlines() if line.strip()]
    return {row["netdev"]: row for row in rows}


def _links(text: str, devices: Mapping[str, Mapping[str, str]], hcas: Mapping[str, Hca]) -> dict[str, Link]:
    links = {}
    for item in json.loads(text):
        name = str(item["ifname"]).split("@")[0]
        row = devices.get(name, {})
        hca = row.get("hca") or next((other for other, value in hcas.items() if value.netdev == name), None)
        device = hcas.get(hca or "")
        speed_mbit_s = int(row["speed"]) if row.get("speed", "").isdigit() else None
        if device is not None and device.state == "ACTIVE" and device.rate_gbit_s is not None:
            speed_mbit_s = 1000 * device.rate_gbit_s
        links[name] = Link(
            mtu_bytes=int(item["mtu"]),
            addresses=tuple(
                str(ipaddress.IPv4Interface(f"{row['local']}/{row['prefixlen']}"))
                for row in item.get("addr_info", [])
                if row.get("family") == "inet"
            ),
            carrier=row.get("carrier") == "1" or ("carrier" not in row and "LOWER_UP" in item.get("flags", [])),
            up="UP" in item.get("flags", ["UP"]),
            mac=str(item.get("address", "")).lower(),
            pci=row.get("pci", ""),
            hca=hca,
            speed_mbit_s=speed_mbit_s,
            port=row.get("phys_port_name", ""),
            switch=row.get("phys_switch_id", ""),
        )
    return links


def _neighbours(text: str) -> tuple[Neighbour, ...]:
    rows = json.loads(text or "[]")
    return tuple(
        Neighbour(str(row["dev"]), str(row["dst"]), str(row["lladdr"]).lower())
        for row in rows
        if row.get("lladdr", _NO_MAC) != _NO_MAC and not {"FAILED", "INCOMPLETE"} & set(row.get("state", []))
    )
