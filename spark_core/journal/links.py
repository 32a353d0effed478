"""Putting a network interface back as it was.

networkd leaves addresses and kernel parameters of an interface that it no longer manages, and drops addresses that
others had put on one that it begins to manage. A link that is gone (an uncabled port of a Spark has no device at all)
needs no putting back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spark_core import root_commands as root
from spark_core.errors import CommandError
from spark_core.journal.entry import JournalEntry
from spark_core.transport.base import Command, Transport, parse_sections, run_checked, script

_LOOK = """
dev=$1; shift
[ -e "/sys/class/net/$dev" ] || exit 0
echo '=== addresses'
ip -o -4 address show dev "$dev" | while read -r _ _ _ address _; do printf '%s\\n' "$address"; done
echo '=== parameters'
for path in "$@"; do
  value=$(cat "/proc/sys/net/$path" 2>/dev/null) || continue
  printf '%s=%s\\n' "$path" "$value"
done
"""


@dataclass(frozen=True)
class LinkNow:
    """An interface as it is: its IPv4 addresses, and those kernel parameters that can be read."""

    addresses: tuple[str, ...]
    parameters: Mapping[str, str]


def put_link_back(transport: Transport, entry: JournalEntry) -> None:
    """Give an interface its earlier addresses, MTU, state and kernel parameters."""
    now = _look(transport, entry)
    if now is None:
        return
    purpose = f"expected to put link {entry.target} back"
    for cmd in plan_link(entry, now):
        result = transport.run(cmd)
        if not result.ok and cmd.argv[2] != "del":  # one that is gone already is told by the look below
            raise CommandError(f"{purpose}, found: {result.stderr.strip()[-160:]}", where=transport.node)
    # Read anew: an MTU or a state that changes takes some of the parameters along.
    now = _look(transport, entry)
    if now is None:
        return
    still = [address for address in entry.added if address in now.addresses]
    if still:
        raise CommandError(f"{purpose}, found that it still has our address {still[0]}", where=transport.node)
    for cmd in plan_parameters(entry, now):
        transport.run(cmd)  # some can be read and not be set, and the kernel changes some by itself


def plan_link(entry: JournalEntry, now: LinkNow) -> list[Command]:
    """Addresses, MTU and state: the addresses that we added go (no others), the earlier ones come back."""
    return [
        *(root.delete_address(entry.target, address) for address in entry.added if address in now.addresses),
        *(root.add_address(entry.target, address) for address in entry.addresses if address not in now.addresses),
        root.set_link_mtu(entry.target, str(entry.old)),
        root.set_link_state(entry.target, "up" if entry.up else "down"),
    ]


def plan_parameters(entry: JournalEntry, now: LinkNow) -> list[Command]:
    """The kernel parameters that differ."""
    return [
        root.set_parameter(f"net/{path}", value)
        for path, value in sorted(entry.parameters.items())
        if now.parameters.get(path, value) != value
    ]


def _look(transport: Transport, entry: JournalEntry) -> LinkNow | None:
    text = run_checked(
        transport,
        script(_LOOK, entry.target, *sorted(entry.parameters)),
        purpose=f"expected to look at the link {entry.target}",
    )
    sections = parse_sections(text)
    if "addresses" not in sections:
        return None
    pairs = (line.partition("=") for line in sections.get("parameters", "").splitlines())
    return LinkNow(tuple(sections["addresses"].split()), {path: value for path, _, value in pairs})
