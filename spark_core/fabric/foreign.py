"""Whether somebody else's files configure an interface at boot: netplan's, NetworkManager's, networkd's."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from spark_core.fabric.facts import NetworkFacts
from spark_core.settings import FabricSettings

_DHCP = re.compile(r"\bdhcp4:\s*(true|yes|on)\b|^DHCP=(true|yes|on|ipv4)\b", re.IGNORECASE | re.MULTILINE)
_NETWORKD = "/etc/systemd/network/"
_DRIVER = "mlx5_core"
"""Of a ConnectX-7, by which files may match its interfaces."""


@dataclass(frozen=True)
class Foreign:
    """Something of somebody else's that configures an interface which is to be managed."""

    path: str
    what: str
    do: str


def words_of(text: str) -> set[str]:
    """The words of a file of netplan or networkd without its comments; enough to tell whether it names an interface."""
    plain = re.sub(r"(^|\s)#.*", "", text)
    plain = re.sub(r"(?m)^---.*$", "", plain)
    return {word.rstrip(":").strip("\"'") for word in re.split(r"[\s\[\]{},=]+", plain)} - {""}


def speaks_of(text: str, netdev: str, mac: str = "", driver: str = "") -> bool:
    """Whether a file names an interface: by its name, hardware address or driver, or by a pattern of name or driver."""
    words = words_of(text)
    # A set of letters in a pattern is split above like a list of YAML.
    sets = re.findall(r"[^\s'\"{},=]*\[[^\]\s,]+\][^\s'\"{},=]*", re.sub(r"(^|\s)#.*", "", text))
    patterns = {word for word in words if re.search(r"[*?]", word)} | set(sets)
    names = {netdev, mac, driver} - {""}
    return bool(names & {*words, *(word.lower() for word in words)}) or any(
        fnmatch.fnmatchcase(name, pattern) for pattern in patterns for name in (netdev, driver) if name
    )


def effective(network: NetworkFacts) -> dict[str, str | None]:
    """The files that count: netplan takes a file in /run instead of one of the same name in /etc."""
    order = ("/usr/lib/netplan/", "/etc/netplan/", "/run/netplan/")
    found: dict[str, tuple[str, str | None]] = {}
    for folder in order:
        found |= {PurePosixPath(p).name: (p, text) for p, text in network.netplan.items() if p.startswith(folder)}
    return dict(found.values())


def foreign_configuration(fabric: FabricSettings, netdevs: Sequence[str], network: NetworkFacts) -> Iterator[Foreign]:
    """Files of others that configure one of these interfaces, as far as they can be read."""
    ours = PurePosixPath(fabric.netplan_file).name
    named = {PurePosixPath(path).name for path in fabric.take_over}
    others = [name for name in network.links if name not in netdevs and name != "lo"]
    for path, text in sorted(network.netplan.items()):
        spoken = [n for n in netdevs if text and path.startswith(_NETWORKD) and _speaks_of(text, n, network)]
        if spoken:
            yield Foreign(
                path,
                f"expected no other file that configures {spoken[0]}, found {path}",
                "take the interface out of that file (networkd takes the first one that matches, and netplan's may "
                "come after it), or set fabric.manage to false to use it as it is",
            )
    for path, text in sorted(effective(network).items()):
        name = PurePosixPath(path).name
        spoken = [n for n in netdevs if text and _speaks_of(text, n, network)]
        if name == ours or not spoken or text is None:
            continue
        rest = [other for other in others if _speaks_of(text, other, network)]
        if name not in named:
            yield Foreign(
                path,
                f"expected no other file that configures {spoken[0]}, found {path}",
                f"add {path} to fabric.take_over (destroy puts it back as it was), or set fabric.manage to false to "
                "use it as it is",
            )
        elif rest:
            yield Foreign(
                path,
                f"expected that {path} configures nothing but the fabric, found {', '.join(rest)} in it",
                "move what is not the fabric's into a file of its own; it would be lost with the rest",
            )
    for path, netdev in sorted(network.profiles.items()):
        # A profile in /run is one that NetworkManager or netplan made by itself.
        if netdev in netdevs and path.startswith("/etc/NetworkManager/"):
            yield Foreign(
                path,
                f"expected no NetworkManager profile of {netdev}, found {path}",
                "delete that profile with nmcli, or set fabric.manage to false to use it as it is",
            )


def persistent(netdev: str, address: str, network: NetworkFacts) -> bool:
    """Whether an address comes back after a boot, as far as can be told: a closed file may always say so."""
    if "netplan" in network.unread or netdev in network.profiles.values():
        return True
    if None in network.netplan.values():
        return True
    networkd = [text for path, text in network.netplan.items() if path.startswith(_NETWORKD)]
    files = [*effective(network).values(), *networkd]
    speaking = [text for text in files if text and _speaks_of(text, netdev, network)]
    return any(address in words_of(text) or _DHCP.search(text) for text in speaking)


def _speaks_of(text: str, netdev: str, network: NetworkFacts) -> bool:
    link = network.links.get(netdev)
    if link is None:
        return speaks_of(text, netdev)
    return speaks_of(text, netdev, link.mac, _DRIVER if link.hca else "")
