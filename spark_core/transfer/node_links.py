"""Runs on a node, sent there as text: the connections between two nodes, and the threads that serve them.

Standard library only. A node that takes listens on its fabric address. Who gives must come from the address that is
expected, and show a token that both got for this once.
"""

from __future__ import annotations

import hmac
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from spark_core.transfer.node_folder import BLOCK

STREAMS = 4
DIAL_S = 5.0


def admit(listener: socket.socket, peer: str, token: bytes) -> list[socket.socket]:
    """The connections of the node that gives; nobody else is let in, and then nobody at all."""
    links: list[socket.socket] = []
    with listener:
        while len(links) < STREAMS:
            link, (address, _) = listener.accept()
            link.settimeout(DIAL_S)
            try:
                known = address == peer and hmac.compare_digest(link.recv(len(token), socket.MSG_WAITALL), token)
            except OSError:
                known = False
            if known:
                links.append(_watched(link))
            else:
                link.close()
    return links


def dial(to: tuple[str, int], own: str, token: bytes) -> list[socket.socket]:
    """Connections to a node that takes.

    Raises:
        OSError: there is no way to it from the address that is our own.
    """
    links = []
    for _ in range(STREAMS):
        link = socket.create_connection(to, DIAL_S, (own, 0))
        link.sendall(token)
        links.append(_watched(link))
    return links


def receive(link: socket.socket, length: int) -> Iterator[memoryview]:
    """So many bytes of a connection, in blocks; each is valid until the next one."""
    block = memoryview(bytearray(BLOCK))
    while length:
        count = link.recv_into(block, min(length, BLOCK), socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("it was closed")
        length -= count
        yield block[:count]


def _watched(link: socket.socket) -> socket.socket:
    """A connection that ends if the other node is gone: who waits for bytes learns it in 17 s."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 4)):
        link.setsockopt(socket.IPPROTO_TCP, option, value)
    return link


def said(error: OSError) -> str:
    """What the system says of an error, without what Python adds to it."""
    return os.strerror(error.errno) if error.errno else str(error)


def started(work: Callable[..., object], *args: Any) -> threading.Thread:
    """A thread that does not keep the process alive, and ends it if it fails: nobody else would notice."""

    def guarded() -> None:
        try:
            work(*args)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    return thread


def in_threads(work: Callable[[socket.socket], object], links: list[socket.socket]) -> None:
    """Do the same for all connections at once."""
    for thread in [started(work, link) for link in links]:
        thread.join()
