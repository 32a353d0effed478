"""``python -m automation COMMAND``: each command is a module of this package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from automation import adopt, pin_hosts, sudoers
from spark_core.errors import SparkError

COMMANDS = (pin_hosts, sudoers, adopt)
REFUSED = 2
"""Exit status when a command cannot be done as asked; argparse ends with it too."""


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m automation", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add_command(commands)
    options = parser.parse_args(words)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except SparkError as error:
        print(error.render(), file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
