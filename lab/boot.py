"""From a process of this machine to PID 1 of an emulated host.

`boot` forks twice. The first child joins the host's control groups and asks for a new PID namespace; the
second is PID 1 in it, gets the other namespaces, builds the host's file system, makes it its root and
becomes systemd. Nothing of this is visible on the machine: every mount lives in the host's own mount
namespace and goes away with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lab import cgroup
from lab.command import die_with_parent

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MS_SLAVE = 0x80000
MS_SHARED = 0x100000
MNT_DETACH = 2

PR_CAPBSET_DROP = 24
CAP_SYS_MODULE = 16
CAP_SYS_TIME = 25

CLASS_LAYER = "/usr/share/spark-lab/class"
"""Folder of a host that lies over its /sys/class, where there is one: device classes that the machine lacks."""

SYS_PIVOT_ROOT = 155
"""System call number on x86-64, the one architecture the lab runs on."""

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class BootPlan:
    """All that a host is made of when it is switched on."""

    tag: str
    host: str
    network_namespace: str
    lower: Path
    """The Debian root that all hosts share."""
    disk: Path
    """Folder with `upper` and `work`, the host's own disk, and `root`, where it is put together."""
    docker_data: Path
    """A real folder for /var/lib/docker: overlay2 cannot stack on an overlay."""
    shared: tuple[tuple[Path, str], ...]
    """Folders of this machine that every host sees, read-only, and where."""
    console: Path
    """File that takes what PID 1 prints."""


@dataclass(frozen=True)
class Ended:
    """How a host went off."""

    wants_restart: bool
    """Whether the host itself asked for a restart, as `reboot` does."""
    text: str


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: Path, kind: str, flags: int = 0, data: str = "") -> None:
    arguments = (source.encode(), str(target).encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())
    _check(_libc.mount(*arguments), f"mount {kind or source} on {target}")


def _bind(source: Path, target: Path, *, read_only: bool = False, recursive: bool = False) -> None:
    _mount(str(source), target, "", MS_BIND | (MS_REC if recursive else 0))
    if read_only:
        _mount("", target, "", MS_REMOUNT | MS_BIND | MS_RDONLY)


def boot(plan: BootPlan) -> tuple[int, int]:
    """Start a host; returns (process to wait for, PID 1 as seen from this machine).

    The process to wait for ends when the host does; give its status to `ended`.
    """
    reader, writer = os.pipe()
    waiter = os.fork()
    if waiter == 0:
        os.close(reader)
        _starter(plan, writer)
    os.close(writer)
    with os.fdopen(reader) as answers:
        said = answers.read()
    if not said.isdigit():
        os.waitpid(waiter, 0)
        raise OSError(said or "the starter ended without a word")
    return waiter, int(said)


def ended(status: int) -> Ended:
    """Read the wait status of the process that `boot` returned."""
    code = os.waitstatus_to_exitcode(status)
    # In a PID namespace the kernel turns the reboot call into a signal to PID 1: SIGHUP for a restart,
    # SIGINT for off.
    if code == -signal.SIGHUP:
        return Ended(True, "restart")
    if code == -signal.SIGINT:
        return Ended(False, "switched off")
    if code == -signal.SIGKILL:
        return Ended(False, "lost power")
    return Ended(False, f"ended with {code}")


def _starter(plan: BootPlan, writer: int) -> NoReturn:
    """First child: prepares what PID 1 inherits, waits for it, and passes on how it ended."""
    try:
        die_with_parent()
        cgroup.enter(plan.tag, plan.host)
        _check(_libc.unshare(CLONE_NEWPID), "new PID namespace")
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            _init(plan)
        os.write(writer, str(pid).encode())
        os.close(writer)
    except BaseException as error:
        os.write(writer, f"{plan.host}: {error}".encode())
        os._exit(1)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))


def _init(plan: BootPlan) -> NoReturn:
    """Second child: becomes PID 1's systemd, or says on the console why not."""
    try:
        die_with_parent()
        os.setsid()
        console = os.open(plan.console, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(console, 1)
        os.dup2(console, 2)
        os.closerange(3, 4096)
        _enter_namespaces(plan)
        _build_root(plan)
        _libc.prctl(PR_CAPBSET_DROP, CAP_SYS_MODULE, 0, 0, 0)
        # The clock is the machine's and every other host's.
        _libc.prctl(PR_CAPBSET_DROP, CAP_SYS_TIME, 0, 0, 0)
        os.umask(0o022)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        env = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            # systemd's documented way to be told that devices and clock are not its own.
            "container": "spark-lab",
        }
        os.execve("/sbin/init", ["/sbin/init", "--log-target=journal"], env)  # noqa: S606
    except BaseException as error:
        print(f"cannot start {plan.host}: {error}", file=sys.stderr, flush=True)
    os._exit(70)


def _enter_namespaces(plan: BootPlan) -> None:
    network = os.open(f"/run/netns/{plan.network_namespace}", os.O_RDONLY)
    _check(_libc.setns(network, CLONE_NEWNET), "enter the network namespace")
    os.close(network)
    _check(_libc.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWCGROUP), "new namespaces")
    name = plan.host.encode()
    _check(_libc.sethostname(name, len(name)), "set the host name")


def _build_root(plan: BootPlan) -> None:
    hierarchies = cgroup.hierarchies()
    _mount("", Path("/"), "", MS_REC | MS_PRIVATE)
    root = plan.disk / "root"
    _mount_disk(plan, root)
    (root / "var/lib/docker").mkdir(parents=True, exist_ok=True)
    _bind(plan.docker_data, root / "var/lib/docker")
    for source, inside in plan.shared:
        target = root / inside.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        _bind(source, target, read_only=True)
    _mount_kernel(root, hierarchies)
    _mount_devices(root)
    for folder, options in (("run", "mode=755"), ("tmp", "mode=1777")):
        _mount("tmpfs", root / folder, "tmpfs", MS_NOSUID | MS_NODEV, options)
    # Nothing of the machine's file system is reachable from here on. With chroot instead, `docker exec`
    # would land outside.
    os.chdir(root)
    _check(_libc.syscall(SYS_PIVOT_ROOT, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "let go of the machine's root")
    os.chdir("/")
    # systemd's default; a bind mount made on the host later shows in containers that ask for it.
    _mount("", Path("/"), "", MS_REC | MS_SHARED)


def _mount_disk(plan: BootPlan, root: Path) -> None:
    data = f"lowerdir={plan.lower},upperdir={plan.disk / 'upper'},workdir={plan.disk / 'work'}"
    end = time.monotonic() + 5
    while True:
        try:
            _mount("overlay", root, "overlay", 0, data)
            return
        except OSError:
            # After a power cut the last mount of this disk goes away a moment later than its processes.
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _mount_kernel(root: Path, hierarchies: list[cgroup.Hierarchy]) -> None:
    plain = MS_NOSUID | MS_NODEV | MS_NOEXEC
    _mount("proc", root / "proc", "proc", plain)
    # Of the kernel's settings only net.* belong to a host; the rest are the machine's and every other host's.
    _bind(root / "proc/sys/net", root / "proc/sys/net")
    _bind(root / "proc/sys", root / "proc/sys", recursive=True)
    _mount("", root / "proc/sys", "", MS_REMOUNT | MS_BIND | MS_RDONLY | plain)
    if (root / "proc/sysrq-trigger").exists():
        _bind(root / "proc/sysrq-trigger", root / "proc/sysrq-trigger", read_only=True)
    _mount("sysfs", root / "sys", "sysfs", plain)
    # The host's own interfaces stay writable: `netplan apply` pokes them.
    _bind(root / "sys/devices/virtual/net", root / "sys/devices/virtual/net")
    # Read-only also tells networkd that no udev is coming.
    _mount("", root / "sys", "", MS_REMOUNT | MS_BIND | MS_RDONLY | plain)
    layer = root / CLASS_LAYER.lstrip("/")
    if layer.is_dir():
        _mount("overlay", root / "sys/class", "overlay", MS_RDONLY, f"lowerdir={layer}:{root / 'sys/class'}")
    top = root / "sys/fs/cgroup"
    if hierarchies[0].folder == cgroup.MOUNT_POINT:
        _mount("cgroup2", top, "cgroup2", plain)
        return
    _mount("tmpfs", top, "tmpfs", plain, "mode=755")
    for hierarchy in hierarchies:
        folder = top / hierarchy.folder.name
        folder.mkdir()
        options = hierarchy.options
        _mount(
            hierarchy.kind,
            folder,
            hierarchy.kind,
            plain,
            f"none,{options}" if options.startswith("name=") else options,
        )
        for alias in options.split(","):
            if alias and alias != hierarchy.folder.name and "=" not in alias:
                (top / alias).symlink_to(hierarchy.folder.name)


def _mount_devices(root: Path) -> None:
    devices = root / "dev"
    _mount("tmpfs", devices, "tmpfs", MS_NOSUID, "mode=755")
    for name in ("null", "zero", "full", "random", "urandom", "tty", "fuse", "net/tun"):
        source = Path("/dev", name)
        if source.exists() and stat.S_ISCHR(source.stat().st_mode):
            target = devices / name
            target.parent.mkdir(exist_ok=True)
            target.touch()
            _bind(source, target)
    for name in ("pts", "shm", "mqueue"):
        (devices / name).mkdir()
    _mount("devpts", devices / "pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5")
    _mount("tmpfs", devices / "shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    _mount("mqueue", devices / "mqueue", "mqueue", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name, target_name in (
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ):
        (devices / name).symlink_to(target_name)
