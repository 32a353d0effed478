"""The last generations as the nodes have kept them: their last status, and what the supervisor said meanwhile."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from automation.deployment_report import GenerationPart, PhasePart
from spark_core.gate import Rank
from spark_core.transport.base import parse_sections, run_checked, script

KEPT_LINES = 12
_STATUS_BYTES = 200_000
_SAID_LINES = 400

# spark_runtime/rank.py leaves the end, spark_runtime/logs.py the lines. A node may have kept hundreds of generations.
_READ = """
cd "$1/logs" 2>/dev/null || exit 0
for g in $(ls | grep -E '^[0-9]+$' | sort -n | tail -n "$3" || true); do
  echo "=== end $g"; head -c "$4" "$g/rank$2.end.json" 2>/dev/null || true; echo
  echo "=== said $g"
  for f in "$g/rank$2.log" "$g/rank$2.tail.1.log" "$g/rank$2.tail.log"; do
    if [ -f "$f" ]; then grep -a -E '^[0-9.]+ supervisor [|] ' "$f" || true; fi
  done | cut -c 1-400 | head -n "$5"
done
"""
_SAID = re.compile(r"^(\d+\.\d+) supervisor \| (.*)$")
PHASES = (
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
)
"""Phases of a rank, as spark_runtime/metrics.py has them; a test holds them against each other."""
_COMING_UP = PHASES[: PHASES.index("serving")]


def read_generations(rank: Rank, count: int) -> tuple[list[GenerationPart], list[PhasePart]]:
    """The last generations of a rank, oldest first, and how long each phase of the newest took until it served.

    Raises:
        SparkError: the node could not be asked.
    """
    words = (str(rank.rank), str(count), str(_STATUS_BYTES), str(_SAID_LINES))
    text = run_checked(
        rank.transport,
        script(_READ, rank.state_folder, *words, timeout_s=60),
        purpose="expected to read the generations of the rank",
    )
    return parse_generations(rank.transport.node, rank.rank, text)


def parse_generations(node: str, rank: int, text: str) -> tuple[list[GenerationPart], list[PhasePart]]:
    """From the output of the reading script. Pure."""
    sections = parse_sections(text)
    numbers = [int(name[5:]) for name in sections if re.fullmatch(r"said \d+", name)]
    found, phases = [], list[PhasePart]()
    for number in numbers:
        said = _said(sections[f"said {number}"])
        found.append(_generation(node, rank, number, _json(sections.get(f"end {number}", "")), said))
        phases = _phases(said)
    return found, phases


def _generation(
    node: str, rank: int, number: int, end: Mapping[str, Any] | None, said: list[tuple[float, str]]
) -> GenerationPart:
    first = (end or {}).get("first_error")
    first = first if isinstance(first, Mapping) else {}
    diagnosis = first.get("diagnosis")
    diagnosis = diagnosis if isinstance(diagnosis, Mapping) else {}
    lines = first.get("lines")
    spoken = [word for _, line in said if (word := line.partition(":")[0]) in PHASES]
    began, ended = (end or {}).get("generation_started"), first.get("at", (end or {}).get("updated"))
    return GenerationPart(
        number=number,
        node=node,
        rank=rank,
        began=float(began) if isinstance(began, int | float) else (said[0][0] if said else None),
        ended=float(ended) if isinstance(ended, int | float) else None,
        phase=_failed_in(end, number) or str((end or {}).get("phase") or (spoken[-1] if spoken else "cut off")),
        error=str(first.get("line") or ""),
        source=str(first.get("source") or ""),
        meaning=str(diagnosis.get("text") or ""),
        do=str(diagnosis.get("do") or ""),
        lines=[str(line) for line in lines][-KEPT_LINES:] if isinstance(lines, list) else [],
    )


def _failed_in(end: Mapping[str, Any] | None, number: int) -> str:
    """The phase in which a head's generation failed; by the time it is kept, the head is already elsewhere."""
    healing = (end or {}).get("healing")
    last = healing.get("last_failure") if isinstance(healing, Mapping) else None
    return str(last.get("phase") or "") if isinstance(last, Mapping) and last.get("generation") == number else ""


def _said(text: str) -> list[tuple[float, str]]:
    matches = (_SAID.match(line) for line in text.splitlines())
    return [(float(match.group(1)), match.group(2)) for match in matches if match]


def _phases(said: list[tuple[float, str]]) -> list[PhasePart]:
    """Until it served for the first time, or until where it came."""
    seconds: dict[str, float] = {}
    now, since = "", 0.0
    for at, line in said:
        phase = line.partition(":")[0]
        if phase not in PHASES or phase == now:
            continue
        if now:
            seconds[now] = seconds.get(now, 0.0) + max(0.0, at - since)
        if phase not in _COMING_UP:
            break
        now, since = phase, at
    else:
        if now:  # it has not come to its end yet, or was cut off there
            seconds[now] = seconds.get(now, 0.0) + max(0.0, said[-1][0] - since)
    return [PhasePart(phase=phase, seconds=round(value, 1)) for phase, value in seconds.items()]


def _json(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
