"""Hosts of a lab whose fabric the core changes and looks at, over real SSH."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from lab import paths
from spark_core.journal import StackFolder
from spark_core.transport.base import script
from spark_core.transport.connection import ConnectionSpec, resolve
from spark_core.transport.ssh import SshTransport
from tests.lab.deployment import SNAPSHOT
from tests.lab.runs import run_lab

FOLDER = StackFolder("/home/spark/.spark-vllm", "dev")


@dataclass(frozen=True)
class FabricNodes:
    """A lab of hosts only.

    Attributes:
        instance: Its name.
        transports: One for each host.
    """

    instance: str
    transports: dict[str, SshTransport]

    def lab(self, *arguments: str) -> None:
        """Run a command of the lab as a person would."""
        run_lab(self.instance, *arguments)

    def as_root(self, node: str, command: str) -> str:
        """Run a shell command as root; it must succeed."""
        done = self.transports[node].run(script(command, sudo=True, timeout_s=60))
        assert done.ok, f"{node}: {command}: {done.stderr}"
        return done.stdout.strip()

    def picture(self, node: str) -> str:
        """What the host is, apart from what changes by itself."""
        return self.as_root(node, SNAPSHOT.read_text())


def fabric_nodes(instance: str, hosts: list[str], *options: str) -> Iterator[FabricNodes]:
    """A lab that is removed at the end; skipped where this machine cannot hold one."""
    if platform.system() != "Linux" or os.geteuid() != 0:
        if os.environ.get("CI") == "true":
            pytest.fail("CI must be able to run the lab: Linux and root")
        pytest.skip("the lab needs Linux and root")
    run_lab(instance, "down")
    run_lab(instance, "up", "--hosts-only", "--hosts", str(len(hosts)), *options)
    folder = paths.instance_dir(instance)
    password = (folder / "sudo_password").read_text().strip()
    transports = {}
    for host in hosts:
        spec = ConnectionSpec(node=host, address=host, user="spark", ssh_config=str(folder / "ssh_config"))
        transports[host] = SshTransport(resolve(spec), lambda: password)
    try:
        yield FabricNodes(instance, transports)
    finally:
        run_lab(instance, "down")
