"""Putting back what a stack's journal holds.

The order is: units stop, then files, kernel parameters and setup commands go back, newest first, then what reads the
files is told. Then the fabric's files and after them its links: as long as netplan still has our file, networkd would
put our addresses on the links again. Entries are forgotten only at the end: a run that is killed before undoes all of
it again.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence

from spark_core import docker_config
from spark_core import root_commands as root
from spark_core.errors import CommandError, SparkError
from spark_core.fabric.rollback import NetplanFile, change_netplan
from spark_core.journal import activation
from spark_core.journal.entry import JournalEntry, Key, StackFolder
from spark_core.journal.file_state import FileState, folder_of_file, observe_files_of_root
from spark_core.journal.links import put_link_back
from spark_core.journal.store import forget, leave, read_journal
from spark_core.transport.base import Command, Transport, command, run_checked, script
from spark_core.transport.ssh import write_file

_SETUP_TIMEOUT_S = 600


def undo(
    transport: Transport, folder: StackFolder, targets: Sequence[Key] | None = None, *, disturb_others: bool = False
) -> list[str]:
    """Put back what the journal holds and forget it. What another stack holds too is only forgotten.

    Args:
        targets: (kind, target) pairs to put back; None for all.
        disturb_others: Whether Docker may be restarted beside containers of others.

    Returns:
        What was done, for the person.
    """
    chosen = [entry for entry in reversed(read_journal(transport, folder)) if targets is None or entry.key in targets]
    if not chosen:
        return []
    dockers = [entry for entry in chosen if entry.activation == "docker"]
    if dockers and not disturb_others:
        live = activation.observe_live(transport, ["docker"])
        if any(live.cgroup_driver != entry.live for entry in dockers):
            activation.refuse_beside_others(transport.node, folder.stack, live, "Docker is restarted")
    kept = leave(transport, folder, chosen)
    told = [
        f"left {entry.kind} {entry.target}, which the stack {kept[entry.file_name]} declares too"
        for entry in chosen
        if entry.file_name in kept
    ]
    ours = [entry for entry in chosen if entry.file_name not in kept]
    try:
        put_back(transport, folder, ours)
    except CommandError as error:
        raise SparkError(
            error.what,
            where=error.where,
            do=error.do or "run destroy again; the old value is still in the journal",
            evidence=error.evidence,
        ) from error
    forget(transport, folder, ours)
    return [*(f"put back {entry.kind} {entry.target}" for entry in ours), *told]


def put_back(transport: Transport, folder: StackFolder, entries: Sequence[JournalEntry]) -> None:
    """Bring things back to what they were, in the order that their kinds need; may be repeated at any point."""
    others = [entry for entry in entries if entry.part != "fabric"]
    activation.before_files_go(transport, others)
    for entry in others:
        _put_back(transport, folder, entry)
    activation.after_files_are_back(transport, others)
    _put_network_back(transport, folder, [entry for entry in entries if entry.part == "fabric"])


def _put_network_back(transport: Transport, folder: StackFolder, entries: Sequence[JournalEntry]) -> None:
    """Under the node's own rollback: what comes back could cut it off just as well."""
    links = [entry for entry in entries if entry.kind == "link"]
    files = [
        NetplanFile(
            entry.target,
            base64.b64decode(entry.old) if entry.old is not None else None,
            entry.mode or "0600",
            entry.owner or "0:0",
        )
        for entry in entries
        if entry.kind == "file"
    ]

    def put_links_back() -> None:
        for link in links:
            put_link_back(transport, link)

    if files:
        netdevs = [link.target for link in links]
        change_netplan(transport, folder.stack, folder.staging, files, netdevs, put_links_back)
    else:
        put_links_back()


def file_commands(folder: StackFolder, entry: JournalEntry, content: bytes | None) -> list[Command]:
    """The commands that give a file the content that it is to have when we leave."""
    if content is not None:
        user, _, group = (entry.owner or "0:0").partition(":")
        mode = entry.mode or "0600"
        if entry.sudo:
            return root.install_file(folder.staging, entry.target, content, mode=mode, owner=user, group=group)
        return [write_file(entry.target, content, mode=mode)]
    return [root.remove_file(entry.target) if entry.sudo else command("rm", "-f", "--", entry.target)]


def _put_back(transport: Transport, folder: StackFolder, entry: JournalEntry) -> None:
    purpose = f"expected to put {entry.kind} {entry.target} back"
    if entry.kind == "command":
        run_checked(transport, script(entry.old or "", timeout_s=_SETUP_TIMEOUT_S), purpose=purpose)
    elif entry.kind == "sysctl":
        # A parameter whose module is not loaded any more needs no putting back.
        path = f"/proc/sys/{entry.target.replace('.', '/')}"
        if activation.present(transport, [path]):
            run_checked(transport, root.set_parameter(entry.target, str(entry.old)), purpose=purpose)
    else:
        _put_file_back(transport, folder, entry, purpose)


def _put_file_back(transport: Transport, folder: StackFolder, entry: JournalEntry, purpose: str) -> None:
    with_root = [entry.target] if entry.sudo else []
    now = observe_files_of_root(transport, [entry.target], with_root)[entry.target]
    content = base64.b64decode(entry.old) if entry.old is not None else None
    if entry.activation == "docker":
        content = docker_config.restored(now.content, content)
    if content is not None and _is(now, content, entry):
        if entry.sudo and activation.present(transport, [f"{entry.target}.new"]):
            run_checked(transport, root.remove_leftover(entry.target), purpose=purpose)
        return
    if entry.folder is not None and now.no_folder:
        return  # the file and the folder that was made for it are gone already
    if content is not None and now.no_folder and entry.sudo:
        run_checked(transport, root.make_folder(folder_of_file(entry.target)), purpose=purpose)
    root.run_each(transport, file_commands(folder, entry, content), purpose=purpose)
    if content is None and entry.folder is not None:
        _remove_folder(transport, entry.folder, entry.sudo)


def _remove_folder(transport: Transport, path: str, sudo: bool) -> None:
    """Remove a folder that was made for a file, unless others have put something into it."""
    cmd = root.remove_folder(path) if sudo else command("rmdir", "--ignore-fail-on-non-empty", "--", path)
    result = transport.run(cmd)
    if not result.ok and activation.present(transport, [path]):
        raise CommandError(f"expected to remove {path}, found: {result.stderr.strip()[-160:]}", where=transport.node)


def _is(now: FileState, content: bytes, entry: JournalEntry) -> bool:
    same_place = entry.mode in (None, now.mode) and entry.owner in (None, now.owner)
    return bool(now.there) and now.content == content and same_place
