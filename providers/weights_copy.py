"""``WeightsCopy``: the weights of one model on every node of its group, whole and the same.

It owns the folder of a revision that it copied; a folder that the nodes already had is used in place and never changed.
Destroy leaves both, since weights are caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, ReadResult, Resource, UpdateResult

from providers._adapter import SparkProvider, each_node, inputs_of, report, told
from providers.cancel import check_cancel
from spark_core.errors import SparkError
from spark_core.transfer.distribution import distribute
from spark_core.transfer.look import Place
from spark_core.weights import local_manifest, observe_weights, verify_in_place

INPUTS = ("stack", "group", "source", "folders", "roots", "addresses", "revisions")


class WeightsCopyProvider(SparkProvider):
    """Life cycle of a model's weights on the nodes of its group."""

    compared = ("source", "folders", "revisions")
    replaced_by = ("stack", "group")

    @told
    def create(self, props: Mapping[str, Any]) -> CreateResult:
        return CreateResult(f"weights-{props['stack']}-{props['group']}", {**props, "revision": self._converge(props)})

    @told
    def update(self, _id: str, _olds: Mapping[str, Any], news: Mapping[str, Any]) -> UpdateResult:
        return UpdateResult({**news, "revision": self._converge(news)})

    @told
    def read(self, id_: str, props: Mapping[str, Any]) -> ReadResult:
        folders, roots = props["folders"], props["roots"]
        named = {node.name for node in self.run.settings.nodes}

        def look(node: str) -> str:
            if node not in named:
                return "not in the settings"
            manifest = observe_weights(self.run.transport(node), folders[node], roots[node])
            return manifest.revision if manifest is not None else "absent"

        found = each_node(list(folders), look)
        if props["source"].startswith("node:"):
            # Nothing is declared but "the same everywhere, as verified": only a change since then is told.
            found = {
                node: "as verified" if revision == props["revision"] else revision for node, revision in found.items()
            }
        live = {"revisions": found}
        return ReadResult(id_, {**props, **live}, {**inputs_of(props, INPUTS), **live})

    @told
    def delete(self, _id: str, _props: Mapping[str, Any]) -> None:
        """Weights are caches; they stay."""
        self.run.require_all_nodes()

    def _converge(self, props: Mapping[str, Any]) -> str:
        kind, _, directory = str(props["source"]).partition(":")
        folders, roots, addresses = props["folders"], props["roots"], props.get("addresses") or {}
        group = self.run.settings.groups.get(str(props["group"]))
        # The engine's maps have no order, and the head comes first.
        nodes = [node for node in (group.nodes if group is not None else sorted(folders)) if node in folders]
        transports = {node: self.run.transport(node) for node in nodes}
        if kind == "node":
            return verify_in_place(transports, directory, roots).revision
        wanted = local_manifest(directory)
        for revision in props["revisions"].values():
            if revision != wanted.revision:
                raise SparkError(
                    f"expected revision {revision[:12]} in {directory}, found {wanted.revision[:12]}",
                    where="model.source",
                    do="the directory changed while this ran; run up again",
                )
        places = [Place(transports[node], folders[node], roots[node], addresses.get(node) or None) for node in nodes]
        distribute(directory, places, wanted, report, lambda: check_cancel("what has arrived is kept"))
        return wanted.revision


class WeightsCopy(Resource, module="spark", name="WeightsCopy"):
    """The weights of a group's model on its nodes.

    Args:
        stack: Name of the stack.
        group: Name of the group.
        source: ``controller:DIR`` or ``node:/DIR``.
        folders: For each node, the folder of the weights.
        roots: For each node, our folder (where hashes are cached).
        addresses: For each node that has one, its address on the fabric; over it nodes give weights to each other.
        revisions: For each node, the revision that its folder must hold; ``as verified`` for a folder used in place.
    """

    revision: pulumi.Output[str]
    """Hash of the content, the same on every node."""

    def __init__(
        self,
        resource_name: str,
        *,
        stack: str,
        group: str,
        source: str,
        folders: dict[str, str],
        roots: dict[str, str],
        addresses: dict[str, str],
        revisions: dict[str, str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        props: dict[str, Any] = {
            "stack": stack,
            "group": group,
            "source": source,
            "folders": folders,
            "roots": roots,
            "addresses": addresses,
            "revisions": revisions,
            "revision": None,
        }
        super().__init__(WeightsCopyProvider(), resource_name, props, opts)
