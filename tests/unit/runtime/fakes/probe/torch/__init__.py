"""Stands in for torch in a probe: tensors are one number; ``FAKE_TORCH`` says what goes wrong."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(os.environ["FAKE_FOLDER"])
RANK_MODE = os.environ.get("FAKE_TORCH", "")
__version__ = "2.fake"
float32 = "float32"
if RANK_MODE == "no-import":
    raise ImportError("libcudart.so.13: cannot open shared object file")


class Tensor:
    """All its values are the same one."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __mod__(self, other: float) -> Tensor:
        return self

    def __mul__(self, other: float) -> Tensor:
        return Tensor(self.value * other)

    def __add__(self, other: float) -> Tensor:
        return Tensor(self.value + other)

    def __ne__(self, other: object) -> Tensor:  # type: ignore[override]
        return Tensor(0 if isinstance(other, Tensor) and self.value == other.value else 7)

    def sum(self) -> float:
        return self.value


def arange(values: int, dtype: str, device: str) -> Tensor:
    return Tensor(1)


def zeros(values: int, dtype: str, device: str) -> Tensor:
    return Tensor(0)


def device(kind: str, index: int = 0) -> str:
    return kind


def set_num_threads(count: int) -> None:
    """One is enough."""


class cuda:
    """A machine without a GPU, unless the mode says otherwise; its NCCL logs what a file of the folder holds."""

    class nccl:
        @staticmethod
        def version() -> tuple[int, int, int]:
            return (2, 28, 9)

    @staticmethod
    def is_available() -> bool:
        return RANK_MODE == "gpu"

    @staticmethod
    def set_device(index: int) -> None:
        Path(os.environ["NCCL_DEBUG_FILE"]).write_text((FOLDER / "nccl.log").read_text())

    @staticmethod
    def get_device_name(index: int) -> str:
        return "NVIDIA GB10"

    @staticmethod
    def synchronize() -> None:
        """Nothing is under way."""
