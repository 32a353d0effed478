"""A newer rank supervisor waits for the next planned restart, also in a checkout that never built the running one."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pulumi
import pytest

from components import runtime_bundle
from components.local_sources import LocalSources
from components.model_weights import weights_places
from components.node_files import FilesOfGroup
from components.runtime_bundle import NodeFile
from components.stack import Stack
from components.supervisor import with_supervisor_to_run
from spark_core.errors import UnreachableError
from spark_core.group import plan_group
from spark_core.settings import NodeSettings, Settings, read_settings
from spark_core.supervisor_choice import RunningGroup
from spark_core.transport.base import Command, Result, Transport
from tests.config_cases import apply_change, load_base
from tests.scripted_transport import ScriptedTransport

IMAGE = "sha256:" + "a" * 64
RUNS = b"the supervisor of the release before"
DIGEST = hashlib.sha256(RUNS).hexdigest()
NEWEST = FilesOfGroup(NodeFile(".build/newest.pyz", "2222/runtime.pyz", "2222"), ())


@dataclass
class Nodes:
    """Stands for the connections of a run.

    Attributes:
        content: What the supervisor's file holds on each node; None where the node does not answer.
    """

    settings: Settings
    content: dict[str, bytes | None]

    def open_node(self, node: NodeSettings) -> Transport:
        def answer(cmd: Command) -> Result:
            content = self.content.get(node.name, b"")
            if content is None:
                raise UnreachableError("no answer", node=node.name, step="connect")
            assert cmd.argv[-1].endswith(f"/stacks/dev/files/{DIGEST}/runtime.pyz")
            return Result(0, base64.encodebytes(content).decode(), "") if content else Result(1, "", "no such file")

        return ScriptedTransport(node.name, answer)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What a person is told; the checkout has built nothing."""
    lines: list[str] = []
    monkeypatch.setattr(runtime_bundle, "PROJECT", tmp_path)
    monkeypatch.setattr(pulumi.log, "info", lines.append)
    monkeypatch.setattr(pulumi.log, "warn", lines.append)
    return lines


def chosen(
    content: dict[str, bytes | None], change: dict[str, Any] | None = None, *, known_image: bool = True
) -> FilesOfGroup:
    """The files of a group whose containers run the supervisor of before, with these changes of the settings."""
    before = read_settings(load_base())
    now = read_settings(apply_change(load_base(), change or {}))
    places = weights_places(before, "dev", "main", None, "weights1")
    runs = FilesOfGroup(NodeFile("", f"{DIGEST}/runtime.pyz", DIGEST), ()).placed(places.folders, places.in_place)
    deployment = plan_group(before, "main", "dev", IMAGE, runs).deployment
    sources = LocalSources(IMAGE if known_image else "", "", {"main": "weights1"})
    running = {"main": RunningGroup(deployment, f"{DIGEST}/runtime.pyz", IMAGE)}
    stack = Stack("dev", now, sources, Nodes(now, content), True, {}, {}, running)  # type: ignore[arg-type]
    return with_supervisor_to_run(stack, "main", NEWEST, weights_places(now, "dev", "main", None, "weights1"))


@pytest.mark.parametrize("known_image", [True, False])
def test_a_newer_supervisor_alone_waits_and_the_running_one_comes_from_a_node(
    said: list[str], tmp_path: Path, known_image: bool
) -> None:
    files = chosen({"spark-a": RUNS}, known_image=known_image)
    assert files.runtime == NodeFile(f".build/runtime-{DIGEST[:16]}.pyz", f"{DIGEST}/runtime.pyz", DIGEST)
    assert (tmp_path / files.runtime.local).read_bytes() == RUNS
    [line] = said
    assert "waits for the next restart" in line
    assert "groups.main.serving.supervisor_update: now" in line
    assert chosen({}, known_image=known_image) == files, "a second time no node is asked"


@pytest.mark.parametrize("other", [None, b"", b"altered"])
def test_a_node_that_cannot_give_it_is_passed_over(said: list[str], other: bytes | None) -> None:
    assert chosen({"spark-a": other, "spark-b": RUNS}).runtime.sha256 == DIGEST
    assert len(said) == 1


def test_where_no_node_has_it_the_newest_takes_its_place_and_that_is_told(said: list[str]) -> None:
    assert chosen({"spark-a": None, "spark-b": b"altered"}) == NEWEST
    [line] = said
    assert "which restarts serving" in line


@pytest.mark.parametrize(
    "change",
    [
        {"groups.main.serving.max_model_len": 4096},
        {"groups.main.serving.environment": {"A": "b"}},
        {"groups.main.serving.supervisor_update": "now"},
    ],
)
def test_a_restart_that_is_asked_for_takes_the_newest(said: list[str], change: dict[str, Any]) -> None:
    assert chosen({"spark-a": RUNS}, change) == NEWEST
    assert said == []


def test_a_change_that_restarts_nothing_takes_none(said: list[str]) -> None:
    assert chosen({"spark-a": RUNS}, {"host": {"sysctls": {"net.core.somaxconn": "5000"}}}).runtime.sha256 == DIGEST
    assert len(said) == 1
