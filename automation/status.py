"""``status``: what runs, in which phase, and how it compares with what is wanted."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from automation import session as frame
from automation.engine import pulumi_json
from automation.exit_codes import Exit
from automation.good_settings import good_settings
from automation.group_nodes import GroupNodes, learn_secrets, open_nodes
from automation.history import update_of, updates_of
from automation.locks import locks_of
from automation.progress import duration
from automation.redaction import redacted
from automation.reports import LockReport, RankReport, SettingsReport, StatusReport
from automation.session import chosen_stack
from automation.stack_file import StackFile, open_stack_file
from spark_core.errors import SparkError
from spark_core.gate import ON_REQUEST, RankState, drift_of, observe_rank
from spark_core.group import public_endpoint
from spark_core.settings.record import differing_keys, digest_of, record_of
from spark_core.wanted import STOPPED, wanted_state


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "status",
        help="say what runs, in which phase, and whether that is what is wanted",
        description="Asks every rank, and compares the settings that served last with the file's; changes nothing.",
    )
    frame.add_arguments(parser, runs=False)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Ask and tell."""
    file = open_stack_file(chosen_stack(options))
    nodes = open_nodes(file)
    learn_secrets(file)
    report = status_of(file, nodes)
    print(report.model_dump_json(indent=2) if options.json else told(report))
    return report.exit_code


@dataclass(frozen=True)
class GroupState:
    """What the nodes alone say of a group, without the engine.

    Attributes:
        states: Each rank's, or why it could not be asked.
        ranks: The same as a report has it.
        wanted: As recorded on the head.
        state: ``serving``, or what is wrong.
        exit_code: 0 if it is as wanted, 2 if not, 1 if that cannot be told.
    """

    states: list[RankState | SparkError]
    ranks: list[RankReport]
    wanted: Literal["running", "stopped", "unknown"]
    state: str
    exit_code: Exit


def group_state(nodes: GroupNodes) -> GroupState:
    """Ask every rank at once."""
    found = nodes.each(lambda rank: (observe_rank(rank), wanted_state(rank)))
    states = [one[0] for one in found if not isinstance(one, SparkError)]
    head = found[0]
    wanted: Literal["running", "stopped", "unknown"] = "unknown"
    if not isinstance(head, SparkError):
        wanted = "stopped" if head[1] == STOPPED else "running"
    complete = len(states) == len(found)
    state = drift_of(states) if complete else "not every node answers"
    right = complete and (state.endswith(ON_REQUEST) if wanted == STOPPED else state == "serving")
    return GroupState(
        [one if isinstance(one, SparkError) else one[0] for one in found],
        [_rank(nodes, place, one) for place, one in enumerate(found)],
        wanted,
        state,
        Exit.DONE if right else (Exit.DRIFT if complete else Exit.FAILED),
    )


def status_of(file: StackFile, nodes: GroupNodes) -> StatusReport:
    """The state of a stack's group."""
    group = group_state(nodes)
    updates = updates_of(file.stack, 1)
    return StatusReport(
        command="status",
        stack=file.stack,
        exit_code=group.exit_code,
        group=nodes.name,
        wanted=group.wanted,
        state=group.state,
        endpoint=public_endpoint(nodes.settings, nodes.name),
        model=nodes.group.model.served_name,
        ranks=group.ranks,
        settings=settings_of(pulumi_json("stack", "export", "-s", file.stack), nodes),
        lock=lock_of(file),
        last_update=update_of(updates[0]) if updates else None,
    )


def _rank(nodes: GroupNodes, place: int, found: tuple[RankState, str] | SparkError) -> RankReport:
    name = nodes.group.nodes[place]
    if isinstance(found, SparkError):
        return RankReport(node=name, rank=place, phase="unreachable", detail=redacted(found.line))
    state, wanted = found
    status: Mapping[str, Any] = state.status or {}
    first, since = status.get("first_error"), status.get("since")
    return RankReport(
        node=name,
        rank=place,
        phase=state.phase,
        detail=redacted(str(status.get("progress") or status.get("detail") or "")),
        wanted=wanted,
        generation=state.generation[1] if state.generation else None,
        since=float(since) if isinstance(since, int | float) else None,
        restarts=state.restarts,
        first_error=redacted(str(first.get("line") or "")) if isinstance(first, Mapping) else "",
    )


def lock_of(file: StackFile) -> LockReport | None:
    """Who holds a stack."""
    locks = locks_of(file.project, file.stack)
    return LockReport(holder=locks[0].holder, stale=locks[0].stale) if locks else None


def settings_of(state: Mapping[str, Any], nodes: GroupNodes) -> SettingsReport:
    """The settings that served last, as a state has them, beside the file's."""
    kept = good_settings(state)
    record = record_of(nodes.settings)
    differs = differing_keys(kept[0].record, record) if kept else []
    return SettingsReport(file=digest_of(record), served=kept[0].digest if kept else None, differs=differs)


def told(report: StatusReport) -> str:
    """For a person."""
    lines = [f"{report.stack}: {report.group} is {report.state} (wanted: {report.wanted})"]
    for rank in report.ranks:
        since = f" for {duration(time.time() - rank.since)}" if rank.since else ""
        generation = f", generation {rank.generation}" if rank.generation is not None else ""
        lines.append(f"  rank {rank.rank} on {rank.node}: {rank.phase}{since}{generation} {rank.detail}".rstrip())
        lines += [f"    first error: {rank.first_error}"] if rank.first_error else []
    lines.append(f"  endpoint: {report.endpoint}, model {report.model}")
    settings = report.settings
    if settings.served is None:
        lines.append("  settings: none has served yet")
    elif settings.differs:
        lines.append(f"  settings: {settings.served} served last; the file has {settings.file}, which differs in")
        lines += [f"    {key}" for key in settings.differs]
    else:
        lines.append(f"  settings: {settings.served}, as in the file")
    if report.lock is not None:
        lines.append(f"  held by {report.lock.holder}{' (dead)' if report.lock.stale else ''}")
    if report.last_update is not None:
        update = report.last_update
        lines.append(f"  last: {update.kind} {update.result} at {update.started}: {update.message}")
    return "\n".join(lines)
