"""Memory of a node; on a Spark it is the memory of the GPU too."""

from __future__ import annotations

import re
from dataclasses import dataclass

from spark_core.facts.answer import Answer, Unread


@dataclass(frozen=True)
class Memory:
    """Memory in bytes; None where the kernel does not say.

    Args:
        total_bytes: MemTotal.
        available_bytes: MemAvailable: what can be had without swapping; page cache counts as available.
        free_bytes: MemFree: what nobody uses, not even as page cache.
        swap_total_bytes: SwapTotal.
        swap_free_bytes: SwapFree.
        cma_total_bytes: CmaTotal, the area for contiguous allocations.
        cma_free_bytes: CmaFree.
    """

    total_bytes: int
    available_bytes: int
    free_bytes: int | None = None
    swap_total_bytes: int | None = None
    swap_free_bytes: int | None = None
    cma_total_bytes: int | None = None
    cma_free_bytes: int | None = None


def parse_memory(answer: Answer) -> Memory | Unread:
    """Memory from /proc/meminfo."""
    values: dict[str, int] = {}
    for line in answer.lines:
        found = re.fullmatch(r"(\w+):\s*(\d{1,15}) kB", line, re.ASCII)
        if found:
            values[found.group(1)] = int(found.group(2)) * 1024
    total, available = values.get("MemTotal", 0), values.get("MemAvailable")
    if available is None or not 0 <= available <= total or not total:
        return answer.unread("the memory", "/proc/meminfo")
    return Memory(
        total,
        available,
        values.get("MemFree"),
        values.get("SwapTotal"),
        values.get("SwapFree"),
        values.get("CmaTotal"),
        values.get("CmaFree"),
    )
