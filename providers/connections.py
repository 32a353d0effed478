"""The settings and the connections of one run.

Connection facts come from the stack's configuration at run time, never from state: after a change of address a resource
is read through the new one. Only a node that the settings no longer name is reached through what its journal resource
remembers of it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spark_core.errors import CommandError, SparkError, UnreachableError, join_errors
from spark_core.preflight.reach import reach_nodes
from spark_core.settings import SECRET_KEYS, SETTING_KEYS, NodeSettings, Settings, read_settings
from spark_core.transport.base import Transport
from spark_core.transport.connection import Connection, ConnectionSpec, jump_of, on_the_way, resolve
from spark_core.transport.first_contact import refused_first_contact
from spark_core.transport.master import Patience
from spark_core.transport.ssh import SshTransport


def connection_facts(node: NodeSettings) -> dict[str, Any]:
    """How a node is reached, for the day the settings no longer name it; kept by every resource that is on it.

    Compared like any other input: a node that is reached in another way is remembered so.
    """
    facts = {"address": node.management_address, "user": node.user, "port": node.ssh_port, "host_key": node.host_key}
    return facts | ({"via": node.via} if node.via else {})


class Run:
    """The settings of this run and one transport for each node, shared by all providers of the process."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.settings: Settings = read_settings(raw)
        self._raw = raw
        self._transports: dict[str, SshTransport] = {}
        self._lock = threading.Lock()
        self._all_reached = False
        self._patience = Patience()

    def secret(self, key: str) -> str | None:
        """A secret of the stack's configuration; it stays in this process."""
        value = self._raw.get(key)
        return str(value) if value else None

    @property
    def has_sudo_password(self) -> bool:
        """Whether the settings have a password for sudo; it may still be a wrong one."""
        return self.secret("sudo_password") is not None or self.settings.ssh.sudo_password_file is not None

    def hub_token(self) -> str | None:
        """The hub's token; it stays in this process and goes to nodes on standard input only.

        Raises:
            CommandError: its file cannot be read.
        """
        secret, file = self.secret("hf_token"), self.settings.hub.token_file
        if secret is not None or file is None:
            return secret
        try:
            return Path(file).expanduser().read_text().strip() or None
        except OSError as error:
            raise CommandError(
                f"expected the hub's token in {file}, found: {error.strerror}", where="hub.token_file"
            ) from None

    def wait_for_boot(self, say: Callable[[str], None], check: Callable[[], None] = lambda: None) -> None:
        """From now on wait for a host that does not answer, since it may be booting; for what runs in ``up`` only.

        Args:
            say: Called with one line when a host is waited for.
            check: Called often while it is; what it raises ends the wait.
        """
        with self._lock:
            self._patience = Patience(self.settings.ssh.boot_wait_s, say, check)
            for transport in self._transports.values():
                transport.patience = self._patience

    def open_node(self, node: NodeSettings) -> Transport:
        """The transport of a node; the connection is opened by its first use.

        Raises:
            UnreachableError: the ssh configuration cannot be used, or no host key is pinned: the node, or the host that
                it is reached through, is then asked which key it offers.
        """
        return self._open(self.settings.connection_of(node))

    def connection(self, node: NodeSettings) -> Connection:
        """How a node is reached, as its transport found it.

        Raises:
            UnreachableError: like :meth:`open_node`.
        """
        return self._open(self.settings.connection_of(node)).connection

    def _open(self, spec: ConnectionSpec) -> SshTransport:
        with self._lock:
            if spec.node in self._transports:
                return self._transports[spec.node]
        # Without the lock: a first contact takes as long as the node does.
        via = self._open_on_the_way(spec.via, spec.node) if spec.via else None
        try:
            connection = resolve(spec)
            jump_of(connection)
        except UnreachableError as error:
            if error.code == "host-key-unpinned" and error.node == spec.node:
                raise refused_first_contact(resolve(spec, render_only=True), error) from None
            raise
        with self._lock:
            transport = SshTransport(connection, self._sudo_password, via=via, patience=self._patience)
            return self._transports.setdefault(spec.node, transport)

    def _open_on_the_way(self, spec: ConnectionSpec, node: str) -> SshTransport:
        try:
            return self._open(spec)
        except UnreachableError as error:
            raise on_the_way(error, node) from None

    def transport(self, name: str, remembered: Mapping[str, Any] | None = None) -> Transport:
        """The transport of a node by name.

        Args:
            remembered: What :func:`connection_facts` gave for a node that the settings no longer have.
        """
        found = [node for node in self.settings.nodes if node.name == name]
        if found:
            return self.open_node(found[0])
        if not remembered or not remembered.get("address"):
            raise SparkError(
                f"expected the node {name} in the settings, found none of that name",
                where="nodes",
                do="put the node back until its resources are destroyed",
            )
        node = NodeSettings(
            name=name,
            management_address=str(remembered["address"]),
            user=str(remembered["user"]),
            ssh_port=int(remembered["port"]) if remembered.get("port") else None,
            host_key=remembered.get("host_key") or None,
            via=remembered.get("via") or None,
        )
        if node.via and node.via not in {other.name for other in self.settings.nodes}:
            raise SparkError(
                f"expected the node {node.via} in the settings, since {name} is reached through it, found none",
                where="nodes",
                do="put the node back until its resources are destroyed",
            )
        return self.open_node(node)

    def require_all_nodes(self) -> None:
        """Refuse to undo anything while a node does not answer, so that nothing is left half undone.

        Nodes that are given up are not asked.

        Raises:
            SparkError: naming each node and the step that failed.
        """
        with self._lock:
            reached = self._all_reached
        if not reached:
            asked = [node for node in self.settings.nodes if node.name not in self.settings.abandoned_nodes]
            errors = reach_nodes(asked, self.open_node)
            if errors:
                raise join_errors(errors)
            self._all_reached = True

    def _sudo_password(self) -> str | None:
        secret = self.secret("sudo_password")
        if secret is not None:
            return secret
        file = self.settings.ssh.sudo_password_file
        if file is None:
            return None
        try:
            return Path(file).expanduser().read_text().strip()
        except OSError as error:
            raise CommandError(
                f"expected the sudo password in {file}, found: {error.strerror}", where="ssh.sudo_password_file"
            ) from None


_RUNS: dict[str, Run] = {}
_RUNS_LOCK = threading.Lock()


def run_of(raw: Mapping[str, Any]) -> Run:
    """The run for this configuration; one for the whole process, whoever asks first."""
    key = json.dumps(raw, sort_keys=True, default=str)
    with _RUNS_LOCK:
        if key not in _RUNS:
            _RUNS[key] = Run(raw)
        return _RUNS[key]


def raw_configuration(get: Callable[[str], Any]) -> dict[str, Any]:
    """Our keys of a stack's configuration as plain values; structured ones arrive as JSON text."""
    raw: dict[str, Any] = {}
    for key in (*SETTING_KEYS, *SECRET_KEYS):
        value = get(key)
        if value is None:
            continue
        raw[key] = _plain(value) if key in SETTING_KEYS else value
    return raw


def _plain(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in "[{":
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
