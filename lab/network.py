"""The lab's networks: a management bridge on this machine, and a fabric that this machine is not on.

Every host has a network namespace. Its `eth0` is on the management bridge. Its fabric interfaces end in one
more namespace that holds nothing but cables: there each link has a partner in a bridge per cable (or per
switch). Setting the partner down takes the carrier away at the host while its interface stays
administratively up, which is what a pulled cable looks like. Names start with the lab's tag, so leftovers
are found by name.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

from lab import cable
from lab.command import run, succeeds
from lab.errors import StepFailed
from lab.instance import Instance
from lab.lock import locked

JUMBO_MTU = 9216
"""MTU inside the cables: above any that a host may set, as on a real cable."""


def prefix(tag: str) -> str:
    """How names of a lab's namespaces begin."""
    return f"sparklab-{tag}-"


def namespace(instance: Instance, host: str) -> str:
    """Name of a host's network namespace."""
    return f"{prefix(instance.tag)}{host}"


def cables_namespace(instance: Instance) -> str:
    """Name of the namespace that holds the cables."""
    return f"{prefix(instance.tag)}cables"


def bridge(tag: str) -> str:
    """Name of the management bridge."""
    return f"sl{tag}br"


def _management_port(instance: Instance, index: int) -> str:
    return f"sl{instance.tag}m{index}"


def _cable_port(index: int, port: int, half: int) -> str:
    return f"h{index}p{port}f{half}"


def _cable_bridge(segment: int, half: int) -> str:
    return f"cable{segment}f{half}"


def _ip(*argv: str, what: str) -> str:
    return run(["ip", *argv], what=what)


def _batch(lines: list[str], *, what: str, within: str | None = None) -> None:
    argv = ["ip", *(["-n", within] if within else []), "-batch", "-"]
    run(argv, what=what, stdin="\n".join(lines) + "\n")


def namespaces(tag: str) -> list[str]:
    """Names of all namespaces of a lab."""
    try:
        names = [entry.name for entry in Path("/run/netns").iterdir()]
    except FileNotFoundError:
        return []
    return sorted(name for name in names if name.startswith(prefix(tag)))


def machine_links(tag: str) -> list[str]:
    """Names of all interfaces of a lab on this machine itself."""
    return sorted(entry.name for entry in Path("/sys/class/net").iterdir() if entry.name.startswith(f"sl{tag}"))


def ensure_base(instance: Instance) -> None:
    """Make the management bridge and the cables' namespace, where they are missing."""
    name = bridge(instance.tag)
    if not Path("/sys/class/net", name).exists():
        _ip("link", "add", name, "type", "bridge", what="management bridge")
    _batch(
        [
            f"address replace {instance.machine_address}/{instance.subnet.prefixlen} dev {name}",
            f"link set {name} addrgenmode none",
            f"link set {name} up",
        ],
        what="management bridge",
    )
    cables = cables_namespace(instance)
    if cables not in namespaces(instance.tag):
        _ip("netns", "add", cables, what="cables")
    present = {link["ifname"] for link in json.loads(_ip("-n", cables, "-j", "link", what="cables"))}
    lines = []
    for segment in cable.segments(instance):
        for half in (0, 1):
            name = _cable_bridge(segment.number, half)
            if name in present:
                continue
            lines.append(f"link add {name} type bridge mcast_snooping 0")
            lines.append(f"link set {name} mtu {JUMBO_MTU} addrgenmode none up")
    if lines:
        _batch(lines, what="cables", within=cables)


def connect(instance: Instance, host: str) -> None:
    """Make a host's network namespace and interfaces anew, as a machine finds them when it is switched on."""
    disconnect(instance, host)
    index = instance.index(host)
    mine = namespace(instance, host)
    cables = cables_namespace(instance)
    _ip("netns", "add", mine, what=f"{host}: network namespace")
    port = _management_port(instance, index)
    eth0_mac = cable.mac_address(instance, index, "eth0")
    lines = [
        f"link add {port} type veth peer name eth0 address {eth0_mac} netns {mine}",
        f"link set {port} master {bridge(instance.tag)} addrgenmode none up",
    ]
    _batch(lines, what=f"{host}: management link")
    inside, outside = [], []
    for (number, half), interface in cable.INTERFACES.items():
        mac = cable.mac_address(instance, index, interface)
        partner = _cable_port(index, number, half)
        inside.append(f"link add {interface} address {mac} type veth peer name {partner} netns {cables}")
        outside.append(f"link set {partner} mtu {JUMBO_MTU} addrgenmode none")
        segment = cable.segment_of(instance, index, number)
        if segment is not None:
            outside.append(f"link set {partner} master {_cable_bridge(segment.number, half)}")
        # No IPv6 link-local address either: what the fabric has is what the host's configuration gives it.
        inside.append(f"link set {interface} addrgenmode none up")
    inside.append("link set lo up")
    _batch(inside, what=f"{host}: fabric links", within=mine)
    _batch(outside, what=f"{host}: fabric links", within=cables)


def disconnect(instance: Instance, host: str) -> None:
    """Remove a host's network namespace with all its links, where there is one."""
    _remove_namespace(namespace(instance, host))
    port = _management_port(instance, instance.index(host))
    if Path("/sys/class/net", port).exists():
        succeeds(["ip", "link", "delete", port])


def _remove_namespace(name: str) -> None:
    if not Path("/run/netns", name).exists():
        return
    # Its processes are gone, but the kernel takes a moment to take the interfaces apart; deleting them here
    # makes their names free at once for the next start.
    listed = subprocess.run(["ip", "-n", name, "-j", "link"], capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        for link in json.loads(listed.stdout or "[]"):
            if link.get("link_type") != "loopback":
                succeeds(["ip", "-n", name, "link", "delete", link["ifname"]])
    if not succeeds(["ip", "netns", "delete", name]):
        time.sleep(0.2)
        if Path("/run/netns", name).exists():
            run(["ip", "netns", "delete", name], what=f"remove namespace {name}")


def remove_all(tag: str) -> None:
    """Remove every namespace and interface of a lab, found by name."""
    for name in namespaces(tag):
        _remove_namespace(name)
    for link in machine_links(tag):
        succeeds(["ip", "link", "delete", link])
    left = [*namespaces(tag), *machine_links(tag)]
    if left:
        raise StepFailed(f"could not remove {', '.join(left)}")


def apply_cables(instance: Instance) -> None:
    """Give every fabric link the carrier that its cable and the power of its ends allow."""
    with locked(instance.folder / "cables.lock", what="cables", timeout_s=30):
        present = namespaces(instance.tag)
        powered = {index for index, host in enumerate(instance.hosts) if namespace(instance, host) in present}
        lines = [
            f"link set {_cable_port(index, port, half)} {'up' if up else 'down'}"
            for (index, port, half), up in cable.links_up(instance, powered).items()
        ]
        if lines:
            # A host that is switched on or off at this moment lacks some of its links: it calls here again
            # itself.
            subprocess.run(
                ["ip", "-n", cables_namespace(instance), "-force", "-batch", "-"],
                input="\n".join(lines) + "\n",
                text=True,
                capture_output=True,
                check=False,
            )
