"""What commands print with ``--json`` fits its published schema, whatever they find."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from automation import adopt, gc, verify
from automation.__main__ import main
from automation.adopt import Planned
from automation.exit_codes import Exit
from automation.verify import Recorded
from spark_core.errors import CommandError, SparkError
from spark_core.garbage.unused import Item
from tests.unit.automation.seen_deployment import REVISION, SeenDeployment

SCHEMAS = Path(__file__).resolve().parents[3] / "docs" / "schemas"
Printed = Callable[..., Any]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Run a command with ``--json``; its document, which fits the schema and has the exit status."""

    def run(command: str, *words: str, code: Exit = Exit.DONE) -> Any:
        assert main([command, "--stack", "spark", *words, "--json"]) == code
        document = json.loads(capsys.readouterr().out)
        jsonschema.validate(document, json.loads((SCHEMAS / f"{command}.json").read_text()))
        assert (document["command"], document["stack"], document["exit_code"]) == (command, "spark", code)
        return document

    return run


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> SeenDeployment:
    found = SeenDeployment(monkeypatch)
    for module in (gc, verify):
        monkeypatch.setattr(module, "open_nodes", lambda _file: found.nodes())
        monkeypatch.setattr(module, "open_stack_file", lambda _name: found.file)
        monkeypatch.setattr(module, "pulumi_json", lambda *_: {"deployment": None})
    return found


@pytest.mark.usefixtures("seen")
def test_what_takes_space_and_what_was_freed(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(transport: Any, *_: Any) -> list[Item]:
        return [
            Item(transport.node, REVISION, "revision", 7, ""),
            Item(transport.node, "sha256:1", "image", 1, "a stage"),
        ]

    monkeypatch.setattr(gc, "look_at_unused", look)
    monkeypatch.setattr(gc, "free", lambda _transport, _root, items: ([item.name for item in items], []))
    listed = printed("gc")
    assert (len(listed["items"]), listed["freed"]) == (4, [])
    assert [(one["node"], one["name"]) for one in printed("gc", "--yes")["freed"]] == [
        ("spark-a", REVISION),
        ("spark-b", REVISION),
    ]

    def refuse(*_: Any) -> Any:
        raise CommandError("expected to free weights, found no Docker", where="spark-a")

    monkeypatch.setattr(gc, "free", refuse)
    assert "found no Docker" in json.dumps(printed("gc", "--yes", code=Exit.FAILED)["error"])


@pytest.mark.usefixtures("seen")
def test_files_that_are_wrong_are_2_and_weights_that_nobody_knows_are_1(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "found none" in printed("verify", code=Exit.FAILED)["error"]["what"]
    recorded = Recorded({"spark-a": "/w"}, {"spark-a": "/r"}, "node:/w", REVISION, None, frozenset())
    monkeypatch.setattr(verify, "recorded_weights", lambda _state: recorded)
    monkeypatch.setattr(verify, "differences", lambda *_: {"spark-a": ["x: content differs"]})
    assert printed("verify", code=Exit.DRIFT)["wrong"] == {"spark-a": ["x: content differs"]}
    monkeypatch.setattr(verify, "differences", lambda *_: {"spark-a": []})
    assert printed("verify")["wrong"] == {"spark-a": []}


def test_containers_that_were_taken_in(printed: Printed, seen: SeenDeployment, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned("urn:rank", "spark-a", "main-spark-a", "abc")
    found: list[str | None] = ["f00d"]
    imported: list[tuple[str, ...]] = []
    monkeypatch.setattr(adopt, "open_stack_file", lambda _name: SimpleNamespace(raw=lambda: seen.raw, stack="spark"))
    monkeypatch.setattr(adopt, "pulumi_json", lambda *_: {})
    monkeypatch.setattr(adopt, "pulumi", lambda *words: imported.append(words))
    monkeypatch.setattr(adopt, "planned_containers", lambda _plan: [planned])
    monkeypatch.setattr(adopt, "with_containers", lambda *_: {})
    monkeypatch.setattr(adopt, "running_id", lambda *_: found[0])
    assert printed("adopt")["adopted"] == {"main-spark-a": "f00d"}
    assert [words[:2] for words in imported] == [("stack", "import")]
    found[0] = None
    assert "found none" in printed("adopt", code=Exit.FAILED)["error"]["what"]
    assert len(imported) == 1


@pytest.mark.parametrize("command", ["preview", "status", "logs", "doctor", "render", "stop", "gc", "verify", "adopt"])
def test_a_stack_without_a_file_is_told_in_a_document(
    command: str, printed: Printed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PULUMI_OPTION_CONFIG_FILE", str(tmp_path / "none.yaml"))
    error = printed(command, code=Exit.FAILED)["error"]
    assert "expected" in error["what"]


def test_an_error_in_a_document_has_no_secret(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_name: str) -> Any:
        raise SparkError("found token=abcd1234", where="https://me:pa55word@hub/x", do="take Bearer abcdefgh1234 away")

    monkeypatch.setattr(gc, "open_stack_file", refuse)
    error = json.dumps(printed("gc", code=Exit.FAILED)["error"])
    assert "[redacted]" in error
    assert not [secret for secret in ("abcd1234", "pa55word", "abcdefgh1234") if secret in error]
