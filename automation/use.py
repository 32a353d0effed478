"""``use``: serve another recipe. Its name is written into the stack's file, and the nodes are made so."""

from __future__ import annotations

import argparse
import sys

from automation import session as frame
from automation import up
from automation.exit_codes import CommandEnd, Exit
from automation.recipe_edit import told, with_recipe
from automation.session import chosen_stack
from automation.stack_file import open_stack_file


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "use",
        help="serve a recipe: write it into the stack's file, then up",
        description="Names a recipe in the stack's file, in place of the group's model, and runs `up`. What the file "
        "says of serving itself stays and wins. `stage RECIPE` before that brings image and weights while the present "
        "model serves.",
    )
    frame.add_arguments(parser)
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe, see `recipes`")
    add_drop_overrides(parser)
    up.add_run_arguments(parser)
    parser.set_defaults(run=run, no_restart=False)


def add_drop_overrides(parser: argparse.ArgumentParser) -> None:
    """The argument that `stage` has too."""
    parser.add_argument(
        "--drop-overrides",
        action="store_true",
        help="take serving settings that the recipe says too out of the stack's file",
    )


def run(options: argparse.Namespace) -> int:
    """Write, then converge. If that is not agreed to, the file is as it was."""
    before = open_stack_file(chosen_stack(options))
    changed = with_recipe(before, options.recipe, drop_overrides=options.drop_overrides)
    changed.file.settings()  # nothing is written that could not be used
    for line in told(changed, options.recipe):
        print(line, file=sys.stderr)
    before.write(changed.file.text)
    try:
        return up.up(options)
    except CommandEnd as end:
        if end.code in (Exit.REFUSED, Exit.LOCKED, Exit.FAILED):  # raised before anything is changed on a node
            before.write(before.text)
            print(f"{before.path} is as it was", file=sys.stderr)
        raise
