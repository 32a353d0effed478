"""`make up`: sets the checkout up, starts the lab, deploys stack `dev` and shows that it answers."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from toolchain import bootstrap, places, show_endpoint
from toolchain.places import ROOT
from toolchain.stack import ensure_stack
from toolchain.steps import Steps, openly, run_command, say

STACK = "dev"


def main() -> int:
    """Every step finds what an earlier run left and goes on from there."""
    steps = Steps(5)
    try:
        with steps("toolchain"):
            bootstrap.bootstrap()
        environ = places.environment()
        python = str(places.venv_python())
        with steps("lab"):
            openly("lab", [python, "-m", "lab", "up"], cwd=ROOT, env=environ)
        with steps(f"stack {STACK}"):
            ensure_stack(STACK, environ)
        with steps("pulumi up"):
            words = ["pulumi", "up", "-s", STACK, "--yes", "--skip-preview"]
            openly(
                "pulumi up",
                words,
                cwd=ROOT,
                env=environ,
                remedy="what it says above comes first; then `make up` again",
            )
        with steps("endpoint"):
            show_endpoint.show(STACK, environ)
    finally:
        say(steps.table())
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
