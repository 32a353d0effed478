"""Nodes of the proofs' tests: folders of this machine, with a kernel's RDMA devices as files."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from tests.local_node import LocalNode

RECORDED = Path(__file__).parents[2] / "fixtures" / "spark"


def rdma_node(base: Path, name: str, devices: Mapping[str, tuple[int, str]]) -> LocalNode:
    """A node whose RDMA devices have the RoCE v2 entry of their address at an index of their own."""
    sandbox = base / name
    for device, (index, address) in devices.items():
        write_gid(sandbox, device, 1, None)
        write_gid(sandbox, device, index - 1, address, kind="IB/RoCE v1")
        write_gid(sandbox, device, index, address)
    return LocalNode(name, programs=sandbox / "programs", sandbox=sandbox)


def write_gid(sandbox: Path, device: str, index: int, address: str | None, kind: str = "RoCE v2") -> None:
    """One entry of a device's table; without an address a link-local one."""
    port = sandbox / "sys/class/infiniband" / device / "ports/1"
    for folder in ("gids", "gid_attrs/types"):
        (port / folder).mkdir(parents=True, exist_ok=True)
    text = "fe80:0000:0000:0000:0000:5eff:fe76:e98b"
    if address is not None:
        a, b, c, d = (int(part) for part in address.split("."))
        text = f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"
    (port / "gids" / str(index)).write_text(text + "\n")
    (port / "gid_attrs/types" / str(index)).write_text(kind + "\n")


def free_ports(address: str, count: int) -> list[int]:
    """Ports that nobody listens at on an address of this machine."""
    held = [socket.create_server((address, 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports
