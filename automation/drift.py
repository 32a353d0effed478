"""``drift``: whether what is there is what the stack says, proven by a completion of its own."""

from __future__ import annotations

import argparse

from automation import session as frame
from automation.exit_codes import Exit
from automation.group_nodes import open_nodes
from automation.redaction import learn, redacted
from automation.reports import FindingReport, RunReport, error_text
from automation.session import Session, finish, session
from spark_core.errors import SparkError
from spark_core.findings import KINDS
from spark_core.gate import complete
from spark_core.wanted import STOPPED, wanted_state

_UNREACHED = "Reaching a node"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "drift",
        help="say whether the nodes are as the stack says; for a nightly job",
        description="Compares every layer on every node with the stack's file, and asks the endpoint for a completion. "
        "Changes nothing. Exit status 0: no drift; 2: drift; 1: it could not be told.",
    )
    frame.add_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Look, compare, ask."""
    with session(options) as here:
        report = here.run("preview").report("drift", here.stack)
        if report.result == "succeeded" and not report.changes:
            report = with_canary(here, report)
        return finish(options, judged(report))


def judged(report: RunReport) -> RunReport:
    """The report with the exit status of its finding.

    A preflight that found something else than it should be on a node is drift; a node that could not be asked is not.
    """
    if report.result == "succeeded":
        return report.model_copy(update={"exit_code": Exit.DRIFT if report.changes else report.exit_code})
    fails = [finding for finding in report.findings if finding.severity == "fail"]
    known = [finding for finding in fails if finding.code and KINDS[finding.code].area != _UNREACHED]
    if report.result == "failed" and fails and len(known) == len(fails):
        return report.model_copy(update={"exit_code": Exit.DRIFT})
    return report


def with_canary(here: Session, report: RunReport) -> RunReport:
    """The report with what a completion through the public endpoint says."""
    outputs = {name: output.value for name, output in here.engine_stack.outputs().items()}
    if not outputs.get("endpoint"):
        return report
    nodes = open_nodes(here.file)
    if wanted_state(nodes.rank(0)) == STOPPED:
        here.progress.say(f"{nodes.name} is stopped on request; no completion is asked for")
        return report
    key = outputs.get("api_key")
    learn([key])
    try:
        done = complete(
            str(outputs["endpoint"]), str(outputs["model"]), key, timeout_s=nodes.group.serving.canary_timeout_s
        )
    except SparkError as error:
        found = FindingReport(severity="fail", text=redacted(error.render()))
        ended = {"exit_code": Exit.DRIFT, "findings": [*report.findings, found], "error": error_text(error)}
        return report.model_copy(update=ended)
    here.progress.say(f"{outputs['endpoint']}: a completion came back in {done.seconds:.1f} s")
    return report
