"""The reference page and the published schemas are those of the command line."""

from __future__ import annotations

import json

import jsonschema
import pytest

from automation.__main__ import build_parser, main
from automation.exit_codes import MEANINGS, CommandEnd, Exit
from automation.reports import failure
from automation.schemas import OLDER, REPORTS, schema_of
from docs import generate_automation_reference as reference


def test_the_pages_are_what_the_command_line_says() -> None:
    stale = "run: python -m docs.generate_automation_reference"
    for path, text in reference.files().items():
        assert path.read_text() == text, f"{path.name} is stale; {stale}"


def test_every_status_has_a_meaning() -> None:
    assert set(MEANINGS) == set(Exit)
    assert build_parser().format_help()


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


@pytest.mark.parametrize("command", sorted(OLDER))
def test_commands_with_statuses_of_their_own_have_a_schema_too(command: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema_of(command))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({}, schema_of(command))


def test_what_sudoers_prints_fits_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sudoers", "--stack", "spark", "spark-a", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    jsonschema.validate(printed, schema_of("sudoers"))
    assert printed["node"] == "spark-a"
