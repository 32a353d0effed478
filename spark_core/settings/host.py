"""Settings of the hosts themselves."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from spark_core.settings.base import FrozenModel, Name

NodePath = Annotated[str, StringConstraints(pattern=r"^(/[\w.@+-]+)+$")]
"""An absolute path on a node, of plain letters: it is part of sudo rules and of unit files."""


class SetupCommand(FrozenModel):
    """A command of the owner, run on every node by the deploy user. It must be idempotent."""

    name: Name = Field(description="name of the command in resources and messages")
    create: str = Field(min_length=1, description="shell text that brings the node into the wanted state")
    delete: str | None = Field(
        default=None, description="shell text that takes it back on destroy; must be idempotent too"
    )


class HostFile(FrozenModel):
    """A file of the owner, put onto every node; what was there before comes back on destroy."""

    source: str = Field(description="file in the project folder", pattern=r"^[^/~][^\x00]*$")
    target: NodePath = Field(description="path on the node; its folder is made if only that is missing")
    mode: Annotated[str, StringConstraints(pattern=r"^0[0-7]{3}$")] = Field(
        default="0644", description="mode of the file, four octal digits in quotes"
    )
    sudo: bool = Field(default=True, description="whether root owns and writes it; false: the deploy user")

    @field_validator("source")
    @classmethod
    def _inside(cls, value: str) -> str:
        if ".." in value.split("/"):
            raise ValueError("must be inside the project folder")
        return value

    @field_validator("target")
    @classmethod
    def _not_one_of_ours(cls, value: str) -> str:
        if any(part in (".", "..") for part in value.split("/")):
            raise ValueError("must be a path without . and ..")
        if value.startswith("/etc/netplan/"):
            raise ValueError("must not be a netplan file; fabric.manage writes the one of the fabric")
        if "spark-vllm" in value or value == "/etc/docker/daemon.json":
            raise ValueError("is a file that other settings write; declare it with those")
        return value


class HostSettings(FrozenModel):
    """Declared tuning; all of it is off unless set.

    What was there is journalled on the node before it is changed, and restored on destroy and when it is no longer
    declared.
    """

    sysctls: dict[str, str] = Field(
        default_factory=dict,
        description="kernel parameters and their values, such as net.core.rmem_max: '67108864'; also set at boot",
    )
    gpu_clock_cap_mhz: int | None = Field(
        default=None,
        ge=500,
        le=3003,
        description="highest GPU clock in MHz, a cap and not a floor, set again at boot by a systemd unit; against "
        "power-offs under load owners recommend 2150 (eugr/spark-vllm-docker) or 2000 (spark-arena/sparkrun)",
    )
    swap: Literal["keep", "off"] = Field(
        default="keep",
        description="off switches all swap off, also at boot, by a systemd unit; fstab is not touched "
        "(how eagerly swap is used is the sysctl vm.swappiness)",
    )
    memlock_unlimited: bool = Field(
        default=False,
        description="whether sessions of the deploy user may lock any amount of memory; ranks may in any case",
    )
    remove_ipc: Literal[False] | None = Field(
        default=None,
        description="false: logind keeps the shared memory of the deploy user at its last logout; not set: as it is",
    )
    docker_cgroup_driver: Literal["cgroupfs", "systemd"] | None = Field(
        default=None,
        description="cgroup driver of Docker, in its daemon.json beside what is there. A change restarts Docker and "
        "every container with it. With systemd any daemon-reload takes GPUs from running containers",
    )
    memory_floor_mib: int | None = Field(
        default=None,
        ge=256,
        le=65536,
        description="MiB of available memory below which the newest container of the stack on a node is killed, after "
        "10 s, before the whole host wedges; it stays down until the next up",
    )
    watchdog: bool = Field(
        default=False, description="whether the machine resets itself when systemd hangs for 30 s; needs /dev/watchdog"
    )
    panic_reboot_s: int | None = Field(
        default=None, ge=1, le=600, description="seconds after a kernel panic or oops until the machine restarts"
    )
    packet_filter: bool = Field(
        default=False,
        description="whether Ray's ports, the status port and the ranks' own can be reached from the fabric only: a "
        "table of ours in nftables, loaded at boot by a systemd unit",
    )
    disturb_others: bool = Field(
        default=False,
        description="whether Docker may be restarted, or GPUs be lost to a daemon-reload, while containers of others "
        "run on the node",
    )
    files: tuple[HostFile, ...] = Field(default=(), description="files of the owner on every node")
    setup: tuple[SetupCommand, ...] = Field(default=(), description="commands of the owner, in order")

    @property
    def parameters(self) -> dict[str, str]:
        """All kernel parameters that are declared, also those that another setting means."""
        if self.panic_reboot_s is None:
            return dict(self.sysctls)
        return self.sysctls | {"kernel.panic": str(self.panic_reboot_s), "kernel.panic_on_oops": "1"}

    @property
    def tuning(self) -> dict[str, str]:
        """Declared tuning beside single kernel parameters: setting to value; what is off is left out."""
        values: dict[str, str | int | None] = {
            "sysctls_at_boot": "; ".join(f"{name} = {item}" for name, item in sorted(self.parameters.items())) or None,
            "gpu_clock_cap_mhz": self.gpu_clock_cap_mhz,
            "swap": self.swap if self.swap != "keep" else None,
            "memlock_unlimited": "true" if self.memlock_unlimited else None,
            "remove_ipc": "false" if self.remove_ipc is False else None,
            "docker_cgroup_driver": self.docker_cgroup_driver,
            "memory_floor_mib": self.memory_floor_mib,
            "watchdog": "true" if self.watchdog else None,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    @field_validator("swap", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: object) -> object:
        """YAML reads an unquoted off as false."""
        return "off" if value is False else value

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
        for key, item in value.items():
            if not re.fullmatch(r"[a-z0-9_]+(\.[A-Za-z0-9_-]+)+", key):
                raise ValueError(f"{key!r} is not a kernel parameter name such as net.core.rmem_max")
            if not all(re.fullmatch(r"-\d+|[\w.:,/+][\w.:,/+-]*", word, re.ASCII) for word in item.split(" ")):
                raise ValueError(f"{key}: {item!r} is not a value such as 67108864 or '4096 131072 6291456'")
        return value

    @field_validator("files")
    @classmethod
    def _targets_differ(cls, value: tuple[HostFile, ...]) -> tuple[HostFile, ...]:
        targets = [file.target for file in value]
        if len(set(targets)) != len(targets):
            raise ValueError("every file needs a target of its own")
        return value

    @field_validator("setup")
    @classmethod
    def _names_differ(cls, value: tuple[SetupCommand, ...]) -> tuple[SetupCommand, ...]:
        names = [command.name for command in value]
        if len(set(names)) != len(names):
            raise ValueError("every setup command needs a name of its own")
        return value

    @model_validator(mode="after")
    def _one_word_for_one_thing(self) -> HostSettings:
        taken = {"kernel.panic", "kernel.panic_on_oops"} & set(self.sysctls) if self.panic_reboot_s else set()
        if taken:
            raise ValueError(
                f"sysctls has {', '.join(sorted(taken))}, which panic_reboot_s sets too; declare one of them"
            )
        return self
