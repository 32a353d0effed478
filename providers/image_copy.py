"""``ImageCopy``: the serving image on every node, one and the same.

It owns nothing but the presence of the image: destroy leaves it, since images are caches. What a floating tag or a
build was at the first ``up`` is recorded in its state, and stays so until the source changes or no node has that image.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, ReadResult, Resource, UpdateResult

from providers._adapter import SparkProvider, each_node, inputs_of, say, told
from providers.cancel import check_cancel
from spark_core.errors import SparkError
from spark_core.image import Bringing, ImageFacts, ImageNode, bring_image, observe_image

INPUTS = ("stack", "source", "image_id", "nodes", "roots", "addresses")
PROJECT = Path(__file__).resolve().parent.parent


class ImageCopyProvider(SparkProvider):
    """Life cycle of the image's presence on all nodes."""

    compared = ("source", "image_id", "nodes")
    replaced_by = ("stack",)

    @told
    def create(self, props: Mapping[str, Any]) -> CreateResult:
        return CreateResult(f"image-{props['stack']}", self._converged(props, ""))

    @told
    def update(self, _id: str, olds: Mapping[str, Any], news: Mapping[str, Any]) -> UpdateResult:
        recorded = str(olds.get("found_id") or "") if olds.get("source") == news.get("source") else ""
        return UpdateResult(self._converged(news, recorded))

    @told
    def read(self, id_: str, props: Mapping[str, Any]) -> ReadResult:
        """A node without the image, or with one of another content under its id, is left out: that shows as drift."""
        reference = str(props["image_id"] or props["found_id"])
        nodes = [node.name for node in self.run.settings.nodes]
        found = each_node(nodes, lambda node: observe_image(self.run.transport(node), reference))
        layers = [str(layer) for layer in props.get("layers") or ()]
        live = {
            "nodes": [
                node
                for node in props["nodes"]
                if (facts := found.get(node)) is not None and (not layers or list(facts.layers) == layers)
            ]
        }
        return ReadResult(id_, {**props, **live}, {**inputs_of(props, INPUTS), **live})

    @told
    def delete(self, _id: str, _props: Mapping[str, Any]) -> None:
        """Images are caches; they stay."""
        self.run.require_all_nodes()

    def _converged(self, props: Mapping[str, Any], recorded: str) -> dict[str, Any]:
        facts = bring_image(
            Bringing(
                settings=self.run.settings.image,
                nodes=[self._node(name, props) for name in props["nodes"]],
                project=PROJECT,
                image_id=str(props["image_id"]),
                recorded=recorded,
                report=say,
                check=lambda: check_cancel("what has arrived is kept"),
            )
        )
        if self.run.settings.image.is_floating and facts.digests:
            say(f"image: {props['source']} is {facts.digests[0]}; pin it so")
        return {**props, **recorded_facts(facts)}

    def _node(self, name: str, props: Mapping[str, Any]) -> ImageNode:
        settings = self.run.settings
        known = next((node for node in settings.nodes if node.name == name), None)
        if known is None:
            raise SparkError(f"expected the node {name} in the settings, found none of that name", where="nodes")
        return ImageNode(
            self.run.transport(name),
            str((props.get("roots") or {}).get(name) or settings.root_of(known)),
            (props.get("addresses") or {}).get(name) or None,
            known.management_address,
        )


def recorded_facts(facts: ImageFacts) -> dict[str, Any]:
    """What state keeps of the image."""
    return {"found_id": facts.image_id, "digest": next(iter(facts.digests), ""), "layers": list(facts.layers)}


class ImageCopy(Resource, module="spark", name="ImageCopy"):
    """The serving image on all nodes.

    Args:
        stack: Name of the stack.
        source: Where the image comes from, for the person and for the difference.
        image_id: The id that must result; empty if only a registry reference or a build is known.
        nodes: Names of the nodes that must have it.
        roots: For each node, our folder, in which layers arrive.
        addresses: For each node that has one, its address on the fabric; over it nodes give layers to each other.
    """

    found_id: pulumi.Output[str]
    """Local image id, the same on every node."""
    digest: pulumi.Output[str]
    """Name in a registry by digest, where the daemon that pulled it told one; else empty."""
    layers: pulumi.Output[list[str]]
    """Layer ids from the lowest on."""

    def __init__(
        self,
        resource_name: str,
        *,
        stack: str,
        source: str,
        image_id: str,
        nodes: list[str],
        roots: dict[str, str],
        addresses: dict[str, str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        props: dict[str, Any] = {
            "stack": stack,
            "source": source,
            "image_id": image_id,
            "nodes": nodes,
            "roots": roots,
            "addresses": addresses,
            "found_id": None,
            "digest": None,
            "layers": None,
        }
        super().__init__(ImageCopyProvider(), resource_name, props, opts)
