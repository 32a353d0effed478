"""A served deployment, operated by ``python -m automation`` as a person or a job does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

from automation.schemas import schema_of
from tests.lab.deployment import Deployment, chat

PROJECT = Path(__file__).resolve().parents[2]
HOSTS = ("spark-a", "spark-b")
ROOT = "/home/spark/.spark-vllm"


def run(served: Deployment, command: str, *words: str, timeout_s: float = 900) -> tuple[Any, str]:
    """The report of a command, which fits its schema, and what else it printed; both are kept in ``printed``."""
    text = 'exec 2>&1 >"$0"; . ./env && exec python -m automation "$@"'
    file = served.home / "report.json"
    done = served.inside("sh", "-c", text, str(file), command, "--stack", "dev", "--json", *words, timeout_s=timeout_s)
    served.printed += [done.text, file.read_text()]
    report = json.loads(file.read_text())
    jsonschema.validate(report, schema_of(command))
    assert report["exit_code"] == done.code, (report, done.text[-3000:])
    assert "encryptionsalt" not in (PROJECT / "Pulumi.dev.yaml").read_text(), command
    return report, done.text


def assert_serves(served: Deployment) -> None:
    """A completion comes back through the endpoint."""
    outputs = served.outputs()
    assert chat(outputs, outputs["api_key"]).status == 200
