"""The RDMA devices of a rank, looked at when it starts: only those whose port is active are handed to NCCL.

A warm reboot can leave one half of a port without its link; a device that is down in ``NCCL_IB_HCA`` can stall the
start of collectives, and a list that matches nothing makes NCCL fall back to TCP without a word. So the list is
filtered at each start, from what the kernel says then, and nothing of it is stored.

``NCCL_IB_GID_INDEX`` is never set here: the index differs between nodes and drifts, and NCCL finds it by itself. An
empty value of it is taken away, since NCCL reads that as 0, the link-local entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SYSFS = Path("/sys/class/infiniband")


class NoActivePort(Exception):
    """RDMA is required and no device has an active port. The text is for the person."""


@dataclass(frozen=True)
class Hcas:
    """The RDMA devices of a rank.

    Attributes:
        used: Those that NCCL gets.
        dropped: Those that it does not get, with what the kernel says of their port.
    """

    used: tuple[str, ...] = ()
    dropped: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """One line for the log; empty if nothing was dropped."""
        if not self.dropped:
            return ""
        dropped = ", ".join(f"{name} ({state})" for name, state in self.dropped.items())
        return f"RDMA devices without an active port are left out: {dropped}; in use: {', '.join(self.used) or 'none'}"

    def as_json(self) -> dict[str, object]:
        """As it stands in the status."""
        return {"used": list(self.used), "dropped": dict(self.dropped)}


def port_state(device: str, sysfs: Path = SYSFS) -> str:
    """What the kernel says of a port, such as ACTIVE or DOWN; ``name:2`` asks for the second one."""
    name, _, port = device.partition(":")
    try:
        text = (sysfs / name / "ports" / (port or "1") / "state").read_text()
    except OSError:
        return "no such device"
    return text.rpartition(":")[2].strip() or "unknown"


def choose_hcas(environ: Mapping[str, str], rdma: str, sysfs: Path = SYSFS) -> tuple[dict[str, str], Hcas]:
    """The environment of a rank with the devices that can be used now.

    Only a list of exact names (``=a,b``, which is what the program sets) is filtered; any other form is the owner's.

    Args:
        rdma: ``required``, ``preferred`` or ``off``: whether a rank without any device may use TCP.

    Raises:
        NoActivePort: none is left and ``rdma`` is ``required``.
    """
    env = dict(environ)
    if not env.get("NCCL_IB_GID_INDEX", "x"):
        del env["NCCL_IB_GID_INDEX"]
    wanted = env.get("NCCL_IB_HCA", "")
    if not wanted.startswith("="):
        return env, Hcas()
    states = {name: port_state(name, sysfs) for name in wanted[1:].split(",") if name}
    used = tuple(name for name, state in states.items() if state == "ACTIVE")
    hcas = Hcas(used, {name: state for name, state in states.items() if name not in used})
    if used:
        env["NCCL_IB_HCA"] = "=" + ",".join(used)
        return env, hcas
    if rdma == "required":
        found = ", ".join(f"{name}: {state}" for name, state in states.items())
        raise NoActivePort(
            f"no RDMA device of this node has an active port ({found}) and rdma is required; check the cable, "
            "and if one half of a port is gone after a reboot, power-cycle the node"
        )
    # NCCL_NET=IB would now end the start; without devices TCP is all there is.
    for name in ("NCCL_IB_HCA", "NCCL_NET"):
        env.pop(name, None)
    env["NCCL_IB_DISABLE"] = "1"
    return env, hcas
