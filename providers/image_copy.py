"""``ImageCopy``: the serving image on every node, one and the same.

It owns nothing but the presence of the image: destroy leaves it, since images are caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, ReadResult, Resource, UpdateResult

from providers._adapter import SparkProvider, each_node, report, told
from spark_core.image import ImageFacts, ensure_image, observe_image, require_parity

INPUTS = ("stack", "source", "image_id", "nodes")


class ImageCopyProvider(SparkProvider):
    """Life cycle of the image's presence on all nodes."""

    compared = ("source", "image_id", "nodes")
    replaced_by = ("stack",)

    @told
    def create(self, props: Mapping[str, Any]) -> CreateResult:
        facts = self._converge(props)
        return CreateResult(f"image-{props['stack']}", {**props, "found_id": facts.image_id})

    @told
    def update(self, _id: str, _olds: Mapping[str, Any], news: Mapping[str, Any]) -> UpdateResult:
        return UpdateResult({**news, "found_id": self._converge(news).image_id})

    @told
    def read(self, id_: str, props: Mapping[str, Any]) -> ReadResult:
        reference = str(props["image_id"] or props["found_id"])
        nodes = [node.name for node in self.run.settings.nodes]
        found = each_node(nodes, lambda node: observe_image(self.run.transport(node), reference))
        live = {"nodes": [node for node in props["nodes"] if found.get(node) is not None]}
        return ReadResult(id_, {**props, **live}, {**{key: props[key] for key in INPUTS}, **live})

    @told
    def delete(self, _id: str, _props: Mapping[str, Any]) -> None:
        """Images are caches; they stay."""
        self.run.require_all_nodes()

    def _converge(self, props: Mapping[str, Any]) -> ImageFacts:
        image_id = str(props["image_id"]) or None
        settings = self.run.settings.image

        def bring(node: str) -> ImageFacts:
            return ensure_image(self.run.transport(node), settings, image_id, report)

        return require_parity(each_node(list(props["nodes"]), bring))


class ImageCopy(Resource, module="spark", name="ImageCopy"):
    """The serving image on all nodes.

    Args:
        stack: Name of the stack.
        source: Where the image comes from, for the person and for the difference.
        image_id: The id that must result; empty if only a registry reference is known.
        nodes: Names of the nodes that must have it.
    """

    found_id: pulumi.Output[str]
    """Local image id, the same on every node."""

    def __init__(
        self,
        resource_name: str,
        *,
        stack: str,
        source: str,
        image_id: str,
        nodes: list[str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        props: dict[str, Any] = {
            "stack": stack,
            "source": source,
            "image_id": image_id,
            "nodes": nodes,
            "found_id": None,
        }
        super().__init__(ImageCopyProvider(), resource_name, props, opts)
