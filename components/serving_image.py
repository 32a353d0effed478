"""``ServingImage``: one and the same image on every node, referred to by its local id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi

from components.fabric_interfaces import interfaces_of
from components.node_files import FilesOfGroup
from components.roce_fabric import RoceFabric
from components.spark_node import SparkNode
from providers.image_check import ImageCheck
from providers.image_copy import ImageCopy
from spark_core.group import plan_group
from spark_core.image.check import architectures_of, question_of
from spark_core.settings import Settings


@dataclass(frozen=True, kw_only=True)
class ServingImageArgs:
    """What the image comes from and goes to."""

    settings: Settings
    """The settings of the stack."""
    stack: str
    """Name of the stack."""
    known_id: str
    """The id that the image will have; empty if only a registry or a build will tell it."""
    source: str
    """Where it comes from; another text brings the image anew."""
    nodes: Sequence[SparkNode]
    """The nodes that must have it, which are those of the group, the head first."""
    group: str
    """Name of the group that is served from it."""
    files: FilesOfGroup
    """The files of the group; its patches lie over those of the image."""
    fabric: RoceFabric
    """The fabric that layers go over."""
    config: str
    """Text of the ``config.json`` of the group's model, or empty if it is not there yet."""


class ServingImage(pulumi.ComponentResource):
    """The serving image. Another image replaces every container of the group; destroy leaves images where they are."""

    known_id: str
    """The id if it is known before the image is on any node, else empty."""
    image_id: pulumi.Output[str]
    """Local image id. Known in preview for an archive and a local id; for others once one node has the image."""

    def __init__(self, name: str, args: ServingImageArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spark:image:ServingImage", name, None, opts)
        image = args.settings.image
        if image.is_floating:
            pulumi.log.warn(
                f"image.registry: {image.registry} is a floating tag: it stays what it was at the first up, and may be "
                "another image where that is lost; pin it as name@sha256:…",
                resource=self,
            )
        known = args.known_id
        self.copy = ImageCopy(
            f"{name}-copy",
            stack=args.stack,
            source=args.source,
            image_id=known,
            nodes=[node.args.node.name for node in args.nodes],
            roots={node.args.node.name: node.folder.root for node in args.nodes},
            addresses={
                node.args.node.name: node.args.node.fabric_address
                for node in args.nodes
                if node.args.node.fabric_address is not None
            },
            opts=pulumi.ResourceOptions(
                parent=self, depends_on=[*(node.host for node in args.nodes), *args.fabric.links]
            ),
        )
        self.known_id = known
        self.image_id = pulumi.Output.from_input(known) if known else self.copy.found_id
        self.check = self._check(args)
        self.register_outputs({"image_id": self.image_id})

    def _check(self, args: ServingImageArgs) -> ImageCheck:
        """What is in the image is looked at before anything starts."""
        settings = args.settings
        members = [settings.node(node.args.node.name) for node in args.nodes]
        files = args.files.placed({node.name: "/" for node in members})
        architectures = architectures_of(args.config)
        containers = plan_group(settings, args.group, args.stack, "", files).containers
        return ImageCheck(
            f"{args.group}-image-check",
            stack=args.stack,
            group=args.group,
            image_id=self.image_id,
            question=question_of(settings, args.group, architectures, containers),
            architectures=list(architectures),
            interfaces={node.name: interfaces_of(node) for node in members},
            roots={node.args.node.name: node.folder.root for node in args.nodes},
            runtime=files.runtime,
            patches=list(files.patches),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[self.copy, *args.nodes]),
        )
