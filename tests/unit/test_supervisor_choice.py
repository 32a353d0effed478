"""Which supervisor a group goes on with, from its containers alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spark_core.facts.answer import Answer
from spark_core.facts.containers import Container, parse_containers
from spark_core.supervisor_choice import RunningGroup, running_group, supervisor_to_run

IMAGE = "sha256:" + "a" * 64
OLD, NEW = "1111/runtime.pyz", "2222/runtime.pyz"
RUNNING = RunningGroup("d1", OLD, IMAGE)


def container(rank: int, *, stack: str = "dev", image: str = IMAGE, **labels: str) -> Container:
    shown = {"stack": stack, "deployment": "d1", "supervisor": OLD} | labels
    text = ",".join(f"spark-vllm.{key}={value}" for key, value in shown.items() if value)
    values: dict[str, Any] = {
        "id": f"{rank}" * 64,
        "names": f"spark-vllm-dev-main-rank{rank}",
        "image": image,
        "status": "Up 3 days",
        "age": "3 days ago",
        "ports": "",
        "labels": f"vendor=a,b,{text},last=x",
        "stack": stack,
    }
    [read] = parse_containers(Answer(json.dumps(values) + "\n"))  # type: ignore[misc]
    assert isinstance(read, Container)
    return read


def test_what_all_ranks_run_is_read_from_their_labels() -> None:
    assert running_group([container(0), container(1)], "dev", "main", 2) == RUNNING
    assert running_group([container(1)], "dev", "main", 2) == RUNNING, "the other one was removed by hand"


@pytest.mark.parametrize(
    "containers",
    [
        [],
        [container(0), container(1, deployment="d2")],
        [container(0), container(1, supervisor=NEW)],
        [container(0), container(1, image="sha256:" + "b" * 64)],
        [container(0, supervisor=""), container(1, supervisor="")],
        [container(0, deployment=""), container(1, deployment="")],
        [container(0, stack="prod"), container(1, stack="prod")],
        [container(2)],
    ],
    ids=["none", "deployments", "supervisors", "images", "from before", "no deployment", "other stack", "other rank"],
)
def test_ranks_that_are_not_one_group_tell_nothing(containers: list[Container]) -> None:
    assert running_group(containers, "dev", "main", 2) is None


def test_a_newer_supervisor_waits_only_while_nothing_else_changes() -> None:
    same, changed = (lambda supervisor: f"d{len(supervisor) // len(OLD)}"), (lambda _: "d9")
    assert supervisor_to_run(RUNNING, NEW, same) == OLD
    assert supervisor_to_run(RUNNING, NEW, changed) == NEW
    assert supervisor_to_run(RUNNING, OLD, changed) == OLD
    assert supervisor_to_run(None, NEW, same) == NEW
