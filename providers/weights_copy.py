"""``WeightsCopy``: the weights of one model on every node of its group, whole and the same.

It owns the folder of a revision that it copied; a folder that the nodes already had, such as that of a hub cache, is
used in place and never changed. Destroy leaves both, since weights are caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, ReadResult, Resource, UpdateResult

from providers._adapter import SparkProvider, each_node, inputs_of, report, told
from providers.cancel import check_cancel
from spark_core.errors import SparkError
from spark_core.garbage.claims import claim
from spark_core.hub.ask import ask_hub
from spark_core.hub.bring import bring_hub_model
from spark_core.hub.download import HubOrigin
from spark_core.hub.listing import from_compact
from spark_core.transfer.distribution import distribute
from spark_core.transfer.look import Place
from spark_core.transport.base import Transport
from spark_core.weights import local_manifest, observe_weights, verify_in_place

INPUTS = (
    "stack",
    "group",
    "source",
    "folders",
    "roots",
    "addresses",
    "revisions",
    "commit",
    "listing",
    "in_place",
    "image",
)


class WeightsCopyProvider(SparkProvider):
    """Life cycle of a model's weights on the nodes of its group."""

    compared = ("source", "folders", "revisions", "commit", "image")
    replaced_by = ("stack", "group")

    @told
    def create(self, props: Mapping[str, Any]) -> CreateResult:
        return CreateResult(f"weights-{props['stack']}-{props['group']}", {**props, **self._converge(props)})

    @told
    def update(self, _id: str, _olds: Mapping[str, Any], news: Mapping[str, Any]) -> UpdateResult:
        return UpdateResult({**news, **self._converge(news)})

    @told
    def read(self, id_: str, props: Mapping[str, Any]) -> ReadResult:
        folders, roots = props["folders"], props["roots"]
        named = {node.name for node in self.run.settings.nodes}

        def look(node: str) -> str:
            if node not in named:
                return "not in the settings"
            only = list(props["listing"]) if node in (props.get("in_place") or ()) else None
            manifest = observe_weights(self.run.transport(node), folders[node], roots[node], only)
            return manifest.revision if manifest is not None else "absent"

        found = each_node(list(folders), look)
        if not props["source"].startswith("controller:"):
            # Nothing is declared but "the same everywhere, as verified": only a change since then is told.
            verified = props.get("content") or props["revision"]
            found = {node: "as verified" if revision == verified else revision for node, revision in found.items()}
        live = {"revisions": found}
        return ReadResult(id_, {**props, **live}, {**inputs_of(props, INPUTS), **live})

    @told
    def delete(self, _id: str, _props: Mapping[str, Any]) -> None:
        """Weights are caches; they stay."""
        self.run.require_all_nodes()

    def _converge(self, props: Mapping[str, Any]) -> dict[str, str]:
        """The outputs that follow from what the nodes have now."""
        kind, _, directory = str(props["source"]).partition(":")
        folders, roots, addresses = props["folders"], props["roots"], props.get("addresses") or {}
        group = self.run.settings.groups.get(str(props["group"]))
        # The engine's maps have no order, and the head comes first.
        nodes = [node for node in (group.nodes if group is not None else sorted(folders)) if node in folders]
        transports = {node: self.run.transport(node) for node in nodes}
        self._claim(props, transports)
        if kind == "node":
            return _verified(verify_in_place(transports, directory, roots).revision)
        in_place, listed = set(props.get("in_place") or ()), props.get("listing") or {}
        only = tuple(sorted(listed))
        places = [
            Place(
                transports[node],
                folders[node],
                roots[node],
                addresses.get(node) or None,
                only if node in in_place else None,
            )
            for node in nodes
        ]
        if kind == "hf":
            return self._bring_from_hub(props, places)
        wanted = local_manifest(directory)
        for revision in props["revisions"].values():
            if revision != wanted.revision:
                raise SparkError(
                    f"expected revision {revision[:12]} in {directory}, found {wanted.revision[:12]}",
                    where="model.source",
                    do="the directory changed while this ran; run up again",
                )
        distribute(directory, places, wanted, report, lambda: check_cancel("what has arrived is kept"))
        return _verified(wanted.revision)

    def _claim(self, props: Mapping[str, Any], transports: Mapping[str, Transport]) -> None:
        """Before anything is copied, so that nobody frees what this needs, nor what served until now."""
        image = str(props.get("image") or "")

        def write(node: str) -> None:
            folder, root = str(props["folders"][node]), str(props["roots"][node])
            revision = folder.removeprefix(f"{root}/weights/") if folder.startswith(f"{root}/weights/") else ""
            wanted = {"revision": revision, "image": image}
            claim(transports[node], root, str(props["stack"]), str(props["group"]), wanted, [image])

        each_node(list(transports), write)

    def _bring_from_hub(self, props: Mapping[str, Any], places: Sequence[Place]) -> dict[str, str]:
        settings, commit, listed = self.run.settings, str(props["commit"]), props.get("listing") or {}
        model, token = settings.groups[str(props["group"])].model, self.run.hub_token()
        listing = from_compact(commit, listed)
        if not listed:  # the program was not to ask anybody
            pinned = model.model_copy(update={"source": f"hf://{model.repository}@{commit}"})
            listing = ask_hub(places[0].transport, pinned, settings.hub, token).listing
        origin = HubOrigin(
            model, settings.hub, commit, str(props["image"]), settings.image.python, str(props["stack"]), token
        )
        found = bring_hub_model(origin, listing, places, report, lambda: check_cancel("what has arrived is kept"))
        return {"revision": commit, "content": found.revision}


def _verified(revision: str) -> dict[str, str]:
    """The outputs of weights whose revision is the hash of their content."""
    return {"revision": revision, "content": revision}


class WeightsCopy(Resource, module="spark", name="WeightsCopy"):
    """The weights of a group's model on its nodes.

    Args:
        stack: Name of the stack.
        group: Name of the group.
        source: ``controller:DIR``, ``node:/DIR`` or ``hf://ORG/NAME@REVISION``.
        folders: For each node, the folder of the weights.
        roots: For each node, our folder (where hashes are cached).
        addresses: For each node that has one, its address on the fabric; over it nodes give weights to each other.
        revisions: For each node, the revision that its folder must hold; ``as verified`` where that is what counts.
        commit: The hub's commit; empty for a directory.
        listing: What the hub says of each file; empty where it was not asked yet.
        in_place: The nodes whose folder is a hub cache's.
        image: Local id of the serving image, in which the hub's client runs.
    """

    revision: pulumi.Output[str]
    """The hub's commit, or the hash of the content; the same on every node."""
    content: pulumi.Output[str]
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
        commit: str,
        listing: dict[str, str],
        in_place: list[str],
        image: pulumi.Input[str],
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
            "commit": commit,
            "listing": listing,
            "in_place": in_place,
            "image": image,
            "revision": None,
            "content": None,
        }
        super().__init__(WeightsCopyProvider(), resource_name, props, opts)
