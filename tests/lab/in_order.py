"""Tests that build on each other: a module that imports the fixture stops at its first failure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def in_order(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that builds on one that failed says so instead of failing in another way."""
    failed = getattr(request.module, "_failed", None)
    if failed:
        pytest.fail(f"not run: it builds on {failed}, which failed")
    before = request.session.testsfailed
    yield
    if request.session.testsfailed != before:
        request.module._failed = request.node.name
