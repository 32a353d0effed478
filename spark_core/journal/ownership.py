"""Who may change what on a node that several stacks use.

A thing that another stack holds already with the same wanted value is held together: our entry takes over its old
value, so that whoever leaves last restores what was there at first. With another wanted value it is refused.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spark_core.errors import CommandError
from spark_core.findings import Finding
from spark_core.journal.entry import JournalEntry, Key


@dataclass(frozen=True)
class Held:
    """An entry as it lies on the node.

    Attributes:
        digest: SHA-256 of the entry's file.
        leaving: Whether its stack is just putting the thing back, or was killed while it did.
    """

    entry: JournalEntry
    digest: str
    leaving: bool


Journals = Mapping[str, Mapping[Key, Held]]
"""Stack to what it holds."""


def contradictions(stack: str, claims: Mapping[Key, str], journals: Journals, node: str) -> list[Finding]:
    """What other stacks on a node declare otherwise than this one; nothing is asked and nothing changed.

    Args:
        claims: What this stack declares on the node: kind and target to the wanted value, as its entries would say it.
        journals: What :func:`parse_journals` found on the node.
    """
    found = []
    for (kind, target), wanted in sorted(claims.items()):
        for other, held in sorted(holders(stack, (kind, target), journals).items()):
            if held.entry.wanted not in (None, wanted):
                found.append(
                    Finding(
                        "setting-contradicted",
                        node,
                        f"expected {kind} {target} = {wanted} for the stack {stack}, "
                        f"found that the stack {other} declares {held.entry.wanted}",
                        "declare the same in both stacks, or in one of them only",
                    )
                )
    return found


def plan_records(
    node: str, stack: str, entries: Sequence[JournalEntry], journals: Journals
) -> list[tuple[JournalEntry, bool]]:
    """Each entry as it will stand, and whether it must be written; pure."""
    shared = {entry.key: entry.wanted for entry in entries if entry.shared and entry.wanted is not None}
    found = contradictions(stack, shared, journals, node)
    if found:
        raise CommandError(
            f"{found[0].what} [{found[0].code}]",
            where=found[0].where,
            do=found[0].do,
            evidence=[finding.what for finding in found[1:]],
        )
    plan = []
    for entry in entries:
        own = journals.get(stack, {}).get(entry.key)
        others = holders(stack, entry.key, journals) if entry.shared else {}
        leaving = next((other for other, held in others.items() if held.leaving), None)
        if leaving is not None:
            raise CommandError(
                f"expected {entry.kind} {entry.target} to change, found that the stack {leaving} is just undoing it",
                where=node,
                do="wait for its destroy to end (or run that again, if it was interrupted), then run this again",
            )
        if own is not None:
            # What makes it count may be another thing than an older version of this program wrote down.
            standing = replace(own.entry, wanted=entry.wanted, domain=entry.domain, activation=entry.activation)
            plan.append((standing, standing != own.entry or own.leaving))
        elif others:
            other = next(iter(others.values())).entry
            plan.append((replace(other, wanted=entry.wanted, domain=entry.domain, at=entry.at or time.time()), True))
        else:
            plan.append((replace(entry, at=entry.at or time.time()), True))
    return plan


def holders(stack: str, key: Key, journals: Journals) -> dict[str, Held]:
    """Other stacks that hold a thing."""
    # In the order in which a glob of the shell gives their folders.
    ordered = sorted(journals.items(), key=lambda item: f"{item[0]}/")
    return {other: held[key] for other, held in ordered if other != stack and key in held}
