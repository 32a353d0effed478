"""Everything that is done as root on a node, one function for each kind of command.

Each is a plain argument vector, never a script, so that it can be listed exactly: who changes a host calls a function
with values, and :mod:`spark_core.privilege` calls the same function with the placeholders below for what is only known
on the node. What runs and what is listed can thereby not differ.

Each may be run again after its answer was lost, alone or, for files, as the whole group.

A file is staged by the deploy user in the stack's own folder, copied beside its place by root, and put there by one
rename: no reader ever sees half of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from spark_core.errors import CommandError
from spark_core.transport.base import Command, Transport, command, run_checked
from spark_core.transport.ssh import write_file

OPEN, CLOSE = "\ue000", "\ue001"
"""Around the name of a placeholder; no argument of ours holds these characters."""


def _placeholder(name: str) -> str:
    return f"{OPEN}{name}{CLOSE}"


VALUE = _placeholder("value")
"""Value of a kernel parameter."""
ADDRESS = _placeholder("address")
"""IPv4 address with prefix length."""
NUMBER = _placeholder("number")
MODE = _placeholder("mode")
OWNER = _placeholder("owner")
"""Number of a user or of a group."""
WORD = _placeholder("word")
"""Last part of a kernel parameter's name."""
FILE = _placeholder("file")
"""Name of a file without its ending."""
DEVICE = _placeholder("device")
"""Path of a swap file or device."""
STATE = _placeholder("state")
"""``up`` or ``down``."""

NETPLAN_TIMEOUT_S = 60.0
SERVICE_TIMEOUT_S = 120.0


def staged_path(staging: str, path: str) -> str:
    """Where the next content of a file waits in the staging folder of the stack."""
    return f"{staging}/{path.strip('/').replace('/', '_')}"


def install_file(
    staging: str, path: str, content: bytes, *, mode: str = "0644", owner: str = "0", group: str = "0"
) -> list[Command]:
    """Put content at a path: staged by the deploy user, then copied and renamed by root. To be run in order.

    Args:
        staging: The stack's staging folder, :attr:`StackFolder.staging`.
        owner: Number of the user; names would not survive a user that is gone.
        group: Number of the group.
    """
    staged = staged_path(staging, path)
    return [
        write_file(staged, content),
        command("install", "-m", mode, "-o", owner, "-g", group, "-T", "--", staged, f"{path}.new", sudo=True),
        command("mv", "-f", "-T", "--", f"{path}.new", path, sudo=True),
    ]


def remove_file(path: str) -> Command:
    """Remove a file, and what an interrupted :func:`install_file` left beside it."""
    return command("rm", "-f", "--", path, f"{path}.new", sudo=True)


def remove_leftover(path: str) -> Command:
    """Remove what an interrupted :func:`install_file` left, and keep the file."""
    return command("rm", "-f", "--", f"{path}.new", sudo=True)


def read_file(path: str) -> Command:
    """A file's content in base64: what is no UTF-8 must come back byte for byte."""
    return command("base64", "-w0", "--", path, sudo=True)


def look_at_file(path: str) -> Command:
    """Kind with mode (hexadecimal), owner and group of a file's folder and of the file.

    The folder is always there, so one line means that the file is not; a refused sudo prints none.
    """
    return command("stat", "-c", "%f %u:%g", "--", str(PurePosixPath(path).parent), path, sudo=True)


def make_folder(path: str) -> Command:
    """Make a folder of root's that everybody may look into."""
    return command("install", "-d", "-m", "0755", "-o", "0", "-g", "0", "--", path, sudo=True)


def remove_folder(path: str) -> Command:
    """Remove a folder if nothing is in it."""
    return command("rmdir", "--ignore-fail-on-non-empty", "--", path, sudo=True)


def set_parameter(name: str, value: str) -> Command:
    """Set a kernel parameter.

    Args:
        name: With dots, or with slashes where a part of it holds a dot (``net/ipv4/conf/eth0.5/rp_filter``).
    """
    return command("sysctl", "-q", "-w", f"{name}={value}", sudo=True)


def read_parameter(name: str) -> Command:
    """The value of a kernel parameter that only root reads."""
    return command("cat", "--", f"/proc/sys/{name.replace('.', '/')}", sudo=True)


def set_link_mtu(netdev: str, mtu_bytes: int | str) -> Command:
    """Set the MTU of an interface."""
    return command("ip", "link", "set", "dev", netdev, "mtu", str(mtu_bytes), sudo=True)


def set_link_state(netdev: str, state: str) -> Command:
    """Set an interface ``up`` or ``down``."""
    return command("ip", "link", "set", "dev", netdev, state, sudo=True)


def add_address(netdev: str, address: str) -> Command:
    """Put an IPv4 address on an interface, or leave it there."""
    return command("ip", "address", "replace", address, "dev", netdev, sudo=True)


def delete_address(netdev: str, address: str) -> Command:
    """Take an IPv4 address off an interface; one that is gone already is an error."""
    return command("ip", "address", "del", address, "dev", netdev, sudo=True)


def apply_netplan() -> Command:
    """Make what netplan's files say so."""
    return command("netplan", "apply", sudo=True, timeout_s=NETPLAN_TIMEOUT_S)


def arm_rollback(unit: str, after_s: int | str, path: str) -> Command:
    """Let systemd run a script after some seconds unless the timer is stopped before; nothing of it outlives a boot."""
    return command(
        "systemd-run",
        "--quiet",
        "--collect",
        f"--unit={unit}",
        f"--on-active={after_s}",
        "--timer-property=AccuracySec=100ms",
        "--property=Type=oneshot",
        "/bin/bash",
        path,
        sudo=True,
    )


def start_unit(unit: str) -> Command:
    """Start a unit of systemd."""
    return command("systemctl", "start", unit, sudo=True, timeout_s=SERVICE_TIMEOUT_S)


def stop_unit(unit: str) -> Command:
    """Stop a unit of systemd."""
    return command("systemctl", "stop", unit, sudo=True, timeout_s=SERVICE_TIMEOUT_S)


def enable_unit(unit: str) -> Command:
    """For the next boot; without the reload of all units that ``enable`` does by itself."""
    return command("systemctl", "enable", "--no-reload", "-q", unit, sudo=True)


def disable_unit(unit: str) -> Command:
    """Not at the next boot any more; without the reload of all units."""
    return command("systemctl", "disable", "--no-reload", "-q", unit, sudo=True)


def reload_units() -> Command:
    """Beside running containers this takes their GPU away where Docker uses systemd's cgroup driver."""
    return command("systemctl", "daemon-reload", sudo=True, timeout_s=SERVICE_TIMEOUT_S)


def reread_logind() -> Command:
    """logind reads its configuration at SIGHUP; a restart of it can take a graphical session along."""
    return command("systemctl", "kill", "-s", "HUP", "systemd-logind.service", sudo=True)


def restart_docker() -> Command:
    """Restart Docker, and with it the containers that it keeps running."""
    return command("systemctl", "restart", "docker.service", sudo=True, timeout_s=SERVICE_TIMEOUT_S)


MANAGER = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
LOGIND = ("org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager")


def set_watchdog(microseconds: int | str) -> Command:
    """Set systemd's runtime watchdog for this boot, without a reload."""
    return command("busctl", "set-property", *MANAGER, "RuntimeWatchdogUSec", "t", str(microseconds), sudo=True)


def swap_on(device: str, priority: int | str | None) -> Command:
    """Use a swap file or device again; priorities below zero are the kernel's own choice."""
    words = ("-p", str(priority)) if priority is not None else ()
    return command("swapon", *words, "--", device, sudo=True)


def run_each(transport: Transport, commands: Sequence[Command], *, purpose: str, setting: str = "") -> None:
    """Run commands in order; each must succeed.

    All of them are done once more if one fails: a carrier repeats a command whose answer was lost with the connection,
    and a rename that was done already then finds nothing to rename.
    """
    try:
        for cmd in commands:
            run_checked(transport, cmd, purpose=purpose, setting=setting)
    except CommandError:
        for cmd in commands:
            run_checked(transport, cmd, purpose=purpose, setting=setting)
