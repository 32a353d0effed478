"""One thing on a node as it was before we changed it, and the folder in which a stack keeps such entries."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from spark_core.errors import SparkError

Kind = Literal["sysctl", "file", "link", "command"]
Domain = Literal["host", "fabric", "setup"]
Key = tuple[Kind, str]
"""What an entry is about: kind and target."""
ACTIVATIONS = ("", "unit", "swap", "logind", "docker", "watchdog")
"""What makes a changed file count (:mod:`spark_core.journal.activation`)."""


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
        activation: What makes a change of the file count in the running system, one of :data:`ACTIVATIONS`.
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


def parse_entry(text: str) -> JournalEntry:
    """The entry that a file holds.

    Nothing is undone by an entry that is not understood wholly: its file would be taken for one that is to go.

    Raises:
        ValueError: what is not understood, in words.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("no whole JSON" if text.strip() else "an empty file") from None
    if not isinstance(values, dict):
        raise ValueError("no object of JSON")
    unknown = sorted(set(values) - {one.name for one in fields(JournalEntry)})
    if unknown:
        raise ValueError(f"{unknown[0]}, as only another version of this program writes")
    wrong = [name for name, fits in _FITS.items() if name in values and not fits(values[name])]
    missing = sorted({"kind", "target", "old"} - set(values))
    if wrong or missing:
        name = (wrong or missing)[0]
        raise ValueError(f"{name} {values[name]!r:.60}" if name in values else f"no {name}")
    entry = JournalEntry(**values)
    if not _OLD_FITS[entry.kind](entry.old):
        raise ValueError(f"old {entry.old!r:.60} of a {entry.kind}")
    return entry


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_text_or_none(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_base64_or_none(value: str | None) -> bool:
    try:
        base64.b64decode(value or "", validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "kind": lambda value: value in get_args(Kind),
    "target": lambda value: _is_text(value) and value != "",
    "old": _is_text_or_none,
    "mode": lambda value: value is None or bool(_is_text(value) and re.fullmatch("[0-7]{3,4}", value)),
    "owner": lambda value: value is None or bool(_is_text(value) and re.fullmatch(r"\d+:\d+", value, re.ASCII)),
    "up": lambda value: isinstance(value, bool),
    "addresses": _are_texts,
    "added": _are_texts,
    "parameters": lambda value: isinstance(value, dict) and _are_texts(list(value.values())),
    "at": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "wanted": _is_text_or_none,
    "domain": lambda value: value in (*get_args(Domain), ""),
    "sudo": lambda value: isinstance(value, bool),
    "folder": _is_text_or_none,
    "activation": lambda value: value in ACTIVATIONS,
    "live": _is_text_or_none,
}
"""What each part of an entry may be."""
_OLD_FITS: Mapping[Kind, Callable[[str | None], bool]] = {
    "sysctl": lambda old: old is not None,
    "file": _is_base64_or_none,
    "link": lambda old: old is not None and re.fullmatch(r"\d{1,6}", old, re.ASCII) is not None,
    "command": lambda _: True,
}
"""What the old value of each kind may be."""


def require_stack_name(stack: str) -> None:
    """Refuse a name that is none for a folder which a shell's ``*`` finds.

    Raises:
        SparkError: the name begins with a dot or a hyphen, or holds what Pulumi does not allow either.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", stack):
        raise SparkError(
            f"expected a name of the stack that begins with a letter, a digit or _, found {stack!r}",
            where="stack",
            do="make a stack of another name (pulumi stack init)",
        )


@dataclass(frozen=True)
class StackFolder:
    """The folder that one stack owns on one node.

    Args:
        root: Our folder on the node, shared by the stacks that use the node.
        stack: Name of the stack.
    """

    root: str
    stack: str

    def __post_init__(self) -> None:
        require_stack_name(self.stack)

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
