"""The settings of a stack as a whole, and what must fit together across them."""

from __future__ import annotations

import difflib
import ipaddress
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from spark_core.findings import KINDS, Severity
from spark_core.settings.base import FrozenModel, Name
from spark_core.settings.fabric import FabricSettings
from spark_core.settings.group import GroupSettings
from spark_core.settings.host import HostSettings
from spark_core.settings.hub import HubSettings
from spark_core.settings.image import ImageSettings
from spark_core.settings.monitoring import MonitoringSettings
from spark_core.settings.node import NodeSettings, SshSettings
from spark_core.transport.connection import ConnectionSpec

ContainerName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{1,127}$")]
"""A container's name as Docker takes it."""

GPUS_PER_NODE = 1
"""A DGX Spark has one GPU."""


class Settings(FrozenModel):
    """Everything that a stack file may say."""

    hardware: Literal["spark", "cpu"] = Field(
        default="spark",
        description="what the nodes are: spark gives containers GPU, RDMA devices and locked memory; cpu gives none",
    )
    preflight: Literal["live", "off"] = Field(
        default="live",
        description="whether preview looks at the nodes; off renders a plan where they cannot be reached",
    )
    severities: dict[str, Severity] = Field(
        default_factory=dict,
        description="severity of kinds of findings (docs/findings.md): fail, warn, unknown or ignore, "
        "such as mtu-differs: warn",
    )
    policy_file: str = Field(
        default="",
        description="Python file in the project folder with rules of your own, which preview and up ask: it defines "
        "check(settings) and gives back texts (docs/how-to/automation.md)",
    )
    abandoned_nodes: tuple[Name, ...] = Field(
        default=(),
        description="nodes that are gone for good: they are never contacted again, and what was made on them is "
        "forgotten and named instead of being put back",
    )
    replaces: tuple[ContainerName, ...] = Field(
        default=(),
        description="names of another launcher's containers that this stack is to replace: while they run, preview "
        "warns instead of failing, up refuses, and `python -m automation cutover` stops them",
    )
    # It is part of unit files and of sudo's rules, and folders below it are removed.
    node_root: Annotated[str, StringConstraints(pattern=r"^(/[\w.@+{}-]*[\w@+}-])+$")] = Field(
        default="/home/{user}/.spark-vllm",
        description="folder of ours on each node; {user} stands for the node's deploy user",
    )
    ssh: SshSettings = Field(default_factory=SshSettings)
    nodes: tuple[NodeSettings, ...] = Field(min_length=1, description="the machines")
    fabric: FabricSettings = Field(default_factory=FabricSettings)
    host: HostSettings = Field(default_factory=HostSettings)
    image: ImageSettings
    hub: HubSettings = Field(default_factory=HubSettings)
    monitoring: MonitoringSettings | None = Field(
        default=None, description="Prometheus and Grafana that watch the stack; not set: none"
    )
    groups: dict[Name, GroupSettings] = Field(description="what is served; one group is supported so far")

    @field_validator("severities")
    @classmethod
    def _known_kinds(cls, value: dict[str, Severity]) -> dict[str, Severity]:
        for code in value:
            if code not in KINDS:
                near = difflib.get_close_matches(code, KINDS, n=1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else " (docs/findings.md lists them)"
                raise ValueError(f"{code!r} is not a kind of finding{hint}")
        return value

    @field_validator("monitoring", mode="before")
    @classmethod
    def _empty_is_none(cls, value: object) -> object:
        return None if value == {} else value  # what the engine gives where a stack file says nothing

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        problems = [*self._node_problems(), *self._fabric_problems(), *self._group_problems()]
        problems += self._monitoring_problems()
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _node_problems(self) -> list[str]:
        problems = []
        for attribute in ("name", "management_address"):
            seen: dict[str, int] = {}
            for index, node in enumerate(self.nodes):
                value = getattr(node, attribute)
                if value in seen:
                    problems.append(
                        f"nodes[{index}].{attribute}: found {value!r}, which nodes[{seen[value]}] already has"
                    )
                seen.setdefault(value, index)
        return [*problems, *self._via_problems()]

    def _via_problems(self) -> list[str]:
        problems = []
        known = {node.name: node for node in self.nodes}
        for index, node in enumerate(self.nodes):
            key = f"nodes[{index}].via"
            if node.via is None:
                continue
            if node.via == node.name:
                problems.append(f"{key}: found the node itself")
            elif node.via not in known:
                problems.append(f"{key}: found {node.via!r}, known nodes are {', '.join(known)}")
            elif known[node.via].via:
                problems.append(
                    f"{key}: found {node.via!r}, which is itself reached through {known[node.via].via!r}; "
                    "expected a node that is reached directly"
                )
        return problems

    def _fabric_problems(self) -> list[str]:
        problems = []
        owner: dict[str, str] = {}
        sides: dict[str, set[int]] = {}
        for index, node in enumerate(self.nodes):
            if node.name in self.abandoned_nodes:
                continue
            if len(self.nodes) > 1 and not node.fabric and self.preflight == "off":
                problems.append(
                    f"nodes[{index}].fabric: found none, and with preflight off none is discovered; declare it"
                )
            networks: dict[ipaddress.IPv4Network, str] = {}
            for place, interface in enumerate(node.fabric):
                key = f"nodes[{index}].fabric[{place}]"
                if interface.ip in owner:
                    problems.append(f"{key}.address: found {interface.ip}, which {owner[interface.ip]} already has")
                owner.setdefault(interface.ip, key)
                shared = next((k for other, k in networks.items() if other.overlaps(interface.network)), None)
                if shared is not None:
                    problems.append(
                        f"{key}.address: found the network {interface.network} of {shared}; "
                        "two interfaces of one node must be on different subnets"
                    )
                networks.setdefault(interface.network, key)
                sides.setdefault(str(interface.network), set()).add(index)
            if len({interface.netdev for interface in node.fabric}) != len(node.fabric):
                problems.append(f"nodes[{index}].fabric: found one netdev twice")
            if (node.control_address is None) != (node.control_netdev is None):
                problems.append(f"nodes[{index}]: control_address and control_netdev go together")
        if self.fabric.topology == "ring":
            problems += [
                f"fabric.topology: found ring, but the subnet {network} joins {len(joined)} nodes, expected two"
                for network, joined in sides.items()
                if len(joined) > 2
            ]
            if self.preflight == "off" and any(node.control_address is None for node in self.nodes):
                problems.append("fabric.topology: ring needs nodes[].control_address with preflight off")
        if self.host.packet_filter and not all(node.fabric for node in self.nodes):
            problems.append("host.packet_filter: found a node without fabric; declare nodes[].fabric of every node")
        if self.fabric.netplan_file in self.fabric.take_over:
            problems.append("fabric.take_over: found netplan_file itself, which is ours")
        return problems

    def _group_problems(self) -> list[str]:
        problems = []
        if len(self.groups) != 1:
            problems.append(f"groups: found {len(self.groups)}, exactly one group is supported so far")
        known = {node.name: node for node in self.nodes}
        for name, group in self.groups.items():
            key = f"groups.{name}"
            unknown = [node for node in group.nodes if node not in known]
            problems += [f"{key}.nodes: found {node!r}, known nodes are {', '.join(known)}" for node in unknown]
            if len(set(group.nodes)) != len(group.nodes):
                problems.append(f"{key}.nodes: found a node twice")
            gpus = len(group.nodes) * GPUS_PER_NODE
            if group.serving.world_size != gpus:
                problems.append(
                    f"{key}.serving: found tensor_parallel_size {group.serving.tensor_parallel_size} times "
                    f"pipeline_parallel_size {group.serving.pipeline_parallel_size} = "
                    f"{group.serving.world_size} ranks, "
                    f"expected {gpus}, one for each node's GPU"
                )
            networks = {str(known[n].fabric[0].network) for n in group.nodes if n in known and known[n].fabric}
            if len(networks) > 1 and self.fabric.topology == "switch":
                problems.append(
                    f"{key}.nodes: found primary fabric interfaces on different subnets ({', '.join(sorted(networks))})"
                )
        return problems

    def _monitoring_problems(self) -> list[str]:
        if self.monitoring is None:
            return []
        return [
            f"monitoring.{field}: found {port}, which groups.{name}.serving.{other} already has"
            for name, group in self.groups.items()
            for other in group.serving.port_fields
            for field in ("prometheus_port", "grafana_port", "node_exporter_port")
            if (port := getattr(self.monitoring, field)) == getattr(group.serving, other)
        ]

    def node(self, name: str) -> NodeSettings:
        """The node of that name."""
        return next(node for node in self.nodes if node.name == name)

    def root_of(self, node: NodeSettings) -> str:
        """Our folder on a node."""
        root = self.node_root
        if node.user == "root":
            root = root.replace("/home/{user}", "/root")
        return root.replace("{user}", node.user)

    def hub_cache_of(self, node: NodeSettings) -> str | None:
        """The hub cache that a node may have; None if none is to be used."""
        cache = self.hub.cache
        if cache is None or not cache.startswith("~"):
            return cache
        return ("/root" if node.user == "root" else f"/home/{node.user}") + cache.removeprefix("~")

    def connection_of(self, node: NodeSettings) -> ConnectionSpec:
        """How a node is reached."""
        return ConnectionSpec(
            node=node.name,
            address=node.management_address,
            user=node.user,
            port=node.ssh_port,
            host_key=node.host_key,
            ssh_config=self.ssh.config_file,
            via=self.connection_of(self.node(node.via)) if node.via else None,
        )
