"""Sizes of files that another program writes, renames and removes meanwhile."""

from __future__ import annotations

import contextlib
from pathlib import Path


def bytes_below(folder: Path, pattern: str = "*") -> int:
    """How much the files below a folder hold; one that went between the listing and the look counts as nothing."""
    total = 0
    paths: list[Path] = []
    with contextlib.suppress(FileNotFoundError):
        paths = list(folder.rglob(pattern))
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total
