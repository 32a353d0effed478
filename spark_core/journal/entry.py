"""One thing on a node as it was before we changed it, and the folder in which a stack keeps such entries."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["sysctl", "file", "link", "command"]
Domain = Literal["host", "fabric", "setup"]
Key = tuple[Kind, str]
"""What an entry is about: kind and target."""


@dataclass(frozen=True)
class JournalEntry:
    """One thing on a node as it was before we changed it.

    Attributes:
        kind: ``sysctl`` (target is the parameter), ``file`` (target is the path), ``link`` (target is the netdev) or
            ``command`` (target is the name of a setup command of the owner).
        target: What was changed.
        old: The value before: text of the sysctl, base64 of the file or None if there was none, MTU of the link, the
            text that takes a setup command back.
        mode: Octal mode of the file before.
        owner: ``user:group`` of the file before, as numbers.
        up: Whether the link was up.
        addresses: IPv4 addresses of the link before.
        added: IPv4 addresses that we put on the link; only these are taken away, not what others have added since.
        parameters: Kernel parameters of the link before, by their path below /proc/sys/net.
        at: Unix time, for the order of undoing.
        wanted: What the stack declares, so that two stacks can be compared; None if an older version wrote the entry.
        domain: Whose resource it belongs to; empty in entries of older versions.
        sudo: Whether root is needed to put a file back.
        folder: The folder that was made for the file; it goes again when it is empty.
        activation: What makes a change of the file count in the running system (:mod:`spark_core.journal.activation`).
        live: What the running system had before, where the file alone does not say it.
    """

    kind: Kind
    target: str
    old: str | None
    mode: str | None = None
    owner: str | None = None
    up: bool = True
    addresses: Sequence[str] = ()
    added: Sequence[str] = ()
    parameters: Mapping[str, str] = field(default_factory=dict)
    at: float = 0.0
    wanted: str | None = None
    domain: Domain | Literal[""] = ""
    sudo: bool = True
    folder: str | None = None
    activation: str = ""
    live: str | None = None

    @property
    def key(self) -> Key:
        return self.kind, self.target

    @property
    def file_name(self) -> str:
        return f"{self.kind}-{hashlib.sha256(self.target.encode()).hexdigest()[:16]}.json"

    @property
    def shared(self) -> bool:
        """Whether two stacks that name this target mean the same thing; setup commands are each stack's own."""
        return self.kind != "command"

    @property
    def part(self) -> Domain:
        """Whose resource the entry belongs to, also for entries of older versions."""
        if self.domain:
            return self.domain
        if self.kind == "command":
            return "setup"
        return "fabric" if self.kind == "link" or self.target.startswith("/etc/netplan/") else "host"


@dataclass(frozen=True)
class StackFolder:
    """The folder that one stack owns on one node.

    Args:
        root: Our folder on the node, shared by the stacks that use the node.
        stack: Name of the stack.
    """

    root: str
    stack: str

    @property
    def path(self) -> str:
        return f"{self.root}/stacks/{self.stack}"

    @property
    def journal(self) -> str:
        return f"{self.path}/journal"

    @property
    def files(self) -> str:
        return f"{self.path}/files"

    @property
    def secrets(self) -> str:
        return f"{self.path}/secrets"

    @property
    def staging(self) -> str:
        """Where content waits that root is about to put in place."""
        return f"{self.path}/staging"

    @property
    def weights(self) -> str:
        return f"{self.root}/weights"

    def state(self, group: str) -> str:
        """Host folder for the status and the logs of a group's rank."""
        return f"{self.path}/state/{group}"
