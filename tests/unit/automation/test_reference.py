"""The reference page and the published schemas are those of the command line."""

from __future__ import annotations

import argparse
import json
import re

import jsonschema
import pytest

from automation.__main__ import build_parser, main
from automation.exit_codes import MEANINGS, CommandEnd, Exit
from automation.reports import failure
from automation.schemas import REPORTS, schema_of
from docs import generate_automation_reference as reference


def test_the_pages_are_what_the_command_line_says() -> None:
    stale = "run: python -m docs.generate_automation_reference"
    for path, text in reference.files().items():
        assert path.read_text() == text, f"{path.name} is stale; {stale}"


def test_each_command_of_the_command_line_takes_json_and_its_schema_is_published() -> None:
    commands = dict(reference.commands())
    assert len(commands) > 20 and set(commands) == set(REPORTS)
    published = {path.stem for path in reference.SCHEMAS.glob("*.json")}
    assert published == set(commands)
    for name, parser in commands.items():
        [option] = [action for action in parser._actions if "--json" in action.option_strings]
        assert (option.dest, option.default, option.const) == ("json", False, True), name
        assert not any(isinstance(action, argparse._SubParsersAction) for action in parser._actions), name
        assert f"]({reference.SCHEMAS.name}/{name}.json)" in reference.page(), name


def test_whoever_interrupts_a_command_gets_a_document_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_options: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("automation.recipes.run", interrupted)
    assert main(["recipes", "--json"]) == Exit.INTERRUPTED
    report = json.loads(capsys.readouterr().out)
    jsonschema.validate(report, schema_of("recipes"))
    assert (report["exit_code"], report["error"]["what"]) == (Exit.INTERRUPTED, "interrupted")


def test_every_status_has_a_meaning_and_a_test_with_the_real_engine() -> None:
    assert set(MEANINGS) == set(Exit)
    assert build_parser().format_help()
    text = (reference.PROJECT / "tests" / "engine" / "test_automation.py").read_text()
    shown = set(re.findall(r"\bExit\.(\w+)", text))
    assert shown == {code.name for code in Exit}


@pytest.mark.parametrize("command", sorted(REPORTS))
def test_a_command_that_ends_early_still_prints_what_its_schema_says(command: str) -> None:
    early = failure(command, "dev", CommandEnd(Exit.LOCKED, "expected nobody, found somebody"))
    jsonschema.Draft202012Validator.check_schema(schema_of(command))
    jsonschema.validate(early.model_dump(mode="json"), schema_of(command))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**early.model_dump(mode="json"), "secret": 1}, schema_of(command))


def test_a_wrong_command_line_is_not_taken_for_drift(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["drift", "--no-such-option"])
    assert ended.value.code == Exit.USAGE
    assert "error: unrecognized arguments" in capsys.readouterr().err


def test_what_sudoers_prints_fits_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sudoers", "--stack", "spark", "spark-a", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    jsonschema.validate(printed, schema_of("sudoers"))
    assert printed["node"] == "spark-a"
