"""Runs on a node, sent there as text: where a model of known files already lies on it. Reads no content.

Standard library only. It tells what our folder lacks, how much space there is, and whether a hub cache has the revision
whole, judged by names, sizes and what is remembered of hashes.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

from spark_core.transfer.node_folder import Hashes, beside, holder, sizes

CONFIG_BYTES = 1 << 20


def own(folder: Path, files: dict[str, list[Any]], hashes: Hashes) -> tuple[bool, int]:
    """Whether our folder is there, and how many bytes are still to arrive in it."""
    there = folder.is_dir()
    arrived = sizes(beside(folder, "incoming")) if not there else {}
    staged = sizes(beside(folder, "partial")) if not there else {}
    missing = 0
    for name, (size, digest) in files.items():
        if there:
            missing += 0 if fault_of(folder / name, size, digest, hashes) == "" else size
        elif staged.get(name) != size:
            missing += max(0, size - arrived.get(name, 0))
    return there, missing


def snapshot(cache: str, repository: str, commit: str, files: dict[str, list[Any]], hashes: Hashes) -> dict[str, Any]:
    """What a hub cache has of a revision; its files as they lie behind its links."""
    root = Path(cache).expanduser() / f"models--{repository.replace('/', '--')}" / "snapshots" / commit
    try:
        if not root.is_dir():
            return {"folder": str(root), "fault": "absent", "file": "", "paths": {}}
        paths = {}
        for name, (size, digest) in sorted(files.items()):
            found = fault_of(root / name, size, digest, hashes)
            if found:
                return {"folder": str(root), "fault": found, "file": name, "paths": {}}
            paths[name] = str((root / name).resolve())
    except PermissionError as error:
        return {"folder": str(root), "fault": "unreadable", "file": str(error.filename or root), "paths": {}}
    return {"folder": str(root), "fault": "", "file": "", "paths": paths}


def fault_of(path: Path, size: int, digest: str, hashes: Hashes) -> str:
    """What is wrong with a file, as far as its content need not be read for that."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return "missing"
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        return "altered"
    if not os.access(path, os.R_OK):
        return "unreadable"
    known = hashes.recall(path)
    return "altered" if known is not None and len(digest) == len(known) and known != digest else ""


def look(orders: dict[str, Any]) -> dict[str, Any]:
    """Where the model lies on this node."""
    folder, files, hashes = Path(orders["folder"]), orders["files"], Hashes(orders["hashes"])
    there, missing = own(folder, files, hashes)
    disk = os.statvfs(next(place for place in (folder, *folder.parents) if place.is_dir()))
    found: dict[str, Any] = {"there": there, "missing": missing, "free": disk.f_bavail * disk.f_frsize}
    found["held"] = holder(folder)
    found["cache"] = None
    if orders["cache"]:
        found["cache"] = snapshot(orders["cache"], orders["repository"], orders["commit"], files, hashes)
    in_cache = found["cache"] is not None and not found["cache"]["fault"] and not there
    config = Path(found["cache"]["folder"] if in_cache else folder) / "config.json"
    try:
        with config.open(encoding="utf-8", errors="replace") as file:
            found["config"] = file.read(CONFIG_BYTES)
    except OSError:
        found["config"] = ""
    return found


def main() -> None:
    """Answer the orders."""
    try:
        print(json.dumps(look(json.loads(sys.stdin.buffer.readline()))))
    except OSError as error:
        sys.exit(f"{error.filename or 'the folder'}: {error.strerror}")
