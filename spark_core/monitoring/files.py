"""The files of a stack's monitoring: what Prometheus scrapes and watches, and what Grafana is provisioned with.

Every file is JSON, which is YAML too. None holds a secret: what is scraped is open where it can be reached, vLLM's
metrics by its own rule and ours on the fabric alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_core.monitoring.dashboard import DATASOURCE, dashboard
from spark_core.monitoring.metrics import JOBS, Source
from spark_core.monitoring.rules import rules_document
from spark_core.settings import NodeSettings, Settings
from spark_core.settings.monitoring import MonitoringSettings

SCRAPE_EVERY_S = 15
_ANY = ("0.0.0.0", "")  # noqa: S104 (what is compared, not bound to)


@dataclass(frozen=True)
class MonitoringFiles:
    """Files by their path: below Prometheus' folder of configuration, and below Grafana's ``/etc/grafana``."""

    prometheus: Mapping[str, str]
    grafana: Mapping[str, str]


def monitoring_files(settings: Settings, group_name: str, stack: str) -> MonitoringFiles:
    """The files for a Prometheus on the head, and a Grafana beside it; default ports where nothing is set."""
    monitoring = settings.monitoring
    exporter_port = monitoring.node_exporter_port if monitoring else _default("node_exporter_port")
    prometheus_port = monitoring.prometheus_port if monitoring else _default("prometheus_port")
    address = monitoring.address if monitoring else "127.0.0.1"
    return MonitoringFiles(
        {
            "prometheus.yml": _json(prometheus_document(settings, group_name, stack, exporter_port)),
            "rules.yml": _json(rules_document()),
        },
        {
            "provisioning/datasources/spark-vllm.yaml": _json(_datasource(f"http://{address}:{prometheus_port}")),
            "provisioning/dashboards/spark-vllm.yaml": _json(_provider()),
            "spark-vllm/dashboard.json": _json(dashboard(stack)),
        },
    )


def prometheus_document(settings: Settings, group_name: str, stack: str, exporter_port: int) -> dict[str, Any]:
    """Prometheus' configuration: the head's supervisor, vLLM, and every node."""
    group = settings.groups[group_name]
    head = settings.node(group.nodes[0])
    serving = group.serving
    vllm = "127.0.0.1" if serving.host in _ANY else serving.host
    nodes = [
        {"targets": [f"{address_of(node)}:{exporter_port}"], "labels": {"node": node.name}} for node in settings.nodes
    ]
    on_head = {"node": head.name, "group": group_name}
    return {
        "global": {
            "scrape_interval": f"{SCRAPE_EVERY_S}s",
            "evaluation_interval": f"{SCRAPE_EVERY_S}s",
            "external_labels": {"stack": stack},
        },
        "rule_files": ["rules.yml"],
        "scrape_configs": [
            _job("supervisor", [{"targets": [f"{address_of(head)}:{serving.status_port}"], "labels": on_head}]),
            _job("vllm", [{"targets": [f"{vllm}:{serving.port}"], "labels": on_head}]),
            _job("node", nodes),
        ],
    }


def address_of(node: NodeSettings) -> str:
    """Where the supervisor and node exporter of a node listen: the address at which ranks meet."""
    return node.rank_address or "127.0.0.1"


def _job(source: Source, targets: list[dict[str, Any]]) -> dict[str, Any]:
    # A rank's own label tells its node; the scraped one is the head.
    return {"job_name": JOBS[source], "honor_labels": True, "static_configs": targets}


def _datasource(url: str) -> dict[str, Any]:
    source = {
        "name": "Prometheus of spark-vllm",
        "uid": DATASOURCE,
        "type": "prometheus",
        "access": "proxy",
        "url": url,
        "isDefault": True,
        "editable": False,
        "jsonData": {"timeInterval": f"{SCRAPE_EVERY_S}s"},
    }
    return {"apiVersion": 1, "datasources": [source]}


def _provider() -> dict[str, Any]:
    provider = {
        "name": "spark-vllm",
        "type": "file",
        "disableDeletion": True,
        "allowUiUpdates": False,
        "options": {"path": "/etc/grafana/spark-vllm"},
    }
    return {"apiVersion": 1, "providers": [provider]}


def _default(port: str) -> int:
    return int(MonitoringSettings.model_fields[port].default)


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"
