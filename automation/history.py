"""``history`` and ``stacks``: what was done to a stack, and which stacks there are."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automation import session as frame
from automation.engine import pulumi_list
from automation.exit_codes import Exit
from automation.redaction import redacted
from automation.reports import HistoryReport, StackEntry, StacksReport, UpdateReport
from automation.session import chosen_stack
from automation.stack_file import PROJECT
from spark_core.errors import CommandError

_SHOWN = ("create", "update", "delete", "same", "replace")
_INIT_TIMEOUT_S = 180
STACK_TOOL = Path(__file__).resolve().parent.parent / "toolchain" / "stack.py"
"""Makes a stack without the salt of its secrets in the committed file."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add them to the command line."""
    history = commands.add_parser("history", help="list the updates of a stack, newest first", description=__doc__)
    frame.add_arguments(history, runs=False)
    history.add_argument("--limit", type=int, default=20, help="how many; by default 20")
    history.set_defaults(run=show_history)
    stacks = commands.add_parser("stacks", help="list, create and select stacks", description=__doc__)
    stacks.add_argument("--json", action="store_true", help="print the result as JSON (docs/schemas/)")
    chosen = stacks.add_mutually_exclusive_group()
    chosen.add_argument("--create", metavar="NAME", help="make a stack; its file Pulumi.NAME.yaml stays as it is")
    chosen.add_argument("--select", metavar="NAME", help="make it the stack of commands without --stack")
    stacks.set_defaults(run=show_stacks, stack=None)


def updates_of(stack: str, limit: int | None = None) -> list[dict[str, Any]]:
    """The updates of a stack as the backend keeps them, newest first, with their settings; secrets stay out."""
    paging = ("--page-size", str(limit), "--page", "1") if limit else ()
    return pulumi_list("stack", "history", "-s", stack, "--json", *paging)


def update_of(update: Mapping[str, Any]) -> UpdateReport:
    """One update as a report has it."""
    return UpdateReport(
        kind=update["kind"],
        result=update["result"],
        started=update["startTime"],
        ended=update.get("endTime"),
        message=redacted(update.get("message", "").partition("\n")[0]),
        changes={key: int(n) for key, n in (update.get("resourceChanges") or {}).items()},
        version=update.get("version"),
    )


def show_history(options: argparse.Namespace) -> int:
    """List what was done."""
    stack = chosen_stack(options)
    updates = [update_of(update) for update in updates_of(stack, options.limit)]
    report = HistoryReport(command="history", stack=stack, exit_code=Exit.DONE, updates=updates)
    if options.json:
        print(report.model_dump_json(indent=2))
        return report.exit_code
    for update in report.updates:
        counts = " ".join(f"{update.changes[key]} {key}" for key in _SHOWN if key in update.changes)
        print(f"{update.started}  {update.kind:9}{update.result:12}{counts:40}  {update.message}")
    if not report.updates:
        print(f"{stack}: nothing was done yet")
    return report.exit_code


def show_stacks(options: argparse.Namespace) -> int:
    """Create, select, list."""
    name = options.create or options.select
    if name:
        # The salt of a new stack's secrets must not land in the committed file; the toolchain knows how.
        words = [sys.executable, str(STACK_TOOL), name] if options.create else []
        words = words or ["pulumi", "stack", "select", name, "--non-interactive"]
        done = subprocess.run(
            words, cwd=PROJECT, env=os.environ, capture_output=True, text=True, timeout=_INIT_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise CommandError(
                f"expected the stack {name}, found: {said[0] if said else 'no word why'}", evidence=said[1:]
            )
    entries = [
        StackEntry(
            name=entry["name"],
            current=bool(entry.get("current")),
            resources=entry.get("resourceCount"),
            updated=entry.get("lastUpdate"),
            in_progress=bool(entry.get("updateInProgress")),
        )
        for entry in pulumi_list("stack", "ls", "--json")
    ]
    report = StacksReport(command="stacks", stack=name or "", exit_code=Exit.DONE, stacks=entries)
    if options.json:
        print(report.model_dump_json(indent=2))
        return report.exit_code
    for entry in report.stacks:
        mark = "*" if entry.current else " "
        print(f"{mark} {entry.name:24}{entry.resources or 0:5} resources  {entry.updated or 'never'}")
    return report.exit_code
