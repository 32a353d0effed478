"""What is wrong between nodes: one stack needs nodes that are alike. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations

from spark_core.facts import NodeFacts, Unread, known
from spark_core.facts.clock import certain_skew_s
from spark_core.facts.docker import Docker
from spark_core.findings import Finding

CLOCK_SKEW_S = 2.0

_ATTRIBUTES: tuple[tuple[str, str, Callable[[NodeFacts], str | None]], ...] = (
    ("nodes-differ-architecture", "architecture", lambda facts: known(facts.architecture)),
    ("nodes-differ-driver", "GPU and driver", lambda facts: _gpu(facts)),
    ("nodes-differ-kernel", "kernel", lambda facts: known(facts.kernel)),
    ("nodes-differ-docker", "Docker", lambda facts: facts.docker.version if isinstance(facts.docker, Docker) else None),
    (
        "nodes-differ-image-store",
        "kind of image store",
        lambda facts: facts.docker.image_store if isinstance(facts.docker, Docker) else None,
    ),
    ("nodes-differ-release", "DGX release", lambda facts: _release(facts)),
)
"""Kind, name, and how a node's value is told; None where it is not known, which has a finding of its own."""


def cluster_findings(looks: Mapping[str, NodeFacts]) -> list[Finding]:
    """Differences between nodes that matter."""
    findings = []
    for code, title, value in _ATTRIBUTES:
        values = {node: found for node, facts in looks.items() if (found := value(facts)) is not None}
        if len(set(values.values())) > 1:
            text = ", ".join(f"{node} {found}" for node, found in values.items())
            findings.append(
                Finding(
                    code,
                    "nodes",
                    f"expected the same {title} on all nodes, found {text}",
                    "bring the nodes to the same state, then run again",
                )
            )
    return findings + _clocks(looks)


def _clocks(looks: Mapping[str, NodeFacts]) -> list[Finding]:
    clocks = {node: clock for node, facts in looks.items() if (clock := known(facts.clock)) is not None}
    pairs = [(certain_skew_s(clocks[one], clocks[other]), one, other) for one, other in combinations(clocks, 2)]
    skew_s, one, other = max(pairs, default=(0.0, "", ""), key=lambda pair: pair[0])
    if skew_s <= CLOCK_SKEW_S:
        return []
    ahead, behind = (one, other) if clocks[one].low_s > clocks[other].high_s else (other, one)
    return [
        Finding(
            "clock-skew",
            "nodes",
            f"expected clocks within {CLOCK_SKEW_S:g} s of each other, found {ahead} at least {skew_s:.1f} s ahead of "
            f"{behind}",
            "`timedatectl set-ntp true` on both, and a time server that both reach",
        )
    ]


def _gpu(facts: NodeFacts) -> str | None:
    if not isinstance(facts.gpus, tuple):
        return None
    return "; ".join(f"{gpu.name}, {gpu.driver}" for gpu in facts.gpus)


def _release(facts: NodeFacts) -> str | None:
    if isinstance(facts.dgx, Unread):
        return None
    return facts.dgx.version if facts.dgx else "none"
