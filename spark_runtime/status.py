"""The status file of a rank: what `status` and `health` print, what the program and people read.

Always a whole JSON document: written beside and renamed. ``updated`` moves every second or two while the
supervisor lives, so a reader can tell a stuck supervisor from a quiet one.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import time
from pathlib import Path

from spark_runtime import __version__
from spark_runtime.healing import Attempts, Crash, kind_of
from spark_runtime.health import read_json

SCHEMA = 1


def write_json(path: Path, document: object, durable: bool = False) -> None:
    """Replace a file by a JSON document in one step; raises OSError."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
        if durable:
            file.flush()
            os.fsync(file.fileno())
    beside.replace(path)


def last_generation_number(state_dir: Path) -> int:
    """The number of the last generation; 0 at first. The log folders stand in for a lost counter."""
    numbers = [0]
    stored = (read_json(state_dir / "generation.json") or {}).get("n")
    if isinstance(stored, int):
        numbers.append(stored)
    with contextlib.suppress(OSError):
        numbers += [int(entry.name) for entry in (state_dir / "logs").iterdir() if entry.name.isdigit()]
    return max(numbers)


def keep_generation_number(state_dir: Path, n: int) -> None:
    """Make the number of a generation that begins durable."""
    with contextlib.suppress(OSError):  # a full disk must not keep the model from serving
        write_json(state_dir / "generation.json", {"n": n}, durable=True)


def read_attempts(state_dir: Path, now: float) -> Attempts:
    """The failures before serving that an earlier life of this head has left. ``now`` is the monotonic clock."""
    document = read_json(state_dir / "attempts.json") or {}
    crashes = []
    listed = document.get("crashes")
    for entry in listed if isinstance(listed, list) else []:
        with contextlib.suppress(TypeError, KeyError, ValueError):
            at, line = float(entry["at"]), str(entry["line"])
            age = max(0.0, time.time() - at)
            crashes.append(Crash(now - age, kind_of(line), line, entry["outside"] is True))
    return Attempts(crashes, document.get("unfinished") is True)


def keep_attempts(state_dir: Path, attempts: Attempts, now: float) -> None:
    """Keep them for the next life; times as wall clock."""
    crashes = [
        {"at": time.time() - (now - crash.at), "line": crash.line, "outside": crash.outside}
        for crash in attempts.crashes
    ]
    with contextlib.suppress(OSError):
        write_json(state_dir / "attempts.json", {"crashes": crashes, "unfinished": attempts.unfinished}, durable=True)


def read_versions() -> dict[str, str | None]:
    """Versions of what this rank runs, from package metadata alone (nothing heavy is imported)."""
    versions: dict[str, str | None] = {"runtime": __version__, "python": platform.python_version()}
    for name in ("vllm", "ray", "torch"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions
