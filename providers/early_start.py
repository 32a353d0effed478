"""Starts the process of our providers while the program still looks at the nodes.

The engine starts it at the first resource, which this program registers only once the preflight has spoken
(docs/adr/0002-run-preflight-in-the-program.md); a Python that imports Pulumi takes a third of a second to be there.
"""

from __future__ import annotations

import contextlib
import threading

import grpc
from pulumi.runtime.proto import resource_pb2
from pulumi.runtime.settings import get_monitor


def start_early() -> None:
    """Let the engine start the process; returns at once.

    To answer a call of a function the engine needs the provider. Pulumi's dynamic providers have no functions, so that
    the answer is an error, which says that the process is there.
    """
    threading.Thread(target=_ask, daemon=True).start()


def _ask() -> None:
    monitor = get_monitor()
    if monitor is None:  # a program without an engine
        return
    with contextlib.suppress(grpc.RpcError):
        monitor.Invoke(resource_pb2.ResourceInvokeRequest(tok="pulumi-python:dynamic:start"))
