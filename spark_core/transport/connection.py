"""Where a node is and which host key it must show.

User, jump host, port, identity and agent are whatever OpenSSH's own configuration says (``ssh -G``), with the settings
on top. Host keys are always pinned: by ``host_key`` in the settings, or by the entry that the person's known-hosts
files already have. An unpinned node is refused, never trusted at first sight.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from spark_core.errors import UnreachableError
from spark_core.transport.keys import agent_has_key, algorithms_of, choose_pin, usable_private_key

CONTROL_DIR = "~/.cache/spark-vllm/ctl"
"""Folder of the control sockets; ``~`` is expanded by ssh itself, so that no person's home enters any state."""

CONNECT_TIMEOUT_S = 8
"""Seconds for TCP and for sshd's first word, each attempt."""

HOST_KEY_STEP = "host key (nodes[].host_key)"

_TOOL_TIMEOUT_S = 10.0


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
        via: Another node that this one is reached through, or None.
    """

    node: str
    address: str
    user: str
    port: int | None = None
    host_key: str | None = None
    ssh_config: str | None = None
    via: ConnectionSpec | None = None


@dataclass(frozen=True)
class Connection:
    """A resolved connection to one node.

    Attributes:
        host_name: The address behind the alias, as ``ssh -G`` gives it.
        user: User on the node.
        port: sshd's port.
        pin: Host key type and key, separated by one blank.
        proxy_jump: Jump host of the ssh configuration, or None.
        identity_agent: Socket of the agent that ssh would use, or None for ``SSH_AUTH_SOCK``.
        identity_files: Private key files that ssh would try.
        pin_file: The known-hosts file that the pin comes from; empty if it comes from the settings.
        proxy_command: Whether the ssh configuration has a ProxyCommand for it.
        via: The connection to the node that this one is reached through, or None.
    """

    spec: ConnectionSpec
    host_name: str
    user: str
    port: int
    pin: str
    proxy_jump: str | None
    identity_agent: str | None
    identity_files: tuple[str, ...]
    pin_file: str = ""
    proxy_command: bool = False
    via: Connection | None = None

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
                self.via.control_path if self.via else "",
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
        return [
            "-o", "BatchMode=yes",
            "-o", "StrictHostKeyChecking=yes",
            "-o", "UserKnownHostsFile=/dev/null",
            "-o", "GlobalKnownHostsFile=/dev/null",
            "-o", f"KnownHostsCommand=/bin/echo %H {self.pin}",
            "-o", f"HostKeyAlgorithms={algorithms_of(self.pin)}",
            "-o", "UpdateHostKeys=no",
            "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}",
            "-o", "ServerAliveInterval=5",
            "-o", "ServerAliveCountMax=3",
        ]  # fmt: skip

    def shared_options(self) -> list[str]:
        """Options for others that use our open connection (the Docker provider): no local path, key or jump host.

        A node that is reached through another one of the settings is so for them too, when they must connect themselves
        because sshd allows no further session on ours.
        """
        return [*self.pin_options(), *self._through([]), *self.over_master()]

    def over_master(self) -> list[str]:
        """Options of a session over the open connection, if there is one."""
        return ["-o", "ControlMaster=no", "-o", f"ControlPath={self.control_path}"]

    def own_options(self) -> list[str]:
        """Options of our own ssh on this machine, without those about sharing a connection."""
        return [*self.configured(), *self.pin_options()]

    def configured(self) -> list[str]:
        """Which configuration file to use, and the way through another node."""
        config = config_arguments(self.spec.ssh_config)
        return [*config, "-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes", *self._through(config)]

    def _through(self, config: list[str]) -> list[str]:
        if self.via is None:
            return []
        # ssh expands % in this line, and a shell splits it.
        start = shlex.join(["ssh", *config, *self.via.pin_options(), *self.via.over_master()])
        target = shlex.join(self.via.target())
        return ["-o", f"ProxyCommand={start.replace('%', '%%')} -W [%h]:%p {target.replace('%', '%%')}"]

    def target(self) -> list[str]:
        """The destination words of an ssh command line."""
        return ["-p", str(self.port), "-l", self.spec.user, self.spec.address]


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
            code="ssh-configuration",
            do="start the lab (make up) if it is the lab's, or correct ssh_config in the stack file",
        )
    via = _resolve_via(spec, render_only) if spec.via else None
    words = ["ssh", *config_arguments(spec.ssh_config), "-G", *(["-l", spec.user] if spec.user else [])]
    if spec.port is not None:
        words += ["-p", str(spec.port)]
    values = parse_ssh_g(_tool([*words, spec.address], spec.node))
    port = int(values.get("port", ["22"])[0])
    pin, pin_file = (spec.host_key, "") if spec.host_key else _known_pin(spec, values, port)
    if pin is None and not render_only:
        raise UnreachableError(
            f"expected a pinned host key for {spec.address}, found none in the settings and none in known_hosts",
            node=spec.node,
            step=HOST_KEY_STEP,
            code="host-key-unpinned",
        )
    agent = values.get("identityagent", [""])[0]
    jump = values.get("proxyjump", ["none"])[0] if via is None else "none"
    return Connection(
        spec=spec,
        host_name=values.get("hostname", [spec.address])[0],
        user=values.get("user", [spec.user])[0],
        port=port,
        pin=" ".join((pin or UNPINNED).split()[:2]),
        proxy_jump=None if jump in ("", "none") else jump,
        identity_agent=None if agent in ("", "SSH_AUTH_SOCK", "none") else str(ssh_path(agent)),
        identity_files=tuple(str(ssh_path(name)) for name in values.get("identityfile", [])),
        pin_file=pin_file,
        proxy_command=via is None and values.get("proxycommand", ["none"])[0] not in ("", "none"),
        via=via,
    )


def _resolve_via(spec: ConnectionSpec, render_only: bool) -> Connection | None:
    if spec.via is None:
        return None
    try:
        return resolve(spec.via, render_only=render_only)
    except UnreachableError as error:
        raise on_the_way(error, spec.node) from None


def on_the_way(error: UnreachableError, node: str) -> UnreachableError:
    """What keeps us from the node that another one is reached through, told of that other one."""
    return UnreachableError(
        f"it is reached through {error.node}, where {error.what}",
        node=node,
        step=f"{error.step} of {error.node}",
        code=error.code,
        do=error.do,
        evidence=error.evidence,
    )


def jump_of(connection: Connection) -> Connection | None:
    """The connection to the host that a node is reached through, or None.

    Raises:
        UnreachableError: there is more than one such host, its host key is not pinned, or it is not known to be a host.
    """
    jump = connection.proxy_jump
    if connection.proxy_command or "," in (jump or "") or (connection.via and not _is_direct(connection.via)):
        found = "ProxyCommand" if connection.proxy_command else jump or "a node that is reached through another host"
        raise UnreachableError(
            f"expected one jump host, found {found}",
            node=connection.node,
            step="ssh configuration (ProxyJump)",
            code="ssh-configuration",
            do="pulumi-command, which copies files, goes through one jump host at most: say it with ProxyJump, or with "
            "nodes[].via if it is a node",
        )
    if connection.via or jump is None:
        return connection.via
    user, _, place = jump.removeprefix("ssh://").rpartition("@")
    host, _, port = place.partition(":")
    spec = ConnectionSpec(
        node=f"{connection.node} (jump host {host})",
        address=host,
        user=user,
        port=int(port) if port.isdigit() else None,
        ssh_config=connection.spec.ssh_config,
    )
    try:
        return resolve(spec, render_only=connection.pin == UNPINNED)
    except UnreachableError as error:
        if error.code == "host-key-unpinned":
            by_hand = "compare its fingerprint with the one on its own console, and connect to it once by hand"
            raise UnreachableError(error.what, node=spec.node, step=error.step, code=error.code, do=by_hand) from None
        raise


def _is_direct(connection: Connection) -> bool:
    return not (connection.proxy_jump or connection.proxy_command or connection.via)


def parse_ssh_g(text: str) -> dict[str, list[str]]:
    """The output of ``ssh -G``: keyword (lower case) to its values in order."""
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        keyword, _, value = line.partition(" ")
        if keyword:
            values.setdefault(keyword.lower(), []).append(value.strip())
    return values


def _known_pin(spec: ConnectionSpec, values: dict[str, list[str]], port: int) -> tuple[str | None, str]:
    host = values.get("hostkeyalias", values.get("hostname", [spec.address]))[0]
    name = host if port == 22 or "hostkeyalias" in values else f"[{host}]:{port}"
    files = values.get("userknownhostsfile", [""])[0].split() + values.get("globalknownhostsfile", [""])[0].split()
    for file in files:
        path = ssh_path(file)
        if not path.is_file():
            continue
        pin = choose_pin(_tool(["ssh-keygen", "-F", name, "-f", str(path)], spec.node, may_fail=True).splitlines())
        if pin is not None:
            return pin, file
    return None, ""


def _tool(words: list[str], node: str, *, may_fail: bool = False) -> str:
    def refused(what: str, do: str = "", evidence: Sequence[str] = ()) -> UnreachableError:
        return UnreachableError(
            what, node=node, step="local OpenSSH", code="ssh-configuration", do=do, evidence=evidence
        )

    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError as error:
        raise refused(f"expected the program {words[0]} on PATH, found none", "install OpenSSH") from error
    except subprocess.TimeoutExpired as error:
        raise refused(f"{words[0]} did not answer in {_TOOL_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0 and not may_fail:
        raise refused(f"{words[0]} refused its configuration", evidence=done.stderr.splitlines()[-4:])
    return done.stdout
