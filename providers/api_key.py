"""``ApiKey``: the key of a group's endpoint, in the encrypted state and as a file of mode 600 on the head.

It owns that file. The key is a secret output; the inputs hold nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, DiffResult, ReadResult, Resource, UpdateResult

from providers._adapter import SparkProvider, say, told
from spark_core.api_key import generate_key, key_digest, observe_key, read_key, remove_key, write_key
from spark_core.errors import SettingsError

INPUTS = ("node", "connection", "stack", "group", "source", "path", "file")


class ApiKeyProvider(SparkProvider):
    """Life cycle of a group's key: made or taken from the settings, written, compared by digest, removed."""

    compared = ("connection", "source", "file")
    replaced_by = ("node", "stack", "group", "path")

    @told
    def diff(self, _id: str, _olds: Mapping[str, Any], _news: Mapping[str, Any]) -> DiffResult:
        found = super().diff(_id, _olds, _news)
        # The person's own key is compared here and not as an input: a digest of it in clear state could be guessed at.
        own = self.run.secret("api_key") if _news.get("source") == "own" else None
        if own is not None and own != _olds.get("api_key"):
            found.changes = True
        return found

    @told
    def create(self, props: Mapping[str, Any]) -> CreateResult:
        transport = self.run.transport(props["node"], props["connection"])
        if props["source"] == "own":
            key = self._own()
        elif observe_key(transport, props["path"]) != "absent":
            # Made by a run that was killed before it was recorded; an empty file is no key.
            key = read_key(transport, props["path"]) or generate_key()
        else:
            key = generate_key()
        write_key(transport, props["path"], key)
        return CreateResult(f"{props['stack']}/{props['group']}", {**props, "api_key": key})

    @told
    def update(self, _id: str, olds: Mapping[str, Any], news: Mapping[str, Any]) -> UpdateResult:
        if news["source"] == "own":
            key = self._own()
        else:
            key = str(olds["api_key"]) if olds["source"] == "generated" else generate_key()
        write_key(self.run.transport(news["node"], news["connection"]), news["path"], key)
        return UpdateResult({**news, "api_key": key})

    @told
    def read(self, id_: str, props: Mapping[str, Any]) -> ReadResult:
        found = observe_key(self.run.transport(props["node"], props["connection"]), props["path"])
        if found == key_digest(str(props["api_key"])):
            found = "in place"
        live = {"file": found if found in ("in place", "absent") else "altered"}
        return ReadResult(id_, {**props, **live}, {**{key: props[key] for key in INPUTS}, **live})

    @told
    def delete(self, _id: str, props: Mapping[str, Any]) -> None:
        if self.abandoned(str(props["node"])):
            say(f"{props['node']} is given up; the API key stays on it: {props['path']}")
            return
        self.run.require_all_nodes()
        remove_key(self.run.transport(props["node"], props["connection"]), props["path"])

    def _own(self) -> str:
        key = self.run.secret("api_key")
        if not key:
            raise SettingsError(["api_key: found none, but serving.api_key is 'own'"])
        return key


class ApiKey(Resource, module="spark", name="ApiKey"):
    """The API key of a group.

    Args:
        node: Name of the head.
        connection: How the head is reached, for the day the settings no longer name it.
        stack: Name of the stack.
        group: Name of the group.
        source: ``generated`` or ``own``.
        path: Path of the key file on the head.
    """

    api_key: pulumi.Output[str]
    """The key; a secret."""

    def __init__(
        self,
        resource_name: str,
        *,
        node: str,
        connection: dict[str, Any],
        stack: str,
        group: str,
        source: str,
        path: str,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        props: dict[str, Any] = {
            "node": node,
            "connection": connection,
            "stack": stack,
            "group": group,
            "source": source,
            "path": path,
            "file": "in place",
            "api_key": None,
        }
        options = pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(additional_secret_outputs=["api_key"]))
        super().__init__(ApiKeyProvider(), resource_name, props, options)
