"""``preview``, ``up``, ``refresh`` and ``destroy``: the engine's own operations, on the Automation API."""

from __future__ import annotations

import argparse
import sys

from automation import session as frame
from automation.exit_codes import CommandEnd, Exit
from automation.session import Session, finish, session, told

PARTIAL = "spark-vllm up without a restart"
FULL = "spark-vllm up"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add them to the command line."""
    for name, do, text in (
        ("preview", preview, "say what up would change, what would restart, and what would fail; changes nothing"),
        ("up", up, "make it so; ends when the model has answered"),
        ("refresh", refresh, "write into the state what is really there; changes no node"),
        ("destroy", destroy, "put the nodes back and forget them"),
    ):
        parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        frame.add_arguments(parser)
        if name in ("up", "destroy"):
            parser.add_argument("--yes", action="store_true", help="do not ask")
        parser.set_defaults(run=do, refused=Exit.FAILED)


def preview(options: argparse.Namespace) -> int:
    """Plan, with a look at every node."""
    with session(options) as here:
        return finish(options, here.run("preview").report("preview", here.stack))


def up(options: argparse.Namespace) -> int:
    """Converge."""
    with session(options) as here:
        here.file.settings()  # what is wrong with them is told before anything else
        here.require_free()
        if not agreed(options, here):
            raise CommandEnd(Exit.REFUSED, "nothing was changed: it was not agreed to")
        return finish(options, here.run("up", message=FULL).report("up", here.stack))


def refresh(options: argparse.Namespace) -> int:
    """Write what is there into the state."""
    with session(options) as here:
        here.require_free()
        return finish(options, here.run("refresh").report("refresh", here.stack))


def destroy(options: argparse.Namespace) -> int:
    """Take everything away."""
    with session(options) as here:
        here.require_free()
        if not options.yes and not _ask(f"Destroy {here.stack}: serving ends and its nodes are put back? [y/N] "):
            raise CommandEnd(Exit.REFUSED, "nothing was destroyed: it was not agreed to", do="give --yes")
        return finish(options, here.run("destroy").report("destroy", here.stack))


def agreed(options: argparse.Namespace, here: Session) -> bool:
    """Whether to go on: on a terminal a person sees the plan and is asked; elsewhere the command is the word for it."""
    if options.yes or options.json or not sys.stdin.isatty():
        return True
    planned = here.run("preview").report("preview", here.stack)
    print(told(planned), flush=True)
    if planned.result != "succeeded":
        raise CommandEnd(Exit.FAILED, "the preview failed; nothing was changed")
    return not planned.changes or _ask("Apply? [y/N] ")


def _ask(question: str) -> bool:
    if not sys.stdin.isatty():
        return False
    return input(question).strip().lower() in ("y", "yes")
