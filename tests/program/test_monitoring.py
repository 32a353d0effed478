"""Monitoring in the program's graph: beside the group, on the nodes' own daemons, and not there unless asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.program.rendering import Rendering, render, settings_of

DIGEST = "sha256:" + "0123456789abcdef" * 4
MONITORING: dict[str, Any] = {
    "prometheus": f"prom/prometheus@{DIGEST}",
    "grafana": f"grafana/grafana@{DIGEST}",
    "node_exporter": DIGEST,
}


def with_monitoring(monitoring: dict[str, Any], *, preview: bool = False) -> Rendering:
    return render({**settings_of("spark"), "monitoring": monitoring}, stack="spark", preview=preview)


@pytest.fixture(scope="module", params=[False, True], ids=["up", "preview"])
def watched(request: pytest.FixtureRequest) -> Rendering:
    return with_monitoring(MONITORING, preview=request.param)


def watching(rendering: Rendering) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in rendering.of_type("Container") if item["parent"] == "monitoring"}


def test_each_part_runs_where_it_belongs_under_its_node_s_own_daemon(watched: Rendering) -> None:
    assert watched.error == ""
    found = watching(watched)
    assert {name: item["provider"] for name, item in found.items()} == {
        "grafana-spark-a": "spark-a-docker",
        "node-exporter-spark-a": "spark-a-docker",
        "node-exporter-spark-b": "spark-b-docker",
        "prometheus-spark-a": "spark-a-docker",
    }
    for name, item in found.items():
        assert item["deleted_with"] == f"spark-{name[-1]}-journal"
        assert item["delete_before_replace"] and item["before_create"]
        assert {"label": "spark-vllm.stack", "value": "spark"} in item["inputs"]["labels"]
        assert item["inputs"]["memory"] == item["inputs"]["memorySwap"] <= 768


def test_it_stands_beside_the_group_and_not_behind_it(watched: Rendering) -> None:
    for item in watching(watched).values():
        assert not [name for name in item["dependencies"] if name.startswith(("main", "image", "fabric"))]
    plain = render(settings_of("spark"), stack="spark")
    ranks = {item["name"]: item["inputs"] for item in watched.of_type("Container") if item["parent"] == "main"}
    assert ranks.keys() == {item["name"] for item in plain.of_type("Container")}
    gate = watched.by_name["EndpointGate main-gate"]
    assert not [name for name in gate["dependencies"] if "prometheus" in name]


def test_what_prometheus_reads_is_put_into_it_and_its_data_lie_in_a_volume_of_the_stack() -> None:
    found = with_monitoring(MONITORING)
    prometheus = watching(found)["prometheus-spark-a"]["inputs"]
    files = {upload["file"]: upload["content"] for upload in prometheus["uploads"]}
    assert set(files) == {"/etc/prometheus/prometheus.yml", "/etc/prometheus/rules.yml"}
    assert json.loads(files["/etc/prometheus/prometheus.yml"])["global"]["external_labels"] == {"stack": "spark"}
    [mount] = prometheus["mounts"]
    volume = found.by_name["Volume prometheus-spark-a-data"]
    assert (mount["source"], mount["target"]) == (volume["inputs"]["name"], "/prometheus")
    assert {"label": "spark-vllm.stack", "value": "spark"} in volume["inputs"]["labels"]
    key = "sk-marker-generated"
    assert key not in json.dumps([item["inputs"] for item in watching(found).values()])


def test_images_are_pulled_by_digest_unless_the_node_has_them() -> None:
    found = with_monitoring(MONITORING)
    pulled = {item["name"]: item["inputs"] for item in found.of_type("RemoteImage") if item["parent"] == "monitoring"}
    assert {name: inputs["name"] for name, inputs in pulled.items()} == {
        "prometheus-spark-a-image": f"prom/prometheus@{DIGEST}",
        "grafana-spark-a-image": f"grafana/grafana@{DIGEST}",
    }
    assert all(inputs["keepLocally"] for inputs in pulled.values())
    exporter = watching(found)["node-exporter-spark-b"]["inputs"]
    assert exporter["image"] == DIGEST
    assert exporter["command"][0].startswith("--web.listen-address=192.168.200.13:")


def test_without_the_setting_there_is_nothing_of_it() -> None:
    cases: tuple[dict[str, Any] | None, ...] = ({}, None)
    for monitoring in cases:
        settings = settings_of("spark") | ({} if monitoring is None else {"monitoring": monitoring})
        names = [item["name"] for item in render(settings, stack="spark").registered]
        assert not [name for name in names if "monitoring" in name or "prometheus" in name or "grafana" in name]
