"""What preview says of the image: whether the nodes have it, whether it is one and the same, and what is in it.

Nothing is pulled, and nothing is left on a node. A container is started only where the node is idle; where that image
was asked the same before, its answer is read instead.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from spark_core.findings import Finding
from spark_core.group import GroupFiles, plan_group
from spark_core.image.check import CheckReport, architectures_of, check_findings, check_spec, check_words, run_check
from spark_core.image.facts import ImageFacts, observe_image, observe_image_and_node
from spark_core.proof.idle import COLLECTIVE_NEEDS_MIB, look_for_readiness, parse_readiness
from spark_core.settings import Settings
from spark_core.transport.base import Transport, run_checked

_Answer = TypeVar("_Answer")

_STEERING = ("NCCL_", "GLOO_", "TP_SOCKET_", "UCX_", "RAY_", "VLLM_HOST_IP")
"""Variables of an image with these beginnings steer how ranks talk."""


@dataclass(frozen=True)
class ImageQuestion:
    """What to look at.

    Args:
        settings: The settings, with every interface filled in.
        stack: Name of the stack.
        image_id: The id if it is known from the source, else empty.
        reference: The name under which a node may have it.
        configs: Group to the text of its model's ``config.json``; empty where it is not there yet.
        transports: One per node.
        may_run: Whether a container may be started.
    """

    settings: Settings
    stack: str
    image_id: str
    reference: str
    configs: Mapping[str, str]
    transports: Mapping[str, Transport]
    may_run: bool


def look_at_image(question: ImageQuestion) -> list[Finding]:
    """Everything that is to be said of the image.

    Raises:
        SparkError: a node or its daemon could not be asked.
    """
    name = question.image_id or question.reference
    found = _each(question, lambda transport: observe_image_and_node(transport, name))
    there = {node: facts for node, (facts, _) in found.items() if facts is not None}
    if not there:
        return [_not_there(question)]
    findings = _different(there) or _architectures(there, {node: own for node, (_, own) in found.items()})
    if findings:
        return findings
    facts = next(iter(there.values()))
    findings = _own_settings(question, facts)
    if not question.image_id:  # the others may have it by its id alone
        others = _each(question, lambda transport: observe_image(transport, facts.image_id))
        there = {node: other for node, other in others.items() if other is not None}
    for name in question.settings.groups:
        findings += _inside(question, name, facts.image_id, set(there))
    return findings


def _each(question: ImageQuestion, work: Callable[[Transport], _Answer]) -> dict[str, _Answer]:
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(question.transports))) as pool:
        return dict(zip(question.transports, pool.map(work, question.transports.values()), strict=True))


def _not_there(question: ImageQuestion) -> Finding:
    source, image = question.settings.image, question.image_id or question.reference
    if source.local_id is not None:
        return Finding(
            "image-missing",
            f"{', '.join(question.transports)} (image.local_id)",
            f"expected the image {image} on one node at least, found none of that id",
            "build or load it on one node, or name an archive, a registry or a build",
        )
    return Finding(
        "image-unknown",
        "image",
        f"no node has {image}; what is in it is checked in up, before anything starts",
    )


def _different(there: Mapping[str, ImageFacts]) -> list[Finding]:
    ids = {node: facts.image_id for node, facts in there.items()}
    if len(set(ids.values())) < 2:
        return []
    text = ", ".join(f"{node} {image_id}" for node, image_id in ids.items())
    return [
        Finding(
            "image-differs",
            f"{', '.join(ids)} (image)",
            f"expected one image under that name, found {text}",
            "pin it by digest or by image.local_id, or remove the wrong one (`docker image rm`)",
        )
    ]


def _architectures(there: Mapping[str, ImageFacts], architectures: Mapping[str, str]) -> list[Finding]:
    findings = []
    for node, facts in there.items():
        own = architectures[node]
        if own and own != facts.architecture:
            findings.append(
                Finding(
                    "image-architecture",
                    f"{node} (image)",
                    f"expected an image for {own}, found one for {facts.architecture} ({facts.image_id[:19]})",
                    "build or pull the image for the nodes' architecture; docker may fall back to another silently",
                )
            )
    return findings


def _own_settings(question: ImageQuestion, facts: ImageFacts) -> list[Finding]:
    findings = []
    if facts.entrypoint:
        shown = " ".join(facts.entrypoint)
        lost = f" with {' '.join(facts.command)}" if facts.command else ""
        findings.append(
            Finding(
                "image-entrypoint",
                "image",
                f"the image's own entrypoint ({shown}{lost}) is replaced by the rank supervisor: what it sets up, such "
                "as clocks, patches or CUDA's forward compatibility, is not done",
                "declare what is needed of it: host.gpu_clock_cap_mhz, serving.patches, serving.environment",
            )
        )
    if facts.user not in ("", "0", "root", "0:0", "root:root"):
        findings.append(
            Finding(
                "image-user",
                "image",
                f"expected an image whose processes are root, found the user {facts.user}: it must be able to write "
                "the state folder, the caches and /dev/shm",
            )
        )
    declared = {name for group in question.settings.groups.values() for name in group.serving.environment}
    steering = [
        word for word in facts.environment if word.startswith(_STEERING) and word.partition("=")[0] not in declared
    ]
    if steering:
        findings.append(
            Finding(
                "image-environment",
                "image",
                f"the image brings variables that steer how ranks talk: {', '.join(steering)}",
                "what the program sets itself wins; set others in serving.environment",
            )
        )
    return findings


def _inside(question: ImageQuestion, name: str, image_id: str, there: set[str]) -> list[Finding]:
    settings, group = question.settings, question.settings.groups[name]
    members = [node for node in group.nodes if node in question.transports and node in there]
    spec = check_spec(settings, name, image_id, architectures_of(question.configs.get(name, "")))
    files = GroupFiles("", tuple("" for _ in group.serving.patches), dict.fromkeys(group.nodes, "/"))
    containers = {c.node: c for c in plan_group(settings, name, question.stack, image_id, files).containers}
    patched = bool(group.serving.patches)

    def ask(node: str) -> tuple[CheckReport | None, str]:
        transport, container = question.transports[node], containers[node]
        words = check_words(settings, name, container, image_id)
        root = settings.root_of(settings.node(node))
        report = run_check(transport, root, spec, container, words, "cached")
        if report is not None or not question.may_run:
            return report, ""
        if patched:
            return None, "its patches are not on the node yet"
        text = run_checked(
            transport, look_for_readiness("127.0.0.1", 0), purpose="expected to learn whether the node is idle"
        )
        ready = parse_readiness(node, text)
        if ready.busy:
            return None, f"node busy: {ready.busy[0]}"
        if ready.memory_mib < COLLECTIVE_NEEDS_MIB:
            return None, f"{ready.memory_mib} MiB of memory available, {COLLECTIVE_NEEDS_MIB} needed"
        return run_check(transport, root, spec, container, words, "no"), ""

    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(members))) as pool:
        answers = dict(zip(members, pool.map(ask, members), strict=True))
    findings = check_findings(name, spec, [report for report, _ in answers.values() if report is not None])
    waiting = [f"{node} ({why})" for node, (report, why) in answers.items() if report is None and why]
    if waiting:
        findings.append(
            Finding(
                "image-unknown",
                "image",
                f"not yet known what is in it on {', '.join(waiting)}: checked in up, before anything starts",
            )
        )
    return findings
