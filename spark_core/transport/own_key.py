"""The key that this user logs in with: found, made, and put onto a node."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spark_core.errors import UnreachableError
from spark_core.transport.base import Command, script
from spark_core.transport.connection import Connection
from spark_core.transport.keys import fingerprint, locked_private_keys, usable_private_key

_TOOL_S = 20.0
_INSTALL = """
umask 077; cd; mkdir -p .ssh; file=.ssh/authorized_keys
[ ! -s "$file" ] || [ -z "$(tail -c 1 "$file")" ] || echo >> "$file"
grep -qxF -- "$1" "$file" 2>/dev/null || printf '%s\\n' "$1" >> "$file"
grep -qxF -- "$1" "$file"
"""


@dataclass(frozen=True)
class OwnKey:
    """A key that can be used without asking anybody for anything.

    Attributes:
        public: Its public half, as a line of ``authorized_keys``.
        place: Its file, or ``the ssh-agent``.
    """

    public: str
    place: str

    @property
    def told(self) -> str:
        """Kind, fingerprint and place."""
        kind, blob = self.public.split()[:2]
        return f"{kind} {fingerprint(f'{kind} {blob}')} ({self.place})"


def find_own_key(connection: Connection) -> OwnKey | None:
    """The key that ssh would log in with at a node, if there is one.

    Raises:
        UnreachableError: the only keys are locked by a passphrase, and no agent holds any.
    """
    for name in connection.identity_files:
        try:
            usable = usable_private_key(Path(name).read_text())
        except (OSError, UnicodeDecodeError):
            continue
        if usable and (public := _said(["ssh-keygen", "-y", "-f", name])):
            return OwnKey(public[0], name)
    if connection.has_agent:
        held = _said(_with_agent(connection, ["ssh-add", "-L"]))
        known = {_blob(text) for name in connection.identity_files if (text := _read(f"{name}.pub"))}
        first = next((line for line in held if _blob(line) in known), held[0] if held else None)
        if first is not None:
            return OwnKey(first, "the ssh-agent")
    locked = locked_private_keys(connection.identity_files)
    if locked:
        raise UnreachableError(
            f"expected a key that can be used without a prompt, found that a passphrase locks {', '.join(locked)}",
            node=connection.node,
            step="authentication",
            code="authentication-failed",
            do=f"such a key needs an ssh-agent: ssh-add {locked[0]}",
        )
    return None


def place_for_key(connection: Connection) -> Path:
    """Where a new key belongs: the first ed25519 file that ssh would look for."""
    files = connection.identity_files
    return Path(next((name for name in files if "ed25519" in name), files[0] if files else "~/.ssh/id_ed25519"))


def make_own_key(path: Path) -> OwnKey:
    """Make an ed25519 key without a passphrase; a file that is there stays.

    Raises:
        UnreachableError: it could not be made.
    """
    path = path.expanduser()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    done = subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TOOL_S,
        check=False,
    )
    public = _read(f"{path}.pub")
    if done.returncode != 0 or not public:
        found = next(iter((done.stderr or done.stdout).strip().splitlines()), "nothing")
        raise UnreachableError(
            f"expected to make a key at {path}, found: {found}",
            node="here",
            step="ssh-keygen",
            code="ssh-configuration",
        )
    return OwnKey(public.strip(), str(path))


def install_key(key: OwnKey) -> Command:
    """The command that lets a node take a key; every other line of its file stays."""
    return script(_INSTALL, key.public, timeout_s=40, purpose="expected to install the key")


def _with_agent(connection: Connection, words: Sequence[str]) -> list[str]:
    return ["env", *([f"SSH_AUTH_SOCK={connection.identity_agent}"] if connection.identity_agent else []), *words]


def _said(words: Sequence[str]) -> list[str]:
    try:
        done = subprocess.run(
            list(words), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TOOL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def _read(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _blob(line: str) -> str:
    words = line.split()
    return words[1] if len(words) > 1 else ""
