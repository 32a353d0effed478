"""`make down`: removes what stack `dev` holds, then the lab. Does nothing where nothing is."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from toolchain import places
from toolchain.places import ROOT
from toolchain.steps import Steps, openly, run_command, say

STACK = "dev"


def resources_in(checkpoint: Path | None) -> bool:
    """Whether a checkpoint holds anything; one that cannot be read is taken to."""
    if checkpoint is None:
        return False
    try:
        raw = checkpoint.read_bytes()
        state = json.loads(gzip.decompress(raw) if checkpoint.suffix == ".gz" else raw)
        return bool((state["checkpoint"].get("latest") or {}).get("resources"))
    except (OSError, ValueError, KeyError, AttributeError):
        return True


def main() -> int:
    """Destroy first: it undoes on the hosts what the lab's end would only throw away."""
    environ = places.environment()
    steps = Steps(2)
    try:
        with steps("pulumi destroy"):
            checkpoint = places.stack_state(environ, places.project_name(ROOT / "Pulumi.yaml"), STACK)
            foreign = places.local_backend(environ["PULUMI_BACKEND_URL"]) is None
            if foreign or resources_in(checkpoint):
                words = ["pulumi", "destroy", "-s", STACK, "--yes", "--skip-preview"]
                openly(
                    "pulumi destroy",
                    words,
                    cwd=ROOT,
                    env=environ,
                    remedy="mend what it names and `make down` again",
                )
            else:
                say(f"  stack {STACK} holds nothing")
        with steps("lab down"):
            python = places.venv_python() if places.venv_python().exists() else Path(sys.executable)
            openly("lab", [str(python), "-m", "lab", "down"], cwd=ROOT, env=environ)
    finally:
        say(steps.table())
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
