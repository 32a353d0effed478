"""``HubRevision``: which commit a model's name on the hub means, recorded once so that it never moves by itself.

It owns nothing on any node. The program asks the hub where the state has no record of the very source, and this keeps
the answer: the commit, and size and hash of every file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, ReadResult, Resource, UpdateResult

from providers._adapter import SparkProvider, told

TYPE = "pulumi-python:dynamic/spark:HubRevision"
"""Its type in a state."""


class HubRevisionProvider(SparkProvider):
    """Life cycle of a record."""

    compared = ("source", "commit", "files")
    replaced_by = ("group",)

    @told
    def create(self, props: Mapping[str, Any]) -> CreateResult:
        return CreateResult(f"hub-revision-{props['group']}", dict(props))

    @told
    def update(self, _id: str, _olds: Mapping[str, Any], news: Mapping[str, Any]) -> UpdateResult:
        return UpdateResult(dict(news))

    @told
    def read(self, id_: str, props: Mapping[str, Any]) -> ReadResult:
        """A record is what it is; the hub is not asked again."""
        return ReadResult(id_, dict(props), {name: props[name] for name in ("group", "source", "commit", "files")})

    @told
    def delete(self, _id: str, _props: Mapping[str, Any]) -> None:
        """Nothing is anywhere else."""


class HubRevision(Resource, module="spark", name="HubRevision"):
    """What the hub said of a group's model.

    Args:
        group: Name of the group.
        source: The source of the settings that was asked for.
        commit: The commit that it means.
        files: Name of each file that serving needs to ``SIZE:DIGEST``.
    """

    commit: pulumi.Output[str]
    """The commit."""

    def __init__(
        self,
        resource_name: str,
        *,
        group: str,
        source: str,
        commit: str,
        files: dict[str, str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        props: dict[str, Any] = {"group": group, "source": source, "commit": commit, "files": files}
        super().__init__(HubRevisionProvider(), resource_name, props, opts)
