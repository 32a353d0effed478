"""Two fake nodes, a stack of settings for them, and the servicer that manages them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pulumi.dynamic import ResourceProvider

import tests.own_home  # noqa: F401  (before anything that looks for the home folder)
from tests.config_cases import apply_change, load_base
from tests.fake_host import FakeHost
from tests.fake_ssh import FakeSsh
from tests.providers.engine import Managed, Servicer

PIN = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAaBcDeF"


@dataclass
class Deployment:
    """What a test needs: nodes, settings and servicers.

    Attributes:
        ssh: How the nodes are reached.
        config: The stack's configuration; changes count for the next servicer.
    """

    ssh: FakeSsh
    config: dict[str, Any]
    _stack: ExitStack = field(default_factory=ExitStack)
    _servicer: Servicer | None = None

    def host(self, name: str = "spark-a") -> FakeHost:
        return self.ssh.hosts[name]

    def root(self, name: str = "spark-a") -> str:
        return f"{self.host(name).base}/root"

    @property
    def servicer(self) -> Servicer:
        """The servicer of this run of Pulumi."""
        if self._servicer is None:
            self._servicer = self._stack.enter_context(Servicer(self.config, self.ssh.programs, self.ssh.home))
        return self._servicer

    def connection(self, name: str = "spark-a") -> dict[str, Any]:
        """What a resource remembers of how its node is reached."""
        return {"address": name, "user": "aurora", "port": None, "host_key": PIN}

    def next_run(self, change: Mapping[str, Any] | None = None, **secrets: str) -> Servicer:
        """Another run of Pulumi, with changed settings: a new process."""
        self._servicer = None
        self.config = apply_change(self.config, change or {}) | secrets
        return self.servicer

    def manage(self, provider: type[ResourceProvider]) -> Managed:
        return Managed(self.servicer, provider())

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """Two nodes whose fabric is as declared."""
    config = apply_change(
        load_base(),
        {
            "hardware": "cpu",
            "fabric": {"manage": True},
            "ssh": {"boot_wait_s": 0},  # a node that does not answer here never will
            **{f"nodes[{n}].management_address": name for n, name in enumerate(("spark-a", "spark-b"))},
            **{f"nodes[{n}].fabric[{i}].hca": None for n in (0, 1) for i in (0, 1)},
        },
    )
    with FakeSsh(tmp_path, ["spark-a", "spark-b"]) as ssh:
        for place, host in enumerate(ssh.hosts.values()):
            host.set_link("enp1s0f1np1", 1500)
            host.set_link("enP2p1s0f1np1", 1500)
            host.set_sysctls({"net.core.rmem_max": "212992", "net.core.wmem_max": f"{place + 1}"})
        found = Deployment(ssh, config)
        try:
            yield found
        finally:
            found.close()


@pytest.fixture
def journal_props(deployment: Deployment) -> Callable[[str], dict[str, Any]]:
    """Inputs of the journal of a node."""

    def props(node: str = "spark-a") -> dict[str, Any]:
        return {
            "node": node,
            "connection": deployment.connection(node),
            "stack": "dev",
            "root": deployment.root(node),
            "groups": ["main"],
        }

    return props
