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

from spark_runtime import signatures
from spark_runtime.logs import Line
from spark_runtime.signatures import Diagnosis

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
    r"WorkerProc (?:initialization failed|failed to start)|"
    r"^(?:SystemExit|KeyboardInterrupt|(?:[a-z_]+\.)*CancelledError)\b|" + signatures.CONSEQUENCE.pattern,
    re.IGNORECASE,
)
_CAUSE = re.compile(
    r": error: |out of memory|NCCL (?:error|WARN .*fail)|CUDA error|" + signatures.CAUSE.pattern, re.IGNORECASE
)
_SIGN = re.compile(r"(?:died|exited) unexpectedly|marked dead|^Error\b|\bfatal\b", re.IGNORECASE)
_RAY_DEATH = re.compile(
    r"A worker died or was killed.*?Worker IP address: (\S+)"
    r".*?Worker exit detail: (.*?)(?: Some common causes|$)"
)
_ADDRESS = re.compile(r"\bip=([\w.:]+)")
_SAID_ADDRESS = re.compile(r"(?:a Ray worker process died on |\(IP: )([\w.]+)")
_CONFIGURATION = re.compile(
    r"^(?:\w+\.)*(?:ValueError|TypeError|KeyError|ValidationError|NotImplementedError|ImportError|ModuleNotFoundError)\b"
)
_OWN = ("supervisor", "ray-probe")
"""Sources that know no causes: we ourselves, and the count of nodes, which fails until Ray is up."""


@dataclass(frozen=True)
class FirstError:
    """The earliest cause: when, whose output, the line itself, its surroundings, and how the log ends.

    Attributes:
        address: Of the node that said it, where Ray's relayed output names one; else empty.
        diagnosis: What the line means, if it is known.
        hints: What else in the log explains a slow or standing start.
    """

    at: float
    source: str
    line: str
    lines: list[str] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)
    address: str = ""
    diagnosis: Diagnosis | None = None
    hints: list[Diagnosis] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The form used in the status file."""
        return {
            **self.__dict__,
            "diagnosis": self.diagnosis.as_json() if self.diagnosis else None,
            "hints": [hint.as_json() for hint in self.hints],
        }


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


def explained(error: FirstError, lines: Iterable[Line] = (), memlock_unlimited: bool = False) -> FirstError:
    """The same error with what it means, and with what else its log says."""
    diagnosis = signatures.diagnose(error.line, memlock_unlimited)
    return replace(error, diagnosis=diagnosis, hints=signatures.hints(line.text for line in lines))


def is_hopeless(line: str, loading_began: bool = True) -> bool:
    """Whether a first error follows from settings, model and image alone, so that no second try can cure it.

    Args:
        loading_began: Whether vLLM had told any step of loading. An error of this kind before that, which is none of
            those that are known to pass, is of its configuration.
    """
    if signatures.HOPELESS.search(line) is not None:
        return True
    return not loading_began and signatures.diagnose(line) is None and _CONFIGURATION.search(line) is not None


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
                address = _ADDRESS.search(bare(line.text)[0]) or _SAID_ADDRESS.search(text)
                at = address.group(1) if address else ""
                found[strength] = FirstError(line.at, line.source, text[:1000], [*before, shown], address=at)
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
