"""Adoption: running containers of ours are written into a state that does not know them, and nothing else is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from automation.adopt import Planned, planned_containers, running_id, with_containers
from automation.events import CONTAINER
from spark_core.errors import SparkError
from spark_core.transport.base import Command, Result

STACK = "urn:pulumi:dev::spark-vllm::pulumi:pulumi:Stack::spark-vllm-dev"
NODE = "urn:pulumi:dev::spark-vllm::spark:node:SparkNode::spark-a"
DOCKER = f"{NODE.replace('SparkNode::spark-a', 'SparkNode$pulumi:providers:docker')}::spark-a-docker"
GROUP = "urn:pulumi:dev::spark-vllm::spark:cluster:VllmRayCluster::main"
RANK = f"urn:pulumi:dev::spark-vllm::spark:cluster:VllmRayCluster${CONTAINER}::main-spark-a"
OTHER = "urn:pulumi:dev::spark-vllm::spark:node:SparkNode$pulumi-python:dynamic/spark:NodeHost::spark-a-host"
LABELS: list[dict[str, Any]] = [
    {"__defaults": [], "label": "spark-vllm.stack", "value": "dev"},
    {"__defaults": [], "label": "spark-vllm.deployment", "value": "abc123"},
]


def plan_of(labels: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """What `pulumi preview --json` gives for a stack with one rank, as far as it matters here."""
    states: list[dict[str, Any]] = [
        {"urn": STACK, "custom": False, "type": "pulumi:pulumi:Stack", "sourcePosition": "project:///x#1"},
        {"urn": NODE, "custom": False, "type": "spark:node:SparkNode", "parent": STACK},
        {
            "urn": DOCKER,
            "custom": True,
            "type": "pulumi:providers:docker",
            "parent": NODE,
            "inputs": {"__defaults": [], "host": "ssh://spark@10.99.0.12:22"},
        },
        {"urn": OTHER, "custom": True, "type": "pulumi-python:dynamic/spark:NodeHost", "parent": NODE, "inputs": {}},
        {"urn": GROUP, "custom": False, "type": "spark:cluster:VllmRayCluster", "parent": STACK},
        {
            "urn": RANK,
            "custom": True,
            "type": CONTAINER,
            "parent": GROUP,
            "provider": f"{DOCKER}::04da6b54-80e4-46f7-96ec-b56ff0331ba9",
            "inputs": {"__defaults": ["start"], "name": "rank0", "labels": LABELS if labels is None else labels},
            "propertyDependencies": {"name": []},
            "replaceOnChanges": ["healthcheck"],
        },
    ]
    return {"steps": [{"op": "create", "urn": state["urn"], "newState": state} for state in states]}


def empty_state(*resources: dict[str, Any]) -> dict[str, Any]:
    return {"version": 3, "deployment": {"manifest": {"magic": "x"}, "resources": list(resources)}}


class Node:
    """A node with one answer."""

    node = "spark-a"

    def __init__(self, result: Result) -> None:
        self._result = result

    def run(self, _cmd: Command) -> Result:
        return self._result

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def shown(**labels: str) -> Result:
    named = {f"spark-vllm.{key}": value for key, value in labels.items()}
    return Result(0, json.dumps([{"Id": "f00d", "Config": {"Labels": named}}]), "")


def test_the_plan_names_each_container_with_its_node_and_deployment() -> None:
    assert planned_containers(plan_of()) == [Planned(RANK, "spark-a", "rank0", "abc123")]


def test_a_deployment_that_is_not_known_yet_is_refused() -> None:
    unknown = {"label": "spark-vllm.deployment", "value": "04da6b54-80e4-46f7-96ec-b56ff0331ba9"}
    cases: list[list[dict[str, Any]]] = [[LABELS[0], unknown], [LABELS[0]], []]
    for labels in cases:
        with pytest.raises(SparkError, match="not yet known"):
            planned_containers(plan_of(labels))


def test_a_container_and_what_it_hangs_on_come_into_the_state_and_nothing_else() -> None:
    state = with_containers(plan_of(), empty_state(), {RANK: "f00d"})
    resources = state["deployment"]["resources"]
    assert [resource["urn"] for resource in resources] == [STACK, NODE, DOCKER, GROUP, RANK]
    rank, provider = resources[-1], resources[2]
    assert rank["id"] == rank["outputs"]["id"] == "f00d"
    assert rank["provider"] == f"{DOCKER}::{provider['id']}"
    assert rank["inputs"]["__defaults"] == ["start"]
    assert rank["outputs"]["labels"] == [{k: v for k, v in label.items() if k != "__defaults"} for label in LABELS]
    assert "sourcePosition" not in resources[0]
    assert state["deployment"]["manifest"] == {"magic": "x"}


def test_a_provider_that_the_state_has_is_used() -> None:
    provider = {"urn": DOCKER, "custom": True, "type": "pulumi:providers:docker", "id": "known"}
    resources = with_containers(plan_of(), empty_state(provider), {RANK: "f00d"})["deployment"]["resources"]
    assert resources[0] == provider
    assert resources[-1]["provider"] == f"{DOCKER}::known"


def test_a_container_that_the_state_has_is_refused() -> None:
    with pytest.raises(SparkError, match="expected a state without main-spark-a"):
        with_containers(plan_of(), empty_state({"urn": RANK, "id": "f00d"}), {RANK: "f00d"})


def test_only_a_container_of_this_stack_and_deployment_is_adopted() -> None:
    planned = Planned(RANK, "spark-a", "rank0", "abc123")
    assert running_id(Node(shown(stack="dev", deployment="abc123")), planned, "dev") == "f00d"
    assert running_id(Node(Result(1, "", "Error: No such container: rank0")), planned, "dev") is None
    with pytest.raises(SparkError, match=r"deployment=abc123 on rank0, found old"):
        running_id(Node(shown(stack="dev", deployment="old")), planned, "dev")
    with pytest.raises(SparkError, match=r"stack=dev on rank0, found none"):
        running_id(Node(shown()), planned, "dev")
    with pytest.raises(SparkError, match="expected an answer"):
        running_id(Node(Result(1, "", "permission denied")), planned, "dev")
