"""``ModelWeights``: the weights of a group's model on its nodes, whole and the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi

from components.spark_node import SparkNode
from providers.weights_copy import WeightsCopy
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
    """Revision of the weights on the controller; empty if they are on the nodes already."""
    nodes: Sequence[SparkNode]
    """The nodes of the group."""


class ModelWeights(pulumi.ComponentResource):
    """The weights of one model. Another revision is another folder, so it replaces every container of the group.

    Destroy leaves the folders where they are.
    """

    folders: dict[str, str]
    """For each node, the folder of the weights; known in preview."""
    revision: pulumi.Output[str]
    """Hash of the content; known once the weights are on the nodes."""

    def __init__(self, name: str, args: ModelWeightsArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spark:weights:ModelWeights", name, None, opts)
        names = [node.args.node.name for node in args.nodes]
        if args.model.kind == "node":
            revision = "as verified"
            self.folders = dict.fromkeys(names, args.model.directory)
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
            opts=pulumi.ResourceOptions(parent=self, depends_on=[node.host for node in args.nodes]),
        )
        self.revision = self.copy.revision
        self.register_outputs({"revision": self.revision})
