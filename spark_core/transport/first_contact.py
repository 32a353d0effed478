"""Which host key a node shows, asked without trusting it: for a first contact, and where it is not the pinned one.

The connection offers no key and no password, and what it learns of the host key goes to a file that is thrown away.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from spark_core.errors import UnreachableError
from spark_core.transport.connection import CONNECT_TIMEOUT_S, HOST_KEY_STEP, UNPINNED, Connection
from spark_core.transport.keys import algorithms_of, choose_pin, fingerprint
from spark_core.transport.login_errors import LoginFailure, login_failure, login_timeout, offered_fingerprint
from spark_core.transport.openssh import attempt

CONTACT_TIMEOUT_S = 15.0
_TRIES = 3
"""Contacts in all when sshd drops them because of too many logins at a time."""


@dataclass(frozen=True)
class OfferedKey:
    """A host key that a node showed and that nobody has confirmed.

    Attributes:
        line: Type and key, as ``host_key`` takes it.
    """

    line: str

    @property
    def kind(self) -> str:
        return self.line.split(" ", 1)[0]

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.line)


def offered_key(connection: Connection, algorithms: str = "") -> OfferedKey:
    """The host key that a node shows.

    Args:
        connection: How it is reached; its pin is not looked at, that of a node on the way is.
        algorithms: Kinds of key to ask for; by default those that ssh prefers.

    Raises:
        UnreachableError: no host key was shown.
    """
    for left in reversed(range(_TRIES)):
        found = _contact(connection, algorithms)
        if isinstance(found, OfferedKey):
            return found
        if found.passing != "busy" or not left:
            raise found.error
        time.sleep(1)
    raise AssertionError("a loop that returns or raises")


def refused_first_contact(connection: Connection, refusal: UnreachableError) -> UnreachableError:
    """The refusal of a node without a pin, with the key that it offers and the line that pins it.

    Args:
        connection: The node, with a stand-in for its pin.
        refusal: What :func:`spark_core.transport.connection.resolve` said.
    """
    try:
        key = offered_key(connection)
    except UnreachableError as error:
        what = f"{refusal.what}; its key cannot be seen either ({error.step}: {error.what})"
        return UnreachableError(what, node=refusal.node, step=refusal.step, code=refusal.code, do=error.do)
    return UnreachableError(
        f"{refusal.what}; the node offers {key.kind} {key.fingerprint}",
        node=refusal.node,
        step=refusal.step,
        code=refusal.code,
        do=f"{_compare(key)}; if it is the same, pin it with this line under nodes, {refusal.node}, or let "
        f"`python -m automation pin-hosts` do so: host_key: {key.line}",
    )


def wrong_host_key(connection: Connection, failure: LoginFailure, log: str) -> LoginFailure:
    """The failure of a node that does not show the pinned key, with both fingerprints.

    Args:
        log: ssh's own log of the connection, for the fingerprint of a node that does not show its key a second time.
    """
    try:
        key = comparable_key(connection)
    except UnreachableError:
        shown, pin_line = offered_fingerprint(log) or failure.error.what.partition("found: ")[2], "the new key"
        compare = "compare its new key on its own console"
    else:
        shown, pin_line, compare = f"{key.kind} {key.fingerprint}", f"host_key: {key.line}", _compare(key)
    where = f"{connection.host_name} port {connection.port}"
    change = f"change the pin to {pin_line}"
    if connection.pin_file:
        old = f"ssh-keygen -R {connection.spec.address} -f {connection.pin_file}"
        change = f"take the old key out ({old}) and pin {pin_line}"
    error = UnreachableError(
        f"expected host key {connection.pin.split(' ', 1)[0]} {fingerprint(connection.pin)} at {where}, found {shown}",
        node=connection.node,
        step=HOST_KEY_STEP,
        code="host-key-mismatch",
        do=f"if the node was reinstalled, {compare} and {change}; if not, somebody else answers at this address",
    )
    return LoginFailure(error)


def comparable_key(connection: Connection) -> OfferedKey:
    """The host key that a node shows, of the pinned kind if it has one of that kind."""
    if connection.pin != UNPINNED:
        try:
            return offered_key(connection, algorithms_of(connection.pin))
        except UnreachableError as error:
            if error.code != "host-key-mismatch":
                raise
    return offered_key(connection)


def _compare(key: OfferedKey) -> str:
    name = {"ssh-ed25519": "ed25519", "ssh-rsa": "rsa"}.get(key.kind, "ecdsa")
    return f"compare with `ssh-keygen -lf /etc/ssh/ssh_host_{name}_key.pub` on the node's own console"


def _contact(connection: Connection, algorithms: str) -> OfferedKey | LoginFailure:
    with tempfile.TemporaryDirectory(prefix="spark-vllm-") as folder:
        known = Path(folder, "known_hosts")
        made = attempt(
            [
                *connection.configured(),
                "-o", "BatchMode=yes",
                "-o", "StrictHostKeyChecking=accept-new",
                "-o", f'UserKnownHostsFile="{known}"',
                "-o", "GlobalKnownHostsFile=/dev/null",
                "-o", "KnownHostsCommand=none",
                "-o", "HashKnownHosts=no",
                "-o", "CheckHostIP=no",
                "-o", "UpdateHostKeys=no",
                "-o", "PreferredAuthentications=none",
                "-o", "ControlMaster=no",
                "-o", "ControlPath=none",
                "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}",
                *(["-o", f"HostKeyAlgorithms={algorithms}"] if algorithms else []),
                "-T", *connection.target(), "--", "true",
            ],
            CONTACT_TIMEOUT_S,
        )  # fmt: skip
        shown = choose_pin(known.read_text().splitlines() if known.exists() else [])
    if shown is not None:
        return OfferedKey(shown)
    if made.status is None:
        return login_timeout(connection, made.log, CONTACT_TIMEOUT_S)
    return login_failure(connection, made.log, made.aside)
