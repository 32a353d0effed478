"""Steps and how long they took, one line each."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """Print one line for the person at the terminal. Standard output stays free for data (``--json``)."""
    print(f"lab: {text}", file=sys.stderr, flush=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Print the step when it is done, with its time; a step that fails prints nothing, its error speaks."""
    start = time.monotonic()
    yield
    say(f"{text} ({time.monotonic() - start:.1f} s)")
