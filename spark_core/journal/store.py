"""The entries on the node: read, written and forgotten, safely beside other stacks of the same host.

Stacks of one root see each other's journals (:mod:`spark_core.journal.ownership`). Each step that depends on what other
stacks hold is made under a lock on the root folder itself, which leaves no file behind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from spark_core.errors import CommandError, ObservationError
from spark_core.journal.entry import JournalEntry, Key, StackFolder, parse_entry
from spark_core.journal.ownership import Held, Journals, holders, plan_records
from spark_core.transport.base import (
    Fragment,
    Transport,
    command,
    compose,
    parse_sections,
    run_checked,
    script,
)
from spark_core.transport.ssh import write_file

_READ = """
cd "$1/stacks" 2>/dev/null || return 0
for f in */journal/*.json; do
  [ -e "$f" ] || continue
  # Another stack may forget it just now; one that is there and cannot be read is no missing one.
  if ! text=$(cat "$f") || ! sum=$(sha256sum < "$f"); then [ ! -e "$f" ] || return 5; continue; fi
  mark=stays
  [ ! -e "${f%.json}.leaving" ] || mark=leaving
  printf '=== journal %s %s %s\\n%s\\n' "${sum%% *}" "$mark" "$f" "$text"
done
echo '=== journals read'
"""
_OTHERS = """
umask 077
root=$1 stack=$2
exec 9< "$root"
flock -w 20 9 || { echo "another run holds the lock of $root for 20 s" >&2; exit 7; }
cd "$root/stacks"
others() {
  case $1 in command-*) return 0 ;; esac
  for f in */journal/"$1"; do
    [ -e "$f" ] && [ "${f%%/*}" != "$stack" ] || continue
    printf '%s %s\\n' "${f%%/*}" "$(sha256sum < "$f" | cut -c1-64)"
  done
}
"""
_CHANGED = 6
_WRITE = (
    _OTHERS
    + """
name=$3 size=$4 seen=$5 place=$stack/journal/$3
[ "$(others "$name")" = "$seen" ] || exit 6
mkdir -p "$stack/journal"
tmp=$(mktemp "$place.tmp.XXXXXX")
trap 'rm -f "$tmp"' EXIT
# A connection that is cut ends the input too: half an entry must never stand.
cat > "$tmp"
[ "$(stat -c %s "$tmp")" = "$size" ] || { echo "the input was cut" >&2; exit 5; }
sync "$tmp"
mv -f "$tmp" "$place"
rm -f "${place%.json}.leaving"
sync "$stack/journal"
"""
)
_LEAVE = (
    _OTHERS
    + """
shift 2
for name in "$@"; do
  other=$(others "$name")
  other=${other%%$'\\n'*}
  mine=$stack/journal/$name mark=$stack/journal/${name%.json}.leaving
  if [ -n "$other" ]; then
    # Told also if it is forgotten already: the answer of the first time may have been lost.
    rm -f -- "$mine" "$mark"
    echo "=== $name"
    echo "${other% *}"
  elif [ -e "$mine" ]; then
    : > "$mark"
  fi
done
sync "$stack/journal"
"""
)


def journals_fragment(root: str) -> Fragment:
    """The part of an observation script that reads the journals of all stacks of a root; changes nothing."""
    return Fragment(_READ, (root,))


def parse_journals(node: str, sections: Mapping[str, str], stack: str | None = None) -> dict[str, dict[Key, Held]]:
    """What each stack holds, from the sections of :func:`journals_fragment`.

    Args:
        stack: Only this stack's.

    Raises:
        ObservationError: an entry cannot be understood, or the journals could not be read.
    """
    found: dict[str, dict[Key, Held]] = {}
    for name, body in sections.items():
        if not name.startswith("journal "):
            continue
        words = name.split(" ", 3)
        owner, _, file_name = words[-1].partition("/journal/")
        if len(words) != 4 or not file_name:
            raise ObservationError(f"expected the journals of all stacks, found {name[:60]!r} among them", where=node)
        _, digest, mark, _ = words
        if stack is not None and owner != stack:
            continue
        try:
            entry = parse_entry(body)
            if entry.file_name != file_name:
                raise ValueError(f"an entry of {entry.kind} {entry.target}, whose file has another name")
        except ValueError as error:
            raise ObservationError(
                f"expected a journal entry of the stack {owner} in {file_name}, found {error}",
                where=node,
                do="use the version of this program that made it, or look at the file: it holds the old value of "
                "something that this stack changed",
            ) from error
        found.setdefault(owner, {})[entry.key] = Held(entry, digest, mark == "leaving")
    # The last line of an answer that is whole; a folder that is not there gives no section at all.
    if found and "journals read" not in sections:
        raise ObservationError("expected the journals of all stacks, found an answer that was cut", where=node)
    return found


def read_journals(transport: Transport, root: str, stack: str | None = None) -> dict[str, dict[Key, Held]]:
    """What each stack of a root holds on a node."""
    text = run_checked(transport, compose(journals_fragment(root)), purpose="expected to read the journal")
    sections = parse_sections(text)
    if "failed-0" in sections:
        raise ObservationError(f"expected to read the journals below {root}/stacks, found none", where=transport.node)
    return parse_journals(transport.node, sections, stack)


def read_journal(transport: Transport, folder: StackFolder) -> list[JournalEntry]:
    """The entries of a stack on a node, oldest first.

    Raises:
        ObservationError: an entry cannot be read; nothing must then be undone or changed blindly.
    """
    held = read_journals(transport, folder.root, folder.stack).get(folder.stack, {})
    return sorted((one.entry for one in held.values()), key=lambda entry: entry.at)


def record_many(
    transport: Transport, folder: StackFolder, entries: Sequence[JournalEntry], journals: Journals | None = None
) -> list[JournalEntry]:
    """Write down what was there, before changing it.

    An earlier record of the same thing stands, with the wanted value of now. If another stack holds the thing already,
    its old value is taken over, since what is there now is that stack's.

    Args:
        entries: With the value of now as the old one.
        journals: What was read of all stacks, before the old values were; read now if it was not. Old values that were
            seen while another stack was about to leave are that stack's.

    Returns:
        The entries as they stand.

    Raises:
        CommandError: another stack declares another value, is just undoing the thing, or has changed its journal since
            it was read.
    """
    seen = journals if journals is not None else read_journals(transport, folder.root)
    plan = plan_records(transport.node, folder.stack, entries, seen)
    for entry, write in plan:
        if write:
            _write(transport, folder, entry, seen)
    return [entry for entry, _ in plan]


def record(transport: Transport, folder: StackFolder, entry: JournalEntry) -> JournalEntry:
    """:func:`record_many` for one entry."""
    [standing] = record_many(transport, folder, [entry])
    return standing


def amend(transport: Transport, folder: StackFolder, entry: JournalEntry) -> None:
    """Replace an entry by one that knows more of what we did; what it says of before must be the same."""
    run_checked(
        transport,
        write_file(f"{folder.journal}/{entry.file_name}", _text(entry)),
        purpose=f"expected to record what is done to {entry.target}",
    )


def leave(transport: Transport, folder: StackFolder, entries: Sequence[JournalEntry]) -> dict[str, str]:
    """Begin to put things back: what another stack holds too is forgotten, the rest is marked as leaving.

    A stack that meets the mark does not take the thing over while it goes back.

    Returns:
        File name of each entry that was forgotten, to the other stack.
    """
    text = run_checked(
        transport,
        script(_LEAVE, folder.root, folder.stack, *(entry.file_name for entry in entries), timeout_s=60),
        purpose="expected to mark what is put back",
    )
    return {name: other.strip() for name, other in parse_sections(text).items()}


def forget(transport: Transport, folder: StackFolder, entries: Sequence[JournalEntry]) -> None:
    """Remove entries whose things are back."""
    names = [
        name for entry in entries for name in (entry.file_name, f"{entry.file_name.removesuffix('.json')}.leaving")
    ]
    if names:
        run_checked(
            transport,
            command("rm", "-f", "--", *(f"{folder.journal}/{name}" for name in names)),
            purpose="expected to forget journal entries",
        )


def _text(entry: JournalEntry) -> bytes:
    return json.dumps(asdict(entry), sort_keys=True).encode()


def _write(transport: Transport, folder: StackFolder, entry: JournalEntry, seen: Journals) -> None:
    """Write an entry, if other stacks still hold what was seen."""
    others = holders(folder.stack, entry.key, seen) if entry.shared else {}
    lines = "\n".join(f"{other} {held.digest}" for other, held in others.items())
    text = _text(entry)
    purpose = f"expected to record the old value of {entry.target}"
    cmd = script(_WRITE, folder.root, folder.stack, entry.file_name, str(len(text)), lines, stdin=text, timeout_s=60)
    result = transport.run(replace(cmd, purpose=purpose))
    if result.status == _CHANGED:
        raise CommandError(
            f"{purpose}, found that another stack has changed its own record of it just now",
            where=transport.node,
            do="wait for the other run to end, then run this again",
        )
    if not result.ok:
        raise CommandError(
            f"{purpose}: expected exit status 0, found {result.status} ({result.stderr.strip()[-160:]})",
            where=transport.node,
        )
