"""Ctrl-C as the engine passes it on: the servicer's own process notices it, and long operations end."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import providers.cancel as cancel
from spark_core.errors import SparkError


class DynamicResourceProviderServicer:
    """As the SDK's: the method is bound before anybody can replace it."""

    def Cancel(self, request: Any, context: Any) -> Any:
        return "ignored"


def test_a_method_that_is_bound_already_sets_the_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("__main__")
    module.DynamicResourceProviderServicer = DynamicResourceProviderServicer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setattr(cancel, "CANCELLED", threading.Event())
    monkeypatch.setitem(globals(), "empty_pb2", types.SimpleNamespace(Empty=lambda: "empty"))
    bound = DynamicResourceProviderServicer().Cancel
    assert bound(None, None) == "ignored"
    cancel.listen()
    assert bound(None, None) == "empty"
    assert cancel.CANCELLED.is_set()
    with pytest.raises(SparkError, match="interrupted; the copy goes on"):
        cancel.check_cancel("the copy goes on")


def test_without_the_sdks_servicer_nothing_is_replaced() -> None:
    cancel.listen()
    cancel.check_cancel("nothing")
    assert not cancel.CANCELLED.is_set()


def test_the_servicer_of_the_sdk_has_what_is_replaced() -> None:
    """If the SDK changes it, Ctrl-C would silently wait for hours again."""
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec("pulumi.dynamic")
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).with_name("__main__.py").read_text()
    assert "class DynamicResourceProviderServicer(" in text
    assert "def Cancel(self, request, context):" in text
    assert "empty_pb2" in text


class Ended(Exception):
    """Instead of the end of this process."""


def test_an_engine_whose_address_outlives_our_input_is_noticed_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, pauses = [True, True, False], list[float]()

    def end(_status: int) -> None:
        raise Ended

    monkeypatch.setattr(cancel, "CANCELLED", threading.Event())
    monkeypatch.setattr(cancel, "_answers", lambda _address: answers.pop(0))
    monkeypatch.setattr("providers.cancel.os.read", lambda _file, _count: b"")
    monkeypatch.setattr("providers.cancel.os._exit", end)
    monkeypatch.setattr("providers.cancel.time.sleep", pauses.append)
    with pytest.raises(Ended):
        cancel._end_with_engine(("127.0.0.1", 1))
    assert cancel.CANCELLED.is_set() and not answers
    assert len(pauses) == 2 and sum(pauses) < 1
