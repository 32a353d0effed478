"""The proof of a group's fabric: after fabric and image, before weights are copied and before the group starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pulumi

from components.fabric_interfaces import interfaces_of
from components.node_files import FilesOfGroup
from components.roce_fabric import RoceFabric
from components.serving_image import ServingImage
from components.spark_node import SparkNode
from providers.fabric_proof import FabricProof
from spark_core.fabric.environment import rdma_policy
from spark_core.group import plan_group
from spark_core.proof.collective import environment_digest
from spark_core.settings import Settings


@dataclass(frozen=True, kw_only=True)
class FabricProofArgs:
    """What is proven."""

    settings: Settings
    """The settings of the stack, with every interface filled in."""
    stack: str
    """Name of the stack."""
    group: str
    """Name of the group."""
    nodes: Sequence[SparkNode]
    """The nodes of the group, the head first."""
    fabric: RoceFabric
    """The fabric that joins them."""
    image: ServingImage
    """The serving image, in which the collective runs."""
    files: FilesOfGroup
    """The files of the group; the rank supervisor's brings the probe."""


def prove_fabric(name: str, args: FabricProofArgs) -> list[pulumi.Resource]:
    """The proof as something to depend on; empty for a group of one node, which has no fabric to prove."""
    settings = args.settings
    members = [settings.node(node.args.node.name) for node in args.nodes]
    if len(members) < 2 or not all(node.fabric for node in members):
        return []
    files = args.files.placed({node.name: "/" for node in members})
    plan = plan_group(settings, args.group, args.stack, "", files)
    fabric = settings.fabric
    proof = FabricProof(
        name,
        stack=args.stack,
        group=args.group,
        image_id=args.image.image_id,
        interfaces={node.name: interfaces_of(node) for node in members},
        environment=environment_digest(plan.containers),
        demands={
            "hardware": settings.hardware,
            "mtu_bytes": fabric.mtu_bytes,
            "rdma": rdma_policy(settings),
            "proof": fabric.proof,
            "minimum_gbps": fabric.minimum_gbps,
        },
        runtime=files.runtime,
        patches=list(files.patches),
        opts=pulumi.ResourceOptions(parent=args.fabric, depends_on=[*args.fabric.links, args.image, *args.nodes]),
    )
    return [proof]
