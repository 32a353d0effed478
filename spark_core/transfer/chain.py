"""A transfer along lanes of nodes: each gets the files from the one before it and passes them on as they arrive."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_core.errors import SparkError
from spark_core.transfer.look import Place
from spark_core.transfer.session import Outcome, Session

STALL_S = 60.0
_TICK_S = 0.05
_REPORT_EVERY_S = 5.0
_LAST_WORDS_S = 2.0
"""Seconds that a node has to end by itself once the next one has."""
_ORPHAN_S = 25.0
"""Seconds that a node has to notice that the one before it is gone."""
_STOP_S = 4.0


@dataclass(frozen=True)
class Lane:
    """Nodes in the order in which the files go along.

    Args:
        places: The first one has the files, or gets them from the controller or a hub.
        feed: What the controller sends to the first one.
        hub: Orders for the first one to download the files.
    """

    places: Sequence[Place]
    feed: Iterable[bytes] | None = None
    hub: Mapping[str, object] | None = None


def carry(
    lanes: Sequence[Lane],
    files: Mapping[str, tuple[int, str]],
    report: Callable[[str], None],
    check: Callable[[], None],
) -> dict[str, Outcome]:
    """Run a transfer to its end; how it ended for each node.

    Args:
        lanes: No node may be in two of them.
        files: Relative path to (size, SHA-256).
        report: Called with a line about how far it is, every few seconds.
        check: Called often; what it raises ends the transfer on all nodes.

    Raises:
        SparkError: nothing arrived anywhere for a minute, or the controller cannot read what it sends.
    """
    rows = [_sessions(lane, files) for lane in lanes]
    sessions = [session for row in rows for session in row]
    progress = _Progress(sessions, report)
    for session in sessions:
        session.start()
    try:
        while any(session.is_alive() for session in sessions):
            check()
            for row in rows:
                for before, after in itertools.pairwise(row):
                    _join(before, after)
                _let_go(row)
            progress.look()
            _raise_failure(sessions)
            time.sleep(_TICK_S)
        _raise_failure(sessions)
    finally:
        for session in sessions:
            session.stop()
        end = time.monotonic() + _STOP_S
        for session in sessions:
            session.join(max(0.0, end - time.monotonic()))
    return {session.node: session.outcome for session in sessions}


def _sessions(lane: Lane, files: Mapping[str, tuple[int, str]]) -> list[Session]:
    row: list[Session] = []
    for place in lane.places:
        onward = place is not lane.places[-1]
        if not row:
            source: str | dict[str, Any] = "disk" if lane.feed is None else "controller"
            if lane.hub is not None:
                source = {"hub": dict(lane.hub)}
            row.append(Session(place, files, source, onward=onward, feed=lane.feed or ()))
        else:
            link = {"listen": str(place.address), "peer": str(row[-1].place.address), "token": secrets.token_hex(32)}
            row.append(Session(place, files, link, onward=onward))
    return row


def _join(before: Session, after: Session) -> None:
    """Tell a node who comes after it, once that one listens."""
    if not before.knows_next and after.status.get("port") and isinstance(after.source, dict):
        to = {"address": after.source["listen"], "port": after.status["port"], "token": after.source["token"]}
        before.tell({"next": to | {"own": after.source["peer"]}})
        before.knows_next = True


def _let_go(row: Sequence[Session]) -> None:
    """Nobody waits for a node that is gone."""
    now = time.monotonic()
    for before, after in itertools.pairwise(row):
        if after.ended_at is not None and not before.released and now - after.ended_at > _LAST_WORDS_S:
            before.tell({"next": None})
            before.released = True
        never_came = before.stopped or not before.knows_next or before.outcome.has("dial")
        if before.ended_at is not None and (never_came or now - before.ended_at > _ORPHAN_S):
            after.stop(orphaned=True)


def _raise_failure(sessions: Sequence[Session]) -> None:
    for session in sessions:
        for error in session.failed:
            raise error


class _Progress:
    """How far all nodes are together: for the person, and as the deadline of the whole."""

    def __init__(self, sessions: Sequence[Session], report: Callable[[str], None]) -> None:
        self._takers = [session for session in sessions if session.source != "disk"]
        self._report = report
        self._started = self._said = self._advanced = time.monotonic()
        self._moved: list[object] = []

    def look(self) -> None:
        now = time.monotonic()
        moved: list[object] = [(session.status.get("moved"), session.is_alive()) for session in self._takers]
        if moved != self._moved:
            self._moved, self._advanced = moved, now
        if now - self._said >= _REPORT_EVERY_S:
            self._said = now
            self._report(self._line(now))
        if now - self._advanced > STALL_S:
            stuck = next((session for session in self._takers if session.is_alive()), self._takers[0])
            raise SparkError(
                f"expected {stuck.status.get('file') or 'the first file'} to go on, found no byte in {STALL_S:.0f} s",
                where=stuck.node,
                do="look at the nodes' load and at the cable, then run up again; what has arrived is not sent again",
                evidence=[self._line(now)],
            )

    def _line(self, now: float) -> str:
        parts, slowest = [], (0.0, "")
        for session in self._takers:
            moved, total = int(session.status.get("moved", 0)), int(session.status.get("total", 0))
            parts.append(f"{session.node} {moved / 1e9:.2f} of {total / 1e9:.2f} GB")
            rate = moved / max(now - self._started, 0.1)
            if rate and moved < total:
                left = (total - moved) / rate
                slowest = max(slowest, (left, f"; {rate / 1e6:.0f} MB/s, {left:.0f} s left"))
        return "weights: " + ", ".join(parts) + slowest[1]
