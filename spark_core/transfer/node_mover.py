"""Runs on a node, sent there as text: takes files into a folder, and passes them on to another node as they arrive.

Standard library only. Orders are lines of JSON on standard input, which stays open: once it ends, nobody waits for this
any more and it ends too. The outcome is a line of JSON on standard output.

Over each connection the taker asks (number of a file, offset) and gets the rest of it. A giver reads from its disk,
also what is still arriving there, so that a slow or dead node holds up none before it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from spark_core.transfer.node_folder import BLOCK
from spark_core.transfer.node_links import admit, dial, in_threads, receive, said, started
from spark_core.transfer.node_store import FLUSH, Store

ASK = "!IQ"
A_MINUTE_S = 60


class Mover:
    """Brings the files of a folder to this node, and from here to the next one."""

    def __init__(self, orders: dict[str, Any], stdin: io.BufferedReader) -> None:
        self.source, self.status = orders["from"], Path(orders["status"])
        self.store = Store(orders["target"], orders["files"], orders["cache"], onward=orders["onward"])
        self.stdin, self.fed_to_end = stdin, False
        self.port = self.sent = 0
        self.passed_on = threading.Event()

    # ---- taking

    def fetch_all(self, listener: socket.socket) -> None:
        """Take what is missing from the node before this one."""
        links = admit(listener, self.source["peer"], self.source["token"].encode())
        self.store.fill(partial(in_threads, self.fetch, links))

    def fetch(self, link: socket.socket) -> None:
        """Take files over one connection, until none is left."""

        def rest(name: str, offset: int) -> Iterator[memoryview]:
            link.sendall(struct.pack(ASK, self.store.names.index(name), offset))
            return receive(link, self.store.files[name][0] - offset)

        with link:
            while True:
                with self.store.changed:
                    name = self.store.todo.pop(0) if self.store.todo else None
                if name is None or not self.store.take(name, partial(rest, name)):
                    return

    def take_fed(self, messages: Iterator[dict[str, Any]]) -> None:
        """Take the files that come on standard input, each part of one behind an order of its own."""

        def rest(name: str, message: dict[str, Any], offset: int) -> Iterator[memoryview]:
            block = memoryview(bytearray(BLOCK))
            while True:
                if name in self.store.whole or message.get("file") != name or message["offset"] != offset:
                    raise ConnectionError("the folder is not as it was")
                left = message["bytes"]
                while left:
                    count = self.stdin.readinto(block[: min(left, BLOCK)])
                    if not count:
                        self.end(3)
                    left, offset = left - count, offset + count
                    yield block[:count]
                if offset >= self.store.files[name][0]:
                    return
                message = next(messages)

        for message in messages:
            self.fed_to_end = "end" in message
            if self.fed_to_end or not self.store.take(message["file"], partial(rest, message["file"], message)):
                return

    # ---- giving

    def pass_on(self, to: dict[str, Any]) -> None:
        """Connect to the node after this one, and answer it until it has what it lacks."""
        try:
            in_threads(self.give, dial((to["address"], to["port"]), to["own"], to["token"].encode()))
        except OSError as error:
            self.store.fault("dial", found=said(error))
        self.passed_on.set()

    def give(self, link: socket.socket) -> None:
        """Answer one connection, until the other node closes it or the rest of a file does not come."""
        name = ""
        with link:
            try:
                while len(request := link.recv(struct.calcsize(ASK), socket.MSG_WAITALL)) == struct.calcsize(ASK):
                    number, offset = struct.unpack(ASK, request)
                    name = self.store.names[number]
                    if not self.send(link, name, offset):
                        return
            except OSError as error:
                self.store.fault("cut onward", name, said(error))

    def send(self, link: socket.socket, name: str, offset: int) -> bool:
        """Send a file as far as it is here, and go on as it arrives; False if the rest does not come."""
        store, size, kept = self.store, self.store.files[name][0], offset
        with contextlib.ExitStack() as stack:
            descriptor = -1
            while offset < size:
                with store.changed:
                    store.changed.wait_for(partial(self.can_send, name, offset))
                    end = store.have[name]
                    if end <= offset:
                        return False
                    if descriptor < 0:
                        try:
                            descriptor = stack.enter_context(store.path(name).open("rb")).fileno()
                        except OSError as error:
                            store.fault("altered", name, said(error))
                            return False
                count = os.sendfile(link.fileno(), descriptor, offset, min(end - offset, FLUSH))
                if not count:
                    store.fault("altered", name, "it became shorter")
                    return False
                offset += count
                with store.changed:
                    self.sent += count
                if offset - kept >= FLUSH or offset == size:
                    os.posix_fadvise(descriptor, kept, offset - kept, os.POSIX_FADV_DONTNEED)
                    kept = offset
        return True

    def can_send(self, name: str, offset: int) -> bool:
        return self.store.have[name] > offset or self.store.arrived.is_set()

    # ---- orders and outcome

    def run(self) -> None:
        """Follow the orders to the end of this process."""
        messages = self.messages()
        if not self.store.onward:
            self.passed_on.set()
        if self.source == "disk":
            self.store.declare_whole()
        elif self.source != "controller":
            try:
                listener = socket.create_server((self.source["listen"], 0))
                self.port = listener.getsockname()[1]
                started(self.fetch_all, listener)
            except OSError as error:
                self.store.fault("listen", found=said(error))
                self.store.arrived.set()
                self.passed_on.set()
        started(self.tell)
        started(self.conclude)
        if self.source == "controller":
            self.store.fill(partial(self.take_fed, messages))
            if not self.fed_to_end:  # what comes now cannot be told from orders
                self.passed_on.set()
                while self.stdin.read(BLOCK):
                    pass
        for _ in messages:
            pass

    def messages(self) -> Iterator[dict[str, Any]]:
        """Orders as they come; those about the node after this one are followed here."""
        for line in iter(self.stdin.readline, b""):
            message = json.loads(line) if line.strip() else {}
            if message.get("next"):
                started(self.pass_on, message["next"])
            elif "next" in message:  # nobody comes any more
                self.passed_on.set()
            elif message:
                yield message
        self.end(3)

    def tell(self) -> None:
        """Write down how far this is, over and over, for whoever asks."""
        store, beside, known = self.store, Path(f"{self.status}.new"), 0
        with contextlib.suppress(OSError):
            self.status.parent.mkdir(parents=True, exist_ok=True)
            for other in self.status.parent.glob("transfer-*"):
                if time.time() - other.stat().st_mtime > A_MINUTE_S:  # of a process that was killed
                    other.unlink()
        while True:
            status = {"port": self.port, "moved": store.progress(), "total": store.total, "file": store.latest}
            with contextlib.suppress(OSError):  # a full disk
                beside.write_text(json.dumps(status))
                beside.replace(self.status)
            if len(store.whole) > known and self.source != "disk":
                known = len(store.whole)
                store.remember()
            time.sleep(0.25)

    def conclude(self) -> None:
        """Say how it ended, once nothing is left to do here."""
        self.store.arrived.wait()
        self.passed_on.wait()
        self.store.clear_up()
        figures = {"received": self.store.received, "sent": self.sent, "memory": peak_bytes()}
        outcome = {"whole": self.store.is_whole(), "faults": self.store.faults}
        print(json.dumps(outcome | figures), flush=True)
        self.end(0)

    def end(self, status: int) -> NoReturn:
        """End this process, whatever its threads do."""
        if self.source != "disk":
            self.store.remember()
        for path in (self.status, Path(f"{self.status}.new")):
            path.unlink(missing_ok=True)
        os._exit(status)


def peak_bytes() -> int:
    """The most memory that this program had; getrusage(2) would begin with that of the process that started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main() -> None:
    """Answer the orders."""
    os.umask(0o022)
    stdin = os.fdopen(0, "rb")
    Mover(json.loads(stdin.readline()), stdin).run()
