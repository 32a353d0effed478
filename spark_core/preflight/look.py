"""The look at all nodes at once: one round trip to each, then every finding about nodes, pairs and the whole."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from spark_core.errors import SparkError
from spark_core.fabric.checks import fabric_cluster_findings, fabric_findings
from spark_core.fabric.discovery import discover
from spark_core.fabric.facts import NETWORK, NetworkFacts, parse_network
from spark_core.fabric.netplan import fabric_claims
from spark_core.fabric.packets import PacketProof, packet_probe, parse_packets, probe_nodes
from spark_core.facts import FactsSpec, NodeFacts, facts_fragment, parse_facts
from spark_core.facts.answer import known as known_fact
from spark_core.facts.docker import may_change_with_login
from spark_core.facts.memory import Memory
from spark_core.findings import Finding, judge
from spark_core.model_look import ModelLook, look_locally, model_findings, model_fragment, parse_model
from spark_core.preflight.cluster import cluster_findings
from spark_core.preflight.node import facts_spec, node_findings
from spark_core.preflight.reach import finding_of
from spark_core.preflight.weights import GroupWeights, KnownWeights, look_at_weights, model_look
from spark_core.settings import NodeSettings, Settings
from spark_core.supervisor_choice import RunningGroup, running_group
from spark_core.transport.base import Fragment, Transport, compose, parse_sections, run_checked
from spark_core.tuning.notes import tuning_findings, tuning_look, tuning_notes

Opener = Callable[[NodeSettings], Transport]

_LOOK_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class NodeLook:
    """What was seen of one node."""

    facts: NodeFacts
    network: NetworkFacts
    packets: tuple[PacketProof, ...]
    model: ModelLook
    sections: Mapping[str, str]
    """All that the node said, for those who read their own part of it."""


@dataclass(frozen=True)
class Preflight:
    """What the look at the nodes gave.

    Attributes:
        settings: The settings, with the parts of the fabric filled in that were left to be discovered.
        findings: All findings by the severities of the settings; nodes that do not answer come first.
        discovered: What discovery filled in, one line each.
        notes: What ``up`` would restart, one line each.
        weights: For each group whose weights are copied or come from the hub, what is known of them.
        configs: For each group whose model could be read, the text of its ``config.json``.
        running: For each group that has containers, all made from the same, what that is.
    """

    settings: Settings
    findings: tuple[Finding, ...]
    discovered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    weights: Mapping[str, GroupWeights] = field(default_factory=dict)
    configs: Mapping[str, str] = field(default_factory=dict)
    running: Mapping[str, RunningGroup] = field(default_factory=dict)


def look_at_nodes(
    settings: Settings,
    stack: str,
    open_node: Opener,
    *,
    sudo_password: bool = True,
    known: KnownWeights | None = None,
) -> Preflight:
    """Look at all nodes at the same time.

    A node that cannot be reached is a finding like any other, so that two dead nodes are told in one run.

    Args:
        sudo_password: Whether the settings have a password for sudo.
        known: What is known of the weights already.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(4, min(16, len(settings.nodes)))) as pool:
        futures = [pool.submit(_look, settings, stack, node, open_node) for node in settings.nodes]
        looks: list[NodeLook | SparkError] = [future.result() for future in futures]
    # A node that does not answer comes first: that its peers have lost their carrier is what follows from it.
    silent = [
        finding_of(look, node.name)
        for node, look in zip(settings.nodes, looks, strict=True)
        if isinstance(look, SparkError)
    ]
    seen = {node.name: look for node, look in zip(settings.nodes, looks, strict=True) if isinstance(look, NodeLook)}
    networks = {name: look.network for name, look in seen.items()}
    packets = {name: look.packets for name, look in seen.items()}
    found = discover(settings, networks)
    if found.settings is not settings:  # the first round could not know the addresses to send to
        transports = {node.name: open_node(node) for node in settings.nodes if node.name in seen}
        try:
            networks, packets = probe_nodes(transports, found.settings)
        except SparkError as error:  # what is known of the nodes is told all the same
            silent.append(finding_of(error, "nodes"))
    findings, notes = [*silent, *found.findings], []
    for node in found.settings.nodes:
        if node.name in seen:
            look = seen[node.name]
            findings += node_findings(found.settings, stack, node, look.facts, sudo_password=sudo_password)
            findings += fabric_findings(found.settings, node, networks[node.name])
            claims = fabric_claims(node.fabric, found.settings.fabric)
            try:
                findings += tuning_findings(found.settings, stack, node, look.sections, claims)
                notes += tuning_notes(found.settings, stack, node, look.sections)
            except SparkError as error:
                findings.append(finding_of(error, node.name))
    findings += cluster_findings({name: look.facts for name, look in seen.items()})
    findings += fabric_cluster_findings(found.settings, networks, packets)
    totals = {n: look.facts.memory.total_bytes for n, look in seen.items() if isinstance(look.facts.memory, Memory)}
    transports = {node.name: open_node(node) for node in settings.nodes if node.name in seen}
    weights, said = look_at_weights(found.settings, transports, known or KnownWeights())
    findings += said
    models = _models(settings, seen, weights)
    findings += model_findings(found.settings, models, totals)
    configs = {name: model.config for name, model in models.items()}
    for name, look in seen.items():
        if may_change_with_login(look.facts.docker):  # last: nothing of this look logs in any more
            transports[name].log_in_again()
    judged = tuple(judge(findings, settings.severities))
    running = _running(settings, stack, seen)
    return Preflight(found.settings, judged, found.lines, tuple(notes), weights, configs, running)


def _look(settings: Settings, stack: str, node: NodeSettings, open_node: Opener) -> NodeLook | SparkError:
    spec: FactsSpec = facts_spec(settings, stack, node)
    try:
        transport = open_node(node)
        text = run_checked(
            transport,
            compose(*_questions(settings, stack, node, spec), timeout_s=_LOOK_TIMEOUT_S),
            purpose="expected the facts of the node",
        )
        sections: Mapping[str, str] = parse_sections(text)
        facts = parse_facts(spec, sections)
        return NodeLook(
            facts,
            parse_network(sections),
            parse_packets(settings, node, sections),
            parse_model(sections),
            sections,
        )
    except SparkError as error:
        return error


def _questions(settings: Settings, stack: str, node: NodeSettings, spec: FactsSpec) -> list[Fragment]:
    model = model_fragment(settings, node)
    return [
        NETWORK,
        packet_probe(settings, node),
        *([model] if model is not None else []),
        *tuning_look(settings, stack, node),
        # Last: their clock is compared with the moment at which the answer is read.
        facts_fragment(spec),
    ]


def _running(settings: Settings, stack: str, seen: Mapping[str, NodeLook]) -> dict[str, RunningGroup]:
    """What the groups of the stack run."""
    found = {}
    for name, group in settings.groups.items():
        containers = [
            one for node in group.nodes if node in seen for one in known_fact(seen[node].facts.containers) or ()
        ]
        running = running_group(containers, stack, name, len(group.nodes))
        if running is not None:
            found[name] = running
    return found


def _models(
    settings: Settings, seen: Mapping[str, NodeLook], weights: Mapping[str, GroupWeights]
) -> dict[str, ModelLook]:
    """What was read of each group's model, on the controller, on the group's head, or on the hub."""
    looks = {}
    for name, group in settings.groups.items():
        if group.model.kind == "hub":
            if name in weights:
                looks[name] = model_look(weights[name])
        elif group.model.kind == "controller":
            looks[name] = look_locally(group.model)
        elif group.nodes[0] in seen:
            looks[name] = seen[group.nodes[0]].model
    return looks
