"""Whether a group is wanted running or stopped: recorded on the head, where the rank supervisor reads it.

A stopped group keeps its containers, whose supervisors hold nothing but themselves (spark_runtime/desired.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from spark_core.gate import Rank
from spark_core.transport.base import command, run_checked, script

FILE = "desired"
STOPPED = "stopped"

_STOP = """
umask 022
printf '%s\\n' "$2" > "$1/.desired.new"
mv -f -- "$1/.desired.new" "$1/desired"
"""
_START = 'rm -f -- "$1/desired"'
_RUNNING = """
found=$(docker ps -aq --filter "name=^/$1$")
if [ -n "$found" ]; then docker start "$1" >/dev/null; else echo absent; fi
"""


def want_stopped(head: Rank) -> None:
    """Record on the head that the group is wanted stopped; its supervisor then ends every rank."""
    run_checked(
        head.transport,
        script(_STOP, head.state_folder, STOPPED),
        purpose=f"expected to record in {head.state_folder} that the group is stopped",
    )


def want_running(ranks: Sequence[Rank]) -> None:
    """Take the record away wherever there is one, and start containers that somebody stopped."""
    for rank in ranks:
        run_checked(
            rank.transport,
            script(_START, rank.state_folder),
            purpose=f"expected to record in {rank.state_folder} that the group runs",
        )
    for rank in ranks:
        run_checked(
            rank.transport,
            script(_RUNNING, rank.container, timeout_s=60),
            purpose=f"expected to start {rank.container}",
        )


def wanted_state(head: Rank) -> str:
    """``stopped`` or ``running``, as recorded on the head; also where no container runs."""
    result = head.transport.run(command("cat", f"{head.state_folder}/{FILE}"))
    return STOPPED if result.ok and result.stdout.strip() == STOPPED else "running"
