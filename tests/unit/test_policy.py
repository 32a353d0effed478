"""Rules of the owner's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_core.errors import SettingsError
from spark_core.findings import judge
from spark_core.policy import policy_findings
from spark_core.settings import Settings, read_settings
from tests.config_cases import load_base


def settings(**more: object) -> Settings:
    return read_settings({**load_base(), "policy_file": "rules.py", **more})


def test_a_rule_that_is_not_met_is_a_finding_that_the_settings_may_make_milder(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(
        "def check(settings):\n"
        "    if settings.hardware != 'cpu':\n"
        "        yield 'expected the lab, found real nodes'\n"
        "    yield 'warn', f'{len(settings.nodes)} nodes'\n"
    )
    found = policy_findings(settings(), tmp_path)
    assert [(f.severity, f.what) for f in found] == [
        ("fail", "expected the lab, found real nodes"),
        ("warn", "2 nodes"),
    ]
    assert found[0].line.startswith("rules.py: expected the lab, found real nodes [policy]")
    assert {f.severity for f in judge(found, {"policy": "warn"})} == {"warn"}


def test_without_a_file_there_are_no_rules(tmp_path: Path) -> None:
    assert policy_findings(settings(policy_file=""), tmp_path) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "expected the file rules.py, found: No such file or directory"),
        ("x = 1\n", "rules.py defines no check(settings)"),
        ("def check(settings):\n    return [1 / 0]\n", "rules.py raised ZeroDivisionError in line 2: division by zero"),
        ("def check(settings)\n", "rules.py raised SyntaxError"),
        ("def check(settings):\n    yield 3\n", "rules.py gave int, expected a text or (severity, text)"),
    ],
)
def test_a_file_that_cannot_be_asked_is_a_clear_error(text: str | None, told: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "rules.py").write_text(text)
    with pytest.raises(SettingsError) as refused:
        policy_findings(settings(), tmp_path)
    assert told in str(refused.value)
