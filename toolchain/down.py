"""`make down`: removes what stack `dev` holds, then the lab. Does nothing where nothing is."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from toolchain import places
from toolchain.places import ROOT, Stop
from toolchain.steps import Steps, openly, run_command, say

STACK = "dev"
STATUS_LIMIT_S = 120
NO_SUCH_LAB = 2


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


def lab_is_off(environ: Mapping[str, str]) -> bool:
    """Whether no host of the lab has power, by the lab's own word; Stop where it cannot be asked."""
    python = places.venv_python() if places.venv_python().exists() else Path(sys.executable)
    words = [str(python), "-m", "lab", "status", "--json"]
    try:
        asked = subprocess.run(
            words, cwd=ROOT, env=dict(environ), capture_output=True, text=True, timeout=STATUS_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Stop(f"lab: no answer in {STATUS_LIMIT_S} s; `python -m lab status` tells more") from None
    if asked.returncode == NO_SUCH_LAB and "is not up" in asked.stderr:
        return True
    try:
        return not any(host["power"] for host in json.loads(asked.stdout)["hosts"])
    except (ValueError, KeyError, TypeError):
        said = (asked.stderr or asked.stdout).strip()
        raise Stop(f"lab: expected its status, found none; nothing was removed\n{said}") from None


def main() -> int:
    """Destroy first: it undoes on the hosts what the lab's end would only throw away."""
    environ = places.environment()
    steps = Steps(2)
    try:
        with steps("pulumi destroy"):
            checkpoint = places.stack_state(environ, places.project_name(ROOT / "Pulumi.yaml"), STACK)
            foreign = places.local_backend(environ["PULUMI_BACKEND_URL"]) is None
            if not (foreign or resources_in(checkpoint)):
                say(f"  stack {STACK} holds nothing")
            elif not foreign and lab_is_off(environ):
                # A machine that was restarted has no hosts any more; their disks end with the lab below, and with them
                # all that a destroy would undo.
                say("  the lab's hosts are off: the state of the stack is dropped with them")
                words = ["pulumi", "stack", "rm", STACK, "--yes", "--force", "--preserve-config"]
                openly("pulumi stack rm", words, cwd=ROOT, env=environ)
            else:
                words = ["pulumi", "destroy", "-s", STACK, "--yes", "--skip-preview"]
                openly(
                    "pulumi destroy",
                    words,
                    cwd=ROOT,
                    env=environ,
                    remedy="mend what it names and `make down` again",
                )
        with steps("lab down"):
            python = places.venv_python() if places.venv_python().exists() else Path(sys.executable)
            openly("lab", [str(python), "-m", "lab", "down"], cwd=ROOT, env=environ)
    finally:
        say(steps.table())
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
