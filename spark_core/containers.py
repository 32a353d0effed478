"""Containers that carry our label: found, stopped in order, removed. A foreign container is never touched."""

from __future__ import annotations

import json

from spark_core.errors import CommandError, ForeignObjectError
from spark_core.group import LABEL
from spark_core.transport.base import Transport, command, run_checked, script

STOP_TIMEOUT_S = 90
"""The supervisor's worst case: vllm 30 s, the leases 9 s, Ray 10 s, and 30 s until what is left is killed."""

# A command substitution in the head of a loop would hide that the daemon could not be asked.
_REMOVE = """
containers=$(docker ps -aq --filter "label=$1")
for c in $containers; do docker stop -t "$2" "$c" >/dev/null 2>&1 || true; docker rm -f "$c" >/dev/null; done
volumes=$(docker volume ls -q --filter "label=$1")
for v in $volumes; do docker volume rm "$v" >/dev/null; done
"""


def make_way(transport: Transport, name: str, stack: str) -> str | None:
    """Before a container is created: remove one of that name that is ours and that no state knows of.

    A run that was killed between Docker's create and Pulumi's record leaves such a container; the next create would
    fail on its name.

    Returns:
        What was removed, for the person, or None.

    Raises:
        ForeignObjectError: a container of that name is not ours.
    """
    result = transport.run(command("docker", "container", "inspect", name))
    if not result.ok:
        if "No such" in result.stderr:
            return None
        raise CommandError(
            f"expected an answer about the container {name}, found: {result.stderr.strip()[-160:]}",
            where=f"{transport.node} (docker)",
        )
    found = json.loads(result.stdout)[0]
    labels = found["Config"].get("Labels") or {}
    entrypoint = found["Config"].get("Entrypoint") or []
    if (
        labels.get(f"{LABEL}.stack") == stack
        and (found.get("State") or {}).get("Running")
        and len(entrypoint) == 2
        and transport.run(command("docker", "exec", name, *entrypoint, "status", timeout_s=30)).ok
    ):
        raise ForeignObjectError(
            f"expected no container named {name}, found one of a stack {stack} that serves and is not in this state",
            where=transport.node,
            do="use the backend that holds its state; if that state is lost, run "
            f"`python -m automation adopt --stack {stack}`, then up again",
        )
    if labels.get(f"{LABEL}.stack") != stack:
        raise ForeignObjectError(
            f"expected no container named {name}, found one that is not ours "
            f"(image {found['Config'].get('Image')}, created {str(found.get('Created'))[:19]})",
            where=transport.node,
            do="remove or rename it yourself, then run up again",
        )
    run_checked(
        transport,
        script(
            'docker stop -t "$2" "$1" >/dev/null 2>&1 || true; docker rm -f "$1" >/dev/null',
            name,
            str(STOP_TIMEOUT_S),
            timeout_s=STOP_TIMEOUT_S + 30,
        ),
        purpose=f"expected to remove the container {name} that an interrupted run left",
    )
    return f"{transport.node}: removed the container {name} that an interrupted run left"


def stop_container(transport: Transport, name: str) -> None:
    """Stop a container in an orderly way; none is fine."""
    run_checked(
        transport,
        script(
            'found=$(docker ps -aq --filter "name=^/$1$"); [ -n "$found" ] || exit 0; '
            'docker stop -t "$2" "$1" >/dev/null',
            name,
            str(STOP_TIMEOUT_S),
            timeout_s=STOP_TIMEOUT_S + 30,
        ),
        purpose=f"expected to stop the container {name}",
    )


def restart_container(transport: Transport, name: str) -> None:
    """Stop a container and start it again."""
    run_checked(
        transport,
        command("docker", "restart", "-t", str(STOP_TIMEOUT_S), name, timeout_s=STOP_TIMEOUT_S + 30),
        purpose=f"expected to restart the container {name}",
    )


def remove_labelled(transport: Transport, stack: str) -> None:
    """Remove every container and volume that carries the stack's label."""
    run_checked(
        transport,
        script(_REMOVE, f"{LABEL}.stack={stack}", str(STOP_TIMEOUT_S), timeout_s=4 * STOP_TIMEOUT_S),
        purpose="expected to remove the stack's containers and volumes",
    )
