"""``sudoers``: print the sudoers drop-in that allows the deploy user of a node just what the stack needs."""

from __future__ import annotations

import argparse

from automation.exit_codes import Exit
from automation.reports import SudoersReport
from automation.stack_file import add_stack_argument, open_stack_file
from spark_core.errors import SparkError
from spark_core.privilege import sudoers_text


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "sudoers",
        help="print the sudoers lines that a node needs",
        description="Prints a drop-in for /etc/sudoers.d of one node; nothing is contacted or changed.",
    )
    add_stack_argument(parser)
    parser.add_argument("node", metavar="NODE", help="name of the node")
    parser.add_argument("--json", action="store_true", help="print it as JSON (docs/schemas/)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the drop-in."""
    file = open_stack_file(options.stack)
    settings = file.settings()
    known = {node.name: node for node in settings.nodes}
    if options.node not in known:
        raise SparkError(f"expected one of {', '.join(known)}, found {options.node!r}", where=f"{file.path} (nodes)")
    text = sudoers_text(settings, file.stack, known[options.node])
    if options.json:
        report = SudoersReport(command="sudoers", stack=file.stack, exit_code=Exit.DONE, node=options.node, text=text)
        print(report.model_dump_json(indent=2))
    else:
        print(text, end="")
    return Exit.DONE
