"""``SparkNode``: one DGX Spark, with its journal, its declared tuning, the files of ours and the owner's own setup."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pulumi
import pulumi_command as command
import pulumi_docker as docker

from components.runtime_bundle import NodeFile
from providers.connections import connection_facts
from providers.node_host import NodeHost
from providers.node_journal import NodeJournal
from spark_core.errors import SparkError
from spark_core.journal import StackFolder
from spark_core.settings import NodeSettings, Settings, SetupCommand
from spark_core.settings.host import HostFile
from spark_core.transport.connection import Connection, jump_of
from spark_core.tuning import items_of, owner_file

_OF_THIS_CONTROLLER = tuple(
    f"connection.{hop}{name}" for hop in ("", "proxy.") for name in ("agentSocketPath", "privateKey")
)
"""What differs between the machines that may run this program, and must not count as a change."""


@dataclass(frozen=True, kw_only=True)
class SparkNodeArgs:
    """What a node is made of."""

    settings: Settings
    """The settings of the stack."""
    node: NodeSettings
    """The node's own settings."""
    stack: str
    """Name of the stack."""
    connection: Connection
    """How the node is reached."""
    files: Sequence[NodeFile]
    """Files that must lie on the node."""


class SparkNode(pulumi.ComponentResource):
    """One node. It needs sshd, Docker and a deploy user on the machine; everything it changes is put back on destroy.

    A change of tuning or of a file is made in place. It restarts nothing but for two, which preview tells: Docker's
    cgroup driver, and a unit of ours that systemd must read anew where that takes the GPU from containers. A change of
    ``node_root`` or of the node's name replaces the node's resources.

    Files and setup commands go with the journal, which knows what takes them back: a destroy asks no other program.
    """

    docker_provider: docker.Provider
    """Pulumi's Docker provider for this node, over the connection that the preflight opened."""
    journal: NodeJournal
    """The resource with which everything on the node goes."""

    def __init__(self, name: str, args: SparkNodeArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("spark:node:SparkNode", name, None, opts)
        node, settings = args.node, args.settings
        self.args = args
        self.folder = StackFolder(settings.root_of(node), args.stack)
        child = pulumi.ResourceOptions(parent=self)
        groups = sorted(group for group, value in settings.groups.items() if node.name in value.nodes)
        self.journal = NodeJournal(
            f"{name}-journal",
            node=node.name,
            stack=args.stack,
            root=self.folder.root,
            groups=groups,
            connection=connection_facts(node),
            opts=child,
        )
        self.host = NodeHost(
            f"{name}-host",
            node=node.name,
            connection=connection_facts(node),
            stack=args.stack,
            root=self.folder.root,
            sysctls=settings.host.parameters,
            tuning=items_of(settings),
            placed={file.target: _placed(file) for file in settings.host.files},
            setup={setup.name: setup.delete for setup in settings.host.setup if setup.delete},
            files={f"{self.folder.files}/{file.remote}": file.sha256 for file in args.files},
            opts=pulumi.ResourceOptions(parent=self, depends_on=[self.journal]),
        )
        self._copy_files(name)
        self._run_setup(name)
        self.docker_provider = docker.Provider(
            f"{name}-docker",
            host=f"ssh://{node.user}@{node.management_address}:{args.connection.port}",
            ssh_opts=args.connection.shared_options(),
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.architecture = self.host.architecture
        self.register_outputs({"architecture": self.architecture, "docker": self.host.docker, "gpu": self.host.gpu})

    def _copy_files(self, name: str) -> None:
        # The content's hash is in the resource's name: new content is a new resource at a new path, and nothing that a
        # running container has mounted is ever written over.
        for file in self.args.files:
            command.remote.CopyToRemote(
                f"{name}-{Path(file.remote).name}-{file.sha256[:8]}",
                connection=self._connection(),
                source=pulumi.FileAsset(file.local),
                remote_path=f"{self.folder.files}/{file.remote}",
                triggers=[self.host.repair],
                opts=self._command_options(),
            )

    def _run_setup(self, name: str) -> None:
        before: list[pulumi.Resource] = []
        for setup in self.args.settings.host.setup:
            before = [self._setup_command(name, setup, before)]

    def _setup_command(self, name: str, setup: SetupCommand, before: list[pulumi.Resource]) -> command.remote.Command:
        return command.remote.Command(
            f"{name}-setup-{setup.name}",
            connection=self._connection(),
            create=setup.create,
            delete=setup.delete,
            add_previous_output_in_env=False,
            opts=self._command_options(before),
        )

    def _command_options(self, before: Sequence[pulumi.Resource] = ()) -> pulumi.ResourceOptions:
        # Another laptop or a CI runner has another agent and another key: that must not run anything again.
        return pulumi.ResourceOptions(
            parent=self,
            depends_on=[self.host, *before],
            ignore_changes=list(_OF_THIS_CONTROLLER),
            deleted_with=self.journal,
        )

    def _connection(self) -> command.remote.ConnectionArgs:
        """pulumi-command has an SSH of its own, without ssh_config: it gets what ``ssh -G`` resolved."""
        connection = self.args.connection
        try:
            jump = jump_of(connection)
        except SparkError as error:
            raise pulumi.RunError(error.render()) from None
        return command.remote.ConnectionArgs(
            **_dial(connection),
            proxy=command.remote.ProxyConnectionArgs(**_dial(jump)) if jump is not None else None,
        )


def _placed(file: HostFile) -> dict[str, Any]:
    """A file of the owner as the node's host takes it; its content is told by its hash, so that a change shows."""
    try:
        content = owner_file(file.source, file.target, file.mode, file.sudo).content
    except SparkError as error:
        raise pulumi.RunError(error.render()) from None
    digest = hashlib.sha256(content).hexdigest()
    return {"source": file.source, "content": digest, "mode": file.mode, "sudo": file.sudo}


def _dial(connection: Connection) -> dict[str, Any]:
    """What pulumi-command needs to reach one host."""
    return {
        "host": connection.host_name,
        "port": float(connection.port),
        "user": connection.user,
        "host_key": connection.pin,
        "agent_socket_path": connection.identity_agent,
        "private_key": _key_material(connection),
        # Copies of several files dial at once, and an sshd with a low MaxStartups drops some of them.
        "dial_error_limit": 10,
        "per_dial_timeout": 5,
    }


def _key_material(connection: Connection) -> pulumi.Output[str] | None:
    """The private key, as a secret, only where there is no agent with a key that could be asked instead."""
    key = None if connection.has_agent else connection.private_key()
    return pulumi.Output.secret(key) if key is not None else None
