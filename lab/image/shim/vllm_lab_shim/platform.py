"""The platform class, made on first access.

vLLM resolves a platform by importing this module and asking it for an attribute. Importing vLLM's CPU
platform at the top would run in the middle of the import of `vllm.platforms`.
"""

from __future__ import annotations

from typing import Any


def _make_platform() -> type:
    from vllm.platforms.cpu import CpuPlatform  # type: ignore[import-not-found]

    class RayCpuPlatform(CpuPlatform):  # type: ignore[misc]
        """CPU platform that asks Ray for GPUs: every lab node declares one."""

        ray_device_key: str = "GPU"

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            """Name of the communicator that keeps off shared memory between nodes."""
            return "vllm_lab_shim.communicator.NodeAwareCommunicator"

    RayCpuPlatform.__module__ = __name__
    RayCpuPlatform.__qualname__ = "RayCpuPlatform"
    return RayCpuPlatform


def __getattr__(name: str) -> Any:
    if name != "RayCpuPlatform":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = _make_platform()
    globals()[name] = made
    return made
