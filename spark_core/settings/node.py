"""Settings of one node, and of how nodes are reached."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, field_validator

from spark_core.settings.base import FrozenModel, Name, Port
from spark_core.settings.fabric import FabricInterface


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
    fabric: tuple[FabricInterface, ...] = Field(
        default=(),
        description="fabric interfaces of this node, the primary one first; two twins of a port, two entries",
    )

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
