"""Gathers what ``report`` tells: state, history, ranks, and what their nodes keep. What cannot be read is said so.

Every part is read by itself, so that a node that is down, a state that is lost or an engine that is missing takes none
of the others away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from automation.bench_report import SpeedReport
from automation.deployment_report import (
    DeploymentReport,
    DriftPart,
    GenerationPart,
    LastUpPart,
    MeasuredPart,
    NodePart,
    PhasePart,
    SubnetPart,
    UnreadPart,
    Verdict,
)
from automation.engine import pulumi_json
from automation.exit_codes import CommandEnd, Exit
from automation.fabric_view import interfaces_of, measured, not_proven, subnets_of
from automation.generations import read_generations
from automation.good_settings import Good, good_settings
from automation.group_nodes import GroupNodes
from automation.history import update_of, updates_of
from automation.redaction import learn, redacted
from automation.stack_file import StackFile
from automation.state_outputs import outputs_of_type
from automation.status import GroupState, group_state, lock_of, settings_of
from automation.step_times import seconds_of, step_times
from spark_core.errors import SparkError
from spark_core.gate import Rank, RankState
from spark_core.group import public_endpoint
from spark_core.journal import JournalEntry, read_journal
from spark_core.settings import NodeSettings

T = TypeVar("T")
GENERATIONS = 8
HISTORY = 15


@dataclass(frozen=True)
class Kept:
    """What one node keeps of its rank."""

    generations: list[GenerationPart]
    phases: list[PhasePart]
    changed: list[str]


@dataclass
class Gathering:
    """The parts that were read, and those that could not be."""

    unread: list[UnreadPart] = field(default_factory=list)

    def part(self, name: str, read: Callable[[], T], instead: T) -> T:
        """One part; what it raises is kept for the report."""
        try:
            return read()
        except SparkError as error:
            if isinstance(error, CommandEnd) and error.code == Exit.INTERRUPTED:
                raise  # by a person, who wants no page
            self.missed(name, error)
        except (KeyError, TypeError, ValueError, AttributeError) as fault:
            # Written by a release that this one does not know, or damaged.
            self.unread.append(UnreadPart(part=name, why=f"what was read has another form than expected: {fault!r}"))
        return instead

    def missed(self, name: str, error: SparkError) -> None:
        """Keep why a part is missing."""
        self.unread.append(UnreadPart(part=name, why=error.line))


def gather(
    file: StackFile, nodes: GroupNodes, drift: Callable[[], DriftPart] | None, now: float | None = None
) -> DeploymentReport:
    """Look at everything once.

    Args:
        drift: Looks for drift, which asks the engine; None where it is not wanted.
    """
    seen = Gathering()
    outputs: dict[str, Any] = seen.part("outputs", lambda: _outputs(file.stack), {})
    state: dict[str, Any] = seen.part("state", lambda: pulumi_json("stack", "export", "-s", file.stack), {})
    updates: list[dict[str, Any]] = seen.part("history", lambda: updates_of(file.stack, HISTORY), [])
    group = group_state(nodes)
    kept = _kept(seen, nodes, group)
    drifted = seen.part("drift", drift, None) if drift is not None else None
    resources: list[dict[str, Any]] = (state.get("deployment") or {}).get("resources") or []
    good = seen.part("last good settings", lambda: good_settings(state), list[Good]())
    head = group.states[0]
    lock = seen.part("lock", lambda: lock_of(file), None)
    verdict, headline = judged(nodes.name, group, drifted)
    phases = kept[0].phases if 0 in kept else []
    return _redacted(
        DeploymentReport(
            command="report",
            stack=file.stack,
            exit_code=Exit.DONE,
            at=time.time() if now is None else now,
            verdict=verdict,
            headline=headline,
            group=nodes.name,
            wanted=group.wanted,
            state=group.state,
            endpoint=str(outputs.get("endpoint") or public_endpoint(nodes.settings, nodes.name)),
            model=str(outputs.get("model") or nodes.group.model.served_name),
            image=str(outputs.get("image_digest") or ""),
            image_source=_image_source(nodes),
            weights=str(outputs.get("model_revision") or ""),
            weights_source=nodes.group.model.source,
            last_good_canary_at=None if isinstance(head, SparkError) else _number(head, "last_good_canary_at"),
            nodes=[_node(nodes, node, resources, group, kept) for node in nodes.settings.nodes],
            subnets=seen.part("fabric", lambda: subnets_of(nodes.settings.nodes, resources), list[SubnetPart]()),
            measured=seen.part("measured fabric", lambda: measured(resources), list[MeasuredPart]()),
            not_proven=seen.part("proof of the fabric", lambda: not_proven(resources), list[str]()),
            drift=drifted,
            last_up=seen.part("last up", lambda: _last_up(updates, resources, phases), None),
            generations=_newest(kept),
            speed=seen.part("speed", lambda: _figures(good), list[SpeedReport]()),
            settings=seen.part("settings", lambda: settings_of(state, nodes), None) if state else None,
            history=[update_of(update) for update in updates],
            held_by="" if lock is None else f"{lock.holder}{' (dead)' if lock.stale else ''}",
            unread=seen.unread,
        )
    )


def judged(name: str, group: GroupState, drift: DriftPart | None) -> tuple[Verdict, str]:
    """The verdict on a group in one word, and in one sentence."""
    silent = [rank.node for rank in group.ranks if rank.phase == "unreachable"]
    if silent:
        others = ", ".join(f"{rank.node}: {rank.phase}" for rank in group.ranks if rank.phase != "unreachable")
        rest = f"; {others}" if others else ""
        return "unknown", f"{name}: {', '.join(silent)} cannot be reached, so it is not known whether it serves{rest}"
    if group.exit_code != Exit.DONE:
        return "broken", f"{name} is wanted {group.wanted} and is not as wanted: {group.state}"
    if group.wanted == "stopped":
        return "stopped", f"{name} is stopped, as was asked for"
    if drift is not None and (drift.changes or drift.error or any(f.severity == "fail" for f in drift.findings)):
        return "drifted", f"{name} serves, and not everything is as the stack's file says"
    return "serving", f"{name} serves"


def _outputs(stack: str) -> dict[str, Any]:
    outputs = pulumi_json("stack", "output", "-s", stack, "--json", "--show-secrets")
    learn([outputs.pop("api_key", None)])
    return outputs


def _kept(seen: Gathering, nodes: GroupNodes, group: GroupState) -> dict[int, Kept]:
    """What the nodes keep that answered just now; a silent one is not waited for twice."""
    for place, state in enumerate(group.states):
        if isinstance(state, SparkError):
            seen.missed(f"node {nodes.group.nodes[place]}", state)

    def look(rank: Rank) -> Kept | None:
        return None if isinstance(group.states[rank.rank], SparkError) else _look(seen, nodes, rank)

    found = nodes.each(look)
    return {place: one for place, one in enumerate(found) if isinstance(one, Kept)}


def _look(seen: Gathering, nodes: GroupNodes, rank: Rank) -> Kept:
    node = rank.transport.node
    empty: tuple[list[GenerationPart], list[PhasePart]] = ([], [])
    generations, phases = seen.part(f"generations on {node}", lambda: read_generations(rank, GENERATIONS), empty)
    folder = nodes.folder(node)
    journal = seen.part(f"journal of {node}", lambda: read_journal(rank.transport, folder), list[JournalEntry]())
    return Kept(generations, phases, [f"{entry.kind} {entry.target}" for entry in journal])


def _node(
    nodes: GroupNodes,
    node: NodeSettings,
    resources: list[dict[str, Any]],
    group: GroupState,
    kept: Mapping[int, Kept],
) -> NodePart:
    names = list(nodes.group.nodes)
    common = {
        "name": node.name,
        "management_address": node.management_address,
        "user": node.user,
        "interfaces": interfaces_of(node, resources),
        "weights": str((outputs_of_type(resources, "WeightsCopy").get("folders") or {}).get(node.name) or ""),
    }
    if node.name not in names:
        return NodePart(**common)
    place = names.index(node.name)
    told, state = group.ranks[place], group.states[place]
    document: Mapping[str, Any] = {} if isinstance(state, SparkError) else state.status or {}
    versions, memory = document.get("versions"), document.get("memory_available_bytes")
    return NodePart(
        **common,
        rank=place,
        phase=told.phase,
        detail=told.detail,
        generation=told.generation,
        since=told.since,
        restarts=told.restarts,
        memory_available_bytes=int(memory) if isinstance(memory, int | float) else None,
        versions={str(k): str(v) for k, v in versions.items() if v} if isinstance(versions, Mapping) else {},
        changed=kept[place].changed if place in kept else [],
    )


def _last_up(
    updates: list[dict[str, Any]], resources: list[dict[str, Any]], phases: list[PhasePart]
) -> LastUpPart | None:
    last = next((update for update in updates if update.get("kind") == "update"), None)
    if last is None:
        return None
    begun, ended = seconds_of(last["startTime"]), seconds_of(last.get("endTime"))
    return LastUpPart(
        update=update_of(last),
        seconds=round(ended - begun, 1) if begun is not None and ended is not None else None,
        steps=step_times(resources, str(last["startTime"]), last.get("endTime")),
        phases=phases,
    )


def _newest(kept: Mapping[int, Kept]) -> list[GenerationPart]:
    """Of each generation the head's account, and others' where they name an error."""
    parts = [
        part for place, one in kept.items() for part in one.generations if place == 0 or 0 not in kept or part.error
    ]
    newest = sorted({part.number for part in parts}, reverse=True)[:GENERATIONS]
    return sorted((part for part in parts if part.number in newest), key=lambda part: (-part.number, part.rank))


def _figures(good: list[Good]) -> list[SpeedReport]:
    return [SpeedReport(**one) for one in good[0].speed] if good else []


def _image_source(nodes: GroupNodes) -> str:
    image = nodes.settings.image
    built = f"built from {image.build.context}" if image.build else ""
    return image.registry or image.archive or image.local_id or built


def _number(state: RankState, key: str) -> float | None:
    value = (state.status or {}).get(key)
    return float(value) if isinstance(value, int | float) else None


def _redacted(report: DeploymentReport) -> DeploymentReport:
    """The report with every text in it redacted, whoever said it."""
    return DeploymentReport.model_validate(_each_text(report.model_dump()))


def _each_text(value: Any) -> Any:
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {key: _each_text(item) for key, item in value.items()}
    return [_each_text(item) for item in value] if isinstance(value, list) else value
