"""Who listens on TCP ports of a node."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from spark_core.facts.answer import NO_ANSWER, Answer, Unread
from spark_core.facts.containers import container_in, containers_by_pid


@dataclass(frozen=True)
class Listener:
    """A listening socket.

    Args:
        port: Its port.
        program: The program that holds it; only root sees that of another user.
        uid: The user that holds it.
        container: Id of the container that it is held in, or None.
        unit: The unit of systemd that it was opened in, or None.
    """

    port: int
    program: str | None = None
    uid: int = 0
    container: str | None = None
    unit: str | None = None


def listener_filter(ports: Iterable[int]) -> str:
    """The expression by which ``ss`` shows the sockets of these ports only."""
    return " or ".join(f"sport = :{port}" for port in ports)


def parse_listeners(answer: Answer, groups: Answer = NO_ANSWER) -> tuple[Listener, ...] | Unread:
    """The listening sockets from ``ss -Hltnpe``.

    Args:
        answer: What ss said. It tells a socket's control group with a unified hierarchy and iproute2 5.10 only.
        groups: The control groups of the processes that it names, from /proc.
    """
    found, containers = [], containers_by_pid(groups)
    for line in answer.lines:
        words = line.split()
        port = words[3].rpartition(":")[2] if len(words) > 4 else ""
        if not re.fullmatch(r"\d{1,5}", port, re.ASCII):
            return Answer(line, answer.status).unread("the listening ports", "ss")
        program = re.search(r'users:\(\("([^"]+)",pid=(\d{1,9})', line, re.ASCII)
        uid = re.search(r"\buid:(\d{1,10})\b", line, re.ASCII)
        group = re.search(r"\bcgroup:(\S+)", line)
        path = group.group(1) if group else ""
        container = container_in(path) or (containers.get(program.group(2)) if program else None)
        unit = re.search(r"([^/]+\.service)(/|$)", path)
        found.append(
            Listener(
                int(port),
                program.group(1) if program else None,
                int(uid.group(1)) if uid else 0,
                container,
                unit.group(1) if unit and not container else None,
            )
        )
    return tuple(found) if answer.status == 0 else answer.unread("the listening ports", "ss")
