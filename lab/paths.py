"""Where the lab keeps things: a cache that every lab shares, and one folder per running lab."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Things that are built once and can be thrown away: Debian roots, the vLLM environment, the image."""
    chosen = os.environ.get("SPARK_VLLM_CACHE")
    if chosen:
        return Path(chosen).absolute() / "lab"
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(xdg) if xdg else Path.home() / ".cache"
    return base / "spark-vllm" / "lab"


def home_dir() -> Path:
    """The folder that holds one folder per lab instance."""
    chosen = os.environ.get("SPARK_VLLM_HOME")
    if chosen:
        return Path(chosen).absolute() / "lab"
    xdg = os.environ.get("XDG_DATA_HOME")
    base = Path(xdg) if xdg else Path.home() / ".local" / "share"
    return base / "spark-vllm" / "lab"


def instance_dir(instance: str) -> Path:
    """The folder of one lab instance: keys, ssh_config, passwords and the disks of its hosts."""
    return home_dir() / instance


def package_dir() -> Path:
    """The folder of this package, where recorded outputs and the shim lie as data."""
    return Path(__file__).resolve().parent
