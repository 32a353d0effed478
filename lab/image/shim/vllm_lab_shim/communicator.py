"""The communicator: shared memory only among ranks of one node, whatever the group is named.

vLLM's CPU communicator uses shared memory when all ranks name the same memory group. Over Ray that name is
the same on every node, so ranks of two nodes would look for one piece of memory: they would find it where
the nodes happen to share /dev/shm (and then not use the network at all), and fail where they do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def _network_namespace() -> int:
    """Identity of this process's network namespace; containers on one host's network share it."""
    return Path("/proc/self/ns/net").stat().st_ino


def _make_communicator() -> type:
    import torch  # type: ignore[import-not-found]
    import torch.distributed as dist  # type: ignore[import-not-found]
    from vllm.distributed.device_communicators.cpu_communicator import (  # type: ignore[import-not-found]
        CpuCommunicator,
    )

    class NodeAwareCommunicator(CpuCommunicator):  # type: ignore[misc]
        """CPU communicator that goes over Gloo as soon as one rank lives on another node."""

        def _all_group_ranks_share_shm_group_name(self) -> bool:
            mine = torch.tensor([_network_namespace()], dtype=torch.int64)
            seen = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group=self.device_group))]
            dist.all_gather(seen, mine, group=self.device_group)
            if len({int(identity.item()) for identity in seen}) != 1:
                return False
            return bool(super()._all_group_ranks_share_shm_group_name())

    NodeAwareCommunicator.__module__ = __name__
    NodeAwareCommunicator.__qualname__ = "NodeAwareCommunicator"
    return NodeAwareCommunicator


def __getattr__(name: str) -> Any:
    if name != "NodeAwareCommunicator":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = _make_communicator()
    globals()[name] = made
    return made
