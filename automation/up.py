"""``up`` and ``rollback``: apply the settings, or go back to the last that served."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from automation import session as frame
from automation.disruption import disrupting
from automation.exit_codes import CommandEnd, Exit
from automation.good_settings import (
    Good,
    choose,
    good_settings,
    record_of_file,
    rollback_message,
    rolled_back,
    up_message,
    with_settings,
)
from automation.history import updates_of
from automation.reports import ErrorText, RunReport
from automation.session import RunResult, Session, ask, finish, session, told
from spark_core.errors import SparkError
from spark_core.settings.record import differing_keys, digest_of

PARTIAL_MESSAGE = "spark-vllm up of what keeps serving"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add them to the command line."""
    parser = commands.add_parser(
        "up",
        help="make it so; ends when the model has answered",
        description="Makes the nodes what the stack's file says. Ends when a completion has come back.",
    )
    frame.add_arguments(parser)
    parser.add_argument(
        "--no-restart",
        action="store_true",
        help=f"apply only what keeps serving up; exit status {Exit.MORE_NEEDED.value} if more is needed",
    )
    add_run_arguments(parser)
    parser.set_defaults(run=up)
    back = commands.add_parser(
        "rollback",
        help="go back to the last settings that served",
        description="Applies the newest settings that have served and are not those of the stack's file. The file "
        "stays as it is; `up` refuses it from then on, unless --retry-failed is given or it is changed.",
    )
    frame.add_arguments(back)
    back.add_argument("--yes", action="store_true", help="do not ask")
    back.set_defaults(run=rollback)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of every command that ends in :func:`up`."""
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--rollback-on-failure",
        action="store_true",
        help=f"if the settings fail, apply the last that served; exit status {Exit.ROLLED_BACK.value}",
    )
    parser.add_argument(
        "--retry-failed", action="store_true", help="apply settings that failed before and were rolled back"
    )


def up(options: argparse.Namespace) -> int:
    """Converge; on failure perhaps go back."""
    with session(options) as here:
        record = record_of_file(here.file)  # what is wrong with the settings is told before anything else
        here.require_free()
        if not options.retry_failed:
            _refuse_failed(here.stack, digest_of(record))
        if not _agreed(options, here):
            raise CommandEnd(Exit.REFUSED, "nothing was changed: it was not agreed to")
        if options.no_restart:
            return finish(options, _without_restart(here, record))
        result = here.run("up", message=up_message(record))
        report = result.report("up", here.stack)
        if options.rollback_on_failure and result.result == "failed" and result.recorder.failed:
            report = _back_after(here, record, result, report)
        return finish(options, report)


def rollback(options: argparse.Namespace) -> int:
    """Go back by hand."""
    with session(options) as here:
        record = record_of_file(here.file)
        here.require_free()
        good = choose(good_settings(_state(here)), digest_of(record))
        differs = ", ".join(differing_keys(good.record, record))
        here.progress.say(f"going back to the settings {good.digest}; the file differs in {differs}")
        if not options.yes and not options.json and sys.stdin.isatty() and not ask("Apply? [y/N] "):
            raise CommandEnd(Exit.REFUSED, "nothing was changed: it was not agreed to")
        result = _apply(here, good, rollback_message(digest_of(record), good.digest, "by hand"))
        report = result.report("rollback", here.stack, rolled_back_to=good.digest)
        return finish(options, report)


def _refuse_failed(stack: str, digest: str) -> None:
    why = rolled_back(updates_of(stack), digest)
    if why:
        raise CommandEnd(
            Exit.REFUSED,
            f"expected settings that may serve, found those that failed before: {why}",
            where=f"settings {digest}",
            do="change the stack's file, or give --retry-failed",
        )


def _agreed(options: argparse.Namespace, here: Session) -> bool:
    """On a terminal a person sees the plan and is asked; elsewhere the command is the word for it."""
    if options.yes or options.json or not sys.stdin.isatty():
        return True
    planned = here.run("preview").report("preview", here.stack)
    print(told(planned), flush=True)
    if planned.result != "succeeded":
        raise CommandEnd(Exit.FAILED, "the preview failed; nothing was changed")
    return not planned.changes or ask("Apply? [y/N] ")


def _without_restart(here: Session, record: Mapping[str, Any]) -> RunReport:
    """Apply what keeps serving up; what depends on the rest waits with it."""
    planned = here.run("preview")
    plan = planned.report("up", here.stack)
    if plan.result != "succeeded":
        return plan
    left = disrupting(planned.recorder.changes.values(), fresh=planned.fresh)
    if not left:
        return here.run("up", message=up_message(record)).report("up", here.stack)
    urns = [change.urn for change in left]
    result = here.run("up", message=PARTIAL_MESSAGE, exclude=urns, exclude_dependents=True)
    report = result.report("up", here.stack)
    done = {change.name for change in report.changes}
    missing = [change.name for change in plan.changes if change.name not in done]
    if report.result != "succeeded":
        return report
    return report.model_copy(
        update={
            "exit_code": Exit.MORE_NEEDED,
            "not_applied": missing,
            "error": ErrorText(
                what=f"not applied, since serving would end: {', '.join(missing)}", do="run `up` when that suits"
            ),
        }
    )


def _back_after(here: Session, record: Mapping[str, Any], failed: RunResult, report: RunReport) -> RunReport:
    """Apply the last settings that served, after others have failed; the report of both."""
    why = failed.first_error.what if failed.first_error else ""
    try:
        good = choose(good_settings(_state(here)), digest_of(record))
    except SparkError as none:
        here.progress.say(none.line)
        return report
    here.progress.say(f"the settings {digest_of(record)} failed; going back to {good.digest}: {why}")
    back = _apply(here, good, rollback_message(digest_of(record), good.digest, why[:200]))
    if back.result != "succeeded":
        second = back.report("rollback", here.stack)
        here.progress.say(f"going back failed too: {second.error.what if second.error else back.result}")
        return report.model_copy(update={"findings": [*report.findings, *second.findings]})
    here.progress.say(f"rolled back: the settings {good.digest} serve again; the file still has those that failed")
    return report.model_copy(update={"exit_code": Exit.ROLLED_BACK, "rolled_back_to": good.digest})


def _apply(here: Session, good: Good, message: str) -> RunResult:
    with _file(with_settings(here.file, good.record), here) as path:
        return here.run("up", message=message, config_file=str(path))


@contextlib.contextmanager
def _file(text: str, here: Session) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="spark-vllm-") as folder:
        path = Path(folder) / f"Pulumi.{here.stack.rsplit('/', 1)[-1]}.yaml"
        path.write_text(text)
        path.chmod(0o600)
        yield path


def _state(here: Session) -> Mapping[str, Any]:
    return {"deployment": here.engine_stack.export_stack().deployment}
