"""What the ranks of a group say to each other, and its form on the wire. Pure; ``protocol.py`` gives it meaning.

A worker asks, the head answers: there is one kind of question (a lease) and one kind of answer (an order). A
worker asks one question at a time, so a question it asks has been asked in knowledge of the last answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal[
    "starting",
    "waiting_for_ranks",
    "ray_starting",
    "ray_ready",
    "joining",
    "loading",
    "canary",
    "serving",
    "ending",
    "backing_off",
    "failed",
    "stopping",
    "stopped",
]
Order = Literal["idle", "join"]

MAX_TEXT = 4000


class BadMessage(Exception):
    """A message that is not of this protocol. The text says what is wrong with it."""


class Refused(Exception):
    """A well-formed message from somebody who does not belong here."""


@dataclass(frozen=True)
class Generation:
    """One attempt to serve. Equality is the only comparison that means anything.

    A head that has not begun one yet speaks of the one before its own first, which nobody was ever in.
    """

    deployment: str
    head_incarnation: str
    n: int

    def as_json(self) -> dict[str, Any]:
        """The form used in messages and in the status file."""
        return {"deployment": self.deployment, "head_incarnation": self.head_incarnation, "n": self.n}

    @classmethod
    def from_json(cls, value: object) -> Generation | None:
        """Read the form above; None stays None."""
        if value is None:
            return None
        if not isinstance(value, dict):
            raise BadMessage("generation: expected an object or null")
        return cls(_text(value, "deployment"), _text(value, "head_incarnation"), _number(value, "n", 0, 2**53))


@dataclass(frozen=True)
class LeaseRequest:
    """What a worker says every few seconds."""

    group: str
    deployment: str
    rank: int
    nodes: int
    address: str
    incarnation: str
    sequence: int
    """Grows with every question of an incarnation, so that a late one is known to be old."""
    phase: str
    detail: str = ""
    idle: bool = False
    """Nothing of any generation is left on this node: no process, no shared memory, and memory has come back."""
    running: Generation | None = None
    """The generation this rank takes part in or still has to end."""
    known: Generation | None = None
    """The generation that the last answer named: no order of an earlier one can reach this rank any more."""
    failed: Generation | None = None
    """The generation this rank had to end by itself, and why in the next two."""
    failure_source: str = ""
    failure_line: str = ""
    leaving: bool = False
    """SIGTERM: somebody stops this rank."""
    restart: bool = False
    """Somebody asks, on this rank, for a new generation."""

    def as_json(self) -> dict[str, Any]:
        """The message body."""
        body = dict(self.__dict__)
        for name in ("running", "known", "failed"):
            value: Generation | None = body[name]
            body[name] = value.as_json() if value else None
        return body

    @classmethod
    def from_json(cls, value: object) -> LeaseRequest:
        """Read a message body; raises BadMessage."""
        if not isinstance(value, dict):
            raise BadMessage("expected a JSON object")
        return cls(
            group=_text(value, "group"),
            deployment=_text(value, "deployment"),
            rank=_number(value, "rank", 0, 10_000),
            nodes=_number(value, "nodes", 1, 10_000),
            address=_text(value, "address"),
            incarnation=_text(value, "incarnation"),
            sequence=_number(value, "sequence", 0, 2**53),
            phase=_text(value, "phase"),
            detail=_text(value, "detail", ""),
            idle=value.get("idle") is True,
            running=Generation.from_json(value.get("running")),
            known=Generation.from_json(value.get("known")),
            failed=Generation.from_json(value.get("failed")),
            failure_source=_text(value, "failure_source", ""),
            failure_line=_text(value, "failure_line", ""),
            leaving=value.get("leaving") is True,
            restart=value.get("restart") is True,
        )


@dataclass(frozen=True)
class LeaseReply:
    """The head's answer: what to do, and enough of its own state for the worker's status."""

    group: str
    deployment: str
    generation: Generation | None
    order: Order
    phase: str
    detail: str = ""
    token: str = field(default="", repr=False)
    """By which the members' Ray know each other, of this generation only; empty where the image's Ray asks for none."""
    group_state: Mapping[str, Any] = field(default_factory=dict)
    """What the head knows of the group, for the worker's own status; nothing follows from it."""

    def as_json(self) -> dict[str, Any]:
        """The message body."""
        return {**self.__dict__, "generation": self.generation.as_json() if self.generation else None}

    @classmethod
    def from_json(cls, value: object) -> LeaseReply:
        """Read an answer; raises BadMessage."""
        if not isinstance(value, dict):
            raise BadMessage("expected a JSON object")
        generation = Generation.from_json(value.get("generation"))
        order: Order = "join" if _text(value, "order") == "join" and generation else "idle"
        return cls(
            group=_text(value, "group"),
            deployment=_text(value, "deployment"),
            generation=generation,
            order=order,
            phase=_text(value, "phase"),
            detail=_text(value, "detail", ""),
            token=_text(value, "token", ""),
            group_state=value["group_state"] if isinstance(value.get("group_state"), dict) else {},
        )


def _text(value: Mapping[str, Any], name: str, default: str | None = None) -> str:
    found = value.get(name, default)
    if not isinstance(found, str):
        raise BadMessage(f"{name}: expected a text")
    return found[:MAX_TEXT]


def _number(value: Mapping[str, Any], name: str, low: int, high: int) -> int:
    found = value.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or not low <= found <= high:
        raise BadMessage(f"{name}: expected a whole number from {low} to {high}")
    return found
