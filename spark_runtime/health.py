"""The container's health check: one look at the status file that the supervisor writes.

Docker runs it every half minute for as long as a group serves. It imports next to nothing, since nothing keeps what
Python compiles out of the supervisor's file.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

STALE_AFTER_S = 60.0
"""Older than this, the writer of a status file is stuck or dead. Generous: a loading node can be starved."""
DEFAULT_STATE_DIR = Path("/var/lib/spark-vllm")
_BAD_PHASES = ("failed", "stopped")


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file; None if there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def is_healthy(document: dict[str, Any] | None, now: float) -> tuple[bool, str]:
    """The verdict of the container's health check, and its one line."""
    if document is None:
        return False, "no status has been written yet"
    phase, detail = document.get("phase"), document.get("detail") or document.get("progress") or ""
    age = now - float(document.get("updated") or 0)
    if phase in _BAD_PHASES:
        return False, f"{phase}: {detail}"
    if age > STALE_AFTER_S:
        return False, f"{phase}, but the supervisor has not written its status for {age:.0f} s"
    return True, f"{phase}: {detail}".rstrip(": ")


def tell(state_dir: Path = DEFAULT_STATE_DIR) -> int:
    """Print the verdict; the return value is the exit code, 0 when serving or on the way to it."""
    healthy, text = is_healthy(read_json(state_dir / "status.json"), time.time())
    print(text)
    return 0 if healthy else 1
