"""``NodeJournal``: the first resource of a node and the last to go.

It owns the stack's folder on the node, and with it the record of everything that was there before. Its delete puts back
whatever is still recorded, also what other resources changed and never lived to see in state, and removes every
container and volume that carries the stack's label.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, ReadResult, Resource, UpdateResult

from providers._adapter import SparkProvider, folder_of, say, told
from spark_core.containers import remove_labelled
from spark_core.group import LABEL
from spark_core.journal import close_journal, journal_exists, kept_caches, open_journal

INPUTS = ("node", "stack", "root", "groups", "connection")


class NodeJournalProvider(SparkProvider):
    """Life cycle of a stack's folder on a node."""

    compared = ("groups", "connection")
    replaced_by = ("node", "stack", "root")

    @told
    def create(self, props: Mapping[str, Any]) -> CreateResult:
        open_journal(self.run.transport(props["node"]), folder_of(props), list(props["groups"]))
        return CreateResult(f"{props['node']}:{props['root']}", dict(props))

    @told
    def update(self, _id: str, _olds: Mapping[str, Any], news: Mapping[str, Any]) -> UpdateResult:
        open_journal(self.run.transport(news["node"]), folder_of(news), list(news["groups"]))
        return UpdateResult(dict(news))

    @told
    def read(self, id_: str, props: Mapping[str, Any]) -> ReadResult:
        if self.abandoned(str(props["node"])):
            return ReadResult(id_, dict(props))
        if not journal_exists(self.run.transport(props["node"], props["connection"]), folder_of(props)):
            return ReadResult(None, {})
        return ReadResult(id_, dict(props))

    @told
    def delete(self, _id: str, props: Mapping[str, Any]) -> None:
        if self.abandoned(str(props["node"])):
            say(
                f"{props['node']} is given up; what stays on it: containers and volumes with the label "
                f"{LABEL}.stack={props['stack']}, and {folder_of(props).path} with the journal of what was changed"
            )
            return
        self.run.require_all_nodes()
        transport = self.run.transport(props["node"], props["connection"])
        remove_labelled(transport, str(props["stack"]))
        disturb = self.run.settings.host.disturb_others
        for text in close_journal(transport, folder_of(props), disturb_others=disturb):
            say(f"{props['node']}: {text}")
        kept = kept_caches(transport, folder_of(props))
        if kept:
            say(f"{props['node']}: kept caches: {kept}; the serving image is kept too")


class NodeJournal(Resource, module="spark", name="NodeJournal"):
    """The journal of a node.

    Args:
        node: Name of the node.
        stack: Name of the stack.
        root: Our folder on the node.
        groups: Groups that have a rank on the node; each gets a folder for its state and one for its secrets.
        connection: How the node is reached, for the day the settings no longer name it.
    """

    def __init__(
        self,
        resource_name: str,
        *,
        node: str,
        stack: str,
        root: str,
        groups: list[str],
        connection: dict[str, Any],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        props = {"node": node, "stack": stack, "root": root, "groups": groups, "connection": connection}
        super().__init__(NodeJournalProvider(), resource_name, props, opts)
