"""The dashboard's panels as Grafana's JSON (schema version 39, Grafana 11)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spark_core.monitoring.panels import SECTIONS, Panel, Section, Unit

DATASOURCE = "spark-vllm-prometheus"
"""Uid of the data source, which is provisioned with it."""
UID = "spark-vllm"
COLUMNS = 24
_UNITS: dict[Unit, str] = {"tokens/s": "suffix: tokens/s"}
"""Where Grafana names a unit otherwise."""


def dashboard(stack: str, sections: Sequence[Section] = SECTIONS) -> dict[str, Any]:
    """The dashboard of a stack."""
    panels: list[dict[str, Any]] = []
    y = 0
    for section in sections:
        panels.append(_row(len(panels) + 1, section.question, y))
        y += 1
        x = line = 0
        for panel in section.panels:
            if x + panel.width > COLUMNS:
                x, y, line = 0, y + line, 0
            panels.append(_panel(len(panels) + 1, panel, x, y))
            x, line = x + panel.width, max(line, panel.height)
        y += line
    return {
        "uid": UID,
        "title": f"spark-vllm: {stack}",
        "tags": ["spark-vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "15s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": []},
        "annotations": {"list": []},
        "panels": panels,
    }


def _row(id_: int, title: str, y: int) -> dict[str, Any]:
    place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
    return {"id": id_, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": place}


def _panel(id_: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": DATASOURCE}
    defaults: dict[str, Any] = {"unit": _UNITS.get(panel.unit, panel.unit), "mappings": _mappings(panel)}
    if panel.unit == "percentunit":
        defaults |= {"min": 0, "max": 1}
    if panel.steps:
        steps = [{"value": value, "color": colour} for value, colour in panel.steps]
        defaults |= {"thresholds": {"mode": "absolute", "steps": steps}, "color": {"mode": "thresholds"}}
    if panel.kind == "timeseries":
        defaults |= {"color": {"mode": "palette-classic"}, "custom": {"fillOpacity": 8, "showPoints": "never"}}
    return {
        "id": id_,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel),
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "expr": query.expression,
                "legendFormat": query.legend,
                "datasource": source,
                "instant": panel.kind in ("stat", "gauge"),
                "range": panel.kind not in ("stat", "gauge"),
            }
            for place, query in enumerate(panel.queries)
        ],
    }


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind in ("stat", "gauge"):
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        named = "name" if panel.title == "Phase" else "auto"
        return {"reduceOptions": reduce} | ({"textMode": named} if panel.kind == "stat" else {})
    if panel.kind == "state-timeline":
        return {"showValue": "never", "mergeValues": True, "legend": {"showLegend": True, "displayMode": "list"}}
    return {"legend": {"showLegend": True, "displayMode": "list"}, "tooltip": {"mode": "multi"}}


def _mappings(panel: Panel) -> list[dict[str, Any]]:
    if not panel.words:
        return []
    words = {str(value): {"text": word, "color": colour} for value, (word, colour) in panel.words.items()}
    return [{"type": "value", "options": words}]
