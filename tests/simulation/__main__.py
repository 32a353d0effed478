"""A long campaign: random schedules by seed, all short ones, and every mutant.

    python -m tests.simulation [--seeds 20000] [--first 0] [--depth 2] [--record]

Failing seeds are printed with what led to the violation; ``--first SEED --seeds 1`` repeats one. ``--record`` writes
what was run and found to bench/results/simulation.json. The exit code is 1 if anything was found or a mutant survived.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spark_runtime import protocol
from tests.simulation.mutants import FURTHER, REQUIRED, Mutant, load
from tests.simulation.schedules import FAULTS, play_short, random_schedule, short_schedules
from tests.simulation.world import Violation

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results" / "simulation.json"
SHOWN = 3
MUTANT_SEEDS = 3000


def random_campaign(first: int, seeds: int) -> dict[str, Any]:
    """Schedules by seed."""
    failed, virtual_s, start = {}, 0.0, time.monotonic()
    for seed in range(first, first + seeds):
        try:
            virtual_s += random_schedule(seed, protocol)
        except Violation as violation:
            failed[seed] = str(violation)
            if len(failed) <= SHOWN:
                print(f"seed {seed}: {violation}\n", flush=True)
    if failed:
        print("failing seeds:", *failed, flush=True)
    return {
        "first_seed": first,
        "seeds": seeds,
        "faults": len(FAULTS),
        "virtual_hours": round(virtual_s / 3600, 1),
        "seconds": round(time.monotonic() - start, 1),
        "failing_seeds": sorted(failed),
    }


def short_campaign(depth: int) -> list[dict[str, Any]]:
    """Every schedule of up to this many faults."""
    found = []
    for faults, over_ray in itertools.product(range(1, depth + 1), (True, False)):
        count, failed, start = 0, 0, time.monotonic()
        for steps in short_schedules(faults):
            count += 1
            try:
                play_short(steps, protocol, over_ray)
            except Violation as violation:
                failed += 1
                if failed <= SHOWN:
                    print(f"{steps}: {violation}\n", flush=True)
        seconds = round(time.monotonic() - start, 1)
        backend = "ray" if over_ray else "mp"
        found.append(
            {"faults": faults, "backend": backend, "schedules": count, "violations": failed, "seconds": seconds}
        )
    return found


def noticed(mutant: Mutant) -> dict[str, Any]:
    """The first seed that notices a mutant, and by what."""
    machine = load(mutant)
    for seed in range(MUTANT_SEEDS):
        try:
            random_schedule(seed, machine)
        except Violation as violation:
            return {"mutant": mutant.name, "seed": seed, "by": str(violation).splitlines()[0]}
    return {"mutant": mutant.name, "seed": None, "by": "survived"}


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--depth", type=int, default=0, help="also all schedules of up to this many faults (1 to 3)")
    parser.add_argument("--mutants", action="store_true", help="also every mutant")
    parser.add_argument("--record", action="store_true", help="write bench/results/simulation.json")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m tests.simulation", *sys.argv[1:]]),
        "random": random_campaign(options.first, options.seeds),
        "exhaustive": short_campaign(options.depth),
        "mutants": [noticed(mutant) for mutant in (*REQUIRED, *FURTHER)] if options.mutants else [],
    }
    print(json.dumps(result, indent=1))
    if options.record:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    survived = [entry for entry in result["mutants"] if entry["seed"] is None]
    violations = sum(entry["violations"] for entry in result["exhaustive"])
    return 1 if result["random"]["failing_seeds"] or violations or survived else 0


if __name__ == "__main__":
    sys.exit(main())
