"""The status of the group as Prometheus metrics. Pure: a status document in, text out.

Names and labels are an interface: they are listed in docs/explanation/health.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PHASES = (
    "starting",
    "waiting_for_ranks",
    "ray_starting",
    "ray_ready",
    "joining",
    "loading",
    "canary",
    "serving",
    "ending",
    "backing_off",
    "failed",
    "stopping",
    "stopped",
)


def render_metrics(document: Mapping[str, Any], now: float) -> str:
    """The metrics of a head's status document. ``now`` is the wall clock in seconds."""
    group = {"group": document["group"]}
    canary = document.get("last_canary") or {}
    good_at = document.get("last_good_canary_at")
    healing = document.get("healing") or {}
    generation = (document.get("generation") or {}).get("n", 0)
    families = [
        _family("serving", "gauge", "1 while a completion is known to come back.", [(group, _is(document, "serving"))]),
        _family(
            "phase",
            "gauge",
            "1 for the phase of the group.",
            [({**group, "phase": phase}, _is(document, phase)) for phase in PHASES],
        ),
        _family("phase_seconds", "gauge", "Seconds in this phase.", [(group, _age(document.get("since"), now))]),
        _family("generation", "counter", "Number of the present generation.", [(group, generation)]),
        _family(
            "failures_before_serving",
            "gauge",
            "Generations that failed since the group last served.",
            [(group, healing.get("failures_before_serving", 0))],
        ),
        _family("canary_ok", "gauge", "Whether the last completion came back.", [(group, int(bool(canary.get("ok"))))]),
        _family("canary_seconds", "gauge", "Duration of the last completion.", [(group, canary.get("ms", 0) / 1000)]),
        _family(
            "last_good_canary_age_seconds",
            "gauge",
            "Seconds since a completion, or the progress of real requests, was last seen.",
            [(group, _age(good_at, now))] if good_at else [],
        ),
        _family(
            "rank_lease_age_seconds",
            "gauge",
            "Seconds since the head last heard of a rank.",
            [(_rank(group, name, rank), rank["lease_age_s"]) for name, rank in document.get("ranks", {}).items()],
        ),
        _family(
            "rank_phase",
            "gauge",
            "1 for the phase of each rank.",
            [
                ({**_rank(group, name, rank), "phase": rank["phase"]}, 1)
                for name, rank in document.get("ranks", {}).items()
            ],
        ),
        _family(
            "memory_available_bytes",
            "gauge",
            "MemAvailable of the head's node.",
            [(group, document.get("memory_available_bytes", 0))],
        ),
    ]
    return "".join(families)


def _is(document: Mapping[str, Any], phase: str) -> int:
    return int(document.get("phase") == phase)


def _age(at: object, now: float) -> float:
    return round(max(0.0, now - float(at)), 1) if isinstance(at, int | float) else 0.0


def _rank(group: Mapping[str, str], name: str, rank: Mapping[str, Any]) -> dict[str, str]:
    return {**group, "rank": name, "node": str(rank.get("node") or rank.get("address"))}


def _family(name: str, kind: str, text: str, samples: list[tuple[dict[str, str], Any]]) -> str:
    name = f"spark_vllm_{name}"
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
    for labels, value in samples:
        inside = ",".join(f'{key}="{_escape(value_)}"' for key, value_ in labels.items())
        lines.append(f"{name}{{{inside}}} {value}")
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    return str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
