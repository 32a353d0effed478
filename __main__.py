"""The program: settings in, five components, outputs out."""

import sys
from pathlib import Path

import pulumi

PROJECT = Path(__file__).resolve().parent
if str(PROJECT) not in sys.path[:1]:
    sys.path.insert(0, str(PROJECT))

from spark_core.errors import SparkError  # noqa: E402
from spark_core.project import require_own_packages, root_of_run  # noqa: E402

try:
    require_own_packages(PROJECT, root_of_run(pulumi.get_root_directory()))
except SparkError as refused:
    raise pulumi.RunError(refused.render()) from None

from components.fabric_proof import FabricProofArgs, prove_fabric  # noqa: E402
from components.good_settings import keep_good_settings  # noqa: E402
from components.model_weights import ModelWeights, ModelWeightsArgs, weights_places  # noqa: E402
from components.monitoring import MonitoringArgs, monitor_stack  # noqa: E402
from components.node_files import files_of_group  # noqa: E402
from components.roce_fabric import RoceFabric, RoceFabricArgs  # noqa: E402
from components.serving_image import ServingImage, ServingImageArgs  # noqa: E402
from components.spark_node import SparkNode, SparkNodeArgs  # noqa: E402
from components.stack import open_stack  # noqa: E402
from components.supervisor import with_supervisor_to_run  # noqa: E402
from components.vllm_ray_cluster import VllmRayCluster, VllmRayClusterArgs  # noqa: E402

stack = open_stack()
settings = stack.settings
[(group_name, group)] = settings.groups.items()
known_weights = stack.weights.get(group_name) if group.model.kind == "hub" else None
places = weights_places(settings, stack.name, group_name, known_weights, stack.sources.revisions.get(group_name, ""))
files = with_supervisor_to_run(stack, group_name, files_of_group(group), places)

nodes = {
    node.name: SparkNode(
        node.name,
        SparkNodeArgs(
            settings=settings,
            node=node,
            stack=stack.name,
            connection=stack.connection(node),
            files=files.all if node.name in group.nodes else [],
        ),
    )
    for node in settings.nodes
}
members = [nodes[name] for name in group.nodes]
monitor_stack(
    "monitoring",
    MonitoringArgs(settings=settings, stack=stack.name, group=group_name, nodes=nodes, make_way=stack.make_way),
)
fabric = RoceFabric("fabric", RoceFabricArgs(settings=settings, stack=stack.name, nodes=list(nodes.values())))
image = ServingImage(
    "image",
    ServingImageArgs(
        settings=settings,
        stack=stack.name,
        known_id=stack.sources.image_id,
        source=stack.sources.image_source,
        nodes=members,
        group=group_name,
        files=files,
        config=stack.configs.get(group_name, ""),
        fabric=fabric,
    ),
)
proof = prove_fabric(
    f"{group_name}-fabric-proof",
    FabricProofArgs(
        settings=settings,
        stack=stack.name,
        group=group_name,
        nodes=members,
        fabric=fabric,
        image=image,
        files=files,
    ),
)
weights = ModelWeights(
    f"{group_name}-weights",
    ModelWeightsArgs(
        settings=settings,
        stack=stack.name,
        group=group_name,
        model=group.model,
        places=places,
        known=known_weights,
        image_id=image.image_id,
        nodes=members,
    ),
    pulumi.ResourceOptions(depends_on=proof),
)
cluster = VllmRayCluster(
    group_name,
    VllmRayClusterArgs(
        settings=settings,
        stack=stack.name,
        group=group_name,
        nodes=nodes,
        image_id=image.image_id,
        known_image_id=image.known_id,
        files=files.placed(places.folders, places.in_place),
        notify=stack.notify_of(group_name),
        make_way=stack.make_way,
        after=[fabric, image, *proof, weights, *members],
    ),
)
keep_good_settings(
    "good-settings",
    stack.declared,
    image.image_id,
    weights.revision,
    cluster.state,
    pulumi.ResourceOptions(depends_on=cluster),
)

pulumi.export("endpoint", cluster.endpoint)
pulumi.export("model", group.model.served_name)
pulumi.export("api_key", cluster.api_key)
pulumi.export("nodes", [stack.node_output(node) for node in settings.nodes])
pulumi.export("image_digest", image.image_id)
pulumi.export("model_revision", weights.revision)
