"""A host that is not what it was: reinstalled, or at another address."""

from __future__ import annotations

import dataclasses
import json

from lab import access, disk, network
from lab.errors import StepFailed
from lab.host import Host
from lab.instance import FIRST_HOST_NUMBER, Instance, write_whole

LAST_HOST_NUMBER = 254


def reimage(lab: Instance, name: str, *, keep_known_hosts: bool) -> None:
    """Reinstall a host: an empty disk, another host key, an empty Docker; name and address stay.

    Args:
        keep_known_hosts: Leave the lab's known_hosts as it is, with the old key, as a reinstalled machine finds it at
            its owner's; the next ``lab up`` writes the new key.
    """
    host = Host(lab, name)
    known = lab.folder / "known_hosts"
    before = known.read_text()
    host.cut_power()
    disk.wipe(lab, name)
    disk.prepare(lab, name, access.public_key(lab), access.host_key(lab, name))
    access.write_ssh_files(lab)
    network.ensure_base(lab)
    host.switch_on()
    host.wait_ready()
    if keep_known_hosts:
        write_whole(known, before)


def readdress(lab: Instance, name: str) -> Instance:
    """Give a host the lowest management address that no host of the lab has; returns the lab as it is then.

    Its host key stays, and ssh_config and known_hosts follow; what anybody else wrote down does not. Done a second
    time, the host gets its first address back.
    """
    host = Host(lab, name)
    if not host.is_on():
        raise StepFailed(f"{name} is off: python -m lab power-on {name}")
    used = {lab.number(other) for other in lab.hosts}
    number = next(n for n in range(FIRST_HOST_NUMBER, LAST_HOST_NUMBER + 1) if n not in used)
    lab = dataclasses.replace(lab, moved={**lab.moved, name: number})
    host = Host(lab, name)
    lab.save()
    access.write_ssh_files(lab)
    host.change(
        'umask 077; cat > "$1"; netplan apply',
        f"/{disk.MANAGEMENT_NETPLAN_FILE}",
        what="another management address",
        stdin=disk.management_netplan(lab, name),
    )
    host.wait_ready()
    shown = json.loads(host.inside(["ip", "-j", "address", "show", "eth0"]).stdout)
    addresses = [entry["local"] for entry in shown[0]["addr_info"] if entry["family"] == "inet"]
    if addresses != [lab.address(name)]:
        raise StepFailed(f"{name}: eth0 has {', '.join(addresses) or 'no address'}, not {lab.address(name)}")
    return lab
