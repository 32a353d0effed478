"""Settings of the optional monitoring: Prometheus, Grafana, node exporter."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator, model_validator

from spark_core.settings.base import FrozenModel, Port

PinnedImage = Annotated[str, StringConstraints(pattern=r"^([\w][\w./:-]*@)?sha256:[0-9a-f]{64}$")]
"""An image by the digest of a registry, or by the id of one that is on the node already."""


class MonitoringSettings(FrozenModel):
    """Prometheus and Grafana on the head, and node exporter on every node; off where this is left out."""

    prometheus: PinnedImage = Field(
        description="Prometheus' image, pinned: name@sha256:…, or sha256:… of one that the head has"
    )
    grafana: PinnedImage | None = Field(default=None, description="Grafana's image, pinned likewise; not set: none")
    node_exporter: PinnedImage | None = Field(
        default=None,
        description="node exporter's image, pinned likewise, for every node; not set: what answers at "
        "node_exporter_port of the nodes already is asked, such as a package of theirs",
    )
    address: str = Field(
        default="127.0.0.1",
        description="address of the head on which Prometheus and Grafana listen; they ask nobody for a password, so "
        "another one than 127.0.0.1 shows everything to whoever reaches it",
    )
    prometheus_port: Port = Field(default=9090, description="port of Prometheus on the head")
    grafana_port: Port = Field(default=3000, description="port of Grafana on the head")
    node_exporter_port: Port = Field(
        default=9100, description="port of node exporter on each node, on the address at which ranks meet"
    )
    retention: Annotated[str, StringConstraints(pattern=r"^[1-9]\d{0,3}[hdwy]$")] = Field(
        default="30d", description="how long Prometheus keeps samples"
    )
    retention_size_gb: int = Field(default=4, ge=1, le=1000, description="how much disk it takes for them at most")

    @field_validator("address")
    @classmethod
    def _plain_ipv4(cls, value: str) -> str:
        try:
            return str(ipaddress.IPv4Address(value))
        except ValueError as error:
            raise ValueError(f"must be an IPv4 address ({error})") from error

    @model_validator(mode="after")
    def _ports_differ(self) -> MonitoringSettings:
        if len({self.prometheus_port, self.grafana_port, self.node_exporter_port}) < 3:
            raise ValueError("prometheus_port, grafana_port and node_exporter_port must differ")
        return self
