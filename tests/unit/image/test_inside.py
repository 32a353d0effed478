"""The look into an image on all nodes of a group."""

from __future__ import annotations

import json
from typing import Any

import pytest

from automation.stage import check_image
from spark_core.errors import SparkError
from spark_core.group import GroupFiles
from spark_core.image.inside import Inside, look_inside
from spark_core.settings import Settings
from spark_core.transport.base import Command
from tests.scripted_transport import ScriptedTransport
from tests.unit.image.test_check import IMAGE, answer, settings_of

READY = "=== containers\n=== load\n9 9 9 1/1 1\n4\n=== memory\nMemAvailable: {kb} kB\n"


class Nodes:
    """Two nodes: what they have in memory, what the image says, and what is remembered there."""

    def __init__(self, *, memory_mib: int = 9000, said: dict[str, Any] | None = None) -> None:
        self.memory_mib, self.said = memory_mib, said or answer()
        self.remembered: dict[str, str] = {}
        self.runs = 0
        self.transports = {name: ScriptedTransport(name, self.answering(name)) for name in ("spark-a", "spark-b")}

    def answering(self, name: str) -> Any:
        def answered(cmd: Command) -> str:
            if "docker run" not in cmd.argv[-1] and not any("docker run" in word for word in cmd.argv):
                return READY.format(kb=self.memory_mib * 1024)
            cache, keep = cmd.argv[9:11]
            key = f"{name}{cache}"
            if key not in self.remembered and keep != "cached":
                self.runs += 1
                self.remembered[key] = json.dumps(self.said)
            return self.remembered.get(key, "")

        return answered

    def look(self, settings: Settings) -> Inside:
        files = GroupFiles("", (), dict.fromkeys(self.transports, "/"))
        roots = dict.fromkeys(self.transports, "/root")
        return look_inside(settings, "dev", "main", IMAGE, ("A",), files, self.transports, roots)


def test_every_node_is_asked_once_and_remembers() -> None:
    nodes, settings = Nodes(), settings_of()
    assert [report.node for report in nodes.look(settings).reports] == ["spark-a", "spark-b"]
    assert nodes.runs == 2
    assert nodes.look(settings).findings == ()
    assert nodes.runs == 2
    nodes.look(settings_of(**{"groups.main.serving.max_model_len": 99}))
    assert nodes.runs == 4


def test_a_busy_node_is_asked_as_long_as_it_has_memory_and_else_said_to_be_unknown() -> None:
    nodes = Nodes(memory_mib=3000)
    found = nodes.look(settings_of())
    assert nodes.runs == 0
    assert [finding.code for finding in found.findings] == ["image-unknown", "image-unknown"]
    assert found.findings[0].what == "not checked what is in it: 3000 MiB of memory available, 6144 needed"


def test_stage_refuses_what_the_image_would_not_serve(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = Nodes(said=answer(refused_flags="unrecognized arguments: --no-such"))
    with pytest.raises(SparkError, match="unrecognized arguments: --no-such"):
        check_image(settings_of(), "dev", "main", IMAGE, "", nodes.transports)
    patch = {"source": "README.md", "target": "/opt/fix.py"}
    nodes = Nodes()
    check_image(settings_of(**{"groups.main.serving.patches": [patch]}), "dev", "main", IMAGE, "", nodes.transports)
    assert nodes.runs == 0
    assert "is checked in up" in capsys.readouterr().err
