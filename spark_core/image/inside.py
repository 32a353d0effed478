"""The look into an image on every node of a group, for whoever is about to start it: ``up``, and ``stage``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spark_core.findings import Finding, judge
from spark_core.group import GroupFiles, plan_group
from spark_core.image.check import CheckReport, check_findings, check_spec, check_words, run_check
from spark_core.proof.idle import COLLECTIVE_NEEDS_MIB, look_for_readiness, parse_readiness
from spark_core.settings import Settings
from spark_core.transfer.distribution import at_once
from spark_core.transport.base import Transport, run_checked


@dataclass(frozen=True)
class Inside:
    """What was found.

    Attributes:
        reports: What the image said on each node that was asked.
        findings: What that means, by the severities of the settings.
    """

    reports: tuple[CheckReport, ...]
    findings: tuple[Finding, ...]


def look_inside(
    settings: Settings,
    stack: str,
    group_name: str,
    image_id: str,
    architectures: Sequence[str],
    files: GroupFiles,
    transports: Mapping[str, Transport],
    roots: Mapping[str, str],
    check: Callable[[], None] = lambda: None,
) -> Inside:
    """Ask the image on every node of a group at the same time, or read what it said before.

    Args:
        settings: The settings, with every interface filled in.
        architectures: The model's; empty where its configuration is not there yet.
        files: Runtime and patches of the group on its nodes.
        roots: For each node, our folder, which keeps the answer.
        check: Called often; what it raises ends the waiting, and the containers by their own deadline.

    Raises:
        UnreachableError: a node does not answer.
    """
    spec = check_spec(settings, group_name, image_id, architectures)
    plan = plan_group(settings, group_name, stack, image_id, files)
    containers = {container.node: container for container in plan.containers}

    def ask(node: str) -> CheckReport | Finding:
        transport, container = transports[node], containers[node]
        words = check_words(settings, group_name, container, image_id)
        known = run_check(transport, roots[node], spec, container, words, "cached")
        if known is not None:
            return known
        purpose = "expected to learn how much memory the node has"
        look = look_for_readiness("127.0.0.1", 0)
        available = parse_readiness(node, run_checked(transport, look, purpose=purpose)).memory_mib
        if available < COLLECTIVE_NEEDS_MIB:
            return Finding(
                "image-unknown",
                f"{node} (image)",
                f"not checked what is in it: {available} MiB of memory available, {COLLECTIVE_NEEDS_MIB} needed",
            )
        return run_check(transport, roots[node], spec, container, words, "yes") or CheckReport(node, error="no answer")

    def asking(node: str) -> Callable[[], CheckReport | Finding]:
        return lambda: ask(node)

    answers = at_once([asking(node) for node in settings.groups[group_name].nodes], check)
    reports = tuple(answer for answer in answers if isinstance(answer, CheckReport))
    unasked = [answer for answer in answers if isinstance(answer, Finding)]
    return Inside(reports, tuple(judge([*check_findings(group_name, spec, reports), *unasked], settings.severities)))
