"""Settings of one node, and of how nodes are reached."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator

from spark_core.settings.base import FrozenModel, Name, Port
from spark_core.settings.fabric import FabricInterface, Netdev


class SshSettings(FrozenModel):
    """How nodes are reached. Identity, agent and jump hosts come from OpenSSH's own configuration."""

    config_file: str | None = Field(
        default=None, description="ssh configuration file to use instead of ~/.ssh/config; ~ is allowed"
    )
    sudo_password_file: str | None = Field(
        default=None,
        description="file on the controller that holds the deploy user's sudo password (mode 600); "
        "the secret sudo_password does the same; not needed if sudo asks for none",
    )
    boot_wait_s: int = Field(
        default=60,
        ge=0,
        le=3600,
        description="seconds that `up` waits for a node whose sshd does not answer, since it may be booting; "
        "preview and destroy do not wait",
    )


class NodeSettings(FrozenModel):
    """One DGX Spark."""

    name: Name = Field(description="name of the node in resources, messages and outputs")
    management_address: str = Field(
        description="what ssh connects to: an address, or a Host alias of the ssh configuration", min_length=1
    )
    user: Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")] = Field(
        description="deploy user on the node; member of the docker group"
    )
    ssh_port: Port | None = Field(default=None, description="sshd's port; default: what the ssh configuration says")
    host_key: Annotated[str, StringConstraints(pattern=r"^(ssh-|ecdsa-)\S+ \S+")] | None = Field(
        default=None,
        description="pinned host key, such as 'ssh-ed25519 AAAA…'; default: the entry in your known_hosts; "
        "a node without either is refused",
    )
    via: Name | None = Field(
        default=None,
        description="name of another node that this one is reached through, for a node whose only address is on the "
        "fabric; that node must be reached directly",
    )
    fabric: tuple[FabricInterface, ...] = Field(
        default=(),
        description="fabric interfaces of this node, the primary one first; two twins of a port, two entries",
    )

    control_address: str | None = Field(
        default=None,
        description="own IPv4 address at which ranks meet, instead of the primary fabric address; only where no fabric "
        "subnet joins all nodes (fabric.topology: ring); default there: the address that ssh comes in at",
    )
    control_netdev: Netdev | None = Field(default=None, description="network device of control_address")

    @field_validator("control_address")
    @classmethod
    def _plain_ipv4(cls, value: str | None) -> str | None:
        try:
            return None if value is None else str(ipaddress.IPv4Address(value))
        except ValueError as error:
            raise ValueError(f"must be an IPv4 address without prefix length ({error})") from error

    @field_validator("management_address")
    @classmethod
    def _one_word(cls, value: str) -> str:
        if value.startswith("-") or any(letter.isspace() for letter in value):
            raise ValueError("must be an address or an ssh Host alias, without blanks and without a leading '-'")
        return value

    @property
    def fabric_address(self) -> str | None:
        """The node's own address on the primary fabric interface, without the prefix length."""
        return self.fabric[0].ip if self.fabric else None

    @property
    def rank_address(self) -> str | None:
        """The node's own address at which the ranks of a group meet."""
        return self.control_address or self.fabric_address
