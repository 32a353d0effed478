"""The stack that is being run: its name, its validated settings, and its connections to the nodes.

This is the only reader of a stack's configuration. Opening the stack is also the preflight: every node is looked at
before the first resource is registered, because of what a person then reads: the findings alone, in one block, before
any provider speaks (docs/adr/0002-run-preflight-in-the-program.md). The look opens the one connection per node that
everything else uses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import pulumi
from pulumi.runtime.config import CONFIG

from components.local_sources import NOT_YET_KNOWN, LocalSources, look_at_sources, sources_not_read
from components.recorded_revisions import recorded_revisions
from providers.connections import Run, raw_configuration, run_of
from spark_core.containers import make_way
from spark_core.errors import SettingsError, SparkError
from spark_core.findings import Finding, judge
from spark_core.image.look import ImageQuestion, look_at_image
from spark_core.journal.entry import require_stack_name
from spark_core.notify import notify_digest, notify_document
from spark_core.policy import policy_findings
from spark_core.preflight.look import Preflight, look_at_nodes
from spark_core.preflight.weights import GroupWeights, KnownWeights
from spark_core.privilege import privileged_lines
from spark_core.settings import NodeSettings, Settings, launcher_variable_notes
from spark_core.settings.recipe_merge import recipe_notes
from spark_core.supervisor_choice import RunningGroup
from spark_core.transport.connection import Connection, resolve

PROJECT = Path(__file__).resolve().parent.parent
DESTROY_VARIABLE = "SPARK_VLLM_DESTROY"
"""Environment variable that tells the program of a destroy, which Pulumi does not; the launcher sets it.

The program is then run for the sake of its settings alone: no node is looked at, since nothing that a node lacks keeps
anything from being taken away, and nodes that are given up may still be among the nodes.
"""


@dataclass(frozen=True)
class Stack:
    """A stack with validated settings, whose nodes have been looked at unless ``preflight`` is off."""

    name: str
    settings: Settings
    sources: LocalSources
    run: Run
    looked: bool
    weights: Mapping[str, GroupWeights]
    configs: Mapping[str, str] = field(default_factory=dict)
    running: Mapping[str, RunningGroup] = field(default_factory=dict)

    @property
    def declared(self) -> Settings:
        """The settings as the stack's file has them, without what was discovered."""
        return self.run.settings

    def connection(self, node: NodeSettings) -> Connection:
        """How a node is reached; where no node was looked at, one without a pinned key can be rendered."""
        try:
            if self.looked:
                return self.run.connection(node)
            return resolve(self.settings.connection_of(node), render_only=True)
        except SparkError as error:
            raise pulumi.RunError(error.render()) from None

    def notify_of(self, group: str) -> str:
        """Digest of whom a group's head tells of trouble."""
        return notify_digest(notify_document(self.settings.groups[group].notify, self.run.secret("notify_webhook")))

    def make_way(self, node: str, container: str) -> None:
        """Remove a container of ours that an interrupted run left; called before one of that name is created."""
        removed = make_way(self.run.transport(node), container, self.name)
        if removed:
            pulumi.log.warn(removed)

    def node_output(self, node: NodeSettings) -> dict[str, Any]:
        """A node as the stack exports it."""
        ranks = {
            group: value.nodes.index(node.name)
            for group, value in self.settings.groups.items()
            if node.name in value.nodes
        }
        return {
            "name": node.name,
            "management_address": node.management_address,
            "fabric_address": node.fabric_address,
            "ranks": ranks,
        }


def open_stack() -> Stack:
    """Read and validate the stack's configuration, and look at its nodes.

    Raises:
        pulumi.RunError: the settings cannot be used (no node is then contacted), or something would fail on a node.
    """
    sys.excepthook = _without_interrupts
    name = pulumi.get_stack()
    prefix = f"{pulumi.get_project()}:"
    values: dict[str, Any] = {
        key.removeprefix(prefix): value for key, value in CONFIG.get().items() if key.startswith(prefix)
    }
    raw = values | raw_configuration(values.get)
    try:
        require_stack_name(name)
        run = run_of(raw)
        for note in launcher_variable_notes(os.environ):
            pulumi.log.warn(note)
        for note in recipe_notes(raw):
            pulumi.log.info(note)
        if os.environ.get(DESTROY_VARIABLE):
            return Stack(
                name, run.settings, sources_not_read(run.settings), run, False, _weights_not_seen(run.settings)
            )
        _refuse_abandoned(run.settings)
        _tell(judge(policy_findings(run.settings, PROJECT), run.settings.severities))
        sources = look_at_sources(run.settings)
        known = KnownWeights(sources.manifests, recorded_revisions(run.settings, name), run.hub_token())
        preflight = _preflight(run, name, known, sources)
    except SparkError as error:
        raise pulumi.RunError(error.render()) from None
    if pulumi.runtime.is_dry_run():
        _tell_privileges(preflight.settings, name)
    looked = preflight.settings.preflight != "off"
    return Stack(
        name, preflight.settings, sources, run, looked, preflight.weights, preflight.configs, preflight.running
    )


def _refuse_abandoned(settings: Settings) -> None:
    """A node that is given up is never contacted, so nothing can be made on it."""
    used = [node.name for node in settings.nodes if node.name in settings.abandoned_nodes]
    if used:
        raise SparkError(
            f"expected no abandoned node among the nodes, found {', '.join(used)}",
            where="abandoned_nodes",
            do="take it out of nodes and of groups, then run again",
        )
    if settings.abandoned_nodes:
        pulumi.log.warn(
            f"abandoned_nodes names {', '.join(settings.abandoned_nodes)}: this run reads no state from any node anew; "
            "once it has ended well, take the setting out again"
        )


def _weights_not_seen(settings: Settings) -> dict[str, GroupWeights]:
    """What stands for models of the hub where nothing will be made of them."""
    return {name: GroupWeights(NOT_YET_KNOWN) for name, group in settings.groups.items() if group.model.kind == "hub"}


def _weights_unlooked(settings: Settings, known: KnownWeights) -> dict[str, GroupWeights]:
    """Models of the hub where no node may be asked: what is recorded, or what is pinned.

    Raises:
        SettingsError: the revision is neither.
    """
    found, violations = {}, []
    for name, group in settings.groups.items():
        listing = known.listing(name, group.model)
        if group.model.kind == "hub" and listing is None and not group.model.is_pinned:
            violations.append(
                f"groups.{name}.model.source: found {group.model.hub_revision!r} behind the @, expected a commit, "
                "since with preflight off nobody is asked what it means"
            )
        elif group.model.kind == "hub":
            found[name] = GroupWeights(group.model.hub_revision if listing is None else listing.commit, listing)
    if violations:
        raise SettingsError(violations)
    return found


def _preflight(run: Run, stack: str, known: KnownWeights, sources: LocalSources) -> Preflight:
    """Look at all nodes; the settings with what was discovered filled in, and what is known of weights and models."""
    if run.settings.preflight == "off":
        pulumi.log.warn("preflight is off: no node is looked at, and what would fail is not found before up")
        return Preflight(run.settings, (), weights=_weights_unlooked(run.settings, known))
    if not pulumi.runtime.is_dry_run():
        run.wait_for_boot(pulumi.log.info)
    preflight = look_at_nodes(run.settings, stack, run.open_node, sudo_password=run.has_sudo_password, known=known)
    for line in preflight.discovered:
        pulumi.log.info(line)
    for note in preflight.notes:
        pulumi.log.warn(note)
    findings = [_as_up_takes(finding) for finding in preflight.findings]
    if not any(finding.severity == "fail" for finding in findings):  # else Docker may be what does not answer
        findings += judge(_image_findings(run, stack, preflight, sources), run.settings.severities)
    _tell(findings)
    return preflight


def _as_up_takes(finding: Finding) -> Finding:
    """Beside a cluster that is to be replaced one may look and plan, but two of them do not fit into the memory."""
    if finding.code == "launcher-to-replace" and not pulumi.runtime.is_dry_run():
        return replace(finding, told_as="fail")
    return finding


def _image_findings(run: Run, stack: str, preflight: Preflight, sources: LocalSources) -> list[Finding]:
    members = {node for group in preflight.settings.groups.values() for node in group.nodes}
    return look_at_image(
        ImageQuestion(
            settings=preflight.settings,
            stack=stack,
            image_id=sources.image_id,
            reference=sources.image_source.split()[-1],
            configs=preflight.configs,
            transports={node.name: run.open_node(node) for node in preflight.settings.nodes if node.name in members},
            may_run=pulumi.runtime.is_dry_run(),
        )
    )


def _tell(findings: Sequence[Finding]) -> None:
    """Tell findings; those that fail end the run together."""
    for finding in findings:
        if finding.severity == "warn":
            pulumi.log.warn(finding.line)
        elif finding.severity == "unknown":
            pulumi.log.info(f"not yet known: {finding.line}")
    failures = [finding.line for finding in findings if finding.severity == "fail"]
    if failures:
        raise pulumi.RunError("\n".join(failures))


def _tell_privileges(settings: Settings, stack: str) -> None:
    """What root is needed for, told by preview; a stack that needs no root says nothing."""
    for node in settings.nodes:
        lines = privileged_lines(settings, stack, node)
        if lines:
            pulumi.log.info("\n  ".join([f"{node.name}: as root, up and destroy would", *lines]))


def _without_interrupts(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Ctrl-C, and the engine ending the program after a failure elsewhere, are no faults to print a trace of."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
