"""Every kind of finding has a test that makes it."""

from __future__ import annotations

from pathlib import Path

from spark_core.findings import KINDS

TESTS = Path(__file__).resolve().parents[1]


def test_every_kind_of_finding_is_named_by_a_test() -> None:
    texts = [path.read_text() for path in TESTS.rglob("*.py") if path.name not in ("test_settings.py", __file__)]
    assert [code for code in KINDS if not any(f'"{code}"' in text for text in texts)] == []
