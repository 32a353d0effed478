"""Settings of the RoCE fabric between the nodes."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator

from spark_core.settings.base import FrozenModel

Netdev = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,15}$")]
NetplanPath = Annotated[str, StringConstraints(pattern=r"^/etc/netplan/[\w.-]+\.yaml$")]


class FabricInterface(FrozenModel):
    """One fabric interface of one node. Names are per node: two nodes may use different cages."""

    netdev: Netdev = Field(description="network device, such as enp1s0f1np1")
    address: str = Field(description="IPv4 address with prefix length, such as 192.168.200.12/24")
    hca: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]{1,32}$")] | None = Field(
        default=None, description="RDMA device of the same function, such as rocep1s0f1; default: what the node has"
    )

    @field_validator("address")
    @classmethod
    def _ipv4_with_prefix(cls, value: str) -> str:
        if "/" not in value:
            raise ValueError("must carry its prefix length, such as 192.168.200.12/24")
        try:
            interface = ipaddress.IPv4Interface(value)
        except ValueError as error:
            raise ValueError(f"must be an IPv4 address with prefix length ({error})") from error
        if interface.network.prefixlen < 31 and interface.ip in (
            interface.network.network_address,
            interface.network.broadcast_address,
        ):
            raise ValueError("must be a host address, not the network's or the broadcast address")
        return value

    @property
    def ip(self) -> str:
        """The address without its prefix length."""
        return str(ipaddress.IPv4Interface(self.address).ip)

    @property
    def network(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Interface(self.address).network


class FabricSettings(FrozenModel):
    """The fabric as a whole."""

    manage: bool = Field(
        default=False,
        description="whether netplan files for the fabric interfaces are written; false: they are only checked",
    )
    mtu_bytes: int = Field(default=9000, ge=1280, le=9978, description="MTU of every fabric interface")
    proof: Literal["idle", "always", "off"] = Field(
        default="idle",
        description="when the fabric's bandwidth and the collectives of the serving image are proven during up: on "
        "idle nodes only, always (also beside a group that serves), or never",
    )
    minimum_gbps: float | None = Field(
        default=None,
        gt=0,
        description="floor in Gb/s of what two nodes must move in each direction over all their links together; "
        "default: what healthy Sparks move",
    )
    topology: Literal["switch", "ring"] = Field(
        default="switch",
        description="switch: every node is on every fabric subnet, as over one cable or a switch; ring: each subnet "
        "joins two of three or more nodes, and ranks meet at nodes[].control_address",
    )
    rdma: Literal["required", "preferred", "off"] | None = Field(
        default=None,
        description="whether ranks must talk over RDMA, may fall back to sockets with a warning, or use sockets; "
        "default: required on hardware spark, off on cpu",
    )
    netplan_file: NetplanPath = Field(
        default="/etc/netplan/60-spark-vllm.yaml", description="the netplan file that is ours"
    )
    take_over: tuple[NetplanPath, ...] = Field(
        default=(),
        description="netplan files of others that configure the fabric interfaces and may give way to ours; destroy "
        "puts them back as they were",
    )
    rollback_after_s: int = Field(
        default=45,
        ge=20,
        le=600,
        description="seconds after which a node takes a network change back by itself, unless it has answered over a "
        "new connection by then",
    )
