"""From raw stack configuration to :class:`Settings`, or to one error that holds every violation.

Each line of the error says the key, what was found, and what is allowed, with the nearest known name for a typo.
"""

from __future__ import annotations

import copy
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from spark_core.errors import SettingsError
from spark_core.settings.recipe_merge import with_recipes
from spark_core.settings.root import Settings

SETTING_KEYS = tuple(Settings.model_fields)
"""Keys of a stack file that are settings."""

SECRET_KEYS = ("api_key", "hf_token", "notify_webhook", "sudo_password")
"""Keys of a stack file that are secrets; they never enter the models."""

_SHOWN = 60
_MAY_HOLD_SECRETS = {"api_key", "environment", "notify_webhook"}
"""Settings into which people put the secret itself by mistake: their values are never shown."""


def read_settings(raw: Mapping[str, Any]) -> Settings:
    """Validate the configuration of a stack, on top of the recipes that its groups name.

    Args:
        raw: Key (without the project's name) to plain value. Secret keys may be present and are left alone.

    Raises:
        SettingsError: with every violation, one line each.
    """
    merged = with_recipes({key: value for key, value in raw.items() if key not in SECRET_KEYS})
    try:
        settings = Settings.model_validate(merged.values)
    except ValidationError as error:
        details = error.errors()
        lines = [line for detail in details for line in _lines(detail)]
        lines += [line for line in _across(merged.values, details) if line not in lines]
        kept = [merged.explain(line) for line in lines if not merged.concerns_a_problem(line)]
        raise SettingsError([*merged.problems.values(), *kept]) from None
    if merged.problems:
        raise SettingsError(list(merged.problems.values()))
    key_wanted = any(group.serving.api_key == "own" for group in settings.groups.values())
    if key_wanted and not raw.get("api_key"):
        raise SettingsError(
            ["api_key: found none, but serving.api_key is 'own'; run `pulumi config set --secret api_key`"]
        )
    return settings


def _across(values: Mapping[str, Any], details: Sequence[ErrorDetails]) -> list[str]:
    """What rules across settings have to say, which pydantic asks only once every single setting is right.

    They are asked again without the settings that are wrong. What they then say of a place from which a value was left
    out may follow from that alone, so it is not told.
    """
    rest = copy.deepcopy(dict(values))
    for detail in details:
        *path, last = [part for part in detail["loc"] if part != "[key]"] or [""]
        holder: Any = rest
        try:
            for part in path:
                holder = holder[part]
            del holder[last]
        except (KeyError, IndexError, TypeError):
            continue
    try:
        Settings.model_validate(rest)
    except ValidationError as error:
        found = [line for detail in error.errors() if detail["type"] == "value_error" for line in _lines(detail)]
        left_out = [_dotted(detail["loc"]) for detail in details if detail["type"] != "extra_forbidden"]
        return [line for line in found if not any(place.startswith(line.partition(":")[0]) for place in left_out)]
    return []


def _lines(detail: ErrorDetails) -> list[str]:
    location = tuple(part for part in detail["loc"] if part != "[key]")
    key = _dotted(location)
    if detail["type"] == "extra_forbidden":
        known = _known_names(location[:-1]) + (list(SECRET_KEYS) if len(location) == 1 else [])
        near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return [f"{key}: found an unknown key{hint} (allowed: {', '.join(sorted(known))})"]
    if detail["type"] == "missing":
        return [f"{key}: found nothing, expected a value" + _description(location)]
    if detail["type"] == "too_short" and isinstance(detail.get("input"), list | tuple) and detail["input"]:
        return []  # the items are there, but wrong: each of them has its own line
    message = detail["msg"].removeprefix("Value error, ")
    if not key:
        return message.splitlines()
    found = detail.get("input")
    if isinstance(found, dict | list | tuple | BaseModel) or _MAY_HOLD_SECRETS.intersection(map(str, location)):
        return [f"{key}: {line}" for line in message.splitlines()]
    shown = repr(found)
    return [f"{key}: found {shown[:_SHOWN] + '…' if len(shown) > _SHOWN else shown}: {_lower_first(message)}"]


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:] if text[1:2].islower() else text


def _dotted(location: Sequence[int | str]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return text


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models that an annotation leads to, through Optional, tuple and dict."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, tuple, dict, typing.Annotated):
        return [model for part in typing.get_args(annotation) for model in _models(part)]
    return []


def _model_at(location: Sequence[int | str]) -> type[BaseModel] | None:
    model: type[BaseModel] = Settings
    inside_map = False
    for part in location:
        if isinstance(part, int) or inside_map:
            inside_map = False
            continue
        field = model.model_fields.get(part)
        if field is None:
            return None
        found = _models(field.annotation)
        if not found:
            return None
        model = found[0]
        inside_map = typing.get_origin(field.annotation) is dict
    return model


def _known_names(location: Sequence[int | str]) -> list[str]:
    model = _model_at(location)
    return list(model.model_fields) if model else []


def describe(location: Sequence[int | str]) -> str:
    """What a setting is, in words: its own description, or the first sentence about what stands below it."""
    model = _model_at(location[:-1])
    field = model.model_fields.get(str(location[-1])) if model and location else None
    if field is None:
        return ""
    below = _models(field.annotation)
    return field.description or ((below[0].__doc__ or "").split("\n", 1)[0] if below else "")


def _description(location: Sequence[int | str]) -> str:
    model = _model_at(location[:-1])
    field = model.model_fields.get(str(location[-1])) if model and location else None
    return f" ({field.description})" if field is not None and field.description else ""
