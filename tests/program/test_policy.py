"""The owner's rules are asked by preview and by up, and what they find counts as any other finding does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config_cases import apply_change
from tests.program.rendering import Rendering, render, settings_of

FILE = "tests/fixtures/policy/rules.py"


def spark(preview: bool, **change: Any) -> Rendering:
    named = {key.replace("__", "."): value for key, value in change.items()}
    return render(apply_change(settings_of("spark"), {"policy_file": FILE, **named}), stack="spark", preview=preview)


@pytest.mark.parametrize("preview", [True, False])
def test_a_rule_that_is_broken_ends_the_run_before_any_resource(preview: bool) -> None:
    found = spark(preview, groups__main__serving__api_key="off")
    assert f"{FILE}: main: expected an API key, found it off [policy]" in found.error + "\n".join(found.log)
    assert found.error != ""
    assert list(found.by_name) == ["Stack spark-vllm-spark"]


@pytest.mark.parametrize("preview", [True, False])
def test_a_rule_that_warns_is_told_and_all_is_planned(preview: bool) -> None:
    found = spark(preview, groups__main__serving__max_model_len=65536)
    assert found.error == ""
    assert [line for line in found.log if "found 65536 [policy]" in line]
    assert [name for name in found.by_name if name.endswith(" main-gate")]


def test_the_stack_chooses_how_much_a_rule_weighs() -> None:
    found = spark(True, groups__main__serving__api_key="off", severities={"policy": "warn"})
    assert found.error == ""
    assert [line for line in found.log if "expected an API key, found it off [policy]" in line]
    assert not [line for line in spark(True).log if "[policy]" in line]
