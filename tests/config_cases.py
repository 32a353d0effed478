"""Case files of the settings: what is changed in the base, and which lines the person then reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "fixtures" / "config"
_PART = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def load_base() -> dict[str, Any]:
    """Settings of two Sparks that are valid as they are."""
    value: dict[str, Any] = yaml.safe_load((FOLDER / "base.yaml").read_text())
    return value


def load_case(path: Path) -> tuple[dict[str, Any], list[str]]:
    """(settings, violations) of a case file."""
    case = yaml.safe_load(path.read_text())
    return apply_change(load_base(), case.get("change", {}), case.get("remove", [])), case.get("violations", [])


def apply_change(raw: dict[str, Any], change: Mapping[str, Any], remove: Sequence[str] = ()) -> dict[str, Any]:
    """Set and remove values at paths such as ``nodes[0].fabric[1].address``."""
    for path in remove:
        owner, last = _owner(raw, path)
        del owner[last]
    for path, value in change.items():
        owner, last = _owner(raw, path)
        owner[last] = value
    return raw


def _owner(raw: dict[str, Any], path: str) -> tuple[Any, Any]:
    parts: list[Any] = [int(index) if index else name for name, index in _PART.findall(path)]
    owner: Any = raw
    for part in parts[:-1]:
        owner = owner[part]
    return owner, parts[-1]
