"""Errors: the full text that a person reads."""

from __future__ import annotations

import pytest

from spark_core.errors import (
    CommandError,
    ForeignObjectError,
    GateError,
    ObservationError,
    SettingsError,
    SparkError,
    UnreachableError,
    join_errors,
)


def test_an_error_is_its_line_what_to_do_and_the_evidence() -> None:
    error = CommandError("expected 2, found 1", where="spark-b (fabric)", do="plug it in", evidence=["a", "b"])
    assert str(error) == "spark-b (fabric): expected 2, found 1\n  do: plug it in\n  seen: a\n  seen: b"
    assert error.args == (str(error),)


def test_an_error_without_a_place_is_its_line_alone() -> None:
    assert str(SparkError("expected one, found none")) == "expected one, found none"


def test_an_error_that_cannot_reach_a_node_names_node_and_step() -> None:
    error = UnreachableError("connection refused", node="spark-a", step="connect (TCP)", do="start sshd")
    assert str(error) == "spark-a, connect (TCP): connection refused\n  do: start sshd"
    assert (error.node, error.step) == ("spark-a", "connect (TCP)")


def test_evidence_is_bounded_to_its_end() -> None:
    error = GateError("stopped", where="spark-a", evidence=[f"line {n}" for n in range(1000)])
    lines = str(error).splitlines()
    assert len(lines) == 26
    assert lines[-1] == "  seen: line 999"


@pytest.mark.parametrize(("count", "words"), [(1, "1 setting that"), (3, "3 settings that")])
def test_a_settings_error_counts_its_violations(count: int, words: str) -> None:
    error = SettingsError([f"key{n}: wrong" for n in range(count)])
    assert str(error) == "\n".join(
        [
            f"the stack file has {words} cannot be used; no node was contacted",
            *[f"  key{n}: wrong" for n in range(count)],
        ]
    )


def test_unreachable_is_neither_an_observation_nor_an_answer() -> None:
    kinds = [CommandError, ObservationError, ForeignObjectError, GateError, SettingsError]
    assert not any(issubclass(UnreachableError, kind) or issubclass(kind, UnreachableError) for kind in kinds)


def test_one_error_joined_is_itself() -> None:
    error = UnreachableError("no answer", node="spark-a", step="login")
    assert join_errors([error]) is error


def test_several_errors_joined_are_all_told() -> None:
    joined = join_errors(
        [
            UnreachableError("no answer", node="spark-a", step="login", do="power-cycle it"),
            UnreachableError("refused", node="spark-b", step="connect (TCP)", do="start sshd"),
        ]
    )
    assert str(joined).splitlines() == [
        "spark-a, login: no answer",
        "  do: power-cycle it",
        "  seen: spark-b, connect (TCP): refused",
        "  seen: do: start sshd",
    ]
