"""The RoCE fabric of a node: netdev, MTU, addresses, and the one netplan file that is ours.

A netplan file is written only if ``fabric.manage`` is set; otherwise the fabric is checked and never changed. The
management interface is left alone: the file names fabric interfaces only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spark_core.errors import CommandError, ObservationError
from spark_core.journal import JournalEntry, StackFolder, amend, read_journal, record, record_file, undo
from spark_core.settings.fabric import FabricInterface
from spark_core.transport.base import Transport, command, parse_sections, run_checked, script
from spark_core.transport.ssh import write_file

_OBSERVE = """
first_line() { cat "$1" 2>/dev/null || echo "$2"; }
echo '=== links'; ip -j address show
echo '=== management'; set -- ${SSH_CONNECTION:-}; ip -o address show | grep -F " ${3:-none}/" | head -1 || true
echo '=== carrier'
for d in /sys/class/net/*; do printf '%s %s\\n' "${d##*/}" "$(first_line "$d/carrier" 0)"; done
echo '=== hcas'
for d in /sys/class/infiniband/*; do
  [ -e "$d" ] || continue
  printf '%s %s\\n' "${d##*/}" "$(first_line "$d/ports/1/state" unknown)"
done
"""
_APPLY_TIMEOUT_S = 60
_SETTLE = """
for i in $(seq 1 50); do
  ok=1
  for pair in "$@"; do
    dev="${pair%%=*}"; addr="${pair#*=}"
    ip -o -4 address show dev "$dev" | grep -qF " $addr " || ok=0
  done
  [ "$ok" = 1 ] && exit 0
  sleep 0.2
done
exit 4
"""


@dataclass(frozen=True)
class Link:
    """A network interface as it is.

    Attributes:
        mtu_bytes: Its MTU.
        addresses: IPv4 addresses with prefix length.
        carrier: Whether a cable with a live peer is plugged in; a link that is down cannot tell.
        up: Whether it is administratively up.
    """

    mtu_bytes: int
    addresses: tuple[str, ...]
    carrier: bool
    up: bool = True


@dataclass(frozen=True)
class FabricFacts:
    """The network of a node.

    Attributes:
        links: All interfaces.
        hcas: RDMA devices with the state of their port.
        management: The interface that our own connection comes in by, or None if that cannot be told.
    """

    links: dict[str, Link]
    hcas: dict[str, str]
    management: str | None = None


def observe_fabric(transport: Transport) -> FabricFacts:
    """Read the interfaces of a node in one round trip; changes nothing."""
    text = run_checked(transport, script(_OBSERVE), purpose="expected to read the network interfaces")
    try:
        return parse_fabric(text)
    except (KeyError, ValueError, TypeError) as error:
        raise ObservationError(
            "expected a list of interfaces from ip -j, found something else", where=transport.node
        ) from error


def observe_link_parameters(transport: Transport, netdev: str) -> dict[str, str]:
    """Kernel parameters of one interface by their path below /proc/sys/net; networkd changes some of them."""
    text = run_checked(
        transport,
        script(
            'cd /proc/sys/net; for f in ipv[46]/conf/"$1"/* ipv[46]/neigh/"$1"/*; do [ -r "$f" ] || continue; '
            'value=$(cat "$f" 2>/dev/null) || continue; printf "%s=%s\\n" "$f" "$value"; done',
            netdev,
        ),
        purpose=f"expected to read the kernel parameters of {netdev}",
    )
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def parse_fabric(text: str) -> FabricFacts:
    """Facts from the output of the observation script."""
    sections = parse_sections(text)
    carrier = dict(line.split()[:2] for line in sections["carrier"].splitlines() if line.strip())
    links = {}
    for item in json.loads(sections["links"]):
        name = item["ifname"].split("@")[0]
        addresses = tuple(
            f"{a['local']}/{a['prefixlen']}" for a in item.get("addr_info", []) if a.get("family") == "inet"
        )
        links[name] = Link(int(item["mtu"]), addresses, carrier.get(name) == "1", "UP" in item.get("flags", ["UP"]))
    hcas = {}
    for line in sections.get("hcas", "").splitlines():
        name, _, state = line.strip().partition(" ")
        if name:
            hcas[name] = state.rpartition(": ")[2] or state
    words = sections.get("management", "").split()
    return FabricFacts(links, hcas, words[1].split("@")[0] if len(words) > 1 else None)


def render_netplan(interfaces: Sequence[FabricInterface], mtu_bytes: int) -> str:
    """The netplan file for the fabric interfaces of one node: static addresses, no link-local ones.

    A static IPv4 address is what gives RoCE v2 its GID; link-local addresses move the index of it.
    """
    lines = [
        "# Written by spark-vllm; removed by its destroy. Changes made here are put back.",
        "network:",
        "  version: 2",
        "  ethernets:",
    ]
    for interface in interfaces:
        lines += [
            f"    {interface.netdev}:",
            "      dhcp4: false",
            "      dhcp6: false",
            "      link-local: []",
            "      optional: true",
            f"      mtu: {mtu_bytes}",
            "      addresses:",
            f"        - {interface.address}",
        ]
    return "\n".join(lines) + "\n"


def observe_netplan_file(transport: Transport, path: str) -> str | None:
    """Text of a netplan file, or None if there is none. Needs root, since netplan files have mode 600."""
    text = run_checked(
        transport,
        script('[ -e "$1" ] || { echo "=== absent"; exit 0; }; echo "=== text"; cat "$1"', path, sudo=True),
        purpose=f"expected to read {path}",
        setting="fabric.manage",
    )
    sections = parse_sections(text)
    return None if "absent" in sections else sections.get("text", "") + "\n"


def live_interfaces(facts: FabricFacts, wanted: Mapping[str, str]) -> list[dict[str, object]]:
    """Interfaces as they are, in the shape of the resource's inputs, so that drift shows as a difference.

    Args:
        wanted: netdev to the address that it should have; of several addresses, that one is told.
    """
    live: list[dict[str, object]] = []
    for netdev, address in wanted.items():
        link = facts.links.get(netdev)
        have = link.addresses if link else ()
        told = address if address in have else ", ".join(have) or "none"
        live.append({"netdev": netdev, "address": told, "mtu_bytes": link.mtu_bytes if link else 0})
    return live


def fabric_findings(node: str, facts: FabricFacts, wanted: Sequence[FabricInterface], mtu_bytes: int) -> list[str]:
    """What is wrong with an unmanaged fabric, one line each."""
    findings = []
    for place, interface in enumerate(wanted):
        link = facts.links.get(interface.netdev)
        where = f"{node} (nodes[].fabric[{place}])"
        if link is None:
            have = ", ".join(sorted(name for name in facts.links if name != "lo"))
            findings.append(
                f"{where}: expected the interface {interface.netdev}, found only {have} (an uncabled port has none)"
            )
            continue
        if interface.address not in link.addresses:
            findings.append(
                f"{where}: expected {interface.address} on {interface.netdev}, "
                f"found {', '.join(link.addresses) or 'no address'}"
            )
        if link.mtu_bytes != mtu_bytes:
            findings.append(f"{where}: expected MTU {mtu_bytes} on {interface.netdev}, found {link.mtu_bytes}")
    return findings


def apply_fabric(
    transport: Transport, folder: StackFolder, interfaces: Sequence[FabricInterface], mtu_bytes: int, path: str
) -> None:
    """Write our netplan file and apply it; judged by the addresses and MTU seen afterwards. May be run again.

    Raises:
        CommandError: netplan refused, or an interface did not get its address or MTU.
    """
    facts = observe_fabric(transport)
    missing = [interface.netdev for interface in interfaces if interface.netdev not in facts.links]
    if missing:
        raise CommandError(
            f"expected the interface {missing[0]}, found none of that name",
            where=f"{transport.node} (nodes[].fabric)",
            do="check the cable (an uncabled port of a Spark has no interface at all), or correct the name",
        )
    for interface in interfaces:
        if interface.netdev == facts.management:
            raise CommandError(
                f"expected a fabric interface, found that {interface.netdev} is the one we are connected by",
                where=f"{transport.node} (nodes[].fabric)",
                do="name the fabric's interface; the management interface is never changed",
            )
    text = render_netplan(interfaces, mtu_bytes)
    if observe_netplan_file(transport, path) != text:
        record_file(transport, folder, path)
    known = {entry.target: entry for entry in read_journal(transport, folder) if entry.kind == "link"}
    for interface in interfaces:
        _record_link(transport, folder, interface, facts.links[interface.netdev], known.get(interface.netdev))
    run_checked(transport, write_file(path, text.encode(), mode="0600", sudo=True), purpose=f"expected to write {path}")
    _netplan_apply(transport)
    for interface in interfaces:  # networkd does not take back an MTU that somebody set by hand
        run_checked(
            transport,
            command("ip", "link", "set", "dev", interface.netdev, "mtu", str(mtu_bytes), sudo=True),
            purpose=f"expected MTU {mtu_bytes} on {interface.netdev}",
            setting="fabric.mtu_bytes",
        )
    pairs = [f"{interface.netdev}={interface.address}" for interface in interfaces]
    transport.run(script(_SETTLE, *pairs, timeout_s=30))
    findings = fabric_findings(transport.node, observe_fabric(transport), interfaces, mtu_bytes)
    if findings:
        what = findings[0].split(": ", 1)[1]
        raise CommandError(what + " after netplan apply", where=f"{transport.node} (fabric)", evidence=findings[1:])


def _record_link(
    transport: Transport, folder: StackFolder, interface: FabricInterface, link: Link, known: JournalEntry | None
) -> None:
    """Write down an interface before it is changed, with the address that it is about to get from us."""
    if known is not None:
        if interface.address not in (*known.added, *known.addresses):
            amend(transport, folder, replace(known, added=[*known.added, interface.address]))
        return
    added = [] if interface.address in link.addresses else [interface.address]
    parameters = observe_link_parameters(transport, interface.netdev)
    record(
        transport,
        folder,
        JournalEntry(
            "link",
            interface.netdev,
            str(link.mtu_bytes),
            up=link.up,
            addresses=link.addresses,
            added=added,
            parameters=parameters,
        ),
    )


def undo_fabric(transport: Transport, folder: StackFolder, netdevs: Sequence[str], path: str) -> None:
    """Take our file away (or put the earlier one back), and the addresses, MTU and parameters that came from it."""
    undo(transport, folder, [("file", path), *(("link", netdev) for netdev in netdevs)])


def _netplan_apply(transport: Transport) -> None:
    run_checked(
        transport,
        command("netplan", "apply", sudo=True, timeout_s=_APPLY_TIMEOUT_S),
        purpose="expected netplan to apply the fabric's file",
        setting="fabric.manage",
    )
