"""Which changes end serving, and for how long that lasted before."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from automation.events import GROUP, Change

_LINK = "pulumi-python:dynamic/spark:FabricLink"
_HOST = "pulumi-python:dynamic/spark:NodeHost"
_JOURNAL = "pulumi-python:dynamic/spark:NodeJournal"
_VOLUME = "docker:index/volume:Volume"
_PROVIDER = "pulumi:providers:docker"
_RESTARTING = ("create", "replace", "create-replacement", "delete-replaced")


def disrupting(changes: Iterable[Change], *, fresh: bool) -> list[Change]:
    """The changes with which serving ends, or may end.

    Args:
        fresh: Whether nothing of the stack is there yet, so that nothing serves.
    """
    return [] if fresh else [change for change in changes if _ends_serving(change)]


def _ends_serving(change: Change) -> bool:
    if change.restarts:
        return True
    if change.kind == _VOLUME and GROUP not in change.urn:
        return False  # of what watches the group
    if change.kind in (_JOURNAL, _VOLUME, _PROVIDER, _HOST):
        # A replaced one takes the containers of its node with it; Docker's cgroup driver restarts the daemon.
        return change.action in ("replace", "delete") or (
            change.kind == _HOST and any(name.startswith("tuning") for name in change.properties)
        )
    return change.kind == _LINK and change.action != "create"


def expected_downtime_s(updates: Sequence[Mapping[str, Any]]) -> float | None:
    """How long serving will be away at most: as long as the last update took that started containers anew.

    Args:
        updates: The history, newest first.
    """
    for update in updates:
        counts = update.get("resourceChanges") or {}
        replaced = any(counts.get(name) for name in _RESTARTING)
        if (
            update.get("kind") == "update"
            and update.get("result") == "succeeded"
            and replaced
            and update.get("endTime")
        ):
            return (_time(update["endTime"]) - _time(update["startTime"])).total_seconds()
    return None


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))
