"""Waiting by time and not by attempts."""

from __future__ import annotations

import secrets
import time

_FIRST_S = 0.2
_LONGEST_S = 2.0


class Backoff:
    """Pauses that grow from a fraction of a second to two, counted from the moment it is made.

    Each pause is of a random length, so that several who were refused together do not come back together.
    """

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._pause_s = _FIRST_S

    def wait(self, limit_s: float) -> bool:
        """Pause, unless the limit, in seconds since the start, is over; whether it was not."""
        left = limit_s - (time.monotonic() - self._start)
        if left <= 0:
            return False
        time.sleep(min(left, self._pause_s * (0.5 + secrets.randbelow(1000) / 1000)))
        self._pause_s = min(_LONGEST_S, self._pause_s * 2)
        return True
