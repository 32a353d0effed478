"""``VllmRayCluster``: one container per node, Ray between them, vLLM on the head, and the gate that proves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pulumi
import pulumi_docker as docker

from components.spark_node import SparkNode
from providers.api_key import ApiKey
from providers.connections import connection_facts
from providers.endpoint_gate import EndpointGate
from spark_core.containers import STOP_TIMEOUT_S
from spark_core.fabric.environment import CACHE_TARGET
from spark_core.group import (
    GroupFiles,
    GroupPlan,
    RankContainer,
    container_name,
    key_path,
    plan_group,
    public_endpoint,
)
from spark_core.settings import Settings

_LOG_OPTIONS = {"max-size": "50m", "max-file": "3"}


@dataclass(frozen=True, kw_only=True)
class VllmRayClusterArgs:
    """What a serving group is made of."""

    settings: Settings
    """The settings of the stack."""
    stack: str
    """Name of the stack."""
    group: str
    """Name of the group."""
    nodes: Mapping[str, SparkNode]
    """All nodes of the stack by name."""
    image_id: pulumi.Output[str]
    """Local id of the serving image."""
    known_image_id: str
    """The id if it is known before the image is on any node, else empty."""
    files: GroupFiles
    """Where runtime, patches and weights lie."""
    notify: str
    """Digest of whom the head tells of trouble; empty if nobody."""
    make_way: Callable[[str, str], None]
    """Called with node and container name before a container is created."""
    after: Sequence[pulumi.Resource]
    """What must be there before a rank starts; the key and the caches need not wait for it."""


class VllmRayCluster(pulumi.ComponentResource):
    """A serving group.

    Any change of image, weights, environment, mounts or serving arguments replaces the containers of all ranks: ranks
    that differ must never join. A new key is written in place and restarts nothing.
    """

    endpoint: pulumi.Output[str]
    """Base URL of the API; known to serve once it is exported."""
    api_key: pulumi.Output[str] | None
    """The key, a secret; None if the API is open."""

    def __init__(self, name: str, args: VllmRayClusterArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spark:cluster:VllmRayCluster", name, None, opts)
        self._args = args
        self._group = args.settings.groups[args.group]
        members = [args.nodes[node] for node in self._group.nodes]
        key = self._api_key(name, members[0])
        plan = self._plan(args.known_image_id)
        # Where only a pull will tell the id, the deployment's is told then too: ranks of two images must never join.
        deployment: pulumi.Input[str] = plan.deployment
        if not args.known_image_id:
            deployment = args.image_id.apply(lambda image_id: self._plan(image_id).deployment)
        self._deployment = deployment
        containers = [self._container(name, rank, node, plan, key) for rank, node in enumerate(members)]
        gate = self._gate(name, members, containers, key)
        self.endpoint = pulumi.Output.all(gate.id, public_endpoint(args.settings, args.group)).apply(
            lambda v: str(v[1])
        )
        self.state = gate.state
        self.api_key = key.api_key if key is not None else None
        self.register_outputs({"endpoint": self.endpoint})

    def _plan(self, image_id: str) -> GroupPlan:
        args = self._args
        return plan_group(args.settings, args.group, args.stack, image_id, args.files)

    def _api_key(self, name: str, head: SparkNode) -> ApiKey | None:
        source = self._group.serving.api_key
        if source == "off":
            pulumi.log.warn("serving.api_key is off: whoever reaches the port can use the model", resource=self)
            return None
        return ApiKey(
            f"{name}-api-key",
            node=head.args.node.name,
            connection=connection_facts(head.args.node),
            stack=self._args.stack,
            group=self._args.group,
            source=source,
            path=key_path(head.folder, self._args.group),
            opts=pulumi.ResourceOptions(parent=self, depends_on=[head.host]),
        )

    def _container(
        self, name: str, rank: int, node: SparkNode, plan: GroupPlan, key: ApiKey | None
    ) -> docker.Container:
        args = self._args
        on_node = pulumi.ResourceOptions(
            parent=self, provider=node.docker_provider, deleted_with=node.journal, depends_on=[node.host]
        )
        rank_name = container_name(args.stack, args.group, rank)
        labels = [
            docker.VolumeLabelArgs(label="spark-vllm.stack", value=args.stack),
            docker.VolumeLabelArgs(label="spark-vllm.group", value=args.group),
        ]
        volume = docker.Volume(
            f"{name}-{node.args.node.name}-cache",
            name=f"spark-vllm-{args.stack}-{args.group}-cache",
            labels=labels,
            opts=on_node,
        )
        spec = plan.containers[rank]
        hook = pulumi.ResourceHook(
            f"{name}-{node.args.node.name}-make-way", lambda _: args.make_way(node.args.node.name, rank_name)
        )
        return docker.Container(
            f"{name}-{node.args.node.name}",
            name=rank_name,
            image=args.image_id,
            entrypoints=list(spec.entrypoint),
            command=[self._deployment if word == plan.deployment else word for word in spec.command],
            envs=list(spec.environment),
            labels=_labels({**spec.labels, "spark-vllm.deployment": self._deployment}),
            mounts=_mounts(spec),
            devices=_devices(spec),
            gpus=spec.gpus,
            capabilities=_capabilities(spec),
            ulimits=_ulimits(spec),
            healthcheck=_healthcheck(spec),
            network_mode="host",
            ipc_mode="private",
            shm_size=self._group.serving.shm_size_mib,
            restart="always",
            must_run=True,
            log_driver="json-file",
            log_opts=_LOG_OPTIONS,
            stop_timeout=STOP_TIMEOUT_S,
            destroy_grace_seconds=STOP_TIMEOUT_S,
            opts=pulumi.ResourceOptions.merge(
                on_node,
                pulumi.ResourceOptions(
                    depends_on=[volume, *args_dependencies(key), *args.after],
                    delete_before_replace=True,
                    # The provider takes a change of these and does nothing with it.
                    replace_on_changes=["healthcheck"],
                    hooks=pulumi.ResourceHookBinding(before_create=[hook]),
                ),
            ),
        )

    def _gate(
        self,
        name: str,
        members: Sequence[SparkNode],
        containers: Sequence[docker.Container],
        key: ApiKey | None,
    ) -> EndpointGate:
        args = self._args
        return EndpointGate(
            f"{name}-gate",
            stack=args.stack,
            group=args.group,
            ranks=[
                {
                    "node": node.args.node.name,
                    "connection": connection_facts(node.args.node),
                    "container": container_name(args.stack, args.group, rank),
                    "state_folder": node.folder.state(args.group),
                }
                for rank, node in enumerate(members)
            ],
            deployment=self._deployment,
            endpoint=public_endpoint(args.settings, args.group),
            model=self._group.model.served_name,
            key_path=key_path(members[0].folder, args.group) if key is not None else "",
            containers=[container.id for container in containers],
            notify=args.notify,
            opts=pulumi.ResourceOptions(parent=self, depends_on=[*containers, *args_dependencies(key)]),
        )


def args_dependencies(key: ApiKey | None) -> list[pulumi.Resource]:
    """What must be there before a rank starts and is not seen in its arguments: the key file."""
    return [key] if key is not None else []


def _labels(labels: Mapping[str, pulumi.Input[str]]) -> list[docker.ContainerLabelArgs]:
    return [docker.ContainerLabelArgs(label=key, value=labels[key]) for key in sorted(labels)]


def _mounts(spec: RankContainer) -> list[docker.ContainerMountArgs]:
    binds = [
        docker.ContainerMountArgs(type="bind", source=mount.source, target=mount.target, read_only=mount.read_only)
        for mount in spec.mounts
    ]
    return [
        *binds,
        docker.ContainerMountArgs(type="volume", source=spec.cache_volume, target=CACHE_TARGET, read_only=False),
    ]


def _devices(spec: RankContainer) -> list[docker.ContainerDeviceArgs]:
    return [docker.ContainerDeviceArgs(host_path=path, container_path=path, permissions="rwm") for path in spec.devices]


def _capabilities(spec: RankContainer) -> docker.ContainerCapabilitiesArgs | None:
    if not spec.capabilities:
        return None
    return docker.ContainerCapabilitiesArgs(adds=[f"CAP_{name}" for name in spec.capabilities])


def _ulimits(spec: RankContainer) -> list[docker.ContainerUlimitArgs]:
    return [docker.ContainerUlimitArgs(name="memlock", soft=-1, hard=-1)] if spec.memlock_unlimited else []


def _healthcheck(spec: RankContainer) -> docker.ContainerHealthcheckArgs:
    return docker.ContainerHealthcheckArgs(
        tests=["CMD", *spec.health_command], interval="30s", timeout="20s", start_period="0s", retries=3
    )
