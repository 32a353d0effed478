"""Every code and every message of the error pages is one that the program tells, and a test makes it happen."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from automation.exit_codes import Exit
from docs import error_index
from spark_core.findings import KINDS
from tests.unit.runtime import test_signatures as known_errors

PROJECT = Path(__file__).resolve().parents[2]
SOURCES = ("spark_core", "spark_runtime", "providers", "components", "automation", "toolchain")
# These name codes without making them happen: of every catalogue, of settings only, and this file.
NAMING_ONLY = {"test_settings.py", "test_error_index.py", "test_finding_kinds.py"}
MESSAGES = re.findall(
    r"^\| ``?([^`]+)``? ",
    (PROJECT / "docs" / "errors.md").read_text().partition("## Frequent messages")[2],
    re.MULTILINE,
)


@functools.cache
def texts_of(*folders: str) -> list[str]:
    """Every module of these folders; strings that go on in the next line are joined."""
    paths = [path for folder in folders for path in (PROJECT / folder).rglob("*.py") if path.name not in NAMING_ONLY]
    return [re.sub(r'"\s*\n\s*f?"', "", path.read_text("utf-8")) for path in paths]


def test_the_index_has_every_code_of_every_catalogue_once_for_each() -> None:
    told = [(entry.code, entry.told_by.split(",")[0]) for entry in error_index.entries()]
    assert len(told) == len(set(told))
    wanted = {(code, "preflight") for code in KINDS} | {(code, "log") for code in error_index.diagnosis_codes()}
    assert set(told) == wanted
    assert {"memlock", "memory-pinned"} <= error_index.diagnosis_codes()
    assert all(entry.meaning for entry in error_index.entries())


def test_every_finding_of_the_index_is_made_by_a_test() -> None:
    tests = texts_of("tests")
    codes = [entry.code for entry in error_index.entries() if entry.told_by.startswith("preflight")]
    assert len(codes) > 50
    assert [code for code in codes if not any(f'"{code}"' in text for text in tests)] == []


def test_every_diagnosis_of_the_index_is_made_by_a_line_of_a_log() -> None:
    shown = {case.code for case in known_errors.CASES} | known_errors.BY_THE_SUPERVISOR
    hints = {entry.code for entry in error_index.entries()} - set(KINDS) - shown
    # Hints and consequences are asked for by other tests of the same file, by name.
    text = Path(known_errors.__file__).read_text("utf-8")
    assert [code for code in hints if f'"{code}"' not in text] == []
    assert error_index.diagnosis_codes() - shown <= hints


@pytest.mark.parametrize("status", Exit)
def test_every_exit_status_is_expected_by_a_test(status: Exit) -> None:
    name = re.compile(rf"\bExit\.{status.name}\b")
    assert any(name.search(text) for text in texts_of("tests"))


@pytest.mark.parametrize("message", MESSAGES)
def test_every_frequent_message_is_one_that_the_program_tells(message: str) -> None:
    """Each part between two values; "expected" and "found" are put around it elsewhere, in some messages."""
    around = r"^expected (an? )?|(?<= )found:? |,? ?found:? ?(none: )?$"
    parts = [re.sub(around, "", part.strip(" ,;():")).strip(" ,") for part in re.split("…|; |, found:? ", message)]
    known = [*texts_of(*SOURCES), (PROJECT / "__main__.py").read_text("utf-8")]
    assert any(parts)
    assert [part for part in parts if not any(part in text for text in known)] == []


def test_the_hardware_runbook_names_codes_that_are_told_and_a_source_for_each_fact() -> None:
    page = (PROJECT / "docs" / "how-to" / "hardware.md").read_text("utf-8")
    told = {"preflight": set(KINDS), "log": error_index.diagnosis_codes()}
    rows, named = 0, 0
    for table in re.findall(r"^\| fact \|.*?(?:\n\n|\Z)", page, re.MULTILINE | re.DOTALL):
        headings = [cell.strip() for cell in table.splitlines()[0].strip("| ").split("|")]
        for line in table.strip().splitlines()[2:]:
            cells = dict(zip(headings, (cell.strip() for cell in line.strip().strip("|").split("|")), strict=True))
            rows += 1
            assert (
                re.search(r"\w+(?:#\d+| PR \d+)|\w+, \S+|page", cells["source"]) or "as for MTU" in cells["source"]
            ), line
            for where, code in re.findall(r"(log: )?`([a-z-]+)`", cells.get("told as", "")):
                named += 1
                assert code in told["log" if where else "preflight"], code
    assert rows > 30 and named > 30
