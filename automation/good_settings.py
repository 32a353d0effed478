"""The last settings that served, as the state keeps them, and which settings failed, as the history tells.

A rollback writes both into the message of its update, so that any machine that shares the backend knows them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from automation.stack_file import StackFile
from spark_core.errors import SparkError
from spark_core.settings import SETTING_KEYS, read_settings
from spark_core.settings.record import NOT_RECORDED, digest_of, record_of

TYPE = "pulumi-python:dynamic/spark:GoodSettings"
_FULL = "spark-vllm up of {digest}"
_ROLLBACK = "spark-vllm rollback from {failed} to {good}"
_FULL_READ = re.compile(r"spark-vllm up of ([0-9a-f]{12})\b")
_ROLLBACK_READ = re.compile(r"spark-vllm rollback from ([0-9a-f]{12}) to ([0-9a-f]{12})\b")


@dataclass(frozen=True)
class Good:
    """Settings that have served.

    Attributes:
        record: The settings, as ``record_of`` gives them.
        image_id: Local id of the image that served.
        revision: Revision of the weights.
        at: When they were proven, in seconds since the epoch.
        speed: What ``bench`` measured with them.
    """

    record: Mapping[str, Any]
    image_id: str
    revision: str
    at: float
    speed: Sequence[Mapping[str, Any]] = ()

    @property
    def digest(self) -> str:
        """By which they are named."""
        return digest_of(self.record)


def good_settings(state: Mapping[str, Any]) -> list[Good]:
    """The settings that have served, newest first, from an exported state (``pulumi stack export``).

    Whatever removes images or weights from nodes leaves those that are named here.
    """
    resources = (state.get("deployment") or {}).get("resources") or []
    kept = next((resource for resource in resources if resource["type"] == TYPE), None)
    if kept is None:
        return []
    outputs = kept.get("outputs") or {}
    return [
        Good(
            json.loads(one["settings"]),
            str(one["image_id"]),
            str(one["revision"]),
            float(one.get("at") or 0),
            tuple(one.get("speed") or ()),
        )
        for one in (outputs, *(outputs.get("before") or []))
        if one.get("settings")
    ]


def up_message(record: Mapping[str, Any]) -> str:
    """The message of an update that applies all of some settings."""
    return _FULL.format(digest=digest_of(record))


def rollback_message(failed: str, good: str, reason: str) -> str:
    """The message of an update that goes back."""
    return _ROLLBACK.format(failed=failed, good=good) + (f": {reason}" if reason else "")


def rolled_back(updates: Sequence[Mapping[str, Any]], digest: str) -> str:
    """Why settings must not be applied again: the message of the rollback from them, or nothing.

    Args:
        updates: The history, newest first.
    """
    for update in updates:
        message = str(update.get("message", ""))
        applied = _FULL_READ.match(message)
        if applied and applied.group(1) == digest and update.get("result") == "succeeded":
            return ""
        back = _ROLLBACK_READ.match(message)
        if back and back.group(1) == digest:
            return message
    return ""


def choose(kept: Sequence[Good], current: str) -> Good:
    """What a rollback from settings goes to: the newest that served and are others.

    Raises:
        SparkError: there are none.
    """
    found = next((good for good in kept if good.digest != current), None)
    if found is None:
        raise SparkError(
            "expected earlier settings whose gate has passed, found none",
            where="rollback",
            do="mend the stack's file and run `up`",
        )
    return found


def record_of_file(file: StackFile) -> dict[str, Any]:
    """The settings of a stack's file, as the state would keep them."""
    return record_of(file.settings())


def with_settings(file: StackFile, record: Mapping[str, Any]) -> str:
    """A stack's file with other settings; secrets, and how nodes are reached, stay as they are.

    Raises:
        SettingsError: the settings are none any more, since this release knows other ones.
    """
    content = yaml.safe_load(file.text)
    prefix = f"{file.project}:"
    replaced = {f"{prefix}{key}" for key in SETTING_KEYS if key not in NOT_RECORDED}
    config = {key: value for key, value in content.get("config", {}).items() if key not in replaced}
    content["config"] = config | {f"{prefix}{key}": value for key, value in record.items()}
    read_settings({key.removeprefix(prefix): value for key, value in content["config"].items()})
    return yaml.safe_dump(content, sort_keys=False)
