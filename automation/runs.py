"""``preview``, ``refresh`` and ``destroy``: the engine's own operations, on the Automation API."""

from __future__ import annotations

import argparse
import contextlib

from automation import session as frame
from automation.disruption import expected_downtime_s
from automation.exit_codes import CommandEnd, Exit
from automation.history import updates_of
from automation.markdown import markdown
from automation.offline import offline
from automation.session import ask, chosen_stack, finish, session, told
from automation.stack_file import open_stack_file


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add them to the command line."""
    for name, do, text in (
        ("preview", preview, "say what up would change, what would restart, and what would fail; changes nothing"),
        ("refresh", refresh, "write into the state what is really there; changes no node"),
        ("destroy", destroy, "put the nodes back and forget them"),
    ):
        parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        frame.add_arguments(parser)
        if name == "preview":
            parser.add_argument(
                "--offline",
                action="store_true",
                help="plan without state, secrets or nodes; for code that is not trusted",
            )
            parser.add_argument("--markdown", action="store_true", help="print a summary for a pull request")
        if name == "destroy":
            parser.add_argument("--yes", action="store_true", help="do not ask")
        parser.set_defaults(run=do)


def preview(options: argparse.Namespace) -> int:
    """Plan, with a look at every node."""
    aside: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if options.offline:
        options.stack = chosen_stack(options)
        aside = offline(open_stack_file(options.stack))
    with aside, session(options) as here:
        report = here.run("preview").report("preview", here.stack)
        if report.restarts:
            report = report.model_copy(update={"downtime_s": expected_downtime_s(updates_of(here.stack))})
        return finish(options, report, markdown if options.markdown else told)


def refresh(options: argparse.Namespace) -> int:
    """Write what is there into the state."""
    with session(options) as here:
        here.require_free()
        return finish(options, here.run("refresh").report("refresh", here.stack))


def destroy(options: argparse.Namespace) -> int:
    """Take everything away."""
    with session(options) as here:
        here.require_free()
        if not options.yes and not ask(f"Destroy {here.stack}: serving ends and its nodes are put back? [y/N] "):
            raise CommandEnd(Exit.REFUSED, "nothing was destroyed: it was not agreed to", do="give --yes")
        return finish(options, here.run("destroy").report("destroy", here.stack))
