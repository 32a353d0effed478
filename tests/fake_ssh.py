"""Nodes behind an ``ssh`` of the tests: sessions run on fake hosts, each step can be made to fail."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.fake_host import FakeHost
from tests.local_node import SYSTEM_FOLDERS

SCRIPT = Path(__file__).parent / "fixtures" / "fake_ssh_program.py"


class FakeSsh:
    """Fake nodes and the ``ssh`` that reaches them.

    Attributes:
        programs: Folder with ``ssh``; it must come first on the ``PATH``.
        home: A home folder for who runs ``ssh``; control sockets lie below it.
        hosts: The fake host of each node.
    """

    def __init__(self, base: Path, nodes: list[str]) -> None:
        self.base = base
        self.programs = base / "programs"
        self.home = base / "home"
        for folder in (self.programs, self.home, base / "node-programs"):
            folder.mkdir(parents=True)
        text = f"#!{sys.executable} -IS\n{SCRIPT.read_text()}"
        for path in (self.programs / "ssh", base / "node-programs" / "sudo", base / "node-programs" / "id"):
            path.write_text(text)
            path.chmod(0o755)
        self.hosts = {name: FakeHost(base / name, name) for name in nodes}
        self._listeners: dict[str, socket.socket] = {}
        self._ports: dict[str, int] = {}
        entries = {}
        for name, host in self.hosts.items():
            self._listen(name)
            (host.base / "home").mkdir()
            entries[name] = {
                "addresses": [name],
                "port": self._ports[name],
                "programs": str(host.programs),
                "home": str(host.base / "home"),
                "sandbox": str(host.base),
                "system_folders": SYSTEM_FOLDERS,
                "user": "user",
                "sudo": "free",
            }
        self._write(entries)

    def __enter__(self) -> FakeSsh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listener in self._listeners.values():
            listener.close()

    def port(self, node: str) -> int:
        """Port at which the node's sshd seems to listen."""
        return self._ports[node]

    def masters(self, node: str) -> list[str]:
        """Control path of each master connection that was opened."""
        return self._lines(f"{node}.masters")

    def lines(self, node: str) -> list[str]:
        """The line of each session."""
        return self._lines(f"{node}.lines")

    def sudo_calls(self, node: str) -> list[str]:
        """The words of each call of sudo."""
        return self._lines(f"{node}.sudo")

    def logins(self, node: str) -> list[str]:
        """The words behind the destination of each connection that was begun, over no open one."""
        return self._lines(f"{node}.logins")

    def proxies(self, node: str) -> list[str]:
        """The ProxyCommand of each ssh that had one."""
        return self._lines(f"{node}.proxies")

    def be(self, node: str, user: str, sudo: str = "free", **rules: Any) -> None:
        """Who logs in, and whether sudo is ``free`` or asks for this password.

        Args:
            rules: ``listed``: commands that sudo allows without a password; ``only_listed``: no others; ``no_sudoer``.
        """
        self._change(node, user=user, sudo=sudo, **rules)

    def want_key(self, node: str, identity: Path, password: str) -> None:
        """The node takes nobody but who has this key; until it knows that, a password.

        Args:
            identity: The key's file, as the person's ssh configuration names it; it need not be there.
        """
        self._change(node, identity=str(identity), password=password)

    @property
    def passwords(self) -> list[str]:
        """Whether each password that was given was ``right`` or ``wrong``."""
        return self._lines("passwords")

    def home_of(self, node: str) -> Path:
        """The deploy user's home on a node."""
        return self.hosts[node].base / "home"

    def refuse_login(self, node: str, stderr: str) -> None:
        self._change(node, login_error=stderr)

    def drop_logins(self, node: str, count: int) -> None:
        """Next connections that sshd ends before the key exchange."""
        self._change(node, dropped_logins=count)

    def refuse_sessions(self, node: str, count: int) -> None:
        """Next sessions that sshd has no room for, on the open connection or on one of their own."""
        self._change(node, refused_sessions=count)

    def offer(self, node: str, host_key: str) -> None:
        """The host key that it shows."""
        self._change(node, host_key=host_key)

    def has_only(self, node: str, algorithm: str) -> None:
        """The only kind of host key that it has."""
        self._change(node, only_kind=algorithm)

    def know(self, node: str, host_key: str) -> Path:
        """Let the person's known_hosts have an entry for a node; the file."""
        path = self.base / "known_hosts"
        path.write_text(f"[127.0.0.1]:{self._ports[node]} {host_key}\n")
        self._change(node, known_hosts=str(path))
        return path

    def greet(self, node: str, banner: str) -> None:
        """What sshd writes before each login."""
        self._change(node, banner=banner)

    def accept_logins(self, node: str) -> None:
        """The opposite of refusing them."""
        self._change(node, login_error=None)

    def start_shell_with(self, node: str, text: str) -> None:
        """What the deploy user's shell runs before each command, as from a ``~/.bashrc``."""
        self._change(node, shell_start=f"{text}\n" if text else "")

    def break_sessions(self, node: str, stderr: str) -> None:
        self._change(node, session_error=stderr)

    def lose(self, node: str, line: str = "true", times: int = 0) -> None:
        """The master goes away while a session with this line runs: its client ends without a word.

        Args:
            times: How often; zero for always.
        """
        self._change(node, lost_line=line, losses=times)

    def slow_master(self, node: str, seconds: float = 30) -> None:
        """The master process is stuck: it does not answer ``ssh -O``."""
        self._change(node, slow_master=seconds)

    def move(self, node: str, address: str) -> None:
        """Give the node another address; nobody answers at the old one."""
        self._change(node, addresses=[address])

    def kill(self, node: str, words: str = "Connection refused") -> None:
        """Nothing of the node answers any more.

        Args:
            words: What connecting to it says.
        """
        self._listeners.pop(node).close()
        self._change(node, dead=words)

    def mend(self, node: str) -> None:
        """The node answers again."""
        if node not in self._listeners:
            self._listen(node)
        self._change(node, dead="", session_error="", lost_line="", port=self._ports[node])

    def _listen(self, node: str) -> None:
        listener = socket.create_server(("127.0.0.1", self._ports.get(node, 0)), backlog=64)
        self._listeners[node] = listener
        self._ports[node] = listener.getsockname()[1]

    def _lines(self, name: str) -> list[str]:
        path = self.base / name
        return path.read_text().splitlines() if path.exists() else []

    def _change(self, node: str, **values: Any) -> None:
        entries: dict[str, Any] = json.loads((self.base / "nodes.json").read_text())
        self._write(entries | {node: entries[node] | values})

    def _write(self, entries: dict[str, Any]) -> None:
        beside = self.base / "nodes.new"
        beside.write_text(json.dumps(entries))
        beside.replace(self.base / "nodes.json")
