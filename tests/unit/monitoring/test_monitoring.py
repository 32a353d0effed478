"""Monitoring: every query asks for what is exported, the files say what is there, and the containers get no secret."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from automation import __main__ as cli
from automation import monitoring as command
from automation.disruption import disrupting
from automation.events import Change
from automation.exit_codes import Exit
from automation.schemas import schema_of
from spark_core.errors import SparkError
from spark_core.monitoring import monitoring_files
from spark_core.monitoring.containers import MEMORY_MIB, monitoring_ports, plan_monitoring
from spark_core.monitoring.dashboard import COLUMNS, DATASOURCE, dashboard
from spark_core.monitoring.metrics import JOBS, METRICS, RDMA_SENT
from spark_core.monitoring.panels import SECTIONS
from spark_core.monitoring.rules import ALERTS, rules_document
from spark_core.proof.idle import parse_readiness
from spark_core.settings import Settings, read_settings
from spark_runtime.metrics import render_metrics
from tests.config_cases import load_base
from tests.unit.automation.seen_deployment import SeenDeployment
from tests.unit.runtime.test_metrics import DOCUMENT

PROJECT = Path(__file__).resolve().parents[3]
NAMES = PROJECT / "tests" / "fixtures" / "monitoring"
DIGEST = "sha256:" + "0123456789abcdef" * 4
ON: dict[str, Any] = {"prometheus": f"prom/prometheus@{DIGEST}", "grafana": f"grafana/grafana@{DIGEST}"}
QUERIES = [query.expression for section in SECTIONS for panel in section.panels for query in panel.queries]
EXPRESSIONS = [*QUERIES, *(alert.expression for alert in ALERTS)]


def settings(monitoring: dict[str, Any] | None = None, **top: Any) -> Settings:
    return read_settings(load_base() | ({"monitoring": monitoring} if monitoring else {}) | top)


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:spark_vllm_\w+|vllm:\w+|node_\w+)", expression))


def test_every_name_in_a_query_or_rule_is_one_of_the_metrics_and_each_is_used() -> None:
    used = {name for expression in EXPRESSIONS for name in names_in(expression)}
    assert used == {metric.name for metric in METRICS}


def test_every_metric_is_exported_by_who_is_said_to() -> None:
    exported = {
        "supervisor": set(re.findall(r"^# TYPE (\S+)", render_metrics(DOCUMENT, 1000.0), re.MULTILINE)),
        "vllm": set((NAMES / "vllm-0.32.0.names.txt").read_text().split()),
        # The recorded machine has no RDMA device, and the collector is silent there.
        "node": set((NAMES / "node-exporter-1.5.0.names.txt").read_text().split()) | {RDMA_SENT.name},
    }
    assert len(METRICS) > 25
    assert [metric.name for metric in METRICS if metric.name not in exported[metric.source]] == []


def test_every_label_that_a_query_of_ours_asks_for_is_exported() -> None:
    text = render_metrics(DOCUMENT, 1000.0)
    for section in SECTIONS:
        for panel in section.panels:
            for query in panel.queries:
                for name in names_in(query.expression) & {m.name for m in METRICS if m.source == "supervisor"}:
                    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
                    wanted = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
                    assert lines and wanted <= set(re.findall(r"(\w+)=", lines[0])), (panel.title, query)


def test_the_dashboard_answers_four_questions_and_its_panels_fit_on_it() -> None:
    shown = dashboard("spark")
    rows = [panel["title"] for panel in shown["panels"] if panel["type"] == "row"]
    assert rows == ["Is it serving?", "How fast?", "How full?", "What happened?"]
    taken: set[tuple[int, int]] = set()
    for panel in shown["panels"]:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["x"] + place["w"] <= COLUMNS
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in shown["panels"]}) == len(shown["panels"])
    for panel in shown["panels"]:
        if panel["type"] != "row":
            assert panel["description"] and panel["datasource"]["uid"] == DATASOURCE
            assert panel["targets"] and len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_the_rules_say_what_is_wrong_and_what_to_do() -> None:
    rules = rules_document()["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 5
    assert all(rule["annotations"]["summary"].endswith(".") and rule["annotations"]["do"] for rule in rules)
    by_job = [alert.expression for alert in ALERTS if "job=" in alert.expression]
    assert all(any(f'job="{job}"' in expression for job in JOBS.values()) for expression in by_job)


def test_prometheus_asks_supervisor_vllm_and_every_node() -> None:
    files = monitoring_files(settings(), "main", "spark")
    document = json.loads(files.prometheus["prometheus.yml"])
    targets = {
        job["job_name"]: [target for entry in job["static_configs"] for target in entry["targets"]]
        for job in document["scrape_configs"]
    }
    assert targets == {
        "spark-vllm": ["192.168.200.12:30001"],
        "vllm": ["127.0.0.1:30000"],
        "node": ["192.168.200.12:9100", "192.168.200.13:9100"],
    }
    nodes = [entry["labels"]["node"] for entry in document["scrape_configs"][2]["static_configs"]]
    assert nodes == ["spark-a", "spark-b"]
    source = json.loads(files.grafana["provisioning/datasources/spark-vllm.yaml"])["datasources"][0]
    assert (source["url"], source["uid"]) == ("http://127.0.0.1:9090", DATASOURCE)


def test_chosen_ports_and_addresses_are_the_same_everywhere() -> None:
    raw = load_base()
    raw["groups"]["main"]["serving"] |= {"host": "10.1.230.180", "port": 8000, "status_port": 8001}
    chosen = settings(ON | {"address": "10.1.230.180", "prometheus_port": 9999, "node_exporter_port": 9101}, **{
        "groups": raw["groups"]})  # fmt: skip
    files = monitoring_files(chosen, "main", "spark")
    text = files.prometheus["prometheus.yml"]
    for target in ("192.168.200.12:8001", "10.1.230.180:8000", "192.168.200.13:9101"):
        assert f'"{target}"' in text
    assert "http://10.1.230.180:9999" in files.grafana["provisioning/datasources/spark-vllm.yaml"]
    prometheus = plan_monitoring(chosen, "main", "spark")[0]
    assert "--web.listen-address=10.1.230.180:9999" in prometheus.command


def test_it_is_off_unless_it_is_asked_for() -> None:
    assert settings().monitoring is None
    assert plan_monitoring(settings(), "main", "spark") == ()
    assert monitoring_ports(settings(), "spark-a") == {}


def test_the_containers_are_pinned_bounded_and_get_no_secret() -> None:
    plan = plan_monitoring(settings(ON | {"node_exporter": DIGEST}), "main", "spark")
    assert [(one.part, one.node, one.is_local) for one in plan] == [
        ("prometheus", "spark-a", False),
        ("grafana", "spark-a", False),
        ("node-exporter", "spark-a", True),
        ("node-exporter", "spark-b", True),
    ]
    assert sum(MEMORY_MIB.values()) < 1536
    for one in plan:
        assert DIGEST in one.image
        assert one.labels["spark-vllm.stack"] == "spark"
        text = json.dumps([one.command, dict(one.environment), dict(one.files)])
        assert not re.search(r"sk-[A-Za-z0-9]|api_key|password|authorization|bearer", text, re.IGNORECASE), one.part
        assert all(mount.read_only for mount in one.mounts)
    grafana = plan[1]
    assert grafana.environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    home = grafana.environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert json.loads(grafana.files[home])["uid"] == "spark-vllm"
    assert plan[2].command[0] == "--web.listen-address=192.168.200.12:9100"


def test_its_ports_are_looked_at_before_anything_starts() -> None:
    on = settings(ON | {"node_exporter": DIGEST})
    assert monitoring_ports(on, "spark-a") == {
        9090: "monitoring.prometheus_port",
        3000: "monitoring.grafana_port",
        9100: "monitoring.node_exporter_port",
    }
    assert monitoring_ports(on, "spark-b") == {9100: "monitoring.node_exporter_port"}
    assert monitoring_ports(settings({"prometheus": DIGEST}), "spark-b") == {}


def test_a_node_that_only_its_monitoring_runs_on_is_idle() -> None:
    labels = plan_monitoring(settings(ON), "main", "spark")[0].labels
    line = f"/spark-vllm-spark-prometheus|{labels['spark-vllm.stack']}|{labels['spark-vllm.probe']}|null|null|runc"
    rest = "=== load\n0.1 0.1 0.1 1/1 1\n8\n=== memory\nMemAvailable: 8388608 kB\n"
    assert parse_readiness("spark-a", f"=== containers\n{line}\n{rest}").busy == ()
    rank = line.replace("|monitoring|", "|<no value>|")
    assert parse_readiness("spark-a", f"=== containers\n{rank}\n{rest}").busy != ()


def test_serving_does_not_end_with_what_watches_it() -> None:
    tree = "urn:pulumi:s::p::spark:monitoring:Monitoring$docker:index"
    changes = [
        Change(f"{tree}/container:Container::prometheus-spark-a", "docker:index/container:Container", "replace"),
        Change(f"{tree}/volume:Volume::prometheus-spark-a-data", "docker:index/volume:Volume", "delete"),
    ]
    assert not any(change.restarts for change in changes)
    assert disrupting(changes, fresh=False) == []
    ranks = [
        Change(c.urn.replace("monitoring:Monitoring", "cluster:VllmRayCluster"), c.kind, c.action) for c in changes
    ]
    assert ranks[0].restarts
    assert len(disrupting(ranks, fresh=False)) == 2


def test_the_command_writes_the_same_files_for_an_owner_s_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = SeenDeployment(monkeypatch)
    monkeypatch.setattr(command, "open_stack_file", lambda _stack: seen.file)
    assert cli.main(["monitoring", "--stack", "spark", "--json", "--output", str(tmp_path)]) == Exit.DONE
    report = json.loads(capsys.readouterr().out)
    assert list(Draft202012Validator(schema_of("monitoring")).iter_errors(report)) == []
    files = monitoring_files(settings(), "main", "spark")
    assert (tmp_path / "prometheus" / "prometheus.yml").read_text() == files.prometheus["prometheus.yml"]
    assert {one["path"] for one in report["files"]} == {
        *(f"prometheus/{path}" for path in files.prometheus),
        *(f"grafana/{path}" for path in files.grafana),
    }
    (tmp_path / "taken").write_text("")
    assert cli.main(["monitoring", "--stack", "spark", "--output", str(tmp_path / "taken")]) == Exit.FAILED
    assert "expected to write the files" in capsys.readouterr().err


def test_a_fabric_that_preview_discovered_is_taken_from_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SeenDeployment(monkeypatch)
    state = seen._engine("stack", "export")
    for node in seen.raw["nodes"]:
        node.pop("fabric")
    monkeypatch.setattr(command, "pulumi_json", lambda *_: state)
    filled = command.with_fabric(seen.file, read_settings(seen.raw))
    assert [node.rank_address for node in filled.nodes] == ["192.168.200.12", "192.168.200.13"]
    monkeypatch.setattr(command, "pulumi_json", lambda *_: {})
    with pytest.raises(SparkError, match="expected to know the fabric address, found none declared"):
        command.with_fabric(seen.file, read_settings(seen.raw))


def test_the_package_installs_nothing_that_only_monitoring_or_development_needs() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    names = {re.split(r"[=<>~!\[ ]", text)[0] for text in project["project"]["dependencies"]}
    assert names == {"pulumi", "pulumi-command", "pulumi-docker", "pydantic"}
    assert "optional-dependencies" not in project["project"]
