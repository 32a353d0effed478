"""The netplan file of a managed fabric: what it says, how it comes onto a node, and how it goes again.

The management interface is left alone: the file names fabric interfaces only. Each change is made under the node's own
rollback (:mod:`spark_core.fabric.rollback`) and written to the journal before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from spark_core import root_commands as root
from spark_core.errors import CommandError, ForeignObjectError, ObservationError
from spark_core.fabric.facts import NETWORK, NetworkFacts, observe_network, parse_network
from spark_core.fabric.foreign import foreign_configuration
from spark_core.fabric.rollback import NetplanFile, change_netplan, end_earlier_change, observe_parameters
from spark_core.journal import (
    JournalEntry,
    Journals,
    Key,
    StackFolder,
    amend,
    read_journal,
    read_journals,
    record_file,
    record_many,
    undo,
)
from spark_core.journal.file_state import complete, files_fragment, observe_files_of_root, parse_files
from spark_core.settings import FabricInterface, FabricSettings
from spark_core.transport.base import Transport, compose, parse_sections, run_checked, script

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


def fabric_claims(interfaces: Sequence[FabricInterface], fabric: FabricSettings) -> dict[Key, str]:
    """What a stack declares of a node's network, as its journal entries say it, for comparison with other stacks."""
    if not fabric.manage or not interfaces:
        return {}
    text = render_netplan(interfaces, fabric.mtu_bytes)
    claims: dict[Key, str] = {("file", fabric.netplan_file): _digest(text)}
    claims |= {("file", path): "absent" for path in fabric.take_over}
    return claims | {("link", interface.netdev): _claim(interface, fabric.mtu_bytes) for interface in interfaces}


def observe_managed(transport: Transport, path: str) -> tuple[NetworkFacts, str | None]:
    """The network of a node, and the text of a netplan file there, or None if there is none.

    Netplan files have mode 600: only then is root asked, in a round trip of its own.
    """
    text = run_checked(
        transport, compose(NETWORK, files_fragment([path])), purpose="expected to read the network interfaces"
    )
    sections = parse_sections(text)
    content = complete(transport, parse_files(transport.node, sections, [path])[path]).content
    return parse_network(sections), None if content is None else content.decode(errors="replace")


def live_interfaces(facts: NetworkFacts, wanted: Mapping[str, str]) -> list[dict[str, object]]:
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


def require_fabric(
    transport: Transport, wanted: Sequence[FabricInterface], mtu_bytes: int, *, moment: str = "", do: str = ""
) -> None:
    """Refuse interfaces that are not as declared.

    Raises:
        CommandError: in what they differ.
    """
    facts = observe_network(transport)
    _require_readable(transport, facts)
    found = unlike(facts, wanted, mtu_bytes)
    if found:
        (place, what), *others = found
        where = f"{transport.node} (nodes[].fabric[{place}])"
        raise CommandError(what + moment, where=where, do=do, evidence=[text for _, text in others])


def unlike(facts: NetworkFacts, wanted: Sequence[FabricInterface], mtu_bytes: int) -> list[tuple[int, str]]:
    """In what the interfaces are not as declared: the place of the interface, and one line."""
    found = []
    for place, interface in enumerate(wanted):
        link = facts.links.get(interface.netdev)
        if link is None:
            found.append((place, f"expected the interface {interface.netdev}, found none of that name"))
            continue
        if interface.address not in link.addresses:
            have = ", ".join(link.addresses) or "no address"
            found.append((place, f"expected {interface.address} on {interface.netdev}, found {have}"))
        if link.mtu_bytes != mtu_bytes:
            found.append((place, f"expected MTU {mtu_bytes} on {interface.netdev}, found {link.mtu_bytes}"))
    return found


def apply_fabric(
    transport: Transport,
    folder: StackFolder,
    interfaces: Sequence[FabricInterface],
    fabric: FabricSettings,
) -> None:
    """Put our netplan file in place and apply it; judged by the addresses and MTU seen afterwards. May be run again.

    Raises:
        CommandError: an interface is missing or the management's, netplan refused, an interface did not get its address
            or MTU, or the node could not be reached any more; what was changed is taken back then.
        ForeignObjectError: another file configures one of the interfaces and is not in ``take_over``.
    """
    end_earlier_change(transport, folder.stack)
    journals = read_journals(transport, folder.root)  # before the look: what another stack changes after it is noticed
    facts = observe_network(transport)
    _require_readable(transport, facts)
    _require_interfaces(transport, interfaces, facts)
    text = render_netplan(interfaces, fabric.mtu_bytes)
    files = observe_files_of_root(
        transport, paths := [fabric.netplan_file, *fabric.take_over, *_closed(facts, fabric)], paths
    )
    texts = {path: (state.content or b"").decode(errors="replace") for path, state in files.items() if state.there}
    _refuse_foreign(transport, interfaces, fabric, replace(facts, netplan={**facts.netplan, **texts}))
    taken = [path for path in fabric.take_over if files[path].there]
    for path in (fabric.netplan_file, *taken):
        wanted = _digest(text) if path == fabric.netplan_file else "absent"
        record_file(transport, folder, path, wanted=wanted, domain="fabric", setting="fabric.manage")
    _record_links(transport, folder, interfaces, facts, fabric.mtu_bytes, journals)
    settled = texts.get(fabric.netplan_file) == text and files[fabric.netplan_file].mode == "0600"
    if settled and not taken and not unlike(facts, interfaces, fabric.mtu_bytes) and not _is_tried(facts, fabric):
        return
    change_netplan(
        transport,
        folder.stack,
        folder.staging,
        [NetplanFile(fabric.netplan_file, text.encode()), *(NetplanFile(path, None) for path in taken)],
        [interface.netdev for interface in interfaces],
        lambda: _finish(transport, interfaces, fabric.mtu_bytes),
        bound_s=fabric.rollback_after_s,
    )


def undo_fabric(transport: Transport, folder: StackFolder, netdevs: Sequence[str], paths: Sequence[str]) -> None:
    """Take our file away (or put the earlier ones back), and the addresses, MTU and parameters that came from it."""
    undo(transport, folder, [*(("file", path) for path in paths), *(("link", netdev) for netdev in netdevs)])


def _require_readable(transport: Transport, facts: NetworkFacts) -> None:
    for part in ("links", "netplan"):
        if part in facts.unread:
            raise ObservationError(facts.unread[part], where=transport.node)


def _require_interfaces(transport: Transport, interfaces: Sequence[FabricInterface], facts: NetworkFacts) -> None:
    for interface in interfaces:
        if interface.netdev not in facts.links:
            raise CommandError(
                f"expected the interface {interface.netdev}, found none of that name",
                where=f"{transport.node} (nodes[].fabric)",
                do="check the cable (an uncabled port of a Spark has no interface at all), or correct the name",
            )
        if interface.netdev == facts.management:
            raise CommandError(
                f"expected a fabric interface, found that {interface.netdev} is the one we are connected by",
                where=f"{transport.node} (nodes[].fabric)",
                do="name the fabric's interface; the management interface is never changed",
            )


def _refuse_foreign(
    transport: Transport, interfaces: Sequence[FabricInterface], fabric: FabricSettings, facts: NetworkFacts
) -> None:
    found = list(foreign_configuration(fabric, [interface.netdev for interface in interfaces], facts))
    if found:
        raise ForeignObjectError(
            found[0].what,
            where=f"{transport.node} (fabric.take_over)",
            do=found[0].do,
            evidence=[other.what for other in found[1:]],
        )


def _closed(facts: NetworkFacts, fabric: FabricSettings) -> list[str]:
    """Netplan files that only root can read, but for those that are looked at anyway."""
    known = {fabric.netplan_file, *fabric.take_over}
    return [p for p, text in facts.netplan.items() if text is None and p.endswith(".yaml") and p not in known]


def _is_tried(facts: NetworkFacts, fabric: FabricSettings) -> bool:
    """Whether a run that was killed after the node had answered left files of its trial."""
    return any(NetplanFile(path, None).trial in facts.netplan for path in (fabric.netplan_file, *fabric.take_over))


def _record_links(
    transport: Transport,
    folder: StackFolder,
    interfaces: Sequence[FabricInterface],
    facts: NetworkFacts,
    mtu_bytes: int,
    journals: Journals,
) -> None:
    """Write down interfaces before they are changed, with the addresses that they are about to get from us."""
    known = {entry.target: entry for entry in read_journal(transport, folder) if entry.kind == "link"}
    new = [interface for interface in interfaces if interface.netdev not in known]
    parameters = observe_parameters(transport, [interface.netdev for interface in new]) if new else {}
    entries = []
    for interface in interfaces:
        link, wanted = facts.links[interface.netdev], _claim(interface, mtu_bytes)
        entry = known.get(interface.netdev) or JournalEntry(
            "link",
            interface.netdev,
            str(link.mtu_bytes),
            up=link.up,
            addresses=link.addresses,
            parameters=parameters[interface.netdev],
        )
        entries.append(replace(entry, wanted=wanted, domain="fabric"))
    for interface, entry in zip(interfaces, record_many(transport, folder, entries, journals), strict=True):
        if interface.address not in (*entry.added, *entry.addresses):
            amend(transport, folder, replace(entry, added=[*entry.added, interface.address]))


def _finish(transport: Transport, interfaces: Sequence[FabricInterface], mtu_bytes: int) -> None:
    for interface in interfaces:  # networkd does not take back an MTU that somebody set by hand
        run_checked(
            transport,
            root.set_link_mtu(interface.netdev, mtu_bytes),
            purpose=f"expected MTU {mtu_bytes} on {interface.netdev}",
            setting="fabric.mtu_bytes",
        )
    pairs = [f"{interface.netdev}={interface.address}" for interface in interfaces]
    transport.run(script(_SETTLE, *pairs, timeout_s=30))
    require_fabric(transport, interfaces, mtu_bytes, moment=" after netplan apply")


def _claim(interface: FabricInterface, mtu_bytes: int) -> str:
    return f"{interface.address}, MTU {mtu_bytes}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
