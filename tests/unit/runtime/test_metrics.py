"""The status of a group as Prometheus metrics."""

from __future__ import annotations

from typing import Any, get_args

from spark_runtime.messages import Phase
from spark_runtime.metrics import PHASES, render_metrics

DOCUMENT: dict[str, Any] = {
    "group": "main",
    "phase": "serving",
    "since": 900.0,
    "generation": {"n": 4},
    "last_canary": {"ok": True, "ms": 250},
    "last_good_canary_at": 990.0,
    "memory_available_bytes": 5,
    "healing": {"failures_before_serving": 0},
    "ranks": {
        "0": {"node": "spark-a", "phase": "serving", "lease_age_s": 0.0},
        "1": {"node": 'spark"b\\', "phase": "serving", "lease_age_s": 1.5},
    },
}


def samples(document: dict[str, Any]) -> dict[str, float]:
    lines = render_metrics(document, 1000.0).splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_a_serving_group_says_so_in_numbers() -> None:
    found = samples(DOCUMENT)
    group = 'group="main"'
    assert found[f"spark_vllm_serving{{{group}}}"] == 1
    assert found[f'spark_vllm_phase{{{group},phase="serving"}}'] == 1
    assert found[f'spark_vllm_phase{{{group},phase="failed"}}'] == 0
    assert found[f"spark_vllm_phase_seconds{{{group}}}"] == 100
    assert found[f"spark_vllm_generation{{{group}}}"] == 4
    assert found[f"spark_vllm_canary_seconds{{{group}}}"] == 0.25
    assert found[f"spark_vllm_last_good_canary_age_seconds{{{group}}}"] == 10
    assert found[f'spark_vllm_rank_lease_age_seconds{{{group},rank="1",node="spark\\"b\\\\"}}'] == 1.5


def test_a_group_that_never_served_has_no_age_of_a_good_completion() -> None:
    found = samples({**DOCUMENT, "phase": "loading", "last_canary": None, "last_good_canary_at": None})
    assert found['spark_vllm_serving{group="main"}'] == 0
    assert not any("last_good_canary_age" in name for name in found)


def test_each_family_is_described_once_and_every_phase_is_known() -> None:
    lines = render_metrics(DOCUMENT, 1000.0).splitlines()
    described = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(described) == len(set(described))
    assert {line.split("{")[0] for line in lines if not line.startswith("#")} <= set(described)
    assert set(PHASES) == set(get_args(Phase))
