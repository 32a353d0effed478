"""Which rank supervisor a group runs: its own release, or the newest.

A newer supervisor alone is no reason to stop a model that serves: it waits for the next restart that something else
asks for. What runs is read from the group's containers and not from any record, so that it holds after anything that
happened to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spark_core.facts.containers import Container
from spark_core.group import LABEL, container_name

DEPLOYMENT_LABEL = f"{LABEL}.deployment"
SUPERVISOR_LABEL = f"{LABEL}.supervisor"


@dataclass(frozen=True)
class RunningGroup:
    """What the containers of a group were made from.

    Attributes:
        deployment: The id that stands for all that they run.
        supervisor: Path of the supervisor's file, below the node's folder of files.
        image_id: Local id of their image.
    """

    deployment: str
    supervisor: str
    image_id: str


def running_group(containers: Iterable[Container], stack: str, group: str, ranks: int) -> RunningGroup | None:
    """What a group's containers run, stopped ones included; None if there are none, or if they differ.

    Args:
        containers: Those of all its nodes.
        ranks: Number of its ranks.
    """
    names = {container_name(stack, group, rank) for rank in range(ranks)}
    found = {
        RunningGroup(container.label(DEPLOYMENT_LABEL), container.label(SUPERVISOR_LABEL), container.image)
        for container in containers
        if container.stack == stack and container.name in names
    }
    [only] = found if len(found) == 1 else [None]
    return only if only is not None and only.deployment and only.supervisor else None


def supervisor_to_run(running: RunningGroup | None, newest: str, deployment_with: Callable[[str], str]) -> str:
    """The supervisor that the next run of the program gives a group.

    Args:
        newest: Path of the newest one.
        deployment_with: Gives the id of what the settings ask for, with a supervisor.
    """
    if running is None or running.supervisor == newest:
        return newest
    return running.supervisor if deployment_with(running.supervisor) == running.deployment else newest
