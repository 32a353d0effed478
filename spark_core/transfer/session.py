"""One node's part of a transfer: its program over ssh, the orders it gets, how far it is, how it ended."""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spark_core.errors import SparkError, UnreachableError
from spark_core.transfer.look import Place, node_program
from spark_core.transport.base import Result, script
from spark_core.transport.openssh import SSH_FAILED

_NO_LIMIT_S = 30 * 86_400.0
"""The deadline of a transfer is its progress."""
_TICK_S = 0.05
_LOOK_EVERY_S = 1.0
_LOOK_TIMEOUT_S = 3.0
_SIGNAL = 128
"""A shell tells the signal that ended a program as a status above this."""


@dataclass(frozen=True)
class Fault:
    """What a node's program says went wrong.

    Attributes:
        kind: ``wrong`` content arrived; a whole file was ``altered``; ``disk``; the connection was ``cut`` by the node
            before, or ``cut onward`` by the next; it could not ``dial`` the next or ``listen``; the folder is ``busy``.
            What begins with ``hub:`` was met while downloading.
        file: The file that it happened to.
        found: What was found, in words.
        got: Bytes of the file that are there.
        wait_s: Seconds that a hub asks to wait.
    """

    kind: str
    file: str = ""
    found: str = ""
    got: int = 0
    wait_s: int = 0


@dataclass(frozen=True)
class Outcome:
    """How a node's part ended.

    Attributes:
        whole: Whether the folder holds everything.
        faults: What its program told.
        received: Bytes that came, and ``sent`` that went on; of the connections, not of the disk.
        memory: Most bytes of memory that its program had.
        died: In words, how its program ended without telling; empty if it told.
        latest: The file that bytes came for last, if it died.
        orphaned: Whether we ended it, since nothing would have come any more.
    """

    whole: bool = False
    faults: tuple[Fault, ...] = ()
    received: int = 0
    sent: int = 0
    memory: int = 0
    died: str = ""
    latest: str = ""
    orphaned: bool = False

    def has(self, *kinds: str) -> list[Fault]:
        """The faults of these kinds."""
        return [fault for fault in self.faults if fault.kind in kinds]


class _StoppedError(Exception):
    """We ended it."""


class Session(threading.Thread):
    """The program of one node while it runs. It ends with this process, with its connection, or when it is told to.

    Args:
        place: The node, and the folder there.
        files: Relative path to (size, SHA-256).
        source: ``disk`` if the folder is whole and only passed on, ``controller`` if ``feed`` brings it, the orders of
            a download from the ``hub``, else the address to ``listen`` at, the ``peer`` that may connect, and the
            ``token`` that it must show.
        onward: Whether another node gets it from here.
        feed: Orders and bytes of the files that come from the controller.
    """

    def __init__(
        self,
        place: Place,
        files: Mapping[str, tuple[int, str]],
        source: str | dict[str, Any],
        *,
        onward: bool,
        feed: Iterable[bytes] = (),
    ) -> None:
        super().__init__(daemon=True, name=f"transfer-{place.node}")
        self.place, self.source, self.onward = place, source, onward
        self.outcome, self.failed = Outcome(), list[BaseException]()
        self.ended_at: float | None = None
        self.status: dict[str, Any] = {}
        self._feed = feed
        self._status_path = f"{place.root}/cache/transfer-{secrets.token_hex(8)}.json"
        self.knows_next = self.released = False
        self._orders: dict[str, object] = {"target": place.folder, "cache": place.cache, "status": self._status_path}
        self._orders |= {"files": files, "from": source, "onward": onward}
        self._told: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        self._to_stop, self._orphaned = threading.Event(), False
        self._ended = threading.Event()

    @property
    def node(self) -> str:
        return self.place.node

    @property
    def stopped(self) -> bool:
        """Whether we ended it."""
        return self._to_stop.is_set()

    def tell(self, message: dict[str, object]) -> None:
        """Give the program another order."""
        self._told.put(message)

    def stop(self, *, orphaned: bool = False) -> None:
        """End the program; what has arrived stays.

        Args:
            orphaned: Whether it is because nothing would come from the node before any more.
        """
        if not self.stopped:
            self._orphaned = orphaned
            self._to_stop.set()

    def run(self) -> None:
        if self.source != "disk":
            threading.Thread(target=self._watch, daemon=True).start()
        text = 'python3 "$@" || exit $?'  # bash tells a signal as a status; ssh alone would say that it lost the node
        downloads = isinstance(self.source, dict) and "hub" in self.source
        words = node_program("node_hub" if downloads else "node_mover")[1:]
        try:
            result = self.place.transport.stream(script(text, *words, timeout_s=_NO_LIMIT_S), self._input())
            self.outcome = self._outcome(result)
        except _StoppedError:
            self.outcome = Outcome(orphaned=self._orphaned)
        except UnreachableError as error:
            self.outcome = self._died(f"does not answer any more ({error.step}: {error.what})")
        except BaseException as error:
            self.failed.append(error)
        finally:
            self.ended_at = time.monotonic()
            self._ended.set()

    def _input(self) -> Iterator[bytes]:
        yield _line(self._orders)
        for part in self._feed:
            yield from self._messages()
            yield part
        if self.source == "controller":
            yield _line({"end": True})
        while True:
            yield from self._messages(_TICK_S)
            yield b"\n"  # so that we notice when the program has ended

    def _messages(self, wait_s: float = 0.0) -> Iterator[bytes]:
        if self.stopped:
            raise _StoppedError
        with contextlib.suppress(queue.Empty):
            yield _line(self._told.get(timeout=wait_s) if wait_s else self._told.get_nowait())

    def _watch(self) -> None:
        """Ask how far the program is, over and over; its output comes only once it has ended."""
        wait = 'for _ in {1..20}; do if [ -s "$1" ]; then cat "$1"; exit; fi; sleep 0.05; done'
        while not self._ended.wait(_LOOK_EVERY_S if self.status else 0):
            with contextlib.suppress(SparkError, ValueError):
                look = script(wait, self._status_path, timeout_s=_LOOK_TIMEOUT_S)
                self.status = json.loads(self.place.transport.run(look).stdout)

    def _outcome(self, result: Result) -> Outcome:
        try:
            told = json.loads(result.stdout)
            faults = tuple(Fault(**fault) for fault in told.pop("faults"))
            return Outcome(faults=faults, **told)
        except (ValueError, TypeError, AttributeError, KeyError):
            if result.status == SSH_FAILED:
                return self._died("was killed, and all that ran it with it")
            if result.status > _SIGNAL:
                return self._died(f"was killed by signal {result.status - _SIGNAL}")
            last = (result.stderr.strip().splitlines() or [""])[-1]
            return self._died(f"ended with status {result.status}" + (f" ({last})" if last else ""))

    def _died(self, how: str) -> Outcome:
        return Outcome(died=how, latest=str(self.status.get("file", "")))


def _line(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def part(name: str, offset: int, content: bytes) -> bytes:
    """An order with a part of a file behind it, for a program that the controller feeds."""
    return _line({"file": name, "offset": offset, "bytes": len(content)}) + content
