"""One lab: its name, its hosts, its addresses, and the folder in which all of that is kept.

Several labs can run side by side on a machine. Everything of a lab that is visible outside its folder
(namespaces, interfaces, cgroups) carries a tag made from the path of that folder, so what a killed lab left
can always be found, and two labs never touch each other's things.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from lab import paths
from lab.command import run
from lab.errors import LabError, StepFailed, UnknownHost

DEFAULT_INSTANCE = "dev"
DEFAULT_SUBNET = "10.99.0.0/24"
FIRST_HOST_NUMBER = 12
MOST_HOSTS = 200
TOPOLOGIES = ("switch", "ring")


def host_name(index: int) -> str:
    """spark-a, spark-b, … spark-z, spark-aa, …"""
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        letters = chr(ord("a") + rest) + letters
    return f"spark-{letters}"


@dataclass(frozen=True)
class Instance:
    """What a lab is; written once by its first `up`."""

    name: str
    host_count: int
    subnet: ipaddress.IPv4Network
    topology: str
    root_key: str
    """Name of the Debian root under which the hosts' disks were made; a disk stays with its root."""
    folder: Path = field(compare=False)
    moved: dict[str, int] = field(default_factory=dict)
    """Last number of the management address of each host that was given another one than its first."""

    @property
    def tag(self) -> str:
        """The mark of this lab in names of namespaces, interfaces and cgroups."""
        return tag_of(self.folder)

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts, in order."""
        return [host_name(index) for index in range(self.host_count)]

    @property
    def machine_address(self) -> str:
        """This machine's own address on the management network."""
        return str(self.subnet.network_address + 1)

    def index(self, host: str) -> int:
        """Position of a host; raises UnknownHost for a name that the lab does not have."""
        try:
            return self.hosts.index(host)
        except ValueError:
            known = ", ".join(self.hosts)
            raise UnknownHost(f"lab {self.name} has no host {host}: it has {known}") from None

    def address(self, host: str) -> str:
        """Management address of a host."""
        return str(self.subnet.network_address + self.number(host))

    def number(self, host: str) -> int:
        """Last number of a host's management address."""
        return self.moved.get(host, FIRST_HOST_NUMBER + self.index(host))

    def host_dir(self, host: str) -> Path:
        """Folder of one host: its disk, its keys, its console."""
        return self.folder / "hosts" / host

    @property
    def root(self) -> Path:
        """The Debian root under the hosts' disks."""
        return paths.cache_dir() / "roots" / self.root_key

    def save(self) -> None:
        """Write instance.json, whole or not at all."""
        text = json.dumps(
            {
                "name": self.name,
                "host_count": self.host_count,
                "subnet": str(self.subnet),
                "topology": self.topology,
                "root_key": self.root_key,
                "moved": self.moved,
            },
            indent=2,
        )
        write_whole(self.folder / "instance.json", text + "\n")


def write_whole(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a small file so that a reader sees the old text or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    temporary.chmod(mode)
    temporary.rename(path)


def tag_of(folder: Path) -> str:
    """Tag of the lab whose folder this is; made from the path alone, so it works when the folder is gone."""
    return hashlib.sha256(str(folder).encode()).hexdigest()[:6]


def check_name(name: str) -> None:
    """Refuse an instance name that would not make a good folder name."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,30}", name):
        raise LabError(f"instance name {name!r}: use up to 31 small letters, digits and dashes")


def load(name: str) -> Instance | None:
    """The lab of that name, or None when it was never brought up (or is down)."""
    check_name(name)
    folder = paths.instance_dir(name)
    try:
        stored = json.loads((folder / "instance.json").read_text())
    except FileNotFoundError:
        return None
    return Instance(
        name=stored["name"],
        host_count=stored["host_count"],
        subnet=ipaddress.IPv4Network(stored["subnet"]),
        topology=stored["topology"],
        root_key=stored["root_key"],
        folder=folder,
        moved=stored.get("moved", {}),
    )


def require(name: str) -> Instance:
    """The lab of that name; raises UnknownHost when there is none."""
    found = load(name)
    if found is None:
        raise UnknownHost(f"lab {name} is not up: python -m lab up" + ("" if name == "dev" else f" --instance {name}"))
    return found


def choose_subnet(name: str, wanted: str | None) -> ipaddress.IPv4Network:
    """The management network of a new lab: the wanted one, or a free one derived from the name."""
    taken = _taken_networks()
    if wanted is not None:
        try:
            network = ipaddress.IPv4Network(wanted)
        except ValueError as error:
            raise LabError(f"--subnet {wanted}: {error}") from error
        if network.prefixlen != 24 or not network.is_private:
            raise LabError(f"--subnet {wanted}: a private /24 is needed, such as 10.99.7.0/24")
        clash = [other for other in taken if other.overlaps(network)]
        if clash:
            raise LabError(f"--subnet {wanted}: this machine already uses {clash[0]}")
        return network
    first = 0 if name == DEFAULT_INSTANCE else 1 + int(hashlib.sha256(name.encode()).hexdigest(), 16) % 254
    for step in range(255):
        network = ipaddress.IPv4Network(f"10.99.{(first + step) % 255}.0/24")
        # 10.99.0.0/24 stays free for the default lab, whose address is written in its stack file.
        reserved = str(network) == DEFAULT_SUBNET and name != DEFAULT_INSTANCE
        if not reserved and not any(other.overlaps(network) for other in taken):
            return network
    raise StepFailed("no free network under 10.99.0.0/16: give one with --subnet")


def _taken_networks() -> list[ipaddress.IPv4Network]:
    """Networks that this machine has routes to, and those of labs that are only switched off."""
    networks = []
    for route in json.loads(run(["ip", "-j", "-4", "route", "show", "table", "all"], what="read routes") or "[]"):
        destination = str(route.get("dst", ""))
        if re.fullmatch(r"[0-9.]+(/\d+)?", destination):
            networks.append(ipaddress.IPv4Network(destination, strict=False))
    for file in paths.home_dir().glob("*/instance.json"):
        networks.append(ipaddress.IPv4Network(json.loads(file.read_text())["subnet"]))
    return networks
