"""The power supply of one emulated host: a process that lives exactly as long as the host is on.

It makes the host's links, starts PID 1, waits, and takes everything apart when the host goes off. A restart
asked for from inside (`systemctl reboot`) starts the host again, as hardware would. It holds a lock file
while it lives, so whether a host is on is a question about a lock, not about a process number. Run as
``python -m lab.power FOLDER HOST``.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lab import boot, cgroup, disk, instance, network, paths
from lab.instance import Instance, write_whole


def switch_on(lab: Instance, host: str) -> subprocess.Popen[bytes]:
    """Start the power supply of a host in the background. It goes on without this process."""
    folder = lab.host_dir(host)
    with (folder / "power.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "lab.power", lab.name, host],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": str(paths.package_dir().parent)},
        )


def is_on(lab: Instance, host: str) -> bool:
    """Whether the host's power supply runs."""
    try:
        descriptor = os.open(lab.host_dir(host) / "power.lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def init_pid(lab: Instance, host: str) -> int | None:
    """PID 1 of a host as this machine numbers it, or None while the host is off or starting."""
    if not is_on(lab, host):
        return None
    try:
        stored = json.loads((lab.host_dir(host) / "power.json").read_text())
    except FileNotFoundError:
        return None
    pid = stored["init"]
    return int(pid) if pid is not None and Path("/proc", str(pid)).exists() else None


def supply_pid(lab: Instance, host: str) -> int | None:
    """The power supply's own process number, or None while the host is off."""
    if not is_on(lab, host):
        return None
    try:
        return int((lab.host_dir(host) / "power.lock").read_text())
    except (FileNotFoundError, ValueError):
        return None


def boots(lab: Instance, host: str) -> int:
    """How often this host was started, ever."""
    try:
        return int(json.loads((lab.host_dir(host) / "power.json").read_text())["boots"])
    except FileNotFoundError:
        return 0


def _plan(lab: Instance, host: str) -> boot.BootPlan:
    folder = lab.host_dir(host)
    return boot.BootPlan(
        tag=lab.tag,
        host=host,
        network_namespace=network.namespace(lab, host),
        lower=lab.root,
        disk=folder,
        docker_data=folder / "docker",
        shared=disk.shared_folders(),
        console=folder / "console.log",
    )


def _remember(lab: Instance, host: str, init: int | None, count: int) -> None:
    write_whole(lab.host_dir(host) / "power.json", json.dumps({"init": init, "boots": count}) + "\n")


def _log(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _run(lab: Instance, host: str) -> int:
    count = boots(lab, host)
    while True:
        count += 1
        cgroup.remove(lab.tag, host)
        network.connect(lab, host)
        network.apply_cables(lab)
        start = time.monotonic()
        try:
            waiter, init = boot.boot(_plan(lab, host))
            _remember(lab, host, init, count)
            _log(f"{host} is on, PID 1 is {init}")
            _, status = os.waitpid(waiter, 0)
            end = boot.ended(status)
            _log(f"{host}: {end.text} after {time.monotonic() - start:.0f} s")
        finally:
            _remember(lab, host, None, count)
            cgroup.remove(lab.tag, host)
            network.disconnect(lab, host)
            network.apply_cables(lab)
        if not end.wants_restart:
            return 0


def main(arguments: list[str]) -> int:
    """Entry point of the background process."""
    name, host = arguments
    lab = instance.require(name)
    descriptor = os.open(lab.host_dir(host) / "power.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log(f"{host} is on already")
        return 0
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    # A terminal that goes away does not switch the hosts off.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return _run(lab, host)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
