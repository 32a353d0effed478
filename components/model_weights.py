"""``ModelWeights``: the weights of a group's model on its nodes, whole and the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi

from components.spark_node import SparkNode
from providers.hub_revision import HubRevision
from providers.weights_copy import WeightsCopy
from spark_core.preflight.weights import GroupWeights
from spark_core.settings import ModelSettings, Settings


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
    local_revision: str
    """Revision of the weights on the controller; empty if they come from elsewhere."""
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

    folders: dict[str, str]
    """For each node, the folder of the weights; known in preview."""
    in_place: dict[str, dict[str, str]]
    """For each node that uses its own hub cache, its files: name to where the content lies."""
    revision: pulumi.Output[str]
    """The hub's commit, or the hash of the content; known once the weights are on the nodes."""

    def __init__(self, name: str, args: ModelWeightsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spark:weights:ModelWeights", name, None, opts)
        names = [node.args.node.name for node in args.nodes]
        self.in_place = {}
        listing: dict[str, str] = {}
        record: list[pulumi.Resource] = []
        revision = "as verified"
        if args.model.kind == "node":
            self.folders = dict.fromkeys(names, args.model.directory)
        elif args.model.kind == "hub":
            known = args.known
            if known is None:
                raise pulumi.RunError(
                    f"groups.{args.group}.model.source: expected to know the commit of {args.model.source}, found that "
                    "nobody could be asked"
                )
            self.folders = {
                node.args.node.name: known.folder(node.args.node.name, node.folder.root) for node in args.nodes
            }
            self.in_place = known.in_place
            if known.listing is not None:
                listing = known.listing.compact()
                record = [self._record(name, args, known.revision, listing)]
        else:
            revision = args.local_revision
            self.folders = {node.args.node.name: f"{node.folder.weights}/{revision}" for node in args.nodes}
        self.copy = WeightsCopy(
            f"{name}-copy",
            stack=args.stack,
            group=args.group,
            source=args.model.source,
            folders=self.folders,
            roots={node.args.node.name: node.folder.root for node in args.nodes},
            addresses={
                node.args.node.name: node.args.node.fabric_address
                for node in args.nodes
                if node.args.node.fabric_address is not None
            },
            revisions=dict.fromkeys(names, revision),
            commit=args.known.revision if args.known is not None else "",
            listing=listing,
            in_place=sorted(self.in_place),
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
