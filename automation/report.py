"""``report``: one self-contained page that tells how a deployment is, for whoever has only a browser."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from automation import session as frame
from automation.deployment_report import DeploymentReport, DriftPart
from automation.deployment_view import gather
from automation.drift import judged
from automation.exit_codes import CommandEnd, Exit
from automation.group_nodes import learn_secrets, open_nodes
from automation.page import page
from automation.reports import RunReport
from automation.session import chosen_stack, seconds_of, session
from automation.stack_file import open_stack_file
from spark_core.errors import SparkError

DEADLINE = "10m"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "report",
        help="write one page that tells how the deployment is: nodes, drift, where time went, errors",
        description="Looks at the stack and every node and writes one HTML file that needs nothing else. Changes "
        "nothing. What cannot be read is named on the page. Exit status 0: the page was written, whatever it says; "
        "`status` and `drift` have statuses that judge.",
    )
    frame.add_arguments(parser, runs=False)
    parser.add_argument("--output", metavar="FILE", type=Path, help="where to; by default report-STACK.html here")
    parser.add_argument("--no-drift", action="store_true", help="do not look for drift, which asks every node more")
    parser.add_argument(
        "--deadline",
        type=seconds_of,
        default=seconds_of(DEADLINE),
        metavar="TIME",
        help=f"stop looking for drift after this long; by default {DEADLINE}",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Look, write, tell."""
    stack = chosen_stack(options)
    file = open_stack_file(stack)
    options.stack = stack
    look: Callable[[], DriftPart] | None = None if options.no_drift else lambda: _drift(options)
    nodes = open_nodes(file)
    learn_secrets(file)
    report = gather(file, nodes, look)
    if options.output or not options.json:
        path = options.output or Path(f"report-{stack.rsplit('/', 1)[-1]}.html")
        write_page(path, report)
        print(f"{report.headline}\n{path}", file=sys.stderr if options.json else sys.stdout)
    if options.json:
        print(report.model_dump_json(indent=2))
    return report.exit_code


def write_page(path: Path, report: DeploymentReport) -> None:
    """Write the page in one step, readable by its owner only: it names addresses and what the nodes said.

    Raises:
        SparkError: it cannot be written there.
    """
    text = page(report)
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as beside:
                beside.write(text)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise SparkError(f"expected to write the page, found: {error.strerror}", where=str(path)) from None


def drift_part(report: RunReport) -> DriftPart:
    """What a preview has found, as the page has it; secrets are out already."""
    error = "" if report.result == "succeeded" else f"the look ended early: {report.result}"
    error = error if report.error is None else report.error.what
    if report.error is not None and report.error.where:
        error = f"{report.error.where}: {error}"
    return DriftPart(result=report.result, changes=report.changes, findings=report.findings, error=error)


def _drift(options: argparse.Namespace) -> DriftPart:
    with session(options) as here:
        seen = here.run("preview").report("drift", here.stack)
        if seen.result == "interrupted":
            raise CommandEnd(Exit.INTERRUPTED, "interrupted; no page was written")
        return drift_part(judged(seen))
