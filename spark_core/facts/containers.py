"""Containers of a node: ours, those of other launchers, and others."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from spark_core.facts.answer import Answer, Unread
from spark_core.group import LABEL

CONTAINERS_FORMAT = (
    '{"id":{{json .ID}},"names":{{json .Names}},"image":{{json .Image}},"status":{{json .Status}},'
    '"age":{{json .RunningFor}},"ports":{{json .Ports}},"labels":{{json .Labels}},'
    f'"stack":{{{{json (.Label "{LABEL}.stack")}}}}}}'
)
"""Format of ``docker ps``: a JSON object on each line, since a label or a name may hold anything."""

_LAUNCHERS = {
    # The names are the defaults in each project's own scripts.
    "eugr/spark-vllm-docker": re.compile(r"vllm_node\w*"),
    "sparkrun": re.compile(r"sparkrun_.+"),
    "vLLM's run_cluster.sh": re.compile(r"node-\d+"),
    "a Ray launcher": re.compile(r"(vllm-)?(ngc-)?ray-(head|worker)(-.+)?"),
}
_LABELS = {"sparkrun": "sparkrun.cluster_id=", "spark-pulse": "spark-pulse.managed="}


@dataclass(frozen=True)
class Container:
    """A container.

    Args:
        id: Its whole id.
        name: Its name.
        image: Its image as it was named.
        status: Docker's words, such as ``Up 3 days``.
        stack: The stack of ours that made it, or empty.
        age: How long ago it was made, in Docker's words.
        ports: Ports of the node that it publishes.
        launcher: The other launcher that made it, or None.
        labels: Its labels in Docker's words, ``key=value,…``; a value with a comma in it cannot be told from two.
    """

    id: str
    name: str
    image: str
    status: str
    stack: str = ""
    age: str = ""
    ports: frozenset[int] = frozenset()
    launcher: str | None = None
    labels: str = ""

    @property
    def running(self) -> bool:
        return self.status.startswith("Up")

    def label(self, key: str) -> str:
        """Value of a label of ours, none of which has a comma in it; empty if there is none."""
        return next((word[len(key) + 1 :] for word in self.labels.split(",") if word.startswith(f"{key}=")), "")


def parse_containers(answer: Answer) -> tuple[Container, ...] | Unread:
    """The containers from ``docker ps -a`` with :data:`CONTAINERS_FORMAT`."""
    found = []
    for line in answer.lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not all(isinstance(value, str) for value in row.values()):
            return Answer(line, answer.status).unread("the containers", "docker ps")
        name, labels = row.get("names", ""), row.get("labels", "")
        found.append(
            Container(
                id=row.get("id", ""),
                name=name,
                image=row.get("image", ""),
                status=row.get("status", ""),
                stack=row.get("stack", ""),
                age=row.get("age", ""),
                ports=published_ports(row.get("ports", "")),
                launcher=None if row.get("stack") else launcher_of(name, labels),
                labels=labels,
            )
        )
    return tuple(found) if answer.status == 0 else answer.unread("the containers", "docker ps")


def launcher_of(name: str, labels: str = "") -> str | None:
    """The launcher that makes containers of that name or with those labels (``key=value,…``)."""
    for launcher, mark in _LABELS.items():
        if labels.startswith(mark) or f",{mark}" in labels:
            return launcher
    return next((launcher for launcher, names in _LAUNCHERS.items() if names.fullmatch(name)), None)


def published_ports(text: str) -> frozenset[int]:
    """Ports of the node in Docker's words, such as ``0.0.0.0:8000-8001->80/tcp, [::]:9000->9000/tcp, 22/tcp``."""
    ports: set[int] = set()
    for first, last in re.findall(r":(\d{1,5})(?:-(\d{1,5}))?->", text, re.ASCII):
        ports.update(range(int(first), int(last or first) + 1))
    return frozenset(ports)


def container_in(group: str) -> str | None:
    """The id of the container that a control group is of, or None."""
    found = re.search(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", group)
    return found.group() if found else None


def containers_by_pid(groups: Answer) -> dict[str, str]:
    """The container of each process that runs in one, from lines of its number and its control groups."""
    found = {}
    for line in groups.lines:
        pid, _, group = line.partition(" ")
        container = container_in(group)
        if container:
            found[pid] = container
    return found
