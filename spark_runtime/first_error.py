"""Find what failed first in a log.

vLLM's last line is always "Engine core initialization failed. See root cause above", and above it several
processes repeat each other's tracebacks. The cause is the earliest of: an exception line that ends a
traceback, or a line known to be a cause by itself. Anything logged as a warning or below is noise: optional
imports fail in every start.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from spark_runtime.logs import Line

# "(EngineCore pid=7) (RayWorkerProc pid=285, ip=…) ERROR 04-20 18:08:14 [core.py:1100] text"
_TAG = re.compile(r"^\s?(\((?:[\w.:\- ]+ )?pid=\d+[^)]*\)|\[[\w.\- ]+ (?:pid|rank)=?\d+\])\s?")
_LEVEL = re.compile(
    r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL|FATAL)\s+\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?\s+\[[^\]]+\]\s?"
)
_RAY_LEVEL = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\s+(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+\S+\s+--\s?")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?::\s.*|)$")
_QUIET = ("DEBUG", "INFO", "WARNING")

_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|See root cause above|Failed core proc|EngineDeadError|"
    r"EngineCore (?:encountered a fatal error|failed to start)|"
    r"AsyncLLM output_handler failed|"
    r"Connection (?:closed|reset) by peer|recvValue failed|Connection was likely closed|remote process exited|"
    r"WorkerProc (?:initialization failed|failed to start)|"
    r"^(?:SystemExit|KeyboardInterrupt|(?:[a-z_]+\.)*CancelledError)\b"
)
_CAUSE = re.compile(
    r"unrecognized arguments:|: error: |out of memory|OutOfMemoryError|running low on memory|"
    r"Free memory on device .* is less than desired|Available memory on node .* is less than|"
    r"No available memory for the cache blocks|To serve at least one request with|"
    r"Version mismatch: The cluster was started with|does not support ray|Cannot provide a placement group|"
    r"Segmentation fault|SIGSEGV|core dumped|NCCL (?:error|WARN .*fail)|connectFullMesh failed|"
    r"Address already in use|InvalidAuthToken|No space left on device|must be divisible by|"
    r"operator \S+ does not exist|Failed to initialize NVML|CUDA error|Inferred operator schema",
    re.IGNORECASE,
)
_SIGN = re.compile(r"(?:died|exited) unexpectedly|marked dead|^Error\b|\bfatal\b", re.IGNORECASE)
_RAY_DEATH = re.compile(
    r"A worker died or was killed.*?Worker IP address: (\S+)"
    r".*?Worker exit detail: (.*?)(?: Some common causes|$)"
)
_HOPELESS = re.compile(
    r"unrecognized arguments:|\berror: argument |must be divisible by|does not recognize this architecture|"
    r"To serve at least one request with|Version mismatch: The cluster was started with|does not support ray|"
    r"No working C\+\+ compiler found|cannot start `\S+` in this image",
    re.IGNORECASE,
)
_OWN = ("supervisor", "ray-probe")
"""Sources that know no causes: we ourselves, and the count of nodes, which fails until Ray is up."""


@dataclass(frozen=True)
class FirstError:
    """The earliest cause: when, whose output, the line itself, its surroundings, and how the log ends."""

    at: float
    source: str
    line: str
    lines: list[str] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The form used in the status file."""
        return dict(self.__dict__)


@dataclass
class _Trace:
    quiet: bool


def bare(text: str) -> tuple[str, str, str]:
    """Split a line of output into (who within the process tree, level, the text itself)."""
    tags = []
    while (tag := _TAG.match(text)) is not None:
        tags.append(tag.group(1))
        text = text[tag.end() :]
    level = _LEVEL.match(text) or _RAY_LEVEL.match(text)
    if level is None:
        return "".join(tags), "", text
    return "".join(tags), level.group(1), text[level.end() :]


def is_consequence(line: str) -> bool:
    """Whether a line only says that another process or rank went away."""
    return _CONSEQUENCE.search(line) is not None


def is_hopeless(line: str) -> bool:
    """Whether a first error follows from settings, model and image alone, so that no second try can cure it."""
    return _HOPELESS.search(line) is not None


def find_first_error(lines: Iterable[Line], context: int = 8, last: int = 30) -> FirstError | None:
    """The earliest cause in a log; otherwise the earliest sign of one; None in a clean log."""
    before: deque[str] = deque(maxlen=context)
    tail: deque[str] = deque(maxlen=last)
    open_traces: dict[str, _Trace] = {}
    found: dict[str, FirstError] = {}  # the earliest of each strength
    for line in lines:
        shown = line.text[:600]
        tail.append(f"{line.source} | {shown}")
        for error in found.values():
            if len(error.lines) < 2 * context + 1:
                error.lines.append(shown)
        if "cause" not in found and line.source not in _OWN:
            strength, text = _judge(line, open_traces)
            if strength and strength not in found:
                found[strength] = FirstError(line.at, line.source, text[:1000], [*before, shown])
        before.append(shown)
    for strength in ("cause", "sign", "consequence"):
        if strength in found:
            return replace(found[strength], last_lines=list(tail))
    return None


def _judge(line: Line, open_traces: dict[str, _Trace]) -> tuple[str, str]:
    # How strongly a line speaks: "cause", "sign" (an error, perhaps not the first), "consequence", or "".
    tag, level, text = bare(line.text)
    key = f"{line.source} {tag}"
    trace = open_traces.get(key)
    if "Traceback (most recent call last)" in text:
        # A traceback announced by a warning or by "Exception ignored in" did no harm.
        quiet = level in _QUIET or (trace is not None and trace.quiet)
        open_traces[key] = _Trace(quiet)
        return "", text
    if text.startswith("Exception ignored in"):
        open_traces[key] = _Trace(quiet=True)
        return "", text
    stripped = text.strip()
    if trace is not None:
        if stripped and not text[:1].isspace() and _EXCEPTION.match(stripped):
            del open_traces[key]
            if trace.quiet or level in _QUIET:
                return "", text
            return ("consequence" if _CONSEQUENCE.search(stripped) else "cause"), stripped
        if text[:1].isspace() or not stripped:
            return "", text
    if level in _QUIET or not stripped:
        return "", text
    if _CONSEQUENCE.search(stripped):
        return "consequence", stripped
    death = _RAY_DEATH.search(stripped)
    if death is not None:
        return "cause", f"a Ray worker process died on {death.group(1)}: {death.group(2)}"
    if _CAUSE.search(stripped):
        return "cause", stripped
    if level in ("ERROR", "CRITICAL", "FATAL") or _SIGN.search(stripped):
        return "sign", stripped
    return "", text
