"""A deployment as ``report`` sees it: a state, a history, and two nodes that say and keep what a test wants."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from automation import deployment_view, status
from automation.deployment_report import DeploymentReport, DriftPart
from automation.group_nodes import GroupNodes
from automation.reports import ChangeReport, FindingReport
from automation.stack_file import StackFile
from providers.connections import Run
from spark_core.errors import CommandError, UnreachableError
from spark_core.journal import JournalEntry
from spark_core.settings import read_settings
from spark_core.settings.record import record_of, record_text
from spark_core.transport.base import Command, Result
from tests.config_cases import load_base
from tests.scripted_transport import ScriptedTransport

NOW = 1_790_000_000.0
IMAGE = "sha256:" + "4f1d" * 16
REVISION = "c0ffee" * 6 + "c0ff"
KEY = "sk-the-key-that-nobody-may-see-0123456789"
LOADING = ((0, "waiting_for_ranks"), (4, "ray_starting"), (11, "loading"), (402, "canary"), (409, "serving"))
SPEED = [
    {
        "concurrency": concurrency,
        "prompts": 8 * concurrency,
        "input_tokens": 512,
        "output_tokens": 128,
        "output_tokens_per_s": 26.9 if concurrency == 1 else 121.4,
        "ttft_median_ms": 412.0,
        "ttft_p99_ms": 733.0,
        "tpot_median_ms": 36.4,
        "at": NOW - 500,
    }
    for concurrency in (1, 8)
]


def moment(before: float) -> str:
    """A time of the engine, so many seconds ago."""
    return datetime.fromtimestamp(NOW - before, UTC).isoformat().replace("+00:00", "Z")


class SeenDeployment:
    """Two Sparks that serve, until a test breaks something.

    Attributes:
        raw: Settings of the stack.
        silent: Nodes that do not answer.
        status: For each node, what its supervisor says of itself.
        kept: For each node, the sections of its generations.
        journal: Targets of the journal of each node.
        lost: Whether state, outputs and history cannot be read.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.raw = load_base()
        self.silent: set[str] = set()
        self.status: dict[str, dict[str, Any]] = {"spark-a": _rank(0, "serving"), "spark-b": _rank(1, "ray_ready")}
        self.kept = {"spark-a": generation(7, LOADING), "spark-b": generation(7, ())}
        self.lost = False
        self.result = "succeeded"
        self.wanted = ""
        self.model = "qwen"
        self.message = "spark-vllm up of 0123456789ab"
        self.journal = ["vm.swappiness"]
        self.resources_more: list[dict[str, Any]] = []
        monkeypatch.setattr(
            Run, "transport", lambda _self, name, _remembered=None: ScriptedTransport(name, self._answer(name))
        )
        for module in (deployment_view, status):
            monkeypatch.setattr(module, "pulumi_json", self._engine)
            monkeypatch.setattr(module, "updates_of", lambda *_: self._history())
        monkeypatch.setattr(deployment_view, "read_journal", lambda *_: _journal(self.journal))
        monkeypatch.setattr(status, "locks_of", lambda *_: [])

    @property
    def file(self) -> StackFile:
        text = yaml.safe_dump({"config": {f"p:{key}": value for key, value in self.raw.items()}})
        return StackFile("spark", Path("Pulumi.spark.yaml"), "p", text)

    def nodes(self) -> GroupNodes:
        """The nodes of the stack."""
        run = Run(self.raw)
        return GroupNodes("spark", run, next(iter(run.settings.groups)))

    def report(self, drift: DriftPart | None = None, look: Callable[[], DriftPart] | None = None) -> DeploymentReport:
        """What ``report`` gathers; ``look`` stands for a look for drift that ends otherwise."""
        return deployment_view.gather(self.file, self.nodes(), (lambda: drift) if drift else look, now=NOW)

    def break_head(self, line: str, lines: list[str]) -> None:
        """The head's last two generations failed while they loaded."""
        failed = _rank(0, "failed", first_error=line, lines=lines)
        self.status["spark-a"] = failed
        self.result = "failed"
        self.status["spark-b"]["phase"] = "waiting_for_ranks"
        self.kept["spark-a"] = "".join(
            generation(
                number,
                (*LOADING[:3], (390, "loading: 12 of 16 shards"), (401, "ending")),
                end=_rank(0, "failed", number, line, lines),
            )
            for number in (6, 7)
        )

    def _engine(self, *words: str) -> Any:
        if self.lost:
            raise CommandError("`pulumi stack` failed: no stack named 'spark' found")
        if words[:2] == ("stack", "output"):
            return {
                "endpoint": "http://10.1.230.180:30000/v1",
                "model": self.model,
                "api_key": KEY,
                "image_digest": IMAGE,
                "model_revision": REVISION,
            }
        return {"deployment": {"resources": self._resources()}}

    def _history(self) -> list[dict[str, Any]]:
        if self.lost:
            raise CommandError("`pulumi stack` failed: no stack named 'spark' found")
        up = {"kind": "update", "result": self.result, "message": self.message, "version": 2}
        before = {"kind": "refresh", "result": "succeeded", "message": "", "version": 1}
        return [
            {**up, "startTime": moment(1500), "endTime": moment(960), "resourceChanges": {"create": 20}},
            {**before, "startTime": moment(9000), "endTime": moment(8990), "resourceChanges": {"same": 20}},
        ]

    def _resources(self) -> list[dict[str, Any]]:
        settings = record_text(record_of(read_settings(self.raw)))
        found: list[dict[str, Any]] = [
            _resource("Stack", "spark-vllm-spark", 1498, kind="pulumi:pulumi:Stack"),
            _resource("GoodSettings", "good-settings", 960, "main-gate", settings=settings, image_id=IMAGE,
                      revision=REVISION, at=NOW - 960, speed=SPEED, before=[]),
        ]  # fmt: skip
        for node in self.raw["nodes"]:
            name = str(node["name"])
            interfaces = [{**one, "mtu_bytes": 9000} for one in node.get("fabric") or []]
            found += [
                _resource("NodeJournal", f"{name}-journal", 1493),
                _resource("NodeHost", f"{name}-host", 1488, f"{name}-journal"),
                _resource("FabricLink", f"fabric-{name}", 1470, f"{name}-host", node=name, interfaces=interfaces),
                _resource(
                    "Container", f"main-{name}", 1377, "main-weights-copy", kind="docker:index/container:Container"
                ),
            ]
        names = [str(node["name"]) for node in self.raw["nodes"]]
        found += [
            _resource("ImageCopy", "image-copy", 1420, *[f"fabric-{name}" for name in names]),
            _resource("FabricProof", "main-fabric-proof", 1400, "image-copy", bandwidth=[
                {"pair": " - ".join(names[:2]), "method": "ib_write_bw", "links": 2, "gbps": [196.21, 195.9],
                 "round_trip_us": 2.1}], not_proven=[]),
            _resource("WeightsCopy", "main-weights-copy", 1380, "image-copy",
                      folders=dict.fromkeys(names, "/models/qwen"), revision=REVISION),
            _resource("EndpointGate", "main-gate", 962, *[f"main-{name}" for name in names]),
        ]  # fmt: skip
        return [*self.resources_more, *found]

    def _answer(self, name: str) -> Any:
        def answered(cmd: Command) -> Result | str:
            if name in self.silent:
                raise UnreachableError("expected sshd, found no answer in 10 s", node=name, step="connect (TCP)")
            if cmd.argv[0] == "cat":
                return self.wanted if self.wanted and name == "spark-a" else Result(1, "", "No such file")
            if "/logs" in " ".join(cmd.argv):
                return self.kept[name]
            document = self.status[name]
            container = {"Running": True, "ExitCode": 0, "OOMKilled": False, "StartedAt": "2026-01-01T00:00:00Z"}
            return (
                f"=== container\n{json.dumps(container)}\n=== restarts\n0\n=== id\nid\n=== status\n"
                f"{json.dumps(document)}\n"
            )

        return answered


def generation(number: int, phases: Any, end: dict[str, Any] | None = None) -> str:
    """The sections of one generation as the reading script prints them."""
    began = NOW - 1370 + (number - 7) * 400
    lines = [f"{began:.3f} supervisor | generation {number}"]
    lines += [f"{began + at:.3f} supervisor | {phase}" for at, phase in phases]
    return f"=== end {number}\n{json.dumps(end) if end else ''}\n=== said {number}\n" + "\n".join(lines) + "\n"


def drifted() -> DriftPart:
    """A preview that found an MTU that somebody changed."""
    change = ChangeReport(
        name="fabric-spark-b", type="spark:FabricLink", action="update", properties=["interfaces"], restarts=False
    )
    finding = FindingReport(
        severity="warn", code="mtu-differs", text="spark-b: MTU of enp1s0f1np1 is 1500, expected 9000 [mtu-differs]"
    )
    return DriftPart(result="succeeded", changes=[change], findings=[finding])


def clean() -> DriftPart:
    """A preview that found nothing."""
    return DriftPart(result="succeeded", changes=[], findings=[])


def _rank(rank: int, phase: str, number: int = 7, first_error: str = "", lines: Any = ()) -> dict[str, Any]:
    first = {
        "at": NOW - 700, "source": "vllm", "line": first_error, "lines": list(lines), "hints": [],
        "diagnosis": {"text": "the KV cache does not fit beside the weights", "do": "lower gpu_memory_utilization"},
    }  # fmt: skip
    return {
        "phase": phase,
        "rank": rank,
        "desired": "run",
        "updated": time.time(),
        "since": NOW - 950,
        "detail": "",
        "progress": "",
        "generation": {"deployment": "d", "head_incarnation": "x", "n": number},
        "generation_started": NOW - 1370,
        "memory_available_bytes": 9_300_000_000,
        "versions": {"vllm": "0.32.0", "ray": "2.60.0", "torch": None},
        "last_good_canary_at": NOW - 12,
        "first_error": first if first_error else None,
        "healing": {"policy": "restart", "last_failure": {"generation": number, "phase": "loading"}},
    }


def _resource(name: str, resource: str, age_s: float, /, *needs: str, kind: str = "", **outputs: Any) -> dict[str, Any]:
    return {
        "urn": f"urn:pulumi:spark::p::t::{resource}",
        "type": kind or f"pulumi-python:dynamic/spark:{name}",
        "created": moment(age_s),
        "modified": moment(age_s),
        "dependencies": [f"urn:pulumi:spark::p::t::{need}" for need in needs],
        "outputs": outputs,
    }


def _journal(targets: list[str]) -> list[JournalEntry]:
    return [JournalEntry("sysctl", target, "60") for target in targets]
