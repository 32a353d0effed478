"""How long `pulumi up` takes when nothing differs, beside the engine's own floor.

Needs a deployed stack `dev` (make up). The floor is `pulumi up` of a stack with one resource that does nothing, by the
same engine and the same Python. Target: below 10 s on a quiet machine with 2 cores, and no more than 4 times the floor.

    python -m bench.noop_up [--runs 5]

Prints minimum, median and maximum of both and their ratio, and writes them to bench/results/noop_up.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results" / "noop_up.json"
TARGET_S = 10.0
TARGET_RATIO = 4.0
_LIMIT_S = 300

_FLOOR = """
import pulumi
from pulumi.dynamic import CreateResult, Resource, ResourceProvider


class Nothing(ResourceProvider):
    def create(self, props):
        return CreateResult("nothing", {})


class Thing(Resource):
    def __init__(self, name):
        super().__init__(Nothing(), name, {})


Thing("thing")
"""


def run(words: list[str], cwd: Path, environ: dict[str, str]) -> tuple[float, str]:
    """Seconds and output of a command that must succeed."""
    start = time.monotonic()
    done = subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode != 0:
        sys.exit(
            f"{' '.join(words)}: expected success, found exit status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return time.monotonic() - start, done.stdout


def in_env(*words: str) -> list[str]:
    """A command inside ``. ./env`` of the checkout."""
    return ["sh", "-c", 'here=$PWD; cd "$0" && . ./env && cd "$here" && exec "$@"', str(PROJECT), *words]


def figures(seconds: list[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"min_s": min(seconds), "median_s": statistics.median(seconds), "max_s": max(seconds)}


def main() -> int:
    """Measure in turns, so that both see the same noise."""
    parser = argparse.ArgumentParser(description="No-op `pulumi up` against the engine's floor.")
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    environ = dict(os.environ)
    up = in_env("pulumi", "up", "-s", "dev", "--yes", "--skip-preview")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "Pulumi.yaml").write_text(
            f"name: floor\nruntime: {{name: python, options: {{virtualenv: {PROJECT / '.venv'}}}}}\n"
            "options: {refresh: always}\n"
        )
        (folder / "__main__.py").write_text(_FLOOR)
        (folder / "backend").mkdir()
        floor_environ = environ | {
            "PULUMI_BACKEND_URL": f"file://{folder}/backend",
            "PULUMI_CONFIG_PASSPHRASE": "floor",
            "PULUMI_HOME": f"{folder}/home",
        }
        run(in_env("pulumi", "stack", "init", "floor"), folder, floor_environ)
        floor_up = in_env("pulumi", "up", "-s", "floor", "--yes", "--skip-preview")
        run(floor_up, folder, floor_environ)
        ours, floor = [], []
        for _ in range(runs):
            seconds, text = run(up, PROJECT, environ)
            if "unchanged" not in text or " updated" in text or " created" in text:
                sys.exit(f"expected an up that changes nothing, found:\n{text[-2000:]}")
            ours.append(seconds)
            floor.append(run(floor_up, folder, floor_environ)[0])
    ratio = statistics.median(ours) / statistics.median(floor)
    result = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f} at the end",
        "command": f"python -m bench.noop_up --runs {runs}",
        "noop_up": figures(ours),
        "floor": figures(floor),
        "ratio_of_medians": ratio,
        "target": {"median_s": TARGET_S, "ratio": TARGET_RATIO},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    met = statistics.median(ours) < TARGET_S and ratio < TARGET_RATIO
    print("target met" if met else "target missed")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
