"""A host whose network, kernel parameters and Docker daemon are a file of JSON, seen through programs.

The programs are one Python script under several names. It keeps everything in one state file under a lock,
so that several commands may run at a time; ``netplan`` reads the folder of netplan files that the tests
name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.local_node import LocalNode

PROGRAMS = ("docker", "ip", "sysctl", "netplan", "proc-cat", "ss", "nvidia-smi")
SHORT = {
    # Nothing of a fake host takes time, or belongs to somebody else.
    "sleep": "exit 0",
    "chown": "exit 0",
    "seq": "echo 1; echo 2",
    "cat": 'case "$1" in /proc/sys/*) exec proc-cat "$@" ;; esac; exec /bin/cat "$@"',
    "python3": f'exec {sys.executable} "$@"',
}
SCRIPT = Path(__file__).parent / "fixtures" / "fake_programs.py"


class FakeHost:
    """A host in a folder.

    Attributes:
        base: The folder.
        node: Carries commands to it.
    """

    def __init__(self, base: Path, name: str = "spark-a") -> None:
        self.base = base
        self.programs = base / "programs"
        self.programs.mkdir(parents=True)
        (base / "netplan").mkdir()
        self._state = base / "state.json"
        self.write(
            {
                "links": {},
                "sysctls": {},
                "containers": {},
                "volumes": {},
                "images": {},
                "registry": {},
                "calls": [],
            }
        )
        for program in PROGRAMS:
            self._install(program, f"#!{sys.executable} -IS\n{SCRIPT.read_text()}")
        for program, text in SHORT.items():
            self._install(program, f"#!/bin/sh\n{text}\n")
        self.node = LocalNode(name, programs=self.programs)

    def _install(self, program: str, text: str) -> None:
        path = self.programs / program
        path.write_text(text)
        path.chmod(0o755)

    @property
    def netplan_file(self) -> str:
        return str(self.base / "netplan" / "60-spark-vllm.yaml")

    def read(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self._state.read_text())
        return value

    def write(self, state: dict[str, Any]) -> None:
        self._state.write_text(json.dumps(state))

    def change(self, **changes: Any) -> None:
        """Set top-level entries of the state."""
        self.write(self.read() | changes)

    def links(self) -> dict[str, Any]:
        found: dict[str, Any] = self.read()["links"]
        return found

    def link(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.links()[name]
        return found

    def addresses(self, name: str) -> list[str]:
        found: list[str] = self.link(name)["addresses"]
        return found

    def set_link(self, name: str, mtu: int, *addresses: str) -> None:
        self.change(links=self.links() | {name: {"mtu": mtu, "addresses": list(addresses)}})

    def set_container(self, name: str, **values: Any) -> None:
        """Put a container onto the host, in the words of ``docker inspect``."""
        self.change(
            containers=self.read()["containers"] | {name: {"Id": f"id-of-{name}", "Running": True, **values}}
        )

    def netplan_refuses(self, words: str) -> None:
        self.change(netplan_error=words)

    def netplan_does_nothing(self) -> None:
        self.change(netplan_idle=True)

    def netplan_accepts(self) -> None:
        self.change(netplan_error="", netplan_idle=False)

    def calls(self, program: str) -> list[list[str]]:
        """The argument lists that a program was started with."""
        return [call[1:] for call in self.read()["calls"] if call[0] == program]
