"""A node that is a folder of this machine, whose long commands run while they are fed, as over ssh.

Each node has a loopback address of its own, so that a transfer between nodes runs with real processes and sockets. What
happens on a cable is done by a relay that a node's callers reach instead of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from spark_core.transfer.look import Place
from spark_core.transport.base import Command, Result
from tests.local_node import LocalNode
from tests.moving_files import bytes_below


@dataclass
class LiveNode(LocalNode):
    """A node of its own address and folder.

    Args:
        base: Folder of the node.
        address: Its address on the fabric.
        cable: What lies between it and who connects to it, or None for a good cable.
    """

    base: Path = Path()
    address: str = ""
    cable: Cable | None = None
    streams: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def place(self, folder: str = "weights/revision") -> Place:
        return Place(self, str(self.base / "root" / folder), str(self.base / "root"), self.address or None)

    @property
    def target(self) -> Path:
        return Path(self.place().folder)

    def run(self, cmd: Command) -> Result:
        result = super().run(cmd)
        if self.cable is None or "transfer-" not in cmd.argv[-1] or not result.stdout:
            return result
        status = json.loads(result.stdout)
        if status["port"]:
            status["port"] = self.cable.port_instead(self.address, status["port"])
        return Result(result.status, json.dumps(status), result.stderr)

    def stream(self, cmd: Command, chunks: Iterable[bytes]) -> Result:
        self.before(cmd)
        self.asked.append(cmd)
        environment = dict(os.environ)
        if self.programs is not None:
            environment["PATH"] = f"{self.programs}:{environment['PATH']}"
        words = [word.replace('python3 "$@"', f'{sys.executable} "$@"') for word in cmd.argv]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=out, stderr=err, env=environment)
            self.streams.append(process)
            assert process.stdin is not None
            try:
                with contextlib.suppress(BrokenPipeError):
                    for chunk in chunks:
                        process.stdin.write(chunk)
                        process.stdin.flush()
            except BaseException:
                process.kill()
                raise
            finally:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
                process.wait()
            out.seek(0)
            err.seek(0)
            return Result(process.returncode, out.read().decode(), err.read().decode())

    def program(self) -> int:
        """The process of the transfer's program that runs on the node now."""
        for process in self.streams:
            if process.poll() is None:
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                if children:
                    return int(children[0])
        raise AssertionError(f"no program runs on {self.node}")

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the transfer's program."""
        os.kill(self.program(), number)

    def arrived(self) -> int:
        """Bytes that have arrived on the node, visible or not."""
        places = (self.target.with_name(f"{self.target.name}.{part}") for part in ("incoming", "partial"))
        return sum(bytes_below(place) for place in places)

    def has_arrived(self, count: int) -> bool:
        """Whether so many bytes have arrived."""
        try:
            return self.arrived() >= count
        except FileNotFoundError:
            return False

    def wait_for(self, count: int, limit_s: float = 20) -> None:
        """Wait until so many bytes have arrived."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if self.has_arrived(count):
                return
            time.sleep(0.01)
        raise AssertionError(f"{self.arrived()} of {count} bytes came to {self.node} in {limit_s} s")


class Cable:
    """A relay in front of a node: it can be slow, flip a bit, or be cut.

    Args:
        bytes_per_s: Speed of each of its connections, or None for no limit.
        flip_at: Number of a byte, of those that go to the node, that is changed; or None.
    """

    def __init__(self, bytes_per_s: float | None = None, flip_at: int | None = None) -> None:
        self.bytes_per_s, self.flip_at = bytes_per_s, flip_at
        self.carried = 0
        self._over = threading.Event()
        self._ports: dict[tuple[str, int], int] = {}
        self._threads: list[threading.Thread] = []

    def cut(self) -> None:
        """End all connections, and let none in any more."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def port_instead(self, address: str, port: int) -> int:
        """Where to connect instead of to the node itself."""
        if (address, port) not in self._ports:
            listener = socket.create_server((address, 0))
            listener.settimeout(0.05)
            # What is on its way lies in buffers: as little as on a short cable, not as much as a loopback device takes.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            self._ports[address, port] = listener.getsockname()[1]
            self._start(self._accept, listener, address, port)
        return self._ports[address, port]

    def _start(self, work: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self, listener: socket.socket, address: str, port: int) -> None:
        with listener:
            while not self._over.is_set():
                try:
                    near, (peer, _) = listener.accept()
                except TimeoutError:
                    continue
                try:
                    far = socket.create_connection((address, port), 5, (peer, 0))
                except OSError:
                    near.close()
                    continue
                self._start(self._carry_both, near, far)

    def _carry_both(self, near: socket.socket, far: socket.socket) -> None:
        with near, far:
            back = self._start(self._carry, far, near, False)
            self._carry(near, far, True)
            back.join()

    def _carry(self, there: socket.socket, back: socket.socket, counts: bool) -> None:
        try:
            while not self._over.is_set():
                if not select.select([there], [], [], 0.05)[0]:
                    continue
                block = there.recv(1 << 16)
                if not block:
                    break
                back.sendall(self._worn(block) if counts else block)
        except OSError:
            pass
        for end in (there, back):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _worn(self, block: bytes) -> bytes:
        if self.flip_at is not None and self.carried <= self.flip_at < self.carried + len(block):
            at = self.flip_at - self.carried
            block = block[:at] + bytes([block[at] ^ 1]) + block[at + 1 :]
            self.flip_at = None
        self.carried += len(block)
        if self.bytes_per_s is not None:
            time.sleep(len(block) / self.bytes_per_s)
        return block
