"""Where a node is and which host key it must show.

User, jump host, port, identity and agent are whatever OpenSSH's own configuration says (``ssh -G``), with the settings
on top. Host keys are always pinned: by ``host_key`` in the settings, or by the entry that the person's known-hosts
files already have. An unpinned node is refused, never trusted at first sight.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import os
import pwd
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spark_core.errors import UnreachableError

CONTROL_DIR = "~/.cache/spark-vllm/ctl"
"""Folder of the control sockets; ``~`` is expanded by ssh itself, so that no person's home enters any state."""

_KEY_PREFERENCE = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")
_TOOL_TIMEOUT_S = 10.0
_AGENT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ConnectionSpec:
    """What the settings say about reaching one node.

    Args:
        node: Name of the node.
        address: What ssh connects to: an address, a name or a Host alias of the ssh configuration.
        user: Deploy user; empty for what the ssh configuration says.
        port: sshd's port, or None for what the ssh configuration says.
        host_key: Pin such as ``ssh-ed25519 AAAA…``, or None for the known-hosts entry.
        ssh_config: Path of an ssh configuration file to use instead of ``~/.ssh/config``, or None. ``~`` is allowed.
    """

    node: str
    address: str
    user: str
    port: int | None = None
    host_key: str | None = None
    ssh_config: str | None = None


@dataclass(frozen=True)
class Connection:
    """A resolved connection to one node.

    Attributes:
        host_name: The address behind the alias, as ``ssh -G`` gives it.
        user: User on the node.
        port: sshd's port.
        pin: Host key type and key, separated by one blank.
        proxy_jump: Jump host, or None.
        identity_agent: Socket of the agent that ssh would use, or None for ``SSH_AUTH_SOCK``.
        identity_files: Private key files that ssh would try.
    """

    spec: ConnectionSpec
    host_name: str
    user: str
    port: int
    pin: str
    proxy_jump: str | None
    identity_agent: str | None
    identity_files: tuple[str, ...]

    @property
    def node(self) -> str:
        return self.spec.node

    @property
    def control_path(self) -> str:
        """Path of the control socket. The pin is part of it, since a live master accepts commands under any pin."""
        text = "\0".join(
            [
                self.spec.address,
                self.spec.user,
                str(self.port),
                self.pin,
                self.spec.ssh_config or "",
                self.proxy_jump or "",
            ]
        )
        return f"{CONTROL_DIR}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @property
    def has_agent(self) -> bool:
        """Whether an ssh-agent can be asked to sign: one that answers and holds a key (macOS starts an empty one)."""
        socket = self.identity_agent or os.environ.get("SSH_AUTH_SOCK")
        return bool(socket) and agent_has_key(str(socket))

    def private_key(self) -> str | None:
        """The first identity file that can be used without asking anybody for anything, or None."""
        for name in self.identity_files:
            try:
                text = Path(name).read_text()
            except (OSError, UnicodeDecodeError):
                continue
            if usable_private_key(text):
                return text
        return None

    def pin_options(self) -> list[str]:
        """Options that accept the pinned host key and nothing else, on any machine, without a known-hosts file."""
        kind = self.pin.split(" ", 1)[0]
        algorithms = "rsa-sha2-512,rsa-sha2-256" if kind == "ssh-rsa" else kind
        return [
            "-o", "BatchMode=yes",
            "-o", "StrictHostKeyChecking=yes",
            "-o", "UserKnownHostsFile=/dev/null",
            "-o", "GlobalKnownHostsFile=/dev/null",
            "-o", f"KnownHostsCommand=/bin/echo %H {self.pin}",
            "-o", f"HostKeyAlgorithms={algorithms}",
            "-o", "UpdateHostKeys=no",
            "-o", "ConnectTimeout=8",
            "-o", "ServerAliveInterval=5",
            "-o", "ServerAliveCountMax=3",
        ]  # fmt: skip

    def shared_options(self) -> list[str]:
        """Options for others that use our open connection (the Docker provider): no local path, key or jump host."""
        return [*self.pin_options(), "-o", "ControlMaster=no", "-o", f"ControlPath={self.control_path}"]

    def target(self) -> list[str]:
        """The destination words of an ssh command line."""
        return ["-p", str(self.port), "-l", self.spec.user, self.spec.address]


@functools.cache
def agent_has_key(socket: str) -> bool:
    """Whether the agent behind a socket answers and holds at least one key; asked once in a run."""
    try:
        done = subprocess.run(
            ["env", f"SSH_AUTH_SOCK={socket}", "ssh-add", "-l"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_AGENT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def usable_private_key(text: str) -> bool:
    """Whether this is a private key without a passphrase that needs no hardware either."""
    header, _, body = text.strip().partition("\n")
    if not header.startswith("-----BEGIN ") or "PRIVATE KEY-----" not in header:
        return False
    if "OPENSSH" not in header:
        return "ENCRYPTED" not in header and "ENCRYPTED" not in body.partition("\n\n")[0]
    try:
        blob = base64.b64decode("".join(body.partition("-----END")[0].split()), validate=True)
    except (binascii.Error, ValueError):
        return False
    # openssh-key-v1: the magic, then the cipher's name with its length before it.
    unlocked = blob.startswith(b"openssh-key-v1\0\0\0\0\4none")
    return unlocked and b"sk-ssh-" not in blob and b"sk-ecdsa-" not in blob


def ssh_path(text: str) -> Path:
    """A path of ssh's own configuration; ssh takes ``~`` from the user database and not from HOME."""
    if text == "~" or text.startswith("~/"):
        return Path(pwd.getpwuid(os.getuid()).pw_dir) / text[2:]
    return Path(text)


def config_arguments(ssh_config: str | None) -> list[str]:
    """``-F file`` if the settings name an ssh configuration file."""
    return ["-F", str(Path(ssh_config).expanduser())] if ssh_config else []


UNPINNED = "ssh-ed25519 UNPINNED"
"""Stands for a pin in a plan that is only rendered; no host can ever show it."""


def resolve(spec: ConnectionSpec, *, render_only: bool = False) -> Connection:
    """Ask OpenSSH what the connection is; contacts nobody.

    Args:
        render_only: Accept that no host key is pinned; the connection can then be shown but not opened.

    Raises:
        UnreachableError: ssh is missing, its configuration is wrong, or no host key is pinned.
    """
    if render_only and spec.ssh_config and not Path(spec.ssh_config).expanduser().is_file():
        spec = replace(spec, ssh_config=None)
    if spec.ssh_config and not Path(spec.ssh_config).expanduser().is_file():
        raise UnreachableError(
            f"expected the ssh configuration file {spec.ssh_config}, found no such file",
            node=spec.node,
            step="ssh configuration (ssh_config)",
            do="start the lab (make up) if it is the lab's, or correct ssh_config in the stack file",
        )
    words = ["ssh", *config_arguments(spec.ssh_config), "-G", *(["-l", spec.user] if spec.user else [])]
    if spec.port is not None:
        words += ["-p", str(spec.port)]
    values = parse_ssh_g(_tool([*words, spec.address], spec.node))
    port = int(values.get("port", ["22"])[0])
    pin = spec.host_key or _known_pin(spec, values, port) or (UNPINNED if render_only else None)
    if pin is None:
        raise UnreachableError(
            f"expected a pinned host key for {spec.address}, found none in the settings and none in known_hosts",
            node=spec.node,
            step="host key (nodes[].host_key)",
            do=f"compare what `ssh-keyscan -p {port} -t ed25519 {values.get('hostname', [spec.address])[0]}` says with "
            "/etc/ssh/ssh_host_ed25519_key.pub on the node's own console, then set host_key, or connect once by hand",
        )
    agent = values.get("identityagent", [""])[0]
    jump = values.get("proxyjump", ["none"])[0]
    return Connection(
        spec=spec,
        host_name=values.get("hostname", [spec.address])[0],
        user=values.get("user", [spec.user])[0],
        port=port,
        pin=" ".join(pin.split()[:2]),
        proxy_jump=None if jump in ("", "none") else jump,
        identity_agent=None if agent in ("", "SSH_AUTH_SOCK", "none") else str(ssh_path(agent)),
        identity_files=tuple(str(ssh_path(name)) for name in values.get("identityfile", [])),
    )


def jump_of(connection: Connection) -> Connection | None:
    """The connection to the jump host that a node is reached through, or None.

    Raises:
        UnreachableError: there is more than one jump, or its host key is not pinned.
    """
    jump = connection.proxy_jump
    if jump is None:
        return None
    if "," in jump:
        raise UnreachableError(
            f"expected one jump host, found {jump}",
            node=connection.node,
            step="ssh configuration (ProxyJump)",
            do="pulumi-command goes through one jump host at most",
        )
    user, _, place = jump.removeprefix("ssh://").rpartition("@")
    host, _, port = place.partition(":")
    spec = ConnectionSpec(
        node=f"{connection.node} (jump host {host})",
        address=host,
        user=user,
        port=int(port) if port.isdigit() else None,
        ssh_config=connection.spec.ssh_config,
    )
    return resolve(spec, render_only=connection.pin == UNPINNED)


def parse_ssh_g(text: str) -> dict[str, list[str]]:
    """The output of ``ssh -G``: keyword (lower case) to its values in order."""
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        keyword, _, value = line.partition(" ")
        if keyword:
            values.setdefault(keyword.lower(), []).append(value.strip())
    return values


def choose_pin(lines: Sequence[str]) -> str | None:
    """The preferred host key among lines of known_hosts format: Ed25519 first, no certificates or revoked keys."""
    found: dict[str, str] = {}
    for line in lines:
        words = line.split()
        if not words or words[0].startswith(("#", "@")) or len(words) < 3:
            continue
        found.setdefault(words[1], f"{words[1]} {words[2]}")
    return next((found[kind] for kind in _KEY_PREFERENCE if kind in found), None)


def _known_pin(spec: ConnectionSpec, values: dict[str, list[str]], port: int) -> str | None:
    host = values.get("hostkeyalias", values.get("hostname", [spec.address]))[0]
    name = host if port == 22 or "hostkeyalias" in values else f"[{host}]:{port}"
    files = values.get("userknownhostsfile", [""])[0].split() + values.get("globalknownhostsfile", [""])[0].split()
    for file in files:
        path = ssh_path(file)
        if not path.is_file():
            continue
        pin = choose_pin(_tool(["ssh-keygen", "-F", name, "-f", str(path)], spec.node, may_fail=True).splitlines())
        if pin is not None:
            return pin
    return None


def _tool(words: list[str], node: str, *, may_fail: bool = False) -> str:
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError as error:
        raise UnreachableError(
            f"expected the program {words[0]} on PATH, found none",
            node=node,
            step="local OpenSSH",
            do="install OpenSSH",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise UnreachableError(
            f"{words[0]} did not answer in {_TOOL_TIMEOUT_S:.0f} s", node=node, step="local OpenSSH"
        ) from error
    if done.returncode != 0 and not may_fail:
        raise UnreachableError(
            f"{words[0]} refused its configuration",
            node=node,
            step="local OpenSSH",
            evidence=done.stderr.splitlines()[-4:],
        )
    return done.stdout
