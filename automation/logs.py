"""``logs``: what the ranks have said, by generation, rank and time."""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import dataclass

from automation import session as frame
from automation.exit_codes import Exit
from automation.group_nodes import GroupNodes, errors_of, learn_secrets, open_nodes
from automation.redaction import redacted
from automation.reports import LogLine, LogsReport
from automation.session import chosen_stack, seconds_of
from automation.stack_file import open_stack_file
from spark_core.errors import SparkError, join_errors
from spark_core.gate import Rank
from spark_core.transport.base import parse_sections, run_checked, script

DEFAULT_LINES = 200

# A rank's log of one generation lies in up to three files, in this order (spark_runtime/logs.py). Each line begins with
# the node's own clock.
_READ = """
cd "$1/logs" 2>/dev/null || exit 0
case $3 in
  last) chosen=$(ls | grep -E '^[0-9]+$' | sort -n | tail -n 1 || true) ;;
  all) chosen=$(ls | grep -E '^[0-9]+$' | sort -n || true) ;;
  *) chosen=$3 ;;
esac
for g in $chosen; do
  echo "=== $g"
  for f in "$g/rank$2.log" "$g/rank$2.tail.1.log" "$g/rank$2.tail.log"; do
    if [ -f "$f" ]; then cat -- "$f"; fi
  done | awk -v since="$4" -v until="$5" '$1 + 0 >= since + 0 && $1 + 0 <= until + 0' | tail -n "$6"
done
"""
_LINE = re.compile(r"^(\d+\.\d+) (\S+) \| (.*)$")


@dataclass(frozen=True)
class Wanted:
    """Which lines are wanted.

    Attributes:
        generation: A number, ``last`` or ``all``.
        since: Seconds since the epoch, by the nodes' clocks.
        until: The same.
        lines: At most so many of each rank and generation, the newest.
    """

    generation: str = "last"
    since: float = 0.0
    until: float = 1e11
    lines: int = DEFAULT_LINES


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "logs",
        help="show what the ranks have said, by generation, rank and time",
        description="Merges the logs of the ranks by time. They lie on the nodes, one for each generation.",
    )
    frame.add_arguments(parser, runs=False)
    parser.add_argument("--generation", default="last", help="a number, last (the default) or all")
    parser.add_argument("--rank", type=int, action="append", help="only this rank; repeatable")
    parser.add_argument("--since", type=seconds_of, metavar="TIME", help="only the last so much, such as 10m")
    parser.add_argument("--until", type=seconds_of, metavar="TIME", help="only what is older than this")
    parser.add_argument("--lines", type=int, default=DEFAULT_LINES, help="at most so many of each rank and generation")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Fetch, merge, show."""
    if not re.fullmatch(r"\d+|last|all", options.generation):
        raise SparkError(f"expected a number, last or all, found {options.generation!r}", where="--generation")
    file = open_stack_file(chosen_stack(options))
    nodes = open_nodes(file)
    learn_secrets(file)
    ranks = options.rank if options.rank is not None else list(range(len(nodes.group.nodes)))
    unknown = [rank for rank in ranks if not 0 <= rank < len(nodes.group.nodes)]
    if unknown:
        raise SparkError(f"expected ranks 0 to {len(nodes.group.nodes) - 1}, found {unknown[0]}", where="--rank")
    now = time.time()
    wanted = Wanted(
        options.generation,
        now - options.since if options.since is not None else 0.0,
        now - options.until if options.until is not None else 1e11,
        options.lines,
    )
    lines = fetch(nodes, wanted, ranks)
    report = LogsReport(command="logs", stack=file.stack, exit_code=Exit.DONE, lines=lines)
    if options.json:
        print(report.model_dump_json(indent=2))
        return report.exit_code
    for line in report.lines:
        at = time.strftime("%m-%d %H:%M:%S", time.localtime(line.at))
        print(f"{at} g{line.generation} {line.node} {line.source} | {line.text}")
    return report.exit_code


def fetch(nodes: GroupNodes, wanted: Wanted, ranks: list[int]) -> list[LogLine]:
    """The lines of some ranks, by time.

    Raises:
        SparkError: a node could not be asked.
    """
    found = nodes.each(lambda rank: lines_of(rank, wanted) if rank.rank in ranks else [])
    errors = errors_of(found)
    if errors:
        raise join_errors(errors)
    return sorted((line for one in found if isinstance(one, list) for line in one), key=lambda line: line.at)


def lines_of(rank: Rank, wanted: Wanted) -> list[LogLine]:
    """The lines of one rank."""
    words = (str(rank.rank), wanted.generation, f"{wanted.since:.3f}", f"{wanted.until:.3f}", str(wanted.lines))
    text = run_checked(
        rank.transport, script(_READ, rank.state_folder, *words, timeout_s=120), purpose="expected the logs of the rank"
    )
    found = []
    for generation, part in parse_sections(text).items():
        for raw in part.splitlines():
            match = _LINE.match(raw)
            if match:
                at, source, said = match.groups()
                found.append(
                    LogLine(
                        at=float(at),
                        node=rank.transport.node,
                        rank=rank.rank,
                        generation=int(generation),
                        source=source,
                        text=redacted(said),
                    )
                )
    return found


def as_text(lines: list[LogLine]) -> str:
    """Lines for a file, one JSON object each."""
    return "".join(json.dumps(line.model_dump()) + "\n" for line in lines)
