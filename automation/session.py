"""What the commands that run the engine share: their arguments, and one run from its lock to its result."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pulumi.automation import ConcurrentUpdateError, Stack

from automation.engine import pulumi
from automation.engine_run import Engine, EngineError, open_stack
from automation.events import Recorder, Told
from automation.exit_codes import CommandEnd, Exit
from automation.group_nodes import learn_files
from automation.locks import locks_told, refusal, require_free
from automation.progress import Progress, duration
from automation.redaction import redacted
from automation.reports import ChangeReport, ErrorText, FindingReport, RunReport
from automation.stack_file import StackFile, open_stack_file
from automation.stopping import Stopper
from spark_core.errors import SparkError

DEFAULT_DEADLINE = "6h"
_UNITS = {"s": 1, "m": 60, "h": 3600, "": 1}
Result = Literal["succeeded", "failed", "interrupted", "out of time", "refused"]
_ENDS: dict[Result, Exit] = {
    "succeeded": Exit.DONE,
    "failed": Exit.FAILED,
    "interrupted": Exit.INTERRUPTED,
    "out of time": Exit.OUT_OF_TIME,
    "refused": Exit.REFUSED,
}


def add_arguments(parser: argparse.ArgumentParser, *, runs: bool = True) -> None:
    """The arguments that every such command has.

    Args:
        runs: Whether it runs the engine for long, or changes something.
    """
    parser.add_argument("--stack", help="name of the stack; by default the one that `stacks --select` chose")
    parser.add_argument("--json", action="store_true", help="print the result as JSON (docs/schemas/)")
    if runs:
        parser.add_argument(
            "--deadline",
            type=seconds_of,
            default=seconds_of(DEFAULT_DEADLINE),
            metavar="TIME",
            help=f"stop after this long, such as 45m; by default {DEFAULT_DEADLINE}",
        )
        parser.add_argument(
            "--clear-stale-lock", action="store_true", help="remove a lock that a dead run on this machine left"
        )
        parser.add_argument(
            "--wait-lock", type=seconds_of, default=0.0, metavar="TIME", help="wait for a run that holds the stack"
        )


def seconds_of(text: str) -> float:
    """``90s``, ``45m``, ``1h30m`` or plain seconds."""
    parts = re.findall(r"(\d+)([smh]?)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise argparse.ArgumentTypeError(f"expected a time such as 45m, found {text!r}")
    return float(sum(int(number) * _UNITS[unit] for number, unit in parts))


def chosen_stack(options: argparse.Namespace) -> str:
    """The stack that a command is about.

    Raises:
        SparkError: none was named and none is selected.
    """
    if options.stack:
        return str(options.stack)
    try:
        name = pulumi("stack", "--show-name").strip()
    except SparkError:
        name = ""
    if not name:
        raise SparkError(
            "expected the name of a stack, found none", do="give --stack, or choose one with `stacks --select NAME`"
        )
    return name


@dataclass
class Session:
    """One command on one stack.

    Attributes:
        stack: Name of the stack.
        file: Its file.
        progress: What the person sees meanwhile.
        stopper: What ends it early.
        engine_stack: The stack of the Automation API.
    """

    stack: str
    file: StackFile
    progress: Progress
    stopper: Stopper
    engine_stack: Stack
    clear_stale: bool = False
    wait_lock_s: float = 0.0
    config: dict[str, str] = field(default_factory=dict)

    def require_free(self) -> None:
        """Raises CommandEnd while another run holds the stack."""
        require_free(
            self.file.project,
            self.stack,
            clear_stale=self.clear_stale,
            wait_s=self.wait_lock_s,
            say=self.progress.say,
            sleep=self.stopper.wait,
        )

    def run(self, kind: str, **more: Any) -> RunResult:
        """One operation of the engine to its end; what fails is in the result.

        Args:
            kind: Name of the operation of the Automation API.
            more: Its arguments.

        Raises:
            CommandEnd: another run holds the stack.
        """
        recorder = Recorder(self.progress.begun, self.progress.ended, self._said)
        start = time.monotonic()
        result: Result = "succeeded"
        error = ""
        self.stopper.check()
        try:
            getattr(self.engine_stack, kind)(on_event=recorder, color="never", **more)
        except ConcurrentUpdateError as conflict:
            raise refusal(self.stack, locks_told(str(conflict))) from None
        except EngineError as fault:
            result, error = "failed", str(fault)
        except RuntimeError as fault:  # the engine ended without a summary
            result, error = "failed", str(fault)
        finally:
            self.progress.close()
        if result == "failed":
            try:
                self.stopper.check()
            except CommandEnd as end:
                result = "interrupted" if end.code == Exit.INTERRUPTED else "out of time"
        return RunResult(kind, result, time.monotonic() - start, recorder, error)

    def _said(self, name: str, line: str) -> None:
        self.progress.said(name, redacted(line))


@dataclass(frozen=True)
class RunResult:
    """How a run of the engine ended."""

    kind: str
    result: Result
    seconds: float
    recorder: Recorder
    error: str

    @property
    def exit_code(self) -> Exit:
        return _ENDS[self.result]

    @property
    def fresh(self) -> bool:
        """Whether nothing of the stack was there before, so that nothing serves that could end."""
        return not {"same", "update", "replace", "delete"} & set(self.recorder.totals)

    @property
    def first_error(self) -> ErrorText | None:
        """What went wrong first, as the engine or a provider said it."""
        if self.result == "succeeded":
            return None
        own = [told for told in self.recorder.errors if not told.text.startswith(_EMPTY_ERRORS)]
        if own:
            line, *rest = redacted(own[0].text).splitlines()
            do = next((text.strip()[4:] for text in rest if text.strip().startswith("do: ")), "")
            evidence = [text.strip() for text in rest if not text.strip().startswith("do: ")]
            return ErrorText(what=line.removeprefix("spark-vllm: "), do=do, evidence=evidence)
        if self.result in ("interrupted", "out of time"):
            return ErrorText(what=self.result, do="run the same command again to go on")
        said = [line for line in redacted(self.error).splitlines() if line.strip()]
        told = [line for line in said if "error:" in line]
        return ErrorText(what=(told or said or ["the engine failed and said nothing"])[-1].strip(), evidence=said[-25:])

    def report(self, command: str, stack: str, **more: Any) -> RunReport:
        """The run as a report."""
        changes = [
            ChangeReport(
                name=change.name,
                type=change.kind,
                action=change.action,
                properties=list(change.properties),
                restarts=change.restarts and (change.action != "create" or not self.fresh),
            )
            for change in self.recorder.changes.values()
        ]
        values: dict[str, Any] = {
            "command": command,
            "stack": stack,
            "exit_code": self.exit_code,
            "result": self.result,
            "seconds": round(self.seconds, 1),
            "changes": changes,
            "totals": self.recorder.totals,
            "findings": [_finding(told) for told in self.recorder.told if not told.text.startswith(_EMPTY_ERRORS)],
            "failed": self.recorder.failed,
            "restarts": [change.name for change in changes if change.restarts],
            "error": self.first_error,
        }
        return RunReport(**(values | more))


_EMPTY_ERRORS = (
    "update failed",
    "preview failed",
    "destroy failed",
    "refresh failed",
    "Resource monitor has",
    "an unhandled error occurred: program exited",
    "update canceled",
)
"""What the engine adds to an error that it has told already."""


def _finding(told: Told) -> FindingReport:
    return FindingReport(severity=told.severity, code=told.code, text=redacted(told.text))


@contextlib.contextmanager
def session(options: argparse.Namespace) -> Iterator[Session]:
    """Open a command's session; Ctrl-C is taken in two stages while it lasts."""
    name = chosen_stack(options)
    file = open_stack_file(name)
    learn_files(file)
    progress = Progress()
    stopper = Stopper(getattr(options, "deadline", None), progress.say)
    engine = Engine(stopper, progress.tick)
    with stopper.listening():
        try:
            yield Session(
                name,
                file,
                progress,
                stopper,
                open_stack(name, engine),
                clear_stale=getattr(options, "clear_stale_lock", False),
                wait_lock_s=getattr(options, "wait_lock", 0.0),
            )
        finally:
            progress.close()


def told(report: RunReport) -> str:
    """A run's report for a person: what changes, what is found, how it ended."""
    lines = []
    for change in report.changes:
        differs = f" ({', '.join(change.properties)})" if change.properties else ""
        lines.append(f"  {change.action:8}{change.name}{differs}{'  RESTARTS' if change.restarts else ''}")
    lines += [f"{finding.severity}: {finding.text}" for finding in report.findings if finding.severity != "fail"]
    if report.error is not None:
        lines.append(f"error: {report.error.what}")
        lines += [f"  do: {report.error.do}"] if report.error.do else []
        lines += [f"  {line}" for line in report.error.evidence]
        others = [finding for finding in report.findings if finding.severity == "fail"][1:]
        lines += [f"error: {finding.text}" for finding in others]
    if report.restarts:
        downtime = "not measured yet" if report.downtime_s is None else f"about {duration(report.downtime_s)}"
        lines.append(f"restarts: {', '.join(report.restarts)}; expected time without serving: {downtime}")
    counts = ", ".join(f"{count} {name}" for name, count in sorted(report.totals.items())) or "no resources"
    lines.append(f"{report.command} of {report.stack} {report.result} in {duration(report.seconds)}: {counts}")
    return "\n".join(lines)


def ask(question: str) -> bool:
    """Ask a person; where there is none, the answer is no."""
    if not sys.stdin.isatty():
        return False
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D is no word of agreement
        return False


def finish(options: argparse.Namespace, report: RunReport, say: Callable[[RunReport], str] = told) -> int:
    """Print a report in the form that was asked for; its exit status."""
    print(report.model_dump_json(indent=2) if options.json else say(report), file=sys.stdout, flush=True)
    return report.exit_code
