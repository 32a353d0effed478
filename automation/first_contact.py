"""From an address to a node that takes this user's key: host keys are shown and agreed to, a key is installed once."""

from __future__ import annotations

import concurrent.futures
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from automation.exit_codes import CommandEnd, Exit
from automation.questions import Questions
from spark_core.errors import SparkError, UnreachableError, join_errors
from spark_core.transport.base import command, run_checked
from spark_core.transport.connection import UNPINNED, Connection, ConnectionSpec, resolve
from spark_core.transport.first_contact import OfferedKey, comparable_key
from spark_core.transport.keys import fingerprint
from spark_core.transport.own_key import OwnKey, find_own_key, install_key, make_own_key, place_for_key
from spark_core.transport.password_login import run_with_password
from spark_core.transport.ssh import SshTransport

_TARGET = re.compile(r"(?:([a-z_][a-z0-9_-]{0,31})@)?([^\s@:-][^\s@:]*)(?::(\d{1,5}))?")


@dataclass(frozen=True)
class Reached:
    """A node that is logged in to by key.

    Attributes:
        spec: How, with its host key.
        transport: Carries commands to it.
        known_key: Whether the key was known on this machine before.
    """

    spec: ConnectionSpec
    transport: SshTransport
    known_key: bool


def parse_target(text: str, ssh_config: str | None) -> ConnectionSpec:
    """``[USER@]HOST[:PORT]`` of the command line.

    Raises:
        SparkError: it is something else.
    """
    found = _TARGET.fullmatch(text)
    if found is None:
        raise SparkError(f"expected [USER@]HOST[:PORT], found {text!r}", where="HOST")
    user, host, port = found.groups()
    return ConnectionSpec(host, host, user or "", int(port) if port else None, ssh_config=ssh_config)


class FirstContact:
    """Reaches nodes for the first time.

    Args:
        questions: Asks the person.
        say: Called with what a person should see.
    """

    def __init__(self, questions: Questions, say: Callable[[str], None]) -> None:
        self._questions, self._say = questions, say

    def reach(self, specs: Sequence[ConnectionSpec], via: Reached | None = None) -> list[Reached]:
        """Log in to nodes, in the order given; a key is installed where none is taken yet.

        Args:
            via: The node that they are all reached through.

        Raises:
            SparkError: a node does not answer, shows another key than the known one, or takes no login.
            CommandEnd: the person said no to what it needs.
        """
        resolved = [self._resolved(spec) for spec in specs]
        nodes = []
        for connection, key in zip(resolved, self._agreed(resolved), strict=True):
            spec = replace(connection.spec, host_key=key.line)
            password = functools.partial(self._questions.password, f"{spec.user}@{spec.address}")
            transport = SshTransport(resolve(spec), password, via=via.transport if via is not None else None)
            nodes.append(Reached(spec, transport, connection.pin != UNPINNED))
        locked_out = [node for node in nodes if not _takes_a_key(node)]
        if locked_out:
            self._install(locked_out)
        return nodes

    def _resolved(self, spec: ConnectionSpec) -> Connection:
        """How a node is reached, with its user; contacts nobody."""
        user = spec.user or resolve(spec, render_only=True).user
        if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}", user):
            raise SparkError(f"expected the name of a user, found {user!r}", where=spec.address, do="give USER@HOST")
        return resolve(replace(spec, user=user), render_only=True)

    def _agreed(self, connections: Sequence[Connection]) -> list[OfferedKey]:
        """The host key of each node, shown and agreed to."""
        keys, errors = [], []
        with concurrent.futures.ThreadPoolExecutor(max_workers=min(16, len(connections))) as pool:
            for future in [pool.submit(comparable_key, connection) for connection in connections]:
                try:
                    keys.append(future.result())
                except SparkError as error:
                    errors.append(error)
        if errors:
            raise join_errors(errors)
        fresh = []
        for connection, key in zip(connections, keys, strict=True):
            state = "new"
            if connection.pin == key.line:
                state = f"known in {connection.pin_file}"
            elif connection.pin != UNPINNED:
                errors.append(_another_key(connection, key))
            else:
                fresh.append(connection)
            self._say(f"{connection.spec.address}  {key.kind}  {key.fingerprint}  {state}")
        if errors:
            raise join_errors(errors)
        if fresh:
            self._say("Compare each with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the node's own console.")
            who = ", ".join(connection.spec.address for connection in fresh)
            if not self._questions.yes("host-keys", f"Are these the keys of {who}?"):
                raise CommandEnd(Exit.REFUSED, f"nothing was changed: the host keys of {who} were not agreed to")
        return keys

    def _install(self, nodes: Sequence[Reached]) -> None:
        """Let nodes take this user's key; each asks for its password once."""
        key = self._own_key(nodes[0].transport.connection)
        who = ", ".join(f"{node.spec.user}@{node.spec.address}" for node in nodes)
        if not self._questions.yes("install-key", f"Install the key {key.told} for {who}?"):
            raise CommandEnd(
                Exit.REFUSED,
                "nothing was changed: the key was not to be installed",
                do="install it yourself: ssh-copy-id " + who.replace(", ", "; ssh-copy-id "),
            )
        for node in nodes:
            self._install_on(node, key)
            self._say(f"{node.spec.address}: takes the key")

    def _install_on(self, node: Reached, key: OwnKey) -> None:
        who = f"{node.spec.user}@{node.spec.address}"
        password = self._questions.password(who)
        if password is None:
            raise UnreachableError(
                f"expected the password of {who}, found nobody to ask",
                node=node.spec.node,
                step="authentication",
                code="authentication-failed",
                do="run it on a terminal, give --password-file, or install the key yourself",
            )
        done = run_with_password(node.transport.connection, password, install_key(key))
        if not done.ok:
            found = next(iter(done.stderr.strip().splitlines()[-1:]), f"status {done.status}")
            raise SparkError(f"expected to install the key, found: {found}", where=node.spec.address)
        run_checked(node.transport, command("true"), purpose="expected a login with the key that was installed")

    def _own_key(self, connection: Connection) -> OwnKey:
        key = find_own_key(connection)
        if key is not None:
            return key
        path = place_for_key(connection)
        if not self._questions.yes("make-key", f"There is no key to log in with. Make an ed25519 key in {path}?"):
            raise CommandEnd(
                Exit.REFUSED,
                "nothing was changed: there is no key to log in with",
                do="make one (ssh-keygen -t ed25519) or start an ssh-agent that holds one",
            )
        made = make_own_key(path)
        self._say(
            f"made {made.told}; without a passphrase (`ssh-keygen -p -f {path}` gives it one, for use with an agent)"
        )
        return made


def _takes_a_key(node: Reached) -> bool:
    """Whether a node can be logged in to without a prompt."""
    try:
        run_checked(node.transport, command("true"), purpose="expected a login")
    except UnreachableError as error:
        if error.code == "authentication-failed":
            return False
        raise
    return True


def _another_key(connection: Connection, key: OfferedKey) -> UnreachableError:
    kind = connection.pin.split(" ", 1)[0]
    return UnreachableError(
        f"expected host key {kind} {fingerprint(connection.pin)}, found {key.kind} {key.fingerprint}",
        node=connection.node,
        step="host key",
        code="host-key-mismatch",
        do=f"if it was reinstalled: ssh-keygen -R {connection.spec.address} -f {connection.pin_file}; if not, somebody "
        "else answers there",
    )
