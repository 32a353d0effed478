"""Settings of the RoCE fabric between the nodes."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator

from spark_core.settings.base import FrozenModel


class FabricInterface(FrozenModel):
    """One fabric interface of one node. Names are per node: two nodes may use different cages."""

    netdev: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,15}$")] = Field(
        description="network device, such as enp1s0f1np1"
    )
    address: str = Field(description="IPv4 address with prefix length, such as 192.168.200.12/24")
    hca: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]{1,32}$")] | None = Field(
        default=None, description="RDMA device of the same function, such as rocep1s0f1; none on hosts without RDMA"
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
    netplan_file: Annotated[str, StringConstraints(pattern=r"^/etc/netplan/[\w.-]+\.yaml$")] = Field(
        default="/etc/netplan/60-spark-vllm.yaml", description="the netplan file that is ours"
    )
