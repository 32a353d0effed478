"""The journal of a node: what was there before we changed it, kept on the node itself.

Every change of a host is written here before it is made (old bytes, old values, owner stack), so that it can be undone
even if the run that made it was killed before Pulumi recorded anything. An entry is one file, named by what it is
about: the first value found is the one to restore, later changes of the same thing do not overwrite it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from spark_core.errors import CommandError, ObservationError
from spark_core.journal.entry import Domain, JournalEntry, Key, Kind, StackFolder
from spark_core.journal.file_state import folder_of_file, observe_files_of_root, require_plain
from spark_core.journal.ownership import Held, Journals, contradictions
from spark_core.journal.store import (
    amend,
    forget,
    journals_fragment,
    parse_journals,
    read_journal,
    read_journals,
    record,
    record_many,
)
from spark_core.journal.undo import undo
from spark_core.transport.base import Transport, command, run_checked, script

__all__ = [
    "Domain",
    "Held",
    "JournalEntry",
    "Journals",
    "Key",
    "Kind",
    "StackFolder",
    "amend",
    "close_journal",
    "contradictions",
    "forget",
    "journal_exists",
    "journals_fragment",
    "kept_caches",
    "open_journal",
    "parse_journals",
    "read_journal",
    "read_journals",
    "record",
    "record_file",
    "record_many",
    "record_setup",
    "undo",
]


def open_journal(transport: Transport, folder: StackFolder, groups: Sequence[str] = ()) -> None:
    """Create the stack's folder on a node, with one folder for each group's state and secrets; may be run again."""
    run_checked(
        transport,
        script(
            'umask 077; for d in "$@"; do mkdir -p "$d"; done; test -w "$1"',
            *(folder.path, folder.journal, folder.files, folder.secrets, folder.staging, f"{folder.path}/state"),
            *(path for group in groups for path in (folder.state(group), f"{folder.secrets}/{group}")),
        ),
        purpose=f"expected a writable folder {folder.path}",
        setting="node_root",
    )


def journal_exists(transport: Transport, folder: StackFolder) -> bool:
    """Whether the stack's journal is on the node; only the node's own word for it counts."""
    said = run_checked(
        transport,
        script('if [ -d "$1" ]; then echo present; else echo absent; fi', folder.journal),
        purpose=f"expected to look for {folder.journal}",
    ).strip()
    if said not in ("present", "absent"):
        raise ObservationError(
            f"expected to learn whether {folder.journal} is there, found: {said[:80]}", where=transport.node
        )
    return said == "present"


def record_file(
    transport: Transport,
    folder: StackFolder,
    path: str,
    *,
    wanted: str | None = None,
    domain: Domain = "host",
    setting: str = "node_root",
) -> JournalEntry:
    """Record the bytes, mode and owner of a file of root, or that there is none.

    Args:
        wanted: What it is to be, to be compared with other stacks; such as the SHA-256 of the new content.
        setting: The setting by which the file is changed, for messages.
    """
    journals = read_journals(transport, folder.root)
    state = observe_files_of_root(transport, [path], [path])[path]
    require_plain(transport.node, state, setting)
    made = folder_of_file(path) if state.no_folder else None
    entry = JournalEntry("file", path, state.old, state.mode, state.owner, wanted=wanted, domain=domain, folder=made)
    [standing] = record_many(transport, folder, [entry], journals)
    return standing


def record_setup(transport: Transport, folder: StackFolder, deletes: Mapping[str, str]) -> None:
    """Write down how the owner's setup commands are taken back, and forget those that are no longer declared.

    The command provider takes back what it has recorded; a run that is killed while a command runs records nothing.

    Args:
        deletes: Name of each command to its delete text.
    """
    known = {entry.target: entry for entry in read_journal(transport, folder) if entry.kind == "command"}
    new = [
        JournalEntry("command", name, text, at=time.time(), domain="setup")
        for name, text in deletes.items()
        if name not in known
    ]
    if new:
        record_many(transport, folder, new)
    for name, text in deletes.items():
        if name in known and known[name].old != text:
            amend(transport, folder, replace(known[name], old=text))
    forget(transport, folder, [entry for name, entry in known.items() if name not in deletes])


def close_journal(transport: Transport, folder: StackFolder, *, disturb_others: bool = False) -> list[str]:
    """End of a stack on a node: undo what is left and remove the stack's folder. May be run again.

    The weights cache, which stacks share, is kept; the empty root folder is not.
    """
    if not re.fullmatch(r"/.*/stacks/[^/]+", folder.path):
        raise CommandError(f"expected the folder of a stack, found {folder.path}", where=transport.node)
    done = undo(transport, folder, disturb_others=disturb_others)
    removed = transport.run(command("rm", "-rf", "--", folder.path, timeout_s=120))
    if not removed.ok:
        raise CommandError(
            f"expected to remove {folder.path}, found: {removed.stderr.strip()[-160:] or 'no word why'}",
            where=transport.node,
            do=f"if root owns what is in it, run `sudo rm -rf -- {folder.path}` on the node; then destroy again",
        )
    run_checked(
        transport,
        script(
            '[ ! -e "$1" ]; rmdir --ignore-fail-on-non-empty -- "$(dirname "$1")" 2>/dev/null || true; '
            # With the last stack goes what copies on their way have left empty.
            '[ ! -d "$2" ] || [ -e "$(dirname "$1")" ] || { find "$2" -mindepth 1 -maxdepth 1 -type d -empty -delete; '
            'rmdir --ignore-fail-on-non-empty -- "$2"; }',
            folder.path,
            folder.root,
        ),
        purpose=f"expected to remove {folder.path}",
    )
    return done


def kept_caches(transport: Transport, folder: StackFolder) -> str | None:
    """What stays on a node after the end of a stack, with its size, for the person; None if nothing does."""
    text = transport.run(
        script(
            'for d in "$@"; do [ ! -d "$d" ] || du -sh "$d" | tr "\\t" " "; done',
            folder.weights,
            f"{folder.root}/cache",
        )
    ).stdout
    kept = [f"{path} ({size})" for size, _, path in (line.partition(" ") for line in text.splitlines()) if path]
    return ", ".join(kept) or None
