"""Ctrl-C during a long operation: the engine tells every plugin, and the SDK's dynamic provider does nothing with it.

The engine then waits for the operation to end, which for a model that loads can be an hour. Here the servicer's empty
answer to ``Cancel`` is replaced by one that also sets a mark, and long operations look at the mark at points from which
the next run goes on. Only the code object can be replaced: the running gRPC server holds the bound method already.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from spark_core.errors import SparkError

CANCELLED = threading.Event()
"""Set once the engine has asked this process to stop."""


def listen() -> None:
    """Make the servicer of this process set the mark; without such a servicer (in tests, in the program) do nothing."""
    servicer = getattr(sys.modules.get("__main__"), "DynamicResourceProviderServicer", None)
    handler = getattr(servicer, "Cancel", None)
    code = getattr(handler, "__code__", None)
    if code is not None and code.co_argcount == _cancel.__code__.co_argcount and not code.co_freevars:
        handler.__code__ = _cancel.__code__  # type: ignore[union-attr]


def check_cancel(goes_on: str) -> None:
    """Stop here if the engine has asked for it.

    Args:
        goes_on: What goes on without us, or where the next run goes on.

    Raises:
        SparkError: saying that it was interrupted.
    """
    if CANCELLED.is_set():
        raise SparkError(f"interrupted; {goes_on}", do="run up again to go on from there")


def _cancel(self: Any, request: Any, context: Any) -> Any:
    # Runs with the globals of the SDK's own module: what it needs of ours it imports, the empty answer is there.
    from providers.cancel import CANCELLED as mark

    mark.set()
    return globals()["empty_pb2"].Empty()
