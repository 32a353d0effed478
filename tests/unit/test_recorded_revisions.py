"""The state is read again while the engine is writing it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pulumi
import pytest

from components import recorded_revisions
from spark_core.errors import SparkError

BUSY = "invocation of pulumi:pulumi:readStackResourceOutputs returned an error: failed to load checkpoint: EOF"


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the engine answers, one after the other; an exception is raised."""
    left: list[Any] = []

    def invoke(token: str, arguments: dict[str, str]) -> object:
        assert (token, arguments) == ("pulumi:pulumi:readStackResourceOutputs", {"stackName": "o/p/dev"})
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(value=answer)

    monkeypatch.setattr(pulumi.runtime, "invoke", invoke)
    monkeypatch.setattr(recorded_revisions, "_FIRST_PAUSE_S", 0.0)
    return left


def test_a_state_that_is_being_written_is_read_again(answers: list[Any]) -> None:
    answers += [Exception(BUSY), Exception(BUSY), {"outputs": {}}]
    assert recorded_revisions._read_state("o/p/dev") == {"outputs": {}}


def test_a_state_that_cannot_be_read_is_told_in_one_line(answers: list[Any]) -> None:
    answers += [Exception(BUSY)] * 20
    with pytest.raises(SparkError, match="expected the state of the stack o/p/dev, found that the engine cannot read"):
        recorded_revisions._read_state("o/p/dev")
    assert len(answers) == 13


def test_any_other_error_is_as_it_was(answers: list[Any]) -> None:
    answers += [ValueError("something else")]
    with pytest.raises(ValueError, match="something else"):
        recorded_revisions._read_state("o/p/dev")
