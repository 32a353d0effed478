"""``python -m automation COMMAND``: everything around ``pulumi up`` from day two on. Each command is a module."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

# gRPC would tell of every process that is started beside it.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

from automation import (
    adopt,
    bench,
    cutover,
    doctor,
    drift,
    gc,
    history,
    init,
    lifecycle,
    logs,
    monitoring,
    pin_hosts,
    recipes,
    render,
    report,
    runs,
    stage,
    status,
    sudoers,
    up,
    use,
    verify,
)
from automation.exit_codes import CommandEnd, Exit
from automation.group_nodes import secrets_of_environment
from automation.redaction import learn, redacted
from automation.reports import failure
from spark_core.errors import SparkError

COMMANDS = (
    init,
    runs,
    up,
    drift,
    status,
    logs,
    doctor,
    lifecycle,
    report,
    bench,
    monitoring,
    render,
    history,
    recipes,
    stage,
    use,
    cutover,
    gc,
    verify,
    pin_hosts,
    sudoers,
    adopt,
)
"""Each adds its parsers, and sets ``run``: called with the options, it returns the exit status."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors do not look like a drift (2)."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(Exit.USAGE, f"{self.prog}: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; the reference page is made from it."""
    parser = Parser(prog="python -m automation", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND", parser_class=Parser)
    for module in COMMANDS:
        module.add_command(commands)
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    given = list(sys.argv[1:] if words is None else words)
    options = build_parser().parse_args(given)
    learn(secrets_of_environment())
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except SparkError as error:
        early = error
    except KeyboardInterrupt:
        early = CommandEnd(Exit.INTERRUPTED, "interrupted")
    report = failure(options.command, getattr(options, "stack", None) or "", early)
    if options.json:
        print(report.model_dump_json(indent=2))
    print(redacted(early.render()), file=sys.stderr)
    return report.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
