"""How a cluster of another launcher is stopped by name, and the commands that bring it back."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from spark_core.errors import CommandError
from spark_core.first_day.survey import FoundContainer, LauncherFolder
from spark_core.settings import NodeSettings, Settings
from spark_core.transport.base import Transport, command, run_checked
from spark_core.transport.connection import config_arguments

GRACE_S = 60
"""How long Docker lets a container end by itself before it kills it."""


@dataclass(frozen=True)
class Replaced:
    """What one node has of a cluster that is to be replaced.

    Attributes:
        node: The node.
        containers: Its containers that the settings name, whether they run or not.
        launchers: Checkouts of launchers on it.
    """

    node: NodeSettings
    containers: tuple[FoundContainer, ...]
    launchers: tuple[LauncherFolder, ...] = ()

    @property
    def running(self) -> tuple[FoundContainer, ...]:
        """Those that are to be stopped."""
        return tuple(one for one in self.containers if one.running)


def stop_container(transport: Transport, name: str) -> None:
    """Stop a container; it, its image and what it has mounted stay.

    Raises:
        CommandError: it still runs.
    """
    asked = transport.run(command("docker", "stop", "-t", str(GRACE_S), name, timeout_s=GRACE_S + 30))
    running = run_checked(
        transport, command("docker", "ps", "--format", "{{.Names}}"), purpose="expected to learn what still runs"
    )
    if name in running.split():
        raise CommandError(
            f"expected the container {name} to stop, found it running",
            where=transport.node,
            do="stop it with its own launcher, then run this again",
            evidence=asked.stderr.strip().splitlines()[-2:],
        )


def notes(replaced: Sequence[Replaced]) -> list[str]:
    """What a person should know before these containers are stopped."""
    found = []
    for one in replaced:
        for container in one.running:
            if container.removed_when_stopped:
                found.append(
                    f"{one.node.name}: {container.name} was started with --rm, so Docker itself removes it when it "
                    "stops; image, cache and netplan stay"
                )
            elif container.restart == "always":
                found.append(
                    f"{one.node.name}: {container.name} has the restart policy always: Docker starts it again at the "
                    f"next boot; `docker update --restart=unless-stopped {container.name}` on that node ends that"
                )
    return found


def way_back(settings: Settings, stack: str, replaced: Sequence[Replaced]) -> list[str]:
    """The commands that bring the old cluster back, in order; the first frees the memory.

    Args:
        replaced: What was there before anything was stopped, the head first.
    """
    lines = [f"python -m automation stop --stack {stack}"]
    gone = [container for one in replaced for container in one.containers if container.removed_when_stopped]
    for one in reversed(replaced):  # workers first, as every launcher does
        kept = [container.name for container in one.containers if not container.removed_when_stopped]
        if kept:
            lines.append(on_node(settings, one.node, f"docker start {shlex.join(kept)}"))
    if gone:
        lines += _by_launcher(settings, replaced, gone)
    return lines


def _by_launcher(settings: Settings, replaced: Sequence[Replaced], gone: Sequence[FoundContainer]) -> list[str]:
    """How containers that Docker removed are made again: only their launcher can."""
    servers = [server for container in gone for server in container.servers if "--headless" not in server.flags]
    if any(container.launcher == "eugr/spark-vllm-docker" for container in gone):
        for one in replaced:
            for checkout in one.launchers:
                words = ["exec", *servers[0].words] if servers else ["start"]
                text = f"cd {shlex.quote(checkout.folder)} && ./launch-cluster.sh -d {shlex.join(words)}"
                others = servers[0].others if servers else ()
                added = f"  # and its other flags: {' '.join(others)}" if others else ""
                return [on_node(settings, one.node, text) + added]
    names = ", ".join(dict.fromkeys(container.name for container in gone))
    launchers = ", ".join(dict.fromkeys(container.launcher or "its launcher" for container in gone))
    return [f"# start {names} again with {launchers}, as before: Docker has removed what was started with --rm"]


def on_node(settings: Settings, node: NodeSettings, text: str) -> str:
    """A command line for a person that runs shell text on a node."""
    words = ["ssh", *config_arguments(settings.ssh.config_file)]
    words += ["-p", str(node.ssh_port)] if node.ssh_port else []
    if node.via:
        head = settings.node(node.via)
        words += ["-J", f"{head.user}@{head.management_address}"]
    return shlex.join([*words, f"{node.user}@{node.management_address}", text])
