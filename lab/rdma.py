"""RDMA devices in a host's /sys/class, as an adapter with two ports would show them; there is none behind.

Device names, PCI addresses, rates, states, firmware and board are those of recordings of a DGX Spark; addresses in the
GID table and link states are taken from the emulated interfaces at the moment of the call. A test may edit the files
under ``/usr/share/spark-lab/class`` on the host afterwards.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping
from typing import Any

from lab.boot import CLASS_LAYER
from lab.cable import INTERFACES
from lab.host import Host

PCI = {(0, 0): "0000:01:00.0", (1, 0): "0000:01:00.1", (0, 1): "0002:01:00.0", (1, 1): "0002:01:00.1"}
"""PCI address by (port, half)."""

DEVICES = {(0, 0): "rocep1s0f0", (1, 0): "rocep1s0f1", (0, 1): "roceP2p1s0f0", (1, 1): "roceP2p1s0f1"}
"""RDMA device by (port, half)."""

GID_TABLE_LENGTH = 16

_PUT = """
import json, os, sys
top = sys.argv[1]
tree = json.load(sys.stdin)
for name, content in tree["files"].items():
    os.makedirs(os.path.dirname(f"{top}/{name}"), exist_ok=True)
    with open(f"{top}/{name}", "w") as file:
        file.write(content)
for name, target in tree["links"].items():
    os.makedirs(os.path.dirname(f"{top}/{name}"), exist_ok=True)
    os.symlink(target, f"{top}/{name}")
"""
_TAKE_OFF = """
if mountpoint -q /sys/class; then umount -l /sys/class; fi
rm -rf "$1"
"""
_PUT_ON = (
    _TAKE_OFF
    + """
mkdir -p "$1"
python3 -c "$2" "$1"
mount -t overlay overlay -o "ro,lowerdir=$1:/sys/class" /sys/class
"""
)


def show(host: Host) -> None:
    """Show RDMA devices for the host's fabric interfaces as these are now; also after a restart."""
    hide(host)
    links = json.loads(host.change("ip -j address show", what="read the interfaces"))
    entries = {
        netdev: host.change('ls "/sys/class/net/$1"', netdev, what="read the interfaces").split()
        for netdev in INTERFACES.values()
    }
    tree = class_tree({link["ifname"]: link for link in links}, entries)
    host.change(_PUT_ON, CLASS_LAYER, _PUT, what="RDMA devices", stdin=json.dumps(tree))


def hide(host: Host) -> None:
    """Show none again."""
    host.change(_TAKE_OFF, CLASS_LAYER, what="no RDMA devices")


def class_tree(links: Mapping[str, Mapping[str, Any]], entries: Mapping[str, list[str]]) -> dict[str, dict[str, str]]:
    """What lies over /sys/class: files with their contents, and links with their targets.

    Args:
        links: Rows of ``ip -j address show`` by interface.
        entries: What the kernel shows of each fabric interface; it is linked to, so that it stays live.
    """
    files: dict[str, str] = {}
    symlinks: dict[str, str] = {}
    system_guid = _guid(links[INTERFACES[0, 0]]["address"])
    for key, netdev in INTERFACES.items():
        device, pci = DEVICES[key], PCI[key]
        link = links[netdev]
        up = "LOWER_UP" in link["flags"]
        # /sys/class/net/NETDEV is a link in reality; as a folder it can have what a veth lacks.
        for entry in entries[netdev]:
            if entry in ("phys_port_name", "speed"):
                continue
            symlinks[f"net/{netdev}/{entry}"] = f"../../../devices/virtual/net/{netdev}/{entry}"
        files[f"net/{netdev}/speed"] = "200000\n" if up else "-1\n"
        files[f"net/{netdev}/phys_port_name"] = f"p{key[0]}\n"
        symlinks[f"net/{netdev}/device"] = f"../../spark-lab-pci/{pci}"
        symlinks[f"infiniband/{device}/device"] = f"../../spark-lab-pci/{pci}"
        symlinks[f"spark-lab-pci/{pci}/infiniband/{device}"] = f"../../../infiniband/{device}"
        symlinks[f"spark-lab-pci/{pci}/net/{netdev}"] = f"../../../net/{netdev}"
        files[f"spark-lab-pci/{pci}/vendor"] = "0x15b3\n"
        files[f"spark-lab-pci/{pci}/device"] = "0x1021\n"
        top = f"infiniband/{device}"
        files |= {
            f"{top}/fw_ver": "28.45.4028\n",
            f"{top}/hca_type": "MT4129\n",
            f"{top}/board_id": "NVD0000000087\n",
            f"{top}/node_type": "1: CA\n",
            f"{top}/node_guid": _guid(link["address"]) + "\n",
            f"{top}/sys_image_guid": system_guid + "\n",
            f"{top}/ports/1/state": "4: ACTIVE\n" if up else "1: DOWN\n",
            f"{top}/ports/1/phys_state": "5: LinkUp\n" if up else "3: Disabled\n",
            f"{top}/ports/1/rate": "200 Gb/sec (4X HDR)\n" if up else "40 Gb/sec (4X QDR)\n",
            f"{top}/ports/1/link_layer": "Ethernet\n",
        }
        gids = _gids(link)
        for index in range(GID_TABLE_LENGTH):
            kind, gid = gids[index] if index < len(gids) else (None, "0000:" * 7 + "0000")
            files[f"{top}/ports/1/gids/{index}"] = gid + "\n"
            # The kernel refuses to read type and netdev of an empty entry; here they are not there.
            if kind is not None:
                files[f"{top}/ports/1/gid_attrs/types/{index}"] = kind + "\n"
                files[f"{top}/ports/1/gid_attrs/ndevs/{index}"] = netdev + "\n"
    return {"files": files, "links": symlinks}


def _guid(mac: str) -> str:
    """Node GUID made from a hardware address."""
    octets = mac.replace(":", "")
    text = f"{octets[:6]}0000{octets[6:]}"
    return ":".join(text[start : start + 4] for start in range(0, 16, 4))


def _gids(link: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(type, GID) in the kernel's order: link-local first, then each IPv4 address, for RoCE v1 and v2."""
    octets = [int(part, 16) for part in link["address"].split(":")]
    interface_id = bytes([octets[0] ^ 2, *octets[1:3], 0xFF, 0xFE, *octets[3:]])
    found = [ipaddress.IPv6Address(b"\xfe\x80" + bytes(6) + interface_id)]
    found += [ipaddress.IPv6Address(f"::ffff:{row['local']}") for row in link["addr_info"] if row["family"] == "inet"]
    return [(kind, address.exploded) for address in found for kind in ("IB/RoCE v1", "RoCE v2")]
