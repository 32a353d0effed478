"""When this process must stop: Ctrl-C during a long operation, and an engine that is gone.

The engine tells every plugin of Ctrl-C, and the SDK's dynamic provider does nothing with it. The engine then waits for
the operation to end, which for a model that loads can be an hour. Here the servicer's empty answer to ``Cancel`` is
replaced by one that also sets a mark, and long operations look at the mark at points from which the next run goes on.
Only the code object can be replaced: the running gRPC server holds the bound method already.

An engine that is killed tells nobody, and the SDK's servicer then waits for ever. Here a thread notices: it sets the
same mark, lets what is in hand come to its end, since half of it is no state for a host, and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from spark_core.errors import SparkError

CANCELLED = threading.Event()
"""Set once the engine has asked this process to stop, or is gone."""
ASK_S = 5.0
_FIRST_PAUSE_S = 0.1
_idle = threading.Condition()
_in_hand = 0
_watch: threading.Thread | None = None


def listen() -> None:
    """Have this process notice what its engine wants; without the SDK's servicer (in tests, in the program) do nothing.

    Called before the first operation, by one thread at a time.
    """
    global _watch
    servicer = getattr(sys.modules.get("__main__"), "DynamicResourceProviderServicer", None)
    host, _, port = (sys.argv[-1] if servicer is not None else "").rpartition(":")
    if _watch is None and host and port.isdecimal():
        _watch = threading.Thread(target=_end_with_engine, args=((host, int(port)),), daemon=True)
        _watch.start()
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


@contextlib.contextmanager
def in_hand() -> Iterator[None]:
    """An operation, beside which this process does not end by itself."""
    global _in_hand
    with _idle:
        _in_hand += 1
    try:
        yield
    finally:
        with _idle:
            _in_hand -= 1
            _idle.notify_all()


def _end_with_engine(address: tuple[str, int]) -> None:
    """Wait until the engine is gone, then until no operation is in hand, and end.

    The engine holds the other end of our standard input, and the kernel closes that when it dies. Should an engine
    close it while it lives, its address still answers. Our parent tells nothing: it is a shell, which waits for us.
    """
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    # The kernel takes a dead engine's files away one after another: our input may end a moment before its address does.
    pause_s = _FIRST_PAUSE_S
    while _answers(address):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, ASK_S)
    CANCELLED.set()
    with _idle:
        _idle.wait_for(lambda: _in_hand == 0)
        os._exit(0)


def _answers(address: tuple[str, int]) -> bool:
    """Whether somebody listens there; what cannot be told counts as yes."""
    try:
        socket.create_connection(address, ASK_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True


def _cancel(self: Any, request: Any, context: Any) -> Any:
    # Runs with the globals of the SDK's own module: what it needs of ours it imports, the empty answer is there.
    from providers.cancel import CANCELLED as mark

    mark.set()
    return globals()["empty_pb2"].Empty()
