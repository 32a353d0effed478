"""A control group of its own for every host, in every hierarchy of this machine.

All layouts are handled: the older one with a hierarchy per controller, the unified one, and the hybrid of
both. Inside, a host sees its own group as the root, so that systemd and Docker run as they would on a
machine of their own.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from lab.errors import StepFailed

MOUNT_POINT = Path("/sys/fs/cgroup")
KILL_TIMEOUT_S = 10


@dataclass(frozen=True)
class Hierarchy:
    """One mounted tree of control groups."""

    folder: Path
    kind: str
    """File system type: `cgroup` for a tree of the older layout, `cgroup2` for the unified one."""
    options: str = ""
    """Mount options that give the same tree again."""

    @property
    def unified(self) -> bool:
        """Whether this is the one tree of cgroup v2."""
        return self.kind == "cgroup2"


def hierarchies() -> list[Hierarchy]:
    """The trees of this machine, as they are mounted now."""
    known = Path("/proc/self/cgroup").read_text()
    names = {name for entry in known.splitlines() for name in entry.split(":")[1].split(",") if name}
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, super_options = after.split(" ", 2)
        folder = Path(before.split(" ")[4])
        if kind not in ("cgroup", "cgroup2") or not folder.is_relative_to(MOUNT_POINT):
            continue
        options = [option for option in super_options.split(",") if option in names or option.startswith("name=")]
        if kind == "cgroup2" or options:
            found.append(Hierarchy(folder, kind, ",".join(options) if kind == "cgroup" else ""))
    if not found:
        raise StepFailed(f"no control groups are mounted under {MOUNT_POINT}")
    return found


def _group_name(tag: str) -> str:
    return f"sparklab-{tag}"


def enter(tag: str, host: str) -> None:
    """Put the calling process into the host's group of every hierarchy; makes the groups that are missing."""
    for hierarchy in hierarchies():
        group = hierarchy.folder
        for part in (_group_name(tag), host):
            parent, group = group, group / part
            if hierarchy.unified:
                _delegate(parent)
            group.mkdir(exist_ok=True)
            for setting in ("cpuset.cpus", "cpuset.mems"):
                # An empty cpuset of the older layout accepts no process.
                if not hierarchy.unified and (group / setting).exists():
                    (group / setting).write_text((parent / setting).read_text())
        (group / "cgroup.procs").write_text(str(os.getpid()))


def _delegate(group: Path) -> None:
    """Let the children of a unified group use the controllers that it has itself."""
    for controller in (group / "cgroup.controllers").read_text().split():
        try:
            (group / "cgroup.subtree_control").write_text(f"+{controller}")
        except OSError:
            # A controller that a parent keeps for itself is one the hosts do without.
            continue


def groups(tag: str, host: str | None = None) -> list[Path]:
    """Folders of a lab's groups (or of one host's) that exist now."""
    found = []
    for hierarchy in hierarchies():
        group = hierarchy.folder / _group_name(tag)
        if host is not None:
            group = group / host
        if group.is_dir():
            found.append(group)
    return found


def processes(tag: str, host: str | None = None) -> set[int]:
    """Every process of a lab, or of one host, wherever it hides in the tree of groups."""
    found: set[int] = set()
    for group in groups(tag, host):
        for file in group.rglob("cgroup.procs"):
            try:
                found.update(int(word) for word in file.read_text().split())
            except OSError:
                # The group went away with its last process.
                continue
    found.discard(0)
    return found


def remove(tag: str, host: str | None = None) -> None:
    """End every process of a lab (or of one host) and remove its groups."""
    end = time.monotonic() + KILL_TIMEOUT_S
    while left := processes(tag, host):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > end:
            raise StepFailed(f"processes {sorted(left)} of {host or 'the lab'} do not end")
        time.sleep(0.05)
    for group in groups(tag, host):
        _remove_tree(group, end)


def _remove_tree(group: Path, end: float) -> None:
    for folder, _, _ in sorted(os.walk(group, topdown=False), key=lambda entry: -entry[0].count("/")):
        while True:
            try:
                Path(folder).rmdir()
                break
            except FileNotFoundError:
                break
            except OSError as error:
                # The kernel lets go of an ended process's group a moment later.
                if time.monotonic() > end:
                    raise StepFailed(f"cannot remove control group {folder}: {error.strerror}") from error
                time.sleep(0.05)
