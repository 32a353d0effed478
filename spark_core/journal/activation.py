"""What makes a changed file count in the running system, and how that is taken back.

=============  ==================================  ===========================================
activation     after the file is there             when it goes
=============  ==================================  ===========================================
``unit``       the unit is enabled and started     it is stopped and disabled before
``swap``       the same: the unit switches swap    the same, then what was in use is used again
               off
``logind``     logind reads its configuration      the same
``docker``     Docker is restarted                 the same, if its cgroup driver then differs
``watchdog``   systemd's property is set           the property is set back
(empty)        nothing                             nothing
=============  ==================================  ===========================================

What is running is read without root, and every step is taken by what is seen, so that it may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from spark_core import root_commands as root
from spark_core.errors import CommandError, ObservationError
from spark_core.journal.entry import JournalEntry
from spark_core.transport.base import Fragment, Transport, compose, parse_sections, run_checked, script

_LABEL = "spark-vllm.stack"
_LIVE = (
    """
for what in "$@"; do
  case $what in
    unit:*)
      echo "=== live $what"
      systemctl show -p LoadState -p ActiveState -p UnitFileState -p NeedDaemonReload -- "${what#unit:}"
      ;;
    logind) echo "=== live $what"; busctl get-property """
    + " ".join(root.LOGIND)
    + """ RemoveIPC ;;
    docker)
      echo "=== live $what"
      timeout -k 1 8 docker info --format '{{.CgroupDriver}}' 2>/dev/null || echo none
      echo '=== live containers'
      timeout -k 1 8 docker ps --format '{{.Names}}|{{.Label """
    + f'"{_LABEL}"'
    + """}}' 2>/dev/null || echo none
      ;;
    watchdog)
      echo "=== live $what"
      if [ -e /dev/watchdog ]; then echo there; else echo missing; fi
      busctl get-property """
    + " ".join(root.MANAGER)
    + """ RuntimeWatchdogUSec
      ;;
    swap) echo "=== live $what"; cat /proc/swaps ;;
  esac
done
"""
)
_DOCKER_BACK = """
for i in $(seq 1 60); do
  driver=$(timeout -k 1 5 docker info --format '{{.CgroupDriver}}' 2>/dev/null) && [ -n "$driver" ] && break
  sleep 1
done
echo "${driver:-none}"
"""


@dataclass(frozen=True)
class UnitState:
    """A unit as systemd sees it.

    Attributes:
        stale: Whether its file has changed since systemd read it.
    """

    loaded: bool
    active: bool
    enabled: bool
    stale: bool


@dataclass(frozen=True)
class Live:
    """The running system, as far as it was asked; what was not asked is empty.

    Attributes:
        units: State of each unit that was asked for.
        remove_ipc: logind's RemoveIPC.
        cgroup_driver: Docker's, or None if Docker gives no answer.
        containers: Name and stack (empty: not ours) of each running container; None if Docker gives no answer.
        watchdog_us: systemd's runtime watchdog in microseconds; 0 is off.
        has_watchdog: Whether there is a watchdog device.
        swaps: Path and priority of each swap in use.
    """

    units: Mapping[str, UnitState]
    remove_ipc: bool | None = None
    cgroup_driver: str | None = None
    containers: tuple[tuple[str, str], ...] | None = ()
    watchdog_us: int | None = None
    has_watchdog: bool = False
    swaps: tuple[tuple[str, int], ...] = ()

    def others(self, stack: str) -> list[str]:
        """Running containers that are not of the stack."""
        return [name for name, owner in self.containers or () if owner != stack]

    @property
    def takes_gpus_at_reload(self) -> bool:
        """Whether a reload of systemd would take the GPU from a running container."""
        return self.cgroup_driver == "systemd" and self.containers != ()


def live_topics(activation: str, target: str) -> tuple[str, ...]:
    """What to ask the running system about a file with an activation."""
    unit = f"unit:{PurePosixPath(target).name}"
    return {
        "unit": (unit, "docker"),
        "swap": (unit, "docker", "swap"),
        "logind": ("logind",),
        "docker": ("docker",),
        "watchdog": ("watchdog",),
    }.get(activation, ())


def live_fragment(topics: Iterable[str]) -> Fragment:
    """The part of an observation script that asks the running system; changes nothing and needs no root."""
    return Fragment(_LIVE, tuple(sorted(set(topics))))


def parse_live(node: str, sections: Mapping[str, str]) -> Live:
    """The running system from the sections of :func:`live_fragment`.

    Raises:
        ObservationError: an answer was not understood.
    """
    found = {name.removeprefix("live "): text.strip() for name, text in sections.items() if name.startswith("live ")}
    try:
        units = {name.removeprefix("unit:"): _unit(text) for name, text in found.items() if name.startswith("unit:")}
        driver = found.get("docker", "none")
        listed = found.get("containers", "")
        watchdog = found.get("watchdog", "").splitlines()
        return Live(
            units,
            remove_ipc={"b true": True, "b false": False}[found["logind"]] if "logind" in found else None,
            cgroup_driver=driver if driver in ("systemd", "cgroupfs") else None,
            containers=None if listed == "none" else tuple(_container(line) for line in listed.splitlines()),
            watchdog_us=int(watchdog[1].split()[1]) if watchdog else None,
            has_watchdog=watchdog[:1] == ["there"],
            swaps=tuple(_swap(line) for line in found.get("swap", "").splitlines()[1:]),
        )
    except (KeyError, ValueError, IndexError) as error:
        raise ObservationError(
            f"expected the state of systemd, logind, Docker and swap, found an answer without {error}", where=node
        ) from error


def observe_live(transport: Transport, topics: Iterable[str]) -> Live:
    """Ask the running system in one round trip."""
    text = run_checked(
        transport, compose(live_fragment(topics), timeout_s=40), purpose="expected the state of the running system"
    )
    return parse_live(transport.node, parse_sections(text))


def live_before(activation: str, live: Live) -> str | None:
    """What the journal must remember of the running system, beside the file."""
    if activation == "docker":
        return live.cgroup_driver
    if activation == "watchdog":
        return str(live.watchdog_us)
    if activation == "swap":
        return "\n".join(f"{device} {priority}" for device, priority in live.swaps)
    return None


def start(transport: Transport, unit: str, setting: str) -> None:
    """Enable and start a unit whose file is in place; systemd is reloaded only if it still knows another file."""
    if observe_live(transport, [f"unit:{unit}"]).units[unit].stale:
        run_checked(transport, root.reload_units(), purpose=f"expected to reload systemd for {unit}", setting=setting)
    for cmd in (root.enable_unit(unit), root.start_unit(unit)):
        run_checked(transport, cmd, purpose=f"expected to start {unit}", setting=setting)


def restart_docker(transport: Transport, setting: str = "") -> str:
    """Restart Docker and wait until it answers; the cgroup driver that it then has, ``none`` if it does not come."""
    run_checked(transport, root.restart_docker(), purpose="expected to restart Docker", setting=setting)
    return run_checked(
        transport, script(_DOCKER_BACK, timeout_s=400), purpose="expected Docker back", setting=setting
    ).strip()


def refuse_beside_others(node: str, stack: str, live: Live, what: str) -> None:
    """Refuse what takes containers of others down.

    Raises:
        CommandError: naming the containers and the setting that allows it.
    """
    if live.containers is None:
        return  # Docker does not run, so no container can be harmed
    others = live.others(stack)
    if others:
        raise CommandError(
            f"expected no containers of others while {what}, found {', '.join(sorted(others)[:6])}",
            where=f"{node} (host.disturb_others)",
            do="stop them first, or set host.disturb_others to true; they may not come back by themselves",
        )


def before_files_go(transport: Transport, entries: Iterable[JournalEntry]) -> None:
    """Stop and disable the units whose files are about to go; a unit without a file is past that already."""
    units = [entry.target for entry in entries if entry.activation in ("unit", "swap")]
    for path in present(transport, units):
        unit = PurePosixPath(path).name
        for cmd in (root.stop_unit(unit), root.disable_unit(unit)):
            run_checked(transport, cmd, purpose=f"expected to stop {unit}")


def after_files_are_back(transport: Transport, entries: Iterable[JournalEntry]) -> None:
    """Make the files that are back count in the running system."""
    entries = list(entries)
    topics = {topic for entry in entries for topic in live_topics(entry.activation, entry.target)}
    if not topics:
        return
    live = observe_live(transport, topics)
    if any(unit.stale for unit in live.units.values()) and not live.takes_gpus_at_reload:
        run_checked(transport, root.reload_units(), purpose="expected systemd to forget units of ours")
    for entry in entries:
        _set_back(transport, entry, live)


def _set_back(transport: Transport, entry: JournalEntry, live: Live) -> None:
    before = entry.live or ""
    if entry.activation == "logind":
        run_checked(transport, root.reread_logind(), purpose="expected logind to read its configuration")
    elif entry.activation == "watchdog" and before.isdigit() and live.watchdog_us != int(before):
        run_checked(transport, root.set_watchdog(before), purpose="expected to set systemd's watchdog back")
    elif entry.activation == "swap":
        in_use = {device for device, _ in live.swaps}
        gone = [pair for pair in _remembered(before) if pair[0] not in in_use]
        there = present(transport, [device for device, _ in gone])
        for device, priority in gone:
            if device in there:  # a swap in compressed memory may not have come back with a reboot
                _swap_on(transport, device, priority)
    elif entry.activation == "docker" and live.cgroup_driver != before:
        found = restart_docker(transport)
        if found == "none":
            raise CommandError(
                "expected Docker back with its earlier configuration, found no answer",
                where=transport.node,
                do="look at `journalctl -u docker`, then run this again",
            )


def _swap_on(transport: Transport, device: str, priority: int) -> None:
    result = transport.run(root.swap_on(device, priority if priority >= 0 else None))
    if not result.ok and device not in {used for used, _ in observe_live(transport, ["swap"]).swaps}:
        raise CommandError(
            f"expected to use the swap {device} again, found: {result.stderr.strip()[-160:]}", where=transport.node
        )


def present(transport: Transport, paths: Sequence[str]) -> list[str]:
    """Those of the paths that are there."""
    if not paths:
        return []
    look = script('n=0; for f in "$@"; do [ ! -e "$f" ] || echo "$n"; n=$((n + 1)); done', *paths)
    return [paths[int(line)] for line in run_checked(transport, look, purpose="expected to look for files").split()]


def _remembered(text: str) -> list[tuple[str, int]]:
    return [(device, int(priority)) for device, _, priority in (line.rpartition(" ") for line in text.splitlines())]


def _unit(text: str) -> UnitState:
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    return UnitState(
        loaded=values["LoadState"] == "loaded",
        active=values["ActiveState"] == "active",
        enabled=values["UnitFileState"] == "enabled",
        stale=values["NeedDaemonReload"] == "yes",
    )


def _container(line: str) -> tuple[str, str]:
    name, _, rest = line.partition("|")
    return name, rest.partition("|")[0]


def _swap(line: str) -> tuple[str, int]:
    words = line.split()
    return words[0], int(words[-1])
