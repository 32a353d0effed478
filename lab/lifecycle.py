"""Bringing a lab up, taking it down, and saying how it is."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

from lab import access, cable, cgroup, debian, disk, host_root, instance, machine, network, paths, power
from lab.errors import LabError, StepFailed
from lab.host import Host
from lab.instance import Instance
from lab.lock import locked
from lab.progress import say, step

LOCK_TIMEOUT_S = 1800


class HostStatus(TypedDict):
    """What `status --json` says about one host."""

    name: str
    address: str
    power: bool
    pid: int | None
    """PID 1 of the host, as this machine numbers it: for a look into its namespaces from outside."""
    system: str
    ssh: bool
    docker: bool
    carrier: dict[str, bool]


class Status(TypedDict):
    """What `status --json` says about a lab."""

    instance: str
    folder: str
    subnet: str
    topology: str
    hosts: list[HostStatus]


def lab_lock(name: str) -> Path:
    """Lock file of an instance; beside its folder, because `down` removes the folder."""
    return paths.home_dir() / f".{name}.lock"


def bring_up(name: str, *, hosts: int | None, topology: str | None, subnet: str | None) -> Instance:
    """Make what is missing of a lab until every host answers; returns the lab.

    An existing lab keeps its shape: asking for another number of hosts or another network is refused.
    """
    machine.require_lab_machine()
    start = time.monotonic()
    with locked(lab_lock(name), what=f"lab {name}", timeout_s=LOCK_TIMEOUT_S):
        lab = instance.load(name)
        if lab is None:
            lab = _new(name, hosts or 2, topology or "switch", subnet)
        else:
            _same_shape(lab, hosts, topology, subnet)
        _ensure_root(lab)
        _prepare_files(lab)
        network.ensure_base(lab)
        started = _start_hosts(lab)
        access.ensure_agent(lab)
        _for_each(lab, lambda host: host.wait_ready(), f"{len(lab.hosts)} hosts answer")
        network.apply_cables(lab)
    word = "started" if started else "already on"
    say(f"lab {name}: {', '.join(lab.hosts)} ({word}, {time.monotonic() - start:.1f} s)")
    return lab


def _new(name: str, count: int, topology: str, subnet: str | None) -> Instance:
    if not 1 <= count <= instance.MOST_HOSTS:
        raise LabError(f"--hosts {count}: between 1 and {instance.MOST_HOSTS}")
    folder = paths.instance_dir(name)
    if "," in str(folder) or ":" in str(folder):
        raise LabError(f"the lab's folder {folder} has a comma or colon in its path, which overlayfs cannot take")
    # What an earlier lab of this name left behind, for instance when its folder was removed by hand.
    _remove_outside(folder)
    if folder.exists():
        shutil.rmtree(folder)
    network_range = instance.choose_subnet(name, subnet)
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    lab = Instance(name, count, network_range, topology, host_root.recipe().key, folder)
    lab.save()
    return lab


def _same_shape(lab: Instance, hosts: int | None, topology: str | None, subnet: str | None) -> None:
    asked = {"hosts": hosts, "topology": topology, "subnet": subnet}
    has = {"hosts": lab.host_count, "topology": lab.topology, "subnet": str(lab.subnet)}
    for key, value in asked.items():
        if value is not None and value != has[key]:
            raise LabError(f"lab {lab.name} has --{key} {has[key]}, not {value}: python -m lab down first")


def _ensure_root(lab: Instance) -> None:
    if lab.root.is_dir():
        return
    recipe = host_root.recipe()
    if recipe.key != lab.root_key:
        raise StepFailed(
            f"lab {lab.name}: its disks were made over {lab.root_key}, which is no longer in the cache: "
            "python -m lab down, then up"
        )
    machine.require_build_tools()
    debian.ensure_root(recipe)


def _prepare_files(lab: Instance) -> None:
    key = access.public_key(lab)
    for host in lab.hosts:
        lab.host_dir(host).mkdir(parents=True, exist_ok=True)
        disk.prepare(lab, host, key, access.host_key(lab, host))
    access.write_ssh_files(lab)


def _start_hosts(lab: Instance) -> bool:
    """Switch on every host that is off; returns whether there was one."""
    off = [host for host in lab.hosts if not Host(lab, host).is_on()]
    if off:
        with step(f"switched on {', '.join(off)}"), ThreadPoolExecutor(len(off)) as pool:
            for done in [pool.submit(Host(lab, host).switch_on) for host in off]:
                done.result()
    return bool(off)


def _for_each(lab: Instance, act: Callable[[Host], None], text: str) -> None:
    with step(text), ThreadPoolExecutor(len(lab.hosts)) as pool:
        for done in [pool.submit(act, Host(lab, host)) for host in lab.hosts]:
            done.result()


def take_down(name: str, *, keep_disks: bool = False) -> None:
    """Remove everything of a lab. Works on whatever is there, also twice, also after a killed `up`."""
    machine.require_lab_machine()
    instance.check_name(name)
    folder = paths.instance_dir(name)
    with locked(lab_lock(name), what=f"lab {name}", timeout_s=LOCK_TIMEOUT_S):
        try:
            lab = instance.load(name)
        except (ValueError, KeyError):
            # A damaged instance.json must not keep anyone from cleaning up.
            lab = None
        had = folder.exists() or bool(network.namespaces(instance.tag_of(folder)))
        if lab is not None:
            _for_each(lab, Host.shut_down if keep_disks else Host.cut_power, "hosts switched off")
        _remove_outside(folder)
        if keep_disks and lab is not None:
            say(f"lab {name} is down; disks kept in {folder}")
            return
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            raise StepFailed(f"could not remove {folder}")
    lab_lock(name).unlink(missing_ok=True)
    say(f"lab {name} is down" if had else f"lab {name} was not up")


def _remove_outside(folder: Path) -> None:
    """Remove what a lab has outside its folder: processes, control groups, namespaces, links, the agent."""
    tag = instance.tag_of(folder)
    access.stop_agent(folder)
    cgroup.remove(tag)
    network.remove_all(tag)


def host_status(host: Host) -> HostStatus:
    """How one host is, asked now."""
    system = host.system_state()
    alive = system not in ("off", "unknown")
    carrier = {name: host.carrier(name) for name in sorted(cable.INTERFACES.values())} if alive else {}
    return {
        "name": host.name,
        "address": host.lab.address(host.name),
        "power": host.is_on(),
        "pid": power.init_pid(host.lab, host.name),
        "system": system,
        "ssh": alive and host.answers_ssh(),
        "docker": alive and host.answers_docker(),
        "carrier": carrier,
    }


def status(name: str) -> Status:
    """How a lab is, asked now."""
    lab = instance.require(name)
    with ThreadPoolExecutor(len(lab.hosts)) as pool:
        hosts = list(pool.map(lambda host: host_status(Host(lab, host)), lab.hosts))
    return {
        "instance": name,
        "folder": str(lab.folder),
        "subnet": str(lab.subnet),
        "topology": lab.topology,
        "hosts": hosts,
    }
