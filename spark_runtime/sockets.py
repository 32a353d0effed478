"""The TCP sockets of this container's processes: what listens on which address, and who waits for an answer.

The container shares the host's network, so the tables of /proc/net hold everybody's sockets; ours are those that a
process of this PID namespace has open.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")
STATES = {"01": "established", "02": "connecting", "03": "accepting", "0A": "listening"}


@dataclass(frozen=True)
class Socket:
    """One TCP socket; ``peer`` is empty for a listener."""

    state: str
    address: str
    port: int
    peer: str
    process: str

    def as_json(self) -> dict[str, Any]:
        """The form that is printed."""
        return dict(self.__dict__)


def own_sockets(proc: Path = PROC) -> list[Socket]:
    """Sockets of the processes that are to be seen here, by address."""
    owners = _owners(proc)
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            text = (proc / "net" / table).read_text()
            found += [
                Socket(state, *address, f"{peer[0]}:{peer[1]}" if peer[1] else "", owners[inode])
                for state, address, peer, inode in parse_table(text)
                if inode in owners
            ]
    return sorted(found, key=lambda each: (each.state, each.address, each.port))


def parse_table(text: str) -> Iterator[tuple[str, tuple[str, int], tuple[str, int], str]]:
    """(state, address, peer, inode) of each row of /proc/net/tcp or tcp6; other states are left out."""
    for row in text.splitlines()[1:]:
        words = row.split()
        if len(words) > 9 and words[3] in STATES:
            yield STATES[words[3]], _address(words[1]), _address(words[2]), words[9]


def off_fabric(sockets: list[Socket], fabric: set[str]) -> list[Socket]:
    """Sockets on an address that is neither the fabric's nor loopback; a listener on all interfaces is one."""
    return [each for each in sockets if each.address not in fabric and not _is_loopback(each.address)]


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _owners(proc: Path) -> dict[str, str]:
    owners: dict[str, str] = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            name = (entry / "comm").read_text().strip()
            for handle in (entry / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(handle.readlink())
                    if target.startswith("socket:["):
                        owners.setdefault(target[8:-1], f"{name} ({entry.name})")
    return owners


def _address(text: str) -> tuple[str, int]:
    # The kernel prints an address as words in the machine's own byte order; both architectures here are little endian.
    raw, _, port = text.partition(":")
    words = struct.pack(f"<{len(raw) // 8}I", *(int(raw[at : at + 8], 16) for at in range(0, len(raw), 8)))
    family = socket.AF_INET if len(words) == 4 else socket.AF_INET6
    shown = socket.inet_ntop(family, words)
    return shown.removeprefix("::ffff:"), int(port, 16)
