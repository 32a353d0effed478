"""Makes sure that a stack exists: `python3 toolchain/stack.py NAME [--select]`.

`pulumi stack init` writes the salt of the new stack's secrets into the stack's file. Here that file is
committed and serves many backends, so the stack is made from an empty folder with only the project's name in
it: the salt goes there and into the state, and the state keeps it. PULUMI_FALLBACK_TO_STATE_SECRETS_MANAGER
makes the engine look there.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from toolchain import places
from toolchain.places import ROOT, Stop
from toolchain.steps import run_command, say

INIT_LIMIT_S = 120


def run_pulumi(words: Sequence[str], *, cwd: Path, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a short command of pulumi and keep its output from the screen."""
    try:
        return subprocess.run(
            ["pulumi", *words, "--non-interactive", "--color", "never"],
            cwd=cwd,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INIT_LIMIT_S,
        )
    except FileNotFoundError:
        raise Stop("pulumi: none on PATH; run `make bootstrap`, then `. ./env`") from None
    except subprocess.TimeoutExpired:
        raise Stop(f"pulumi {words[0]}: no end after {INIT_LIMIT_S} s; is the backend reachable?") from None


def ensure_stack(stack: str, environ: Mapping[str, str], root: Path = ROOT) -> bool:
    """Make the stack if it is not there; says whether it did."""
    project = places.project_name(root / "Pulumi.yaml")
    short = stack.rsplit("/", 1)[-1]
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", short):
        raise Stop(f"stack: expected a name of letters, digits, dots, dashes and underscores, found {stack!r}")
    if places.stack_state(dict(environ), project, short) is not None:
        return False
    with tempfile.TemporaryDirectory(prefix="spark-vllm-stack-") as folder:
        (Path(folder) / "Pulumi.yaml").write_text(f"name: {project}\nruntime: python\n")
        made = run_pulumi(["stack", "init", stack, "--no-select"], cwd=Path(folder), environ=environ)
    if made.returncode != 0:
        said = (made.stderr or made.stdout).strip()
        if "already exists" in said:
            return False
        raise Stop(f"stack {stack}: `pulumi stack init` failed in {environ.get('PULUMI_BACKEND_URL')}\n{said}")
    return True


def select_stack(stack: str, environ: Mapping[str, str], root: Path = ROOT) -> None:
    """Make it the one that `pulumi` without -s means in this checkout."""
    chosen = run_pulumi(["stack", "select", stack], cwd=root, environ=environ)
    if chosen.returncode != 0:
        raise Stop(f"stack {stack}: `pulumi stack select` failed\n{(chosen.stderr or chosen.stdout).strip()}")


def main(words: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make sure that a stack exists.")
    parser.add_argument("stack")
    parser.add_argument("--select", action="store_true", help="also make it the current one")
    chosen = parser.parse_args(words)
    # Inside `. ./env` nothing is to be found out; a check takes a tenth of a second then.
    environ = dict(os.environ) if os.environ.get("SPARK_VLLM_ENV_HOME") else places.environment()
    made = ensure_stack(chosen.stack, environ)
    if chosen.select:
        select_stack(chosen.stack, environ)
    say(f"stack {chosen.stack}: {'made' if made else 'is there'} ({environ.get('PULUMI_BACKEND_URL')})")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
