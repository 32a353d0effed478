"""``ServingImage``: one and the same image on every node, referred to by its local id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi

from components.spark_node import SparkNode
from providers.image_copy import ImageCopy
from spark_core.settings import Settings


@dataclass(frozen=True, kw_only=True)
class ServingImageArgs:
    """What the image comes from and goes to."""

    settings: Settings
    """The settings of the stack."""
    stack: str
    """Name of the stack."""
    known_id: str
    """The id that the image will have; empty if only the registry knows it."""
    nodes: Sequence[SparkNode]
    """The nodes that must have it."""


class ServingImage(pulumi.ComponentResource):
    """The serving image. Another image replaces every container of the group; destroy leaves images where they are."""

    known_id: str
    """The id if it is known before the image is on any node, else empty."""
    image_id: pulumi.Output[str]
    """Local image id. Known in preview for an archive and a local id; for a registry name, once it has been pulled."""

    def __init__(self, name: str, args: ServingImageArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spark:image:ServingImage", name, None, opts)
        image = args.settings.image
        if image.registry is not None and "@sha256:" not in image.registry:
            pulumi.log.warn(
                f"image.registry: {image.registry} is a floating tag; nodes that pull it on different days may get "
                "different images; pin it as name@sha256:…",
                resource=self,
            )
        known = args.known_id
        self.copy = ImageCopy(
            f"{name}-copy",
            stack=args.stack,
            source=image.registry or image.archive or str(image.local_id),
            image_id=known,
            nodes=[node.args.node.name for node in args.nodes],
            opts=pulumi.ResourceOptions(parent=self, depends_on=[node.host for node in args.nodes]),
        )
        self.known_id = known
        self.image_id = pulumi.Output.from_input(known) if known else self.copy.found_id
        self.register_outputs({"image_id": self.image_id})
