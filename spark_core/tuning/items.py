"""Declared tuning that consists of files: what each setting puts where, and how its value is read back.

An item is a set of files and an activation (:mod:`spark_core.journal.activation`) that makes them count. Its value is
read from the files alone, whatever is wanted, so that drift shows as what is really there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from spark_core import docker_config, packet_filter
from spark_core.journal import StackFolder
from spark_core.journal.activation import Live
from spark_core.journal.file_state import FileState

ABSENT, ALTERED = "absent", "altered"
UNITS = "/etc/systemd/system"
WATCHDOG_US = 30_000_000
PROJECT = Path(__file__).resolve().parents[2]
_FLOOR_SCRIPT = PROJECT / "spark_runtime" / "host" / "memory_floor.py"


@dataclass(frozen=True)
class Place:
    """Where a stack's tuning goes.

    Attributes:
        folder: The stack's folder on the node.
        user: The deploy user.
    """

    folder: StackFolder
    user: str


@dataclass(frozen=True)
class ManagedFile:
    """A file that is put onto a node.

    Attributes:
        sudo: Whether root owns and writes it; else the deploy user does.
        activation: What makes it count.
        makes_folder: Whether its folder may be missing.
    """

    path: str
    content: bytes
    mode: str = "0644"
    sudo: bool = True
    activation: str = ""
    makes_folder: bool = False

    @property
    def unit(self) -> str:
        return PurePosixPath(self.path).name

    def is_in_place(self, state: FileState) -> bool:
        """Whether the file on the node is this one."""
        owned = state.owner == "0:0" or not self.sudo
        return state.kind == "file" and state.content == self.content and state.mode == self.mode and owned


@dataclass(frozen=True)
class Item:
    """A setting that means files.

    Attributes:
        setting: Its name below ``host``.
        render: The files for a value, of which the last one holds the value and is activated. For a file that others
            write too, what is there now is taken into account.
        value_of: The value that the last file says.
        problem: What the running system lacks, in words, or nothing.
    """

    setting: str
    render: Callable[[Place, str, Mapping[str, FileState]], tuple[ManagedFile, ...]]
    value_of: Callable[[bytes], str | None]
    problem: Callable[[ManagedFile, str, Live], str | None]

    def files(self, place: Place, value: str) -> tuple[ManagedFile, ...]:
        """The files for a value where nothing is there yet."""
        return self.render(place, value, {})

    def paths(self, place: Place) -> tuple[str, ...]:
        return tuple(file.path for file in self.files(place, "0"))

    def value(self, place: Place, found: Mapping[str, FileState], live: Live) -> str:
        """The value as it is on the node: as the setting says it, ``absent``, ``altered``, or with what it lacks."""
        main = self.files(place, "0")[-1].path
        content = found[main].content
        value = self.value_of(content) if content is not None else None
        if value is None:
            return ABSENT if not found[main].there or main == docker_config.PATH else ALTERED
        files = self.render(place, value, found)
        if main != docker_config.PATH and not all(file.is_in_place(found[file.path]) for file in files):
            return ALTERED
        problem = self.problem(files[-1], value, live)
        return f"{value}, {problem}" if problem else value


def _text(*lines: str) -> bytes:
    return "\n".join(("# Written by spark-vllm; removed by its destroy.", *lines, "")).encode()


def _matches(pattern: bytes) -> Callable[[bytes], str | None]:
    def value_of(content: bytes) -> str | None:
        found = re.search(pattern, content, re.MULTILINE)
        return (found[1].decode() if found.re.groups else "true") if found else None

    return value_of


def _fine(_file: ManagedFile, _value: str, _live: Live) -> None:
    return None


def _runs(file: ManagedFile, _value: str, live: Live) -> str | None:
    unit = live.units[file.unit]
    if not unit.active:
        return "not active"
    return None if unit.enabled else "not at boot"


def _unit(name: str, description: str, *lines: str) -> ManagedFile:
    text = _text("[Unit]", f"Description={description}", *lines, "", "[Install]", "WantedBy=multi-user.target")
    return ManagedFile(f"{UNITS}/{name}", text, activation="unit")


def _sysctls(place: Place, value: str, _found: Mapping[str, FileState]) -> tuple[ManagedFile, ...]:
    path = f"/etc/sysctl.d/60-spark-vllm-{place.folder.stack}.conf"
    return (ManagedFile(path, _text(*value.split("; "))),)


def _sysctls_value(content: bytes) -> str:
    lines = content.decode(errors="replace").splitlines()
    return "; ".join(line.strip() for line in lines if line.strip() and not line.startswith("#"))


def _clock_cap(_place: Place, value: str, _found: Mapping[str, FileState]) -> tuple[ManagedFile, ...]:
    # A cap and not a floor: the GPU still clocks down when it has nothing to do.
    return (
        _unit(
            "spark-vllm-clock-cap.service",
            "GPU clock cap of spark-vllm",
            "After=nvidia-persistenced.service",
            "",
            "[Service]",
            "Type=oneshot",
            "RemainAfterExit=yes",
            f"ExecStart=/usr/bin/nvidia-smi -lgc 200,{value}",
            "ExecStop=/usr/bin/nvidia-smi -rgc",
        ),
    )


def _swap(_place: Place, _value: str, _found: Mapping[str, FileState]) -> tuple[ManagedFile, ...]:
    unit = _unit(
        "spark-vllm-swap-off.service",
        "No swap, for spark-vllm",
        "After=swap.target",
        "",
        "[Service]",
        "Type=oneshot",
        "RemainAfterExit=yes",
        "ExecStart=/usr/sbin/swapoff -a",
    )
    return (ManagedFile(unit.path, unit.content, activation="swap"),)


def _swap_problem(file: ManagedFile, value: str, live: Live) -> str | None:
    if live.swaps:
        return f"but {', '.join(device for device, _ in live.swaps)} is in use"
    return _runs(file, value, live)


def _memlock(place: Place, _value: str, _found: Mapping[str, FileState]) -> tuple[ManagedFile, ...]:
    text = _text(*(f"{place.user} {kind} memlock unlimited" for kind in ("soft", "hard")))
    return (ManagedFile("/etc/security/limits.d/60-spark-vllm-memlock.conf", text),)


def _remove_ipc(_place: Place, _value: str, _found: Mapping[str, FileState]) -> tuple[ManagedFile, ...]:
    path = "/etc/systemd/logind.conf.d/60-spark-vllm.conf"
    text = _text("[Login]", "RemoveIPC=no")
    return (ManagedFile(path, text, activation="logind", makes_folder=True),)


def _remove_ipc_value(content: bytes) -> str | None:
    return "false" if b"RemoveIPC=no" in content else None


def _remove_ipc_problem(_file: ManagedFile, _value: str, live: Live) -> str | None:
    return None if live.remove_ipc is False else "but logind still removes it"


def _docker(_place: Place, value: str, found: Mapping[str, FileState]) -> tuple[ManagedFile, ...]:
    state = found.get(docker_config.PATH)
    content = docker_config.with_cgroup_driver(state.content if state else None, value)
    mode = (state.mode if state else None) or "0644"
    return (ManagedFile(docker_config.PATH, content, mode, activation="docker", makes_folder=True),)


def _docker_problem(_file: ManagedFile, value: str, live: Live) -> str | None:
    return None if live.cgroup_driver == value else f"but Docker has {live.cgroup_driver or 'no answer'}"


def _memory_floor(place: Place, value: str, _found: Mapping[str, FileState]) -> tuple[ManagedFile, ...]:
    content = _FLOOR_SCRIPT.read_bytes()
    # The hash is in its name, so that another script is another command of the unit and runs.
    script = f"{place.folder.path}/memory_floor-{hashlib.sha256(content).hexdigest()[:12]}.py"
    log = f"{place.folder.path}/state/memory_floor.log"
    return (
        ManagedFile(script, content, sudo=False),
        _unit(
            f"spark-vllm-memory-floor-{place.folder.stack}.service",
            f"Memory floor of spark-vllm, stack {place.folder.stack}",
            "After=docker.service",
            "",
            "[Service]",
            f"User={place.user}",
            f"ExecStart=/usr/bin/python3 -I {script} {place.folder.stack} {value} {log}",
            "Restart=always",
            "RestartSec=5",
            # The last process to go, with its pages locked: it works when nothing else does.
            "OOMScoreAdjust=-1000",
            "LimitMEMLOCK=infinity",
            "Nice=-10",
        ),
    )


def _packet_filter(place: Place, value: str, _found: Mapping[str, FileState]) -> tuple[ManagedFile, ...]:
    stack = place.folder.stack
    lines = packet_filter.unit_lines(packet_filter.table_of(stack), value)
    return (_unit(f"spark-vllm-packet-filter-{stack}.service", f"Packet filter of spark-vllm, stack {stack}", *lines),)


def _watchdog(_place: Place, _value: str, _found: Mapping[str, FileState]) -> tuple[ManagedFile, ...]:
    path = "/etc/systemd/system.conf.d/60-spark-vllm-watchdog.conf"
    text = _text("[Manager]", f"RuntimeWatchdogSec={WATCHDOG_US // 1_000_000}s")
    return (ManagedFile(path, text, activation="watchdog", makes_folder=True),)


def _watchdog_problem(_file: ManagedFile, _value: str, live: Live) -> str | None:
    return None if live.watchdog_us == WATCHDOG_US else "not set before the next boot"


ITEMS: Mapping[str, Item] = {
    item.setting: item
    for item in (
        Item("sysctls_at_boot", _sysctls, _sysctls_value, _fine),
        Item("gpu_clock_cap_mhz", _clock_cap, _matches(rb"-lgc 200,(\d+)$"), _runs),
        Item("swap", _swap, lambda content: "off" if b"swapoff -a" in content else None, _swap_problem),
        Item("memlock_unlimited", _memlock, _matches(rb"hard memlock unlimited$"), _fine),
        Item("remove_ipc", _remove_ipc, _remove_ipc_value, _remove_ipc_problem),
        Item("docker_cgroup_driver", _docker, docker_config.cgroup_driver_of, _docker_problem),
        Item("memory_floor_mib", _memory_floor, _matches(rb"\.py \S+ (\d+) \S+$"), _runs),
        Item("packet_filter", _packet_filter, _matches(rb"^# packet filter: (.+)$"), _runs),
        Item("watchdog", _watchdog, _matches(rb"^RuntimeWatchdogSec="), _watchdog_problem),
    )
}
"""Every item by its setting, in the order in which they are applied."""
