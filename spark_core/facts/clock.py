"""How far a node's clock is from the controller's, as far as one round trip can tell."""

from __future__ import annotations

import re
from dataclasses import dataclass

from spark_core.facts.answer import Answer, Unread


@dataclass(frozen=True)
class ClockOffset:
    """The node's clock minus the controller's, in seconds, between two bounds.

    The script's start and end are stamped by the node; the asking before it and the reading after it by the
    controller. What lies between is the round trip, which may be slow on one side only.
    """

    low_s: float
    high_s: float


def parse_clock(answer: Answer, read_s: float) -> ClockOffset | Unread:
    """The bounds from three numbers: when the controller asked, and the node's clock at start and end of the script.

    Args:
        answer: The numbers, in seconds since 1970.
        read_s: The controller's clock when the answer had been read.
    """
    numbers = [float(word) for word in answer.text.split() if re.fullmatch(r"\d{1,12}\.\d{1,9}", word, re.ASCII)]
    if len(numbers) != 3 or len(answer.text.split()) != 3:
        return answer.unread("the clock", "date")
    asked_s, start_s, end_s = numbers
    low_s, high_s = end_s - read_s, start_s - asked_s
    # A clock that was set in between gives bounds that cross each other.
    return ClockOffset(low_s, high_s) if low_s <= high_s else answer.unread("the clock", "date")


def certain_skew_s(one: ClockOffset, other: ClockOffset) -> float:
    """Seconds by which two clocks differ at the least; 0 where the round trips may explain it all."""
    return max(0.0, one.low_s - other.high_s, other.low_s - one.high_s)
