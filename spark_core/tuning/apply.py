"""Bringing a host to its declared tuning, and back from what is no longer declared.

Everything that could refuse is asked before anything is changed; every old value is in the journal before its thing
changes; every step is taken by what is seen on the host, so that a run that was killed at any point, or a host that
lost its power, is finished by the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from spark_core import root_commands as root
from spark_core.containers import STOP_TIMEOUT_S
from spark_core.errors import CommandError
from spark_core.journal import JournalEntry, Key, record_many, undo
from spark_core.journal.activation import Live, live_before, refuse_beside_others, restart_docker, start
from spark_core.journal.file_state import FileState, folder_of_file, require_plain
from spark_core.transport.base import Command, Transport, command, run_checked
from spark_core.transport.ssh import write_file
from spark_core.tuning.items import ABSENT, ITEMS, WATCHDOG_US, ManagedFile, Place
from spark_core.tuning.observe import Tuning, TuningFacts, observe_tuning, values_of
from spark_core.tuning.sysctls import plan_sysctls


def apply_tuning(transport: Transport, place: Place, tuning: Tuning) -> None:
    """Make a host as declared; what its journal holds beyond that is put back. May be run again.

    Raises:
        CommandError: another stack declares another value, something that is not ours would be disturbed (nothing was
            changed then), or the host did not take a value.
    """
    facts = observe_tuning(transport, place, tuning)
    entries = claims(place, tuning, facts)
    for refused in refusals(transport.node, place, tuning, facts):
        raise refused
    declared = {entry.key for entry in entries}
    # The check against other stacks is made before the first change, the undoing of our own included.
    record_many(transport, place.folder, entries, facts.journals)
    no_longer = [key for key in facts.held(place.folder.stack) if key not in declared]
    if no_longer:
        undo(transport, place.folder, no_longer, disturb_others=tuning.disturb_others)
    changed = _set_parameters(transport, tuning, facts)
    for name in tuning.items:
        changed |= _apply_item(transport, place, tuning, name, facts)
    for file in tuning.files:
        changed |= _put(transport, place, file, facts.files[file.path], _setting_of(file))
    if changed:
        _require_in_place(transport.node, place, tuning, observe_tuning(transport, place, tuning))


def claims(place: Place, tuning: Tuning, facts: TuningFacts) -> list[JournalEntry]:
    """The journal entries of all that is declared, with the values of now as the old ones; pure."""
    entries = [
        JournalEntry("sysctl", name, facts.sysctls[name], wanted=" ".join(value.split()), domain="host")
        for name, value in sorted(tuning.sysctls.items())
    ]
    for file, wanted in _wanted_files(place, tuning):
        entries.append(_entry(file, wanted, facts.files[file.path], facts.live))
    return entries


def wanted_file(setting: str, value: str, file: ManagedFile) -> str:
    """What a stack wants of a file, to be compared with other stacks and to be read by people."""
    if file.activation == "docker":  # its content is others' too
        return f"{setting}: {value}"
    state = FileState(file.path, there=True, content=file.content)
    digest = f"content {state.digest[:16]}, mode {file.mode}"
    return f"{setting}: {value} ({digest})" if value else f"{setting}: {digest}"


def wanted_keys(place: Place, tuning: Tuning) -> dict[Key, str]:
    """What a stack declares on a host, for the comparison with other stacks; needs no look at it."""
    wanted: dict[Key, str] = {("sysctl", name): " ".join(value.split()) for name, value in tuning.sysctls.items()}
    return wanted | {("file", file.path): text for file, text in _wanted_files(place, tuning)}


def _wanted_files(place: Place, tuning: Tuning) -> list[tuple[ManagedFile, str]]:
    found = [
        (file, wanted_file(name, value, file))
        for name, value in tuning.items.items()
        for file in ITEMS[name].files(place, value)
    ]
    return found + [(file, wanted_file("files", "", file)) for file in tuning.files]


def _entry(file: ManagedFile, wanted: str, state: FileState, live: Live) -> JournalEntry:
    return JournalEntry(
        "file",
        file.path,
        state.old,
        state.mode,
        state.owner,
        wanted=wanted,
        domain="host",
        sudo=file.sudo,
        folder=folder_of_file(file.path) if state.no_folder else None,
        activation=file.activation,
        live=live_before(file.activation, live),
    )


def refusals(node: str, place: Place, tuning: Tuning, facts: TuningFacts) -> Iterator[CommandError]:
    """Why what is declared cannot be made, as far as the facts tell; nothing is asked and nothing changed."""
    for absent in (name for name, value in facts.sysctls.items() if value is None):
        yield CommandError(
            f"expected the kernel parameter {absent}, found none of that name",
            where=f"{node} (host.sysctls)",
            do="correct the name; a module that is not loaded has no parameters yet",
        )
    if "watchdog" in tuning.items and not facts.live.has_watchdog:
        yield CommandError(
            "expected /dev/watchdog, found none", where=f"{node} (host.watchdog)", do="take host.watchdog out"
        )
    for name, value in tuning.items.items():
        try:
            files = ITEMS[name].render(place, value, facts.files)
        except CommandError as error:  # what others have in the same file is not understood
            yield CommandError(error.what, where=f"{node} (host.{name})", do=error.do)
            return
        yield from _refused(_refuse_file, ((node, file, facts.files[file.path], f"host.{name}") for file in files))
    yield from _refused(_refuse_file, ((node, f, facts.files[f.path], _setting_of(f)) for f in tuning.files))
    yield from _refused(_refuse_disturbance, [(node, place, tuning, facts)])


def _refused(check: Callable[..., None], cases: Iterable[tuple[Any, ...]]) -> Iterator[CommandError]:
    for case in cases:
        try:
            check(*case)
        except CommandError as error:
            yield error


def _refuse_disturbance(node: str, place: Place, tuning: Tuning, facts: TuningFacts) -> None:
    driver = tuning.items.get("docker_cgroup_driver")
    if tuning.disturb_others:
        return
    if driver is not None and driver != facts.live.cgroup_driver:
        refuse_beside_others(node, place.folder.stack, facts.live, "Docker is restarted")
    if tuning.gpu and facts.live.takes_gpus_at_reload and reloads(place, tuning, facts):
        refuse_beside_others(node, place.folder.stack, facts.live, "systemd is reloaded, which takes their GPU")


def _refuse_file(node: str, file: ManagedFile, state: FileState, setting: str) -> None:
    require_plain(node, state, setting)
    if state.no_folder and (state.no_parents or not file.makes_folder):
        raise CommandError(
            f"expected the folder {folder_of_file(file.path)} or the one above it, found none",
            where=f"{node} ({setting})",
            do="make it with a setup command, or correct the path",
        )


def reloads(place: Place, tuning: Tuning, facts: TuningFacts) -> list[str]:
    """The settings whose unit changes while systemd knows its earlier file, so that systemd must be reloaded."""
    found = []
    for name, value in tuning.items.items():
        file = ITEMS[name].render(place, value, facts.files)[-1]
        if file.activation not in ("unit", "swap") or ITEMS[name].value(place, facts.files, facts.live) == value:
            continue
        unit = facts.live.units[file.unit]
        if unit.stale or (unit.loaded and not file.is_in_place(facts.files[file.path])):
            found.append(name)
    return found


def _set_parameters(transport: Transport, tuning: Tuning, facts: TuningFacts) -> bool:
    commands = plan_sysctls(tuning.sysctls, facts.sysctls)
    for cmd in commands:
        name = cmd.argv[-1].split("=", 1)[0]
        run_checked(transport, cmd, purpose=f"expected to set {name}", setting="host.sysctls")
    return bool(commands)


def _apply_item(transport: Transport, place: Place, tuning: Tuning, name: str, facts: TuningFacts) -> bool:
    value, item, setting = tuning.items[name], ITEMS[name], f"host.{name}"
    if item.value(place, facts.files, facts.live) == value:
        return False
    files = item.render(place, value, facts.files)
    main = files[-1]
    unit = facts.live.units[main.unit] if main.activation in ("unit", "swap") else None
    reloaded = name in reloads(place, tuning, facts)
    if unit is not None and unit.active and not main.is_in_place(facts.files[main.path]):
        # Stopped before its file changes: a run that is killed then leaves a unit that is seen not to run.
        run_checked(transport, root.stop_unit(main.unit), purpose=f"expected to stop {main.unit}", setting=setting)
    for file in files:
        _put(transport, place, file, facts.files[file.path], setting)
    if unit is not None:
        start(transport, main.unit, setting)
        if reloaded and tuning.gpu and facts.live.takes_gpus_at_reload:
            _restart_own_containers(transport, place, facts.live, setting)
    elif main.activation == "logind":
        run_checked(transport, root.reread_logind(), purpose="expected logind to read it", setting=setting)
    elif main.activation == "watchdog":
        wanted = root.set_watchdog(WATCHDOG_US)
        run_checked(transport, wanted, purpose="expected to set systemd's watchdog", setting=setting)
    elif main.activation == "docker" and facts.live.cgroup_driver != value:
        _restart_docker_with(transport, place, tuning, main, setting)
    return True


def _restart_docker_with(transport: Transport, place: Place, tuning: Tuning, file: ManagedFile, setting: str) -> None:
    try:
        found = restart_docker(transport, setting)
        seen: Sequence[str] = ()
    except CommandError as error:
        found, seen = "none", error.evidence
    if found == "none":
        undo(transport, place.folder, [("file", file.path)], disturb_others=tuning.disturb_others)
        raise CommandError(
            "expected Docker back with another cgroup driver, found that it does not start with it; "
            "its earlier configuration is back",
            where=f"{transport.node} ({setting})",
            do="look at `journalctl -u docker` on the node",
            evidence=seen,
        )


def _restart_own_containers(transport: Transport, place: Place, live: Live, setting: str) -> None:
    """Give our containers their GPU back, which the reload of systemd has taken."""
    ours = [name for name, stack in live.containers or () if stack == place.folder.stack]
    if ours:
        again = command(
            "docker", "restart", "-t", str(STOP_TIMEOUT_S), *ours, timeout_s=len(ours) * STOP_TIMEOUT_S + 60
        )
        run_checked(transport, again, purpose="expected to restart our containers", setting=setting)


def _put(transport: Transport, place: Place, file: ManagedFile, state: FileState, setting: str) -> bool:
    """Put a file in its place if it is not there; whether it was put."""
    if file.is_in_place(state):
        return False
    commands = put_commands(place, file, make_folder=state.no_folder)
    root.run_each(transport, commands, purpose=f"expected to write {file.path}", setting=setting)
    return True


def put_commands(place: Place, file: ManagedFile, *, make_folder: bool) -> list[Command]:
    """The commands that put a file in its place."""
    if not file.sudo:
        return [write_file(file.path, file.content, mode=file.mode)]
    folder = [root.make_folder(folder_of_file(file.path))] if make_folder else []
    return [*folder, *root.install_file(place.folder.staging, file.path, file.content, mode=file.mode)]


def _require_in_place(node: str, place: Place, tuning: Tuning, facts: TuningFacts) -> None:
    for name, value in tuning.sysctls.items():
        if facts.sysctls[name] != " ".join(value.split()):
            raise CommandError(
                f"expected {name} = {value}, found {facts.sysctls[name]} after setting it",
                where=f"{node} (host.sysctls)",
                do="the kernel limits this value; declare one that it takes",
            )
    for name, found in values_of(place, list(tuning.items), facts).items():
        if found != tuning.items[name]:
            raise CommandError(
                f"expected {name} = {tuning.items[name]}, found {found} after setting it",
                where=f"{node} (host.{name})",
                do="look at the node's journal for what refused it" if found != ABSENT else "run up again",
            )
    for file in tuning.files:
        if not file.is_in_place(facts.files[file.path]):
            raise CommandError(f"expected our content in {file.path}, found another after writing it", where=node)


def _setting_of(file: ManagedFile) -> str:
    return f"host.files: {file.path}"
