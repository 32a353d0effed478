"""Prometheus' rules: what an owner is to hear of. They show in Prometheus and on the dashboard; nothing is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from spark_core.monitoring.metrics import (
    DISK_FREE,
    DISK_SIZE,
    FAILURES,
    JOBS,
    KV_CACHE,
    LEASE_AGE,
    MEMORY_AVAILABLE,
    PREEMPTIONS,
    SERVING,
    UP,
    WAITING,
)

LOW_MEMORY_BYTES = 2 * 2**30
"""A Spark with less available memory than this is close to not answering at all, since GPU and kernel share it."""


@dataclass(frozen=True)
class Alert:
    """One rule.

    Attributes:
        expression: True while something is not as it should be.
        after: How long that may last, as Prometheus writes times.
        text: What is wrong, in a sentence; Prometheus fills in ``{{ }}``.
        do: What to do.
    """

    name: str
    expression: str
    after: str
    severity: Literal["critical", "warning"]
    text: str
    do: str


ALERTS = (
    Alert(
        "NotServing", f"{SERVING} == 0", "5m", "critical",
        "{{ $labels.group }} does not serve.",
        "python -m automation status, then report",
    ),
    Alert(
        "HeadSilent", f'{UP}{{job="{JOBS["supervisor"]}"}} == 0', "2m", "critical",
        "The head's supervisor does not answer.",
        "python -m automation status; the node may be down, or booting",
    ),
    Alert(
        "RankSilent", f"{LEASE_AGE} > 60", "0m", "critical",
        "Rank {{ $labels.rank }} on {{ $labels.node }} has been silent for a minute.",
        "look at its node: python -m automation doctor",
    ),
    Alert(
        "FailsToStart", f"{FAILURES} >= 2", "0m", "warning",
        "{{ $value }} generations of {{ $labels.group }} failed since it last served.",
        "python -m automation logs; the first error is in report",
    ),
    Alert(
        "NodeSilent", f'{UP}{{job="{JOBS["node"]}"}} == 0', "5m", "warning",
        "Node exporter of {{ $labels.node }} does not answer.",
        "the node may be down; docker ps on it",
    ),
    Alert(
        "MemoryLow", f"{MEMORY_AVAILABLE} < {LOW_MEMORY_BYTES}", "2m", "critical",
        "{{ $labels.node }} has {{ $value | humanize1024 }}B of memory left.",
        "lower serving.gpu_memory_utilization, or stop what else runs there",
    ),
    Alert(
        "DiskFull", f'{DISK_FREE}{{mountpoint="/"}} / {DISK_SIZE}{{mountpoint="/"}} < 0.05', "15m", "warning",
        "{{ $labels.node }} has {{ $value | humanizePercentage }} of its disk left.",
        "python -m automation gc",
    ),
    Alert(
        "CacheFull", f"{KV_CACHE} > 0.95 and {WAITING} > 0", "10m", "warning",
        "The KV cache is full and requests wait.",
        "lower max_model_len or max_num_seqs, or give the cache more memory",
    ),
    Alert(
        "Preempting", f"rate({PREEMPTIONS}[10m]) > 0.1", "10m", "warning",
        "Requests are put off and computed again, since the KV cache is too small.",
        "lower max_num_seqs",
    ),
)  # fmt: skip


def rules_document() -> dict[str, Any]:
    """The rule file."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expression,
            "for": alert.after,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.text, "do": alert.do},
        }
        for alert in ALERTS
    ]
    return {"groups": [{"name": "spark-vllm", "rules": rules}]}
