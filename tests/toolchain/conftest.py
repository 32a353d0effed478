"""The binaries under test and an sshd for them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.toolchain import resource_plugin, ssh_server


@pytest.fixture(scope="session")
def command_plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[resource_plugin.Plugin]:
    """pulumi-resource-command, without an SSH agent to fall back on."""
    environ = {name: value for name, value in os.environ.items() if name != "SSH_AUTH_SOCK"}
    with resource_plugin.running(resource_plugin.find_plugin("command"), environ) as plugin:
        plugin.configure({})
        yield plugin


@pytest.fixture(scope="session")
def docker_plugin() -> Iterator[resource_plugin.Plugin]:
    """pulumi-resource-docker, not configured: nothing here needs a Docker daemon."""
    with resource_plugin.running(resource_plugin.find_plugin("docker")) as plugin:
        yield plugin


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh_server.SshServer]:
    """A real sshd on loopback."""
    sshd = ssh_server.find_sshd()
    if sshd is None:
        pytest.skip("no sshd: `make sshd` unpacks one into the cache")
    with ssh_server.running(sshd, tmp_path_factory.mktemp("sshd")) as running:
        yield running
