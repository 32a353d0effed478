"""The containers that watch a stack: Prometheus and Grafana on the head, node exporter on every node. Pure.

Their images are the official ones, or laid out like them. They get little memory, and none of them gets a secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from spark_core.group import LABEL, BindMount
from spark_core.monitoring.files import address_of, monitoring_files
from spark_core.proof.idle import PROBE_LABEL
from spark_core.settings import Settings
from spark_core.settings.monitoring import MonitoringSettings

Part = Literal["prometheus", "grafana", "node-exporter"]
MEMORY_MIB: Mapping[Part, int] = {"prometheus": 768, "grafana": 384, "node-exporter": 128}
"""Bounds: on a Spark this is memory of the model too."""

_GRAFANA = {
    "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION": "true",
    "GF_AUTH_ANONYMOUS_ENABLED": "true",
    "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
    "GF_AUTH_BASIC_ENABLED": "false",
    "GF_AUTH_DISABLE_LOGIN_FORM": "true",
    "GF_ANALYTICS_REPORTING_ENABLED": "false",
    "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
    "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
    "GF_NEWS_NEWS_FEED_ENABLED": "false",
    "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": "/etc/grafana/spark-vllm/dashboard.json",
}
"""Whoever reaches it may look and change nothing: there is no user, and so no password. It asks nobody outside."""


@dataclass(frozen=True)
class WatchContainer:
    """One container.

    Attributes:
        part: What it is.
        node: Name of its node.
        name: Name in Docker.
        image: Pinned image.
        entrypoint: None where the image's own is used.
        command: Arguments.
        environment: Variables.
        files: Path in the container to content, put there before it starts.
        mounts: Bind mounts.
        volume: (name, path in the container) of the volume that keeps its data, or None.
        pid_host: Whether it sees the node's processes.
    """

    part: Part
    node: str
    name: str
    image: str
    entrypoint: tuple[str, ...] | None
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[BindMount, ...] = ()
    volume: tuple[str, str] | None = None
    pid_host: bool = False

    @property
    def labels(self) -> dict[str, str]:
        """By the stack's label destroy finds it, by the probe's a look for idle nodes passes it by."""
        stack = self.name.removeprefix("spark-vllm-").removesuffix(f"-{self.part}")
        return {f"{LABEL}.stack": stack, PROBE_LABEL: "monitoring"}

    @property
    def is_local(self) -> bool:
        """Whether the node has the image already, so that nobody is asked for it."""
        return self.image.startswith("sha256:")


def plan_monitoring(settings: Settings, group_name: str, stack: str) -> tuple[WatchContainer, ...]:
    """The containers of a stack's monitoring; none where it is off."""
    monitoring = settings.monitoring
    if monitoring is None:
        return ()
    head = settings.groups[group_name].nodes[0]
    files = monitoring_files(settings, group_name, stack)
    found = [_prometheus(monitoring, head, stack, files.prometheus)]
    if monitoring.grafana is not None:
        where = {
            "GF_SERVER_HTTP_ADDR": monitoring.address,
            "GF_SERVER_HTTP_PORT": str(monitoring.grafana_port),
        }
        found.append(
            WatchContainer(
                "grafana",
                head,
                monitoring_name(stack, "grafana"),
                monitoring.grafana,
                None,
                environment=_GRAFANA | where,
                files={f"/etc/grafana/{path}": text for path, text in files.grafana.items()},
            )
        )
    if monitoring.node_exporter is not None:
        found += [
            WatchContainer(
                "node-exporter",
                node.name,
                monitoring_name(stack, "node-exporter"),
                monitoring.node_exporter,
                ("/bin/node_exporter",),
                (
                    f"--web.listen-address={address_of(node)}:{monitoring.node_exporter_port}",
                    "--path.rootfs=/host",
                ),
                mounts=(BindMount("/", "/host"),),
                pid_host=True,
            )
            for node in settings.nodes
        ]
    return tuple(found)


def monitoring_name(stack: str, part: Part) -> str:
    """Name of a container of the monitoring, the same on every machine that runs the stack."""
    return f"spark-vllm-{stack}-{part}"


def monitoring_ports(settings: Settings, node: str) -> dict[int, str]:
    """The ports that the monitoring needs on a node, and the setting of each."""
    monitoring = settings.monitoring
    if monitoring is None:
        return {}
    ports = {monitoring.node_exporter_port: "monitoring.node_exporter_port"} if monitoring.node_exporter else {}
    if node in [group.nodes[0] for group in settings.groups.values()]:
        ports[monitoring.prometheus_port] = "monitoring.prometheus_port"
        if monitoring.grafana is not None:
            ports[monitoring.grafana_port] = "monitoring.grafana_port"
    return ports


def _prometheus(monitoring: MonitoringSettings, head: str, stack: str, files: Mapping[str, str]) -> WatchContainer:
    return WatchContainer(
        "prometheus",
        head,
        monitoring_name(stack, "prometheus"),
        monitoring.prometheus,
        ("/bin/prometheus",),
        (
            "--config.file=/etc/prometheus/prometheus.yml",
            "--storage.tsdb.path=/prometheus",
            f"--storage.tsdb.retention.time={monitoring.retention}",
            f"--storage.tsdb.retention.size={monitoring.retention_size_gb}GB",
            f"--web.listen-address={monitoring.address}:{monitoring.prometheus_port}",
        ),
        files={f"/etc/prometheus/{path}": text for path, text in files.items()},
        volume=(f"{monitoring_name(stack, 'prometheus')}-data", "/prometheus"),
    )
