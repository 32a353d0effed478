"""``ModelWeights``: the weights of a group's model on its nodes, whole and the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi

from components.spark_node import SparkNode
from providers.hub_revision import HubRevision
from providers.weights_copy import WeightsCopy
from spark_core.journal import StackFolder
from spark_core.preflight.weights import GroupWeights
from spark_core.settings import ModelSettings, Settings

_AS_VERIFIED = "as verified"


@dataclass(frozen=True)
class WeightsPlaces:
    """Where the weights of a group lie on its nodes; known in preview.

    Attributes:
        folders: For each node, the folder of the weights.
        in_place: For each node that uses its own hub cache, its files: name to where the content lies.
        revision: Hash of the content if it is on the controller, else that it is what will be verified.
    """

    folders: dict[str, str]
    in_place: dict[str, dict[str, str]]
    revision: str


def weights_places(
    settings: Settings, stack: str, group: str, known: GroupWeights | None, local_revision: str
) -> WeightsPlaces:
    """Where the weights of a group lie, or will.

    Args:
        known: What is known of a model of the hub.
        local_revision: Revision of the weights on the controller; empty if they come from elsewhere.

    Raises:
        pulumi.RunError: nothing is known of a model of the hub.
    """
    model, nodes = settings.groups[group].model, settings.groups[group].nodes
    roots = {name: settings.root_of(settings.node(name)) for name in nodes}
    if model.kind == "node":
        return WeightsPlaces(dict.fromkeys(nodes, model.directory), {}, _AS_VERIFIED)
    if model.kind == "controller":
        folders = {name: f"{StackFolder(root, stack).weights}/{local_revision}" for name, root in roots.items()}
        return WeightsPlaces(folders, {}, local_revision)
    if known is None:
        raise pulumi.RunError(
            f"groups.{group}.model.source: expected to know the commit of {model.source}, "
            "found that nobody could be asked"
        )
    return WeightsPlaces({name: known.folder(name, root) for name, root in roots.items()}, known.in_place, _AS_VERIFIED)


@dataclass(frozen=True, kw_only=True)
class ModelWeightsArgs:
    """What the weights come from and go to."""

    settings: Settings
    """The settings of the stack."""
    stack: str
    """Name of the stack."""
    group: str
    """Name of the group."""
    model: ModelSettings
    """The model."""
    places: WeightsPlaces
    """Where they lie, or will."""
    known: GroupWeights | None
    """What is known of a model of the hub; None for others."""
    image_id: pulumi.Output[str]
    """Local id of the serving image, in which the hub's client runs."""
    nodes: Sequence[SparkNode]
    """The nodes of the group."""


class ModelWeights(pulumi.ComponentResource):
    """The weights of one model. Another revision is another folder, so it replaces every container of the group.

    Destroy leaves the folders where they are.
    """

    revision: pulumi.Output[str]
    """The hub's commit, or the hash of the content; known once the weights are on the nodes."""

    def __init__(self, name: str, args: ModelWeightsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spark:weights:ModelWeights", name, None, opts)
        names = [node.args.node.name for node in args.nodes]
        listing: dict[str, str] = {}
        record: list[pulumi.Resource] = []
        if args.known is not None and args.known.listing is not None:
            listing = args.known.listing.compact()
            record = [self._record(name, args, args.known.revision, listing)]
        self.copy = WeightsCopy(
            f"{name}-copy",
            stack=args.stack,
            group=args.group,
            source=args.model.source,
            folders=args.places.folders,
            roots={node.args.node.name: node.folder.root for node in args.nodes},
            addresses={
                node.args.node.name: node.args.node.fabric_address
                for node in args.nodes
                if node.args.node.fabric_address is not None
            },
            revisions=dict.fromkeys(names, args.places.revision),
            commit=args.known.revision if args.known is not None else "",
            listing=listing,
            in_place=sorted(args.places.in_place),
            image=args.image_id,
            opts=pulumi.ResourceOptions(parent=self, depends_on=[*(node.host for node in args.nodes), *record]),
        )
        self.revision = self.copy.revision
        self.register_outputs({"revision": self.revision})

    def _record(self, name: str, args: ModelWeightsArgs, commit: str, listing: dict[str, str]) -> HubRevision:
        """Recorded before anything is copied, so that a run that is cut goes on with the same commit."""
        return HubRevision(
            f"{name}-revision",
            group=args.group,
            source=args.model.source,
            commit=commit,
            files=listing,
            opts=pulumi.ResourceOptions(parent=self),
        )
