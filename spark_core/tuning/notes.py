"""What a preview tells of the tuning: what two stacks contradict each other in, and what of it restarts serving."""

from __future__ import annotations

from collections.abc import Mapping

from spark_core.findings import Finding
from spark_core.journal import Key, StackFolder, contradictions
from spark_core.settings import NodeSettings, Settings
from spark_core.transport.base import Fragment
from spark_core.tuning.apply import refusals, reloads, wanted_keys
from spark_core.tuning.items import Place
from spark_core.tuning.observe import Tuning, TuningFacts, tuning_fragments, tuning_of, without_root


def place_of(settings: Settings, stack: str, node: NodeSettings) -> Place:
    """Where a stack's tuning goes on a node."""
    return Place(StackFolder(settings.root_of(node), stack), node.user)


def tuning_look(settings: Settings, stack: str, node: NodeSettings) -> tuple[Fragment, ...]:
    """The parts of the look at a node that the functions below need; they change nothing and need no root."""
    return tuning_fragments(place_of(settings, stack, node), _without_parameters(tuning_of(settings)))


def tuning_findings(
    settings: Settings,
    stack: str,
    node: NodeSettings,
    sections: Mapping[str, str],
    fabric_claims: Mapping[Key, str] | None = None,
) -> list[Finding]:
    """What another stack on the node declares otherwise than this one, and what ``up`` would refuse to do.

    Args:
        sections: The answer to :func:`tuning_look`.
        fabric_claims: What the fabric declares on the node, as its journal entries say it.
    """
    place, tuning, facts = _facts(settings, stack, node, sections)
    claims = wanted_keys(place, tuning) | dict(fabric_claims or {})
    refused = [
        Finding("tuning-refused", error.where, error.what, error.do)
        for error in refusals(node.name, place, tuning, facts)
    ]
    return [*contradictions(stack, claims, facts.journals, node.name), *refused]


def tuning_notes(settings: Settings, stack: str, node: NodeSettings, sections: Mapping[str, str]) -> list[str]:
    """What ``up`` would do to the node's tuning that restarts Docker or serving, one line each.

    Args:
        sections: The answer to :func:`tuning_look`.
    """
    place, tuning, facts = _facts(settings, stack, node, sections)
    notes = []
    wanted, live = tuning.items.get("docker_cgroup_driver"), facts.live
    if wanted is not None and wanted != live.cgroup_driver:
        notes.append(
            f"host.docker_cgroup_driver: {live.cgroup_driver or 'no answer'} becomes {wanted}: "
            "Docker is restarted, and serving with it"
        )
    held = facts.held(stack)
    if wanted is None and any(entry.activation == "docker" for entry in held.values()):
        notes.append(
            "host.docker_cgroup_driver is no longer declared: if Docker's earlier driver was another one, "
            "Docker is restarted, and serving with it"
        )
    if tuning.gpu and live.takes_gpus_at_reload:
        notes += [
            f"host.{name}: systemd is reloaded, which takes the GPU from running containers where Docker uses "
            "systemd's cgroup driver: ours are restarted, and serving with them"
            for name in reloads(place, tuning, facts)
        ]
    return [f"{node.name}: {note}" for note in notes]


def _facts(
    settings: Settings, stack: str, node: NodeSettings, sections: Mapping[str, str]
) -> tuple[Place, Tuning, TuningFacts]:
    place, tuning = place_of(settings, stack, node), tuning_of(settings)
    return place, tuning, without_root(place, tuning, node.name, sections)


def _without_parameters(tuning: Tuning) -> Tuning:
    """Kernel parameters are no part of a preview's look: those that only root reads would need root."""
    return Tuning({}, tuning.items, tuning.files, tuning.disturb_others, tuning.gpu)
