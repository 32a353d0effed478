"""Settings of the hosts themselves."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from spark_core.settings.base import FrozenModel, Name


class SetupCommand(FrozenModel):
    """A command of the owner, run on every node by the deploy user. It must be idempotent."""

    name: Name = Field(description="name of the command in resources and messages")
    create: str = Field(min_length=1, description="shell text that brings the node into the wanted state")
    delete: str | None = Field(
        default=None, description="shell text that takes it back on destroy; must be idempotent too"
    )


class HostSettings(FrozenModel):
    """Declared tuning. Old values are journalled on the node before they are changed, and restored on destroy."""

    sysctls: dict[str, str] = Field(
        default_factory=dict, description="kernel parameters and their values, such as net.core.rmem_max: '67108864'"
    )
    setup: tuple[SetupCommand, ...] = Field(default=(), description="commands of the owner, in order")

    @field_validator("sysctls", mode="before")
    @classmethod
    def _values_are_text(cls, value: object) -> object:
        if isinstance(value, dict):
            return {
                key: " ".join(str(item).split()) for key, item in value.items() if not isinstance(item, dict | list)
            } | {key: item for key, item in value.items() if isinstance(item, dict | list)}
        return value

    @field_validator("sysctls")
    @classmethod
    def _keys_are_sysctls(cls, value: dict[str, str]) -> dict[str, str]:
        for key in value:
            if not re.fullmatch(r"[a-z0-9_]+(\.[A-Za-z0-9_-]+)+", key):
                raise ValueError(f"{key!r} is not a kernel parameter name such as net.core.rmem_max")
        return value

    @field_validator("setup")
    @classmethod
    def _names_differ(cls, value: tuple[SetupCommand, ...]) -> tuple[SetupCommand, ...]:
        names = [command.name for command in value]
        if len(set(names)) != len(names):
            raise ValueError("every setup command needs a name of its own")
        return value
