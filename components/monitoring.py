"""``Monitoring``: Prometheus, Grafana and node exporter in containers of their own, where the settings ask for them.

It stands beside the group, not behind it: what watches a deployment has to be there while that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pulumi
import pulumi_docker as docker

from components.spark_node import SparkNode
from spark_core.monitoring.containers import MEMORY_MIB, WatchContainer, plan_monitoring
from spark_core.settings import Settings

_LOG_OPTIONS = {"max-size": "10m", "max-file": "2"}


@dataclass(frozen=True, kw_only=True)
class MonitoringArgs:
    """What is watched."""

    settings: Settings
    """The settings of the stack, with every interface filled in."""
    stack: str
    """Name of the stack."""
    group: str
    """Name of the group."""
    nodes: Mapping[str, SparkNode]
    """All nodes of the stack by name."""
    make_way: Callable[[str, str], None]
    """Called with node and container name before a container is created."""


class Monitoring(pulumi.ComponentResource):
    """The containers that watch a stack.

    A changed configuration replaces the container that reads it; Prometheus' data lie in a volume of its own, which
    destroy removes with everything else of the stack. Images are pulled by each node's own daemon and are kept.
    """

    def __init__(self, name: str, args: MonitoringArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spark:monitoring:Monitoring", name, None, opts)
        self._args = args
        for spec in plan_monitoring(args.settings, args.group, args.stack):
            self._container(spec, args.nodes[spec.node])
        self.register_outputs({})

    def _container(self, spec: WatchContainer, node: SparkNode) -> None:
        on_node = pulumi.ResourceOptions(
            parent=self, provider=node.docker_provider, deleted_with=node.journal, depends_on=[node.host]
        )
        name = f"{spec.part}-{spec.node}"
        image: pulumi.Input[str] = spec.image
        if not spec.is_local:
            image = docker.RemoteImage(f"{name}-image", name=spec.image, keep_locally=True, opts=on_node).image_id
        before: list[pulumi.Resource] = []
        if spec.volume is not None:
            labels = [docker.VolumeLabelArgs(label=key, value=value) for key, value in sorted(spec.labels.items())]
            before.append(docker.Volume(f"{name}-data", name=spec.volume[0], labels=labels, opts=on_node))
        make_way = self._args.make_way
        hook = pulumi.ResourceHook(f"{name}-make-way", lambda _: make_way(spec.node, spec.name))
        docker.Container(
            name,
            name=spec.name,
            image=image,
            entrypoints=list(spec.entrypoint) if spec.entrypoint is not None else None,
            command=list(spec.command) or None,
            envs=[f"{key}={value}" for key, value in sorted(spec.environment.items())] or None,
            uploads=[
                docker.ContainerUploadArgs(file=path, content=content) for path, content in sorted(spec.files.items())
            ]
            or None,
            mounts=_mounts(spec) or None,
            labels=[docker.ContainerLabelArgs(label=key, value=value) for key, value in sorted(spec.labels.items())],
            network_mode="host",
            pid_mode="host" if spec.pid_host else None,
            memory=MEMORY_MIB[spec.part],
            memory_swap=MEMORY_MIB[spec.part],
            restart="always",
            must_run=True,
            log_driver="json-file",
            log_opts=_LOG_OPTIONS,
            opts=pulumi.ResourceOptions.merge(
                on_node,
                pulumi.ResourceOptions(
                    depends_on=before,
                    delete_before_replace=True,
                    hooks=pulumi.ResourceHookBinding(before_create=[hook]),
                ),
            ),
        )


def monitor_stack(name: str, args: MonitoringArgs) -> Monitoring | None:
    """The monitoring of a stack; None where the settings ask for none."""
    return Monitoring(name, args) if args.settings.monitoring is not None else None


def _mounts(spec: WatchContainer) -> list[docker.ContainerMountArgs]:
    mounts = [
        docker.ContainerMountArgs(type="bind", source=mount.source, target=mount.target, read_only=mount.read_only)
        for mount in spec.mounts
    ]
    if spec.volume is not None:
        source, target = spec.volume
        mounts.append(docker.ContainerMountArgs(type="volume", source=source, target=target, read_only=False))
    return mounts
