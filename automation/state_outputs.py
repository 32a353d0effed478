"""Outputs of resources in an exported state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def outputs_of_type(resources: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The outputs of the one resource of a type of ours, such as ``WeightsCopy``; empty if there is none."""
    for resource in resources:
        if str(resource.get("type", "")).endswith(f"spark:{name}") and not resource.get("delete"):
            return resource.get("outputs") or {}
    return {}
