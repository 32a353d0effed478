"""Telling people: which events are worth a notice, and how one is sent.

``Watch`` decides and is pure. ``send`` speaks to a webhook. What to call stands in ``notify.json`` in the state folder,
mode 600, read at each notice: a webhook's address is often its secret, and a change of it restarts nothing.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_runtime.health import read_json

FILE = "notify.json"
DEFAULT_DEADLINE_S = 1800.0
LOST_AFTER_S = 60.0
TIMEOUT_S = 10.0
TRIES = 3


@dataclass(frozen=True)
class Notice:
    """One message: what happened, to which group, in one sentence."""

    event: str
    group: str
    text: str

    def as_json(self) -> dict[str, str]:
        """The body of the request. ``text`` is the field that chat services show."""
        return dict(self.__dict__)


@dataclass
class Watch:
    """Follows a group and says what people should be told, each thing once until the group serves again."""

    group: str
    deadline_s: float = DEFAULT_DEADLINE_S
    told: set[str] = field(default_factory=set)
    _down_since: float | None = None
    _silent_since: dict[str, float] = field(default_factory=dict)

    def look(self, now: float, phase: str, detail: str, silent: Mapping[str, str]) -> list[Notice]:
        """What is new.

        Args:
            now: The monotonic clock.
            phase: Of the group.
            detail: Its detail.
            silent: Each rank that has let its lease lapse, by its name, with what is known of its node.
        """
        if phase == "serving":
            return self._serves()
        if phase in ("stopped", "stopping"):
            self._down_since = None
            return []
        self._down_since = now if self._down_since is None else self._down_since
        found = []
        if phase == "failed":
            found.append(("verdict", f"does not serve and does not try again by itself: {detail}"))
        if now - self._down_since > self.deadline_s:
            minutes = self.deadline_s / 60
            found.append(("not healed", f"has not served for {minutes:.0f} min; it is in {phase}: {detail}"))
        for name, why in silent.items():
            if now - self._silent_since.setdefault(name, now) > LOST_AFTER_S:
                found.append((f"node lost: {name}", f"has lost {name}: {why}"))
        for name in set(self._silent_since) - set(silent):
            del self._silent_since[name]
            self.told.discard(f"node lost: {name}")
        new = [(event, text) for event, text in found if event not in self.told]
        self.told |= {event for event, _ in new}
        return [Notice(event.partition(":")[0], self.group, f"{self.group} {text}") for event, text in new]

    def _serves(self) -> list[Notice]:
        told, self.told, self._down_since = self.told, set(), None
        self._silent_since.clear()
        return [Notice("serving", self.group, f"{self.group} serves again")] if told else []


@dataclass(frozen=True)
class Channel:
    """Who is told, and after which time down."""

    webhook: str = ""
    command: tuple[str, ...] = ()
    deadline_s: float = DEFAULT_DEADLINE_S

    @classmethod
    def read(cls, state_dir: Path) -> Channel:
        """From the state folder; nobody where there is no file."""
        document = read_json(state_dir / FILE) or {}
        command = document.get("command")
        deadline = document.get("deadline_s")
        return cls(
            str(document.get("webhook") or ""),
            tuple(str(word) for word in command) if isinstance(command, list) else (),
            float(deadline) if isinstance(deadline, int | float) else DEFAULT_DEADLINE_S,
        )


class Outbox:
    """Sends to a webhook beside the main loop, and remembers how that went; never the address."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def post(self, webhook: str, notice: Notice, at: float) -> None:
        """Send one notice; a failure is noted and nothing more."""
        entry: dict[str, Any] = {"at": at, **notice.as_json(), "outcome": "under way"}
        self.sent[:] = [*self.sent[-9:], entry]
        threading.Thread(target=self._send, args=(webhook, notice, entry), name="notice", daemon=True).start()

    def note(self, notice: Notice, at: float, outcome: str) -> None:
        """A notice that went another way."""
        self.sent[:] = [*self.sent[-9:], {"at": at, **notice.as_json(), "outcome": outcome}]

    def _send(self, webhook: str, notice: Notice, entry: dict[str, Any]) -> None:
        wait = threading.Event()
        for attempt in range(1, TRIES + 1):
            entry["outcome"] = send(webhook, notice)
            if entry["outcome"] == "sent" or attempt == TRIES:
                return
            wait.wait(5.0 * attempt)


def send(webhook: str, notice: Notice) -> str:
    """``sent``, or why not; the reason never holds the address."""
    body = json.dumps(notice.as_json()).encode()
    try:
        request = urllib.request.Request(webhook, body, {"Content-Type": "application/json"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):  # noqa: S310 (the settings allow http and https only)
            return "sent"
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None)
        return f"not sent: {type(reason or error).__name__}"
