"""Settings as they are kept with the state: what was said, without secrets and without how nodes are reached from here.

How a controller reaches the nodes is no part of it, nor what only one run is to do: laptop and CI runner may differ in
both. Defaults are left out, so that a release that adds a setting changes no record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from spark_core.settings.root import Settings

NOT_RECORDED = frozenset({"ssh", "preflight", "abandoned_nodes", "severities", "policy_file", "replaces"})
"""Settings of this controller, or of this run."""

_LEFT_OUT: dict[str, Any] = {**dict.fromkeys(NOT_RECORDED, True), "groups": {"__all__": {"recipe": True}}}
# What a recipe gave is recorded, not its name: a recipe may say other things tomorrow.


def record_of(settings: Settings) -> dict[str, Any]:
    """The settings in a form from which they can be read again."""
    found: dict[str, Any] = settings.model_dump(mode="json", exclude_defaults=True, exclude=_LEFT_OUT)
    return found


def record_text(record: Mapping[str, Any]) -> str:
    """A record as text; equal records have equal texts."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"))


def digest_of(record: Mapping[str, Any]) -> str:
    """Twelve hex digits by which settings are named in histories and reports."""
    return hashlib.sha256(record_text(record).encode()).hexdigest()[:12]


def differing_keys(one: Mapping[str, Any], other: Mapping[str, Any], path: str = "") -> list[str]:
    """Paths of what differs between two records, such as ``groups.main.serving.max_model_len``."""
    found: list[str] = []
    for key in sorted({*one, *other}):
        here = f"{path}.{key}" if path else str(key)
        left, right = one.get(key), other.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found += differing_keys(left, right, here)
        elif left != right:
            found.append(here)
    return found
