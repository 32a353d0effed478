"""``GoodSettings``: the settings whose gate has passed, kept with the state so that a rollback has something to go to.

It owns nothing on any node. It comes after the gate: a run that fails before leaves what it holds as it was.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, Resource, UpdateResult

from providers._adapter import SparkProvider, told
from spark_core.gate import ON_REQUEST

KEPT = 2
"""How many earlier ones are kept beside the newest."""
_RECORD = ("settings", "image_id", "revision", "at", "speed")
"""``speed`` is written by `python -m automation bench`: what it measured while these settings served."""


class GoodSettingsProvider(SparkProvider):
    """Keeps what it is given; the one before moves down."""

    compared = ("settings", "image_id", "revision")

    @told
    def diff(self, _id: str, _olds: Mapping[str, Any], _news: Mapping[str, Any]) -> DiffResult:
        if str(_news.get("state")).endswith(ON_REQUEST):
            return DiffResult(changes=False, replaces=[], stables=[])
        return super().diff(_id, _olds, _news)

    @told
    def create(self, props: Mapping[str, Any]) -> CreateResult:
        if str(props.get("state")).endswith(ON_REQUEST):
            props = {**props, "settings": ""}
        return CreateResult("good-settings", {**props, "at": time.time(), "before": []})

    @told
    def update(self, _id: str, olds: Mapping[str, Any], news: Mapping[str, Any]) -> UpdateResult:
        before = [{key: olds[key] for key in _RECORD if key in olds}, *(olds.get("before") or [])]
        others = [record for record in before if record["settings"] not in ("", news["settings"])]
        # The same settings with another image or revision, or as they were once before: their figures are theirs still.
        figures = [record["speed"] for record in before if record["settings"] == news["settings"] and "speed" in record]
        known = {"speed": figures[0]} if figures else {}
        return UpdateResult({**news, **known, "at": time.time(), "before": others[:KEPT]})

    @told
    def delete(self, _id: str, _props: Mapping[str, Any]) -> None:
        """There is nothing to take away."""


class GoodSettings(Resource, module="spark", name="GoodSettings"):
    """The last settings that served.

    Args:
        settings: The settings as text, without secrets.
        image_id: Local id of the image that served with them.
        revision: Revision of the weights.
        state: What the gate has found; while the group is stopped on request, nothing new has served or is kept.
    """

    at: pulumi.Output[float]
    before: pulumi.Output[list[dict[str, Any]]]

    def __init__(
        self,
        resource_name: str,
        *,
        settings: str,
        image_id: pulumi.Input[str],
        revision: pulumi.Input[str],
        state: pulumi.Input[str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        props: dict[str, Any] = {
            "settings": settings,
            "image_id": image_id,
            "revision": revision,
            "state": state,
            "at": None,
            "before": None,
        }
        super().__init__(GoodSettingsProvider(), resource_name, props, opts)
