"""The journal of a node: what was there before we changed it, kept on the node itself.

Every change of a host is written here before it is made (old bytes, old values, owner stack), so that it can be undone
even if the run that made it was killed before Pulumi recorded anything. An entry is one file, named by what it is
about: the first value found is the one to restore, later changes of the same thing do not overwrite it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from spark_core.errors import CommandError, ObservationError, SparkError
from spark_core.transport.base import Command, Transport, command, parse_sections, run_checked, script
from spark_core.transport.ssh import write_file

Kind = Literal["sysctl", "file", "link", "command"]

_READ = (
    'cd "$1" 2>/dev/null || exit 0; for f in *.json; do [ -e "$f" ] || continue; echo "=== $f"; cat "$f"; echo; done'
)


# networkd leaves addresses and kernel parameters of an interface that it no longer manages, and drops addresses that
# others had put on one that it begins to manage. A link that is gone (an uncabled port of a Spark has no device at all)
# needs no putting back.
_UNDO_LINK = """
dev=$1 mtu=$2 state=$3 added=$4 before=$5; shift 5
[ -e "/sys/class/net/$dev" ] || exit 0
have=$(ip -o -4 address show dev "$dev" | while read -r _ _ _ address _; do printf ' %s ' "$address"; done)
for address in $added; do
  case "$have" in *" $address "*) ip address del "$address" dev "$dev" ;; esac
done
for address in $before; do
  case "$have" in *" $address "*) ;; *) ip address add "$address" dev "$dev" ;; esac
done
ip link set dev "$dev" mtu "$mtu"
ip link set dev "$dev" "$state"
for pair in "$@"; do
  file="/proc/sys/net/${pair%%=*}"
  [ -w "$file" ] || continue
  [ "$(cat "$file" 2>/dev/null)" = "${pair#*=}" ] || echo "${pair#*=}" 2>/dev/null > "$file" || true
done
"""
_NETPLAN_APPLY_TIMEOUT_S = 60
_SETUP_TIMEOUT_S = 600


@dataclass(frozen=True)
class JournalEntry:
    """One thing on a node as it was before we changed it.

    Attributes:
        kind: ``sysctl`` (target is the parameter), ``file`` (target is the path), ``link`` (target is the netdev) or
            ``command`` (target is the name of a setup command of the owner).
        target: What was changed.
        old: The value before: text of the sysctl, base64 of the file or None if there was none, MTU of the link, the
            text that takes a setup command back.
        mode: Octal mode of the file before.
        owner: ``user:group`` of the file before.
        up: Whether the link was up.
        addresses: IPv4 addresses of the link before.
        added: IPv4 addresses that we put on the link; only these are taken away, not what others have added since.
        parameters: Kernel parameters of the link before, by their path below /proc/sys/net.
        at: Unix time, for the order of undoing.
    """

    kind: Kind
    target: str
    old: str | None
    mode: str | None = None
    owner: str | None = None
    up: bool = True
    addresses: Sequence[str] = ()
    added: Sequence[str] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    at: float = 0.0

    @property
    def file_name(self) -> str:
        return f"{self.kind}-{hashlib.sha256(self.target.encode()).hexdigest()[:16]}.json"


@dataclass(frozen=True)
class StackFolder:
    """The folder that one stack owns on one node.

    Args:
        root: Our folder on the node, shared by the stacks that use the node.
        stack: Name of the stack.
    """

    root: str
    stack: str

    @property
    def path(self) -> str:
        return f"{self.root}/stacks/{self.stack}"

    @property
    def journal(self) -> str:
        return f"{self.path}/journal"

    @property
    def files(self) -> str:
        return f"{self.path}/files"

    @property
    def secrets(self) -> str:
        return f"{self.path}/secrets"

    @property
    def weights(self) -> str:
        return f"{self.root}/weights"

    def state(self, group: str) -> str:
        """Host folder for the status and the logs of a group's rank."""
        return f"{self.path}/state/{group}"


def open_journal(transport: Transport, folder: StackFolder, groups: Sequence[str] = ()) -> None:
    """Create the stack's folder on a node, with one folder for each group's state and secrets; may be run again."""
    run_checked(
        transport,
        script(
            'umask 077; for d in "$@"; do mkdir -p "$d"; done; test -w "$1"',
            *(folder.path, folder.journal, folder.files, folder.secrets, f"{folder.path}/state"),
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


def read_journal(transport: Transport, folder: StackFolder) -> list[JournalEntry]:
    """The entries of a stack on a node, oldest first.

    Raises:
        ObservationError: an entry cannot be read; nothing must then be undone or changed blindly.
    """
    text = run_checked(transport, script(_READ, folder.journal), purpose="expected to read the journal")
    entries = []
    for name, body in parse_sections(text).items():
        try:
            entries.append(JournalEntry(**json.loads(body)))
        except (ValueError, TypeError) as error:
            raise ObservationError(
                f"expected a journal entry in {folder.journal}/{name}, found something else",
                where=transport.node,
                do="look at the file; it holds the old value of something that this stack changed",
            ) from error
    return sorted(entries, key=lambda entry: entry.at)


def record(transport: Transport, folder: StackFolder, entry: JournalEntry) -> None:
    """Write down what was there, before changing it; an earlier record of the same thing stands."""
    stamped = JournalEntry(**{**asdict(entry), "at": entry.at or time.time()})
    text = json.dumps(asdict(stamped), sort_keys=True).encode()
    run_checked(
        transport,
        script(
            'umask 077; mkdir -p "$(dirname "$1")"; [ -e "$1" ] && exit 0; tmp=$(mktemp "$1.tmp.XXXXXX"); '
            # A connection that is cut ends the input too: half an entry must never stand.
            'cat > "$tmp"; '
            '[ "$(stat -c %s "$tmp")" = "$2" ] || { rm -f "$tmp"; echo "the input was cut" >&2; exit 5; }; '
            'sync "$tmp"; mv -n "$tmp" "$1"; rm -f "$tmp"',
            f"{folder.journal}/{stamped.file_name}",
            str(len(text)),
            stdin=text,
        ),
        purpose=f"expected to record the old value of {entry.target}",
    )


def amend(transport: Transport, folder: StackFolder, entry: JournalEntry) -> None:
    """Replace an entry by one that knows more of what we did; what it says of before must be the same."""
    run_checked(
        transport,
        write_file(f"{folder.journal}/{entry.file_name}", json.dumps(asdict(entry), sort_keys=True).encode()),
        purpose=f"expected to record what is done to {entry.target}",
    )


def record_file(transport: Transport, folder: StackFolder, path: str) -> None:
    """Record a file's bytes, mode and owner, or that there is none."""
    text = run_checked(
        transport,
        script(
            '[ -e "$1" ] || { echo "=== absent"; exit 0; }; echo "=== stat"; stat -c "%a %U:%G" "$1"; '
            'echo "=== bytes"; base64 -w0 "$1"; echo',
            path,
            sudo=True,
        ),
        purpose=f"expected to read {path} before changing it",
    )
    sections = parse_sections(text)
    if "absent" in sections:
        record(transport, folder, JournalEntry("file", path, None))
        return
    mode, owner = sections["stat"].split()
    record(transport, folder, JournalEntry("file", path, sections["bytes"].strip(), mode.zfill(4), owner))


def record_setup(transport: Transport, folder: StackFolder, deletes: Mapping[str, str]) -> None:
    """Write down how the owner's setup commands are taken back, and forget those that are no longer declared.

    The command provider takes back what it has recorded; a run that is killed while a command runs records nothing.

    Args:
        deletes: Name of each command to its delete text.
    """
    known = {entry.target: entry for entry in read_journal(transport, folder) if entry.kind == "command"}
    for name, text in deletes.items():
        entry = JournalEntry("command", name, text, at=time.time())
        if name not in known:
            record(transport, folder, entry)
        elif known[name].old != text:
            amend(transport, folder, replace(known[name], old=text))
    gone = [f"{folder.journal}/{entry.file_name}" for name, entry in known.items() if name not in deletes]
    if gone:
        run_checked(transport, command("rm", "-f", "--", *gone), purpose="expected to forget setup commands")


def undo_commands(entry: JournalEntry) -> list[Command]:
    """The commands that put one entry back."""
    if entry.kind == "sysctl":
        # A parameter whose module is not loaded any more needs no putting back.
        return [
            script(
                '[ -e "/proc/sys/${1//.//}" ] || exit 0; sysctl -q -w "$1=$2"', entry.target, str(entry.old), sudo=True
            )
        ]
    if entry.kind == "link":
        pairs = [f"{path}={value}" for path, value in sorted(entry.parameters.items())]
        state = "up" if entry.up else "down"
        addresses = (" ".join(entry.added), " ".join(entry.addresses))
        return [script(_UNDO_LINK, entry.target, str(entry.old), state, *addresses, *pairs, sudo=True)]
    if entry.kind == "command":
        return [script(entry.old or "", timeout_s=_SETUP_TIMEOUT_S)]
    if entry.old is None:
        return [command("rm", "-f", "--", entry.target, sudo=True)]
    restore = write_file(entry.target, base64.b64decode(entry.old), mode=entry.mode or "0600", sudo=True)
    return [restore, command("chown", entry.owner or "root:root", entry.target, sudo=True)]


def undo(transport: Transport, folder: StackFolder, targets: Sequence[tuple[Kind, str]] | None = None) -> list[str]:
    """Put back what the journal holds, newest first, and forget each entry once it is back.

    Args:
        targets: (kind, target) pairs to put back; None for all.

    Returns:
        What was put back, for the person.
    """
    chosen = [
        entry
        for entry in reversed(read_journal(transport, folder))
        if targets is None or (entry.kind, entry.target) in targets
    ]
    # Links last: as long as netplan still has our file, networkd would put our addresses on them again.
    files = [entry for entry in chosen if entry.kind != "link"]
    done = [_put_back(transport, entry) for entry in files]
    if any(entry.target.startswith("/etc/netplan/") for entry in files):
        run_checked(
            transport,
            command("netplan", "apply", sudo=True, timeout_s=_NETPLAN_APPLY_TIMEOUT_S),
            purpose="expected netplan to apply what is left without our file",
        )
    done += [_put_back(transport, entry) for entry in chosen if entry.kind == "link"]
    for entry in chosen:  # only now: a run that is killed before this undoes all of it again
        run_checked(
            transport,
            command("rm", "-f", "--", f"{folder.journal}/{entry.file_name}"),
            purpose="expected to forget a journal entry",
        )
    return done


def _put_back(transport: Transport, entry: JournalEntry) -> str:
    for cmd in undo_commands(entry):
        result = transport.run(cmd)
        if not result.ok:
            raise SparkError(
                f"expected to put {entry.kind} {entry.target} back, found: {result.stderr.strip()[-200:]}",
                where=transport.node,
                do="run destroy again; the old value is still in the journal",
            )
    return f"{entry.kind} {entry.target}"


def close_journal(transport: Transport, folder: StackFolder) -> list[str]:
    """End of a stack on a node: undo what is left and remove the stack's folder. May be run again.

    The weights cache, which stacks share, is kept; the empty root folder is not.
    """
    if not re.fullmatch(r"/.*/stacks/[^/]+", folder.path):
        raise CommandError(f"expected the folder of a stack, found {folder.path}", where=transport.node)
    done = undo(transport, folder)
    if not transport.run(command("rm", "-rf", "--", folder.path, timeout_s=120)).ok:
        # A container's root can leave a folder that the deploy user alone cannot remove.
        run_checked(
            transport,
            command("rm", "-rf", "--", folder.path, sudo=True, timeout_s=120),
            purpose=f"expected to remove {folder.path}",
        )
    run_checked(
        transport,
        script(
            '[ ! -e "$1" ]; rmdir --ignore-fail-on-non-empty -- "$(dirname "$1")" 2>/dev/null || true; '
            '[ ! -d "$2" ] || rmdir --ignore-fail-on-non-empty -- "$2"',
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
