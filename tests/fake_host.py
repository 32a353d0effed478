"""A host whose network, kernel parameters and Docker daemon are a file of JSON, seen through programs.

The programs are one Python script under several names. It keeps everything in one state file under a lock,
so that several commands may run at a time; ``netplan`` reads the folder of netplan files that the tests
name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.local_node import LocalNode

PROGRAMS = ("docker", "ip", "sysctl", "netplan", "ss", "nvidia-smi", "systemd-run", "systemctl")
SHORT = {
    # Nothing of a fake host takes time, or belongs to somebody else.
    "sleep": "exit 0",
    "chown": "exit 0",
    "seq": "echo 1; echo 2",
    "python3": f'exec {sys.executable} "$@"',
    "install": """
while [ "$1" != -- ]; do
  case $1 in -d) folder=1; shift ;; -T) shift ;; -m) mode=$2; shift 2 ;; *) shift 2 ;; esac
done
if [ -n "${folder:-}" ]; then mkdir -p "$2" && chmod "$mode" "$2"; else cp "$2" "$3" && chmod "$mode" "$3"; fi
""",
    "stat": 'exec /usr/bin/stat "$@" | sed "s/ $(id -u):$(id -g)$/ 0:0/"',
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
        for folder in ("sys/class/net", "proc/sys/net", "etc/netplan", "run/netplan"):
            (base / folder).mkdir(parents=True)
        self._state = base / "state.json"
        self.write(
            {
                "links": {},
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
        self.node = LocalNode(name, programs=self.programs, sandbox=base)

    def _install(self, program: str, text: str) -> None:
        path = self.programs / program
        path.write_text(text)
        path.chmod(0o755)

    netplan_file = "/etc/netplan/60-spark-vllm.yaml"
    """Its netplan file of ours, as its commands name it."""

    @property
    def netplan_path(self) -> Path:
        """Where that file lies on this machine."""
        return Path(f"{self.base}{self.netplan_file}")

    @property
    def sysctls(self) -> dict[str, str]:
        """Kernel parameters that are no interface's own."""
        root = self.base / "proc/sys"
        files = [path for path in root.rglob("*") if path.is_file() and "conf" not in path.parts]
        return {str(path.relative_to(root)).replace("/", "."): path.read_text().strip() for path in sorted(files)}

    def set_sysctls(self, values: dict[str, str]) -> None:
        for name, value in values.items():
            path = self.base / "proc/sys" / name.replace(".", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(value + "\n")

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
        """Put an interface with a carrier onto the host."""
        folder = self.base / "sys/class/net" / name
        folder.mkdir(exist_ok=True)
        (folder / "carrier").write_text("1\n")
        self.change(links=self.links() | {name: {"mtu": mtu, "addresses": list(addresses)}})

    def pull_cable(self, name: str) -> None:
        """An uncabled port of a Spark has no interface at all."""
        (self.base / "sys/class/net" / name / "carrier").unlink()
        (self.base / "sys/class/net" / name).rmdir()
        self.change(links={other: link for other, link in self.links().items() if other != name})

    def set_container(self, name: str, **values: Any) -> None:
        """Put a container onto the host, in the words of ``docker inspect``."""
        self.change(containers=self.read()["containers"] | {name: {"Id": f"id-of-{name}", "Running": True, **values}})

    def let_timers_end(self) -> None:
        """The time of every timer that systemd was given has come."""
        for unit in self.read().get("timers", {}):
            subprocess.run([self.programs / "systemctl", "start", f"{unit}.service"], check=True)
            subprocess.run([self.programs / "systemctl", "stop", f"{unit}.timer"], check=True)

    def netplan_refuses(self, words: str) -> None:
        self.change(netplan_error=words)

    def netplan_does_nothing(self) -> None:
        self.change(netplan_idle=True)

    def netplan_accepts(self) -> None:
        self.change(netplan_error="", netplan_idle=False)

    def calls(self, program: str) -> list[list[str]]:
        """The argument lists that a program was started with."""
        return [call[1:] for call in self.read()["calls"] if call[0] == program]
