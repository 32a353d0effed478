"""How long a group takes to serve again after each kind of fault, beside a restart of it, and a soak of random faults.

Needs a deployed stack on a lab (make up). Each fault is done to a group that serves; what is measured is until its head
knew, and until a completion through the endpoint has come back. A restart that was asked for stands beside each round,
so that both see the same noise. Bound of a fault: 1.3 times the restart, plus what finding it may take.

    python -m bench.faults [--stack dev] [--instance dev] [--rounds 1] [--only NAME ...] [--soak 200] [--seed 1]

Prints a table and adds it to bench/results/faults.json under the stack's backend. A soak draws faults at random, and
also fails on what grows: processes, sockets, files of /dev/shm and memory of the containers, and generations that two
heads would serve. Exit code 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results" / "faults.json"
HEAD, WORKER = "spark-a", "spark-b"
AT_MOST = 1.3
PATIENCE_S = 900.0
LEASE_S, MARGIN_S = 30.0, 10.0
RIDDEN_OUT_S = 10.0
LONG_PULL_S = 180.0
KILL_ALL = "kill -9 $(docker inspect -f '{{{{.State.Pid}}}}' {container})"
ENGINE = "VLLM::|multiprocessing.*spawn_main|ray::"


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        do: Makes it happen; what is to be waited for from when on is its end.
        found_within_s: How long finding it may take; None for the canary's own bound.
        restarts: Whether a new generation has to come; None if either is right.
    """

    name: str
    do: Callable[[Group], None]
    found_within_s: float | None
    restarts: bool | None = True


@dataclass
class Group:
    """The deployed group from outside: ssh, the lab's switches, and the endpoint."""

    stack: str
    instance: str
    ssh_config: Path
    endpoint: str
    model: str
    key: str | None

    @classmethod
    def of(cls, stack: str, instance: str) -> Group:
        home = Path(os.environ.get("SPARK_VLLM_HOME") or Path.home() / ".local" / "share" / "spark-vllm")
        words = ["sh", "-c", '. ./env && exec pulumi stack output -s "$0" --json --show-secrets', stack]
        outputs = json.loads(subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, check=True).stdout)
        config = home / "lab" / instance / "ssh_config"
        return cls(stack, instance, config, outputs["endpoint"], outputs["model"], outputs.get("api_key"))

    def container(self, host: str) -> str:
        return f"spark-vllm-{self.stack}-main-rank{int(host == WORKER)}"

    def on(self, host: str, shell: str, *, root: bool = False) -> str:
        if root:
            words = [sys.executable, "-m", "lab", "shell", "--instance", self.instance, host]
        else:
            words = [
                "ssh",
                "-F",
                str(self.ssh_config),
                "-o",
                "BatchMode=yes",
                "-o",
                "ConnectTimeout=5",
                host,
                "bash -s",
            ]
        done = subprocess.run(words, cwd=PROJECT, input=shell + "\n", capture_output=True, text=True, timeout=60)
        if done.returncode != 0:
            raise OSError(f"{host}: {shell}: {done.stderr[-300:]}")
        return done.stdout

    def lab(self, *words: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "lab", words[0], "--instance", self.instance, *words[1:]],
            cwd=PROJECT,
            capture_output=True,
            check=True,
            timeout=300,
        )

    def status(self, host: str = HEAD) -> dict[str, Any]:
        folder = f"/home/spark/.spark-vllm/stacks/{self.stack}/state/main"
        found: dict[str, Any] = json.loads(self.on(host, f"cat {folder}/status.json"))
        return found

    def answers(self) -> bool:
        """Whether a completion comes back now."""
        body = {"model": self.model, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(f"{self.endpoint}/chat/completions", json.dumps(body).encode(), headers)  # noqa: S310
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with contextlib.suppress(OSError, ValueError), opener.open(request, timeout=30) as answer:
            return bool(answer.status == 200)
        return False

    def kill_supervisor(self, host: str) -> None:
        self.on(host, KILL_ALL.format(container=self.container(host)), root=True)

    def kill_a_process(self, host: str) -> None:
        """The newest process of ours that is not the supervisor."""
        inside = "ps -eo pid= --sort=-start_time | awk '$1 != 1' | head -1 | xargs -r kill -9"
        self.on(host, f"docker exec {self.container(host)} sh -c \"{inside}\" || pkill -9 -n -f '{ENGINE}'", root=True)

    def freeze_engine(self, host: str) -> None:
        self.on(host, "pkill -STOP -f 'VLLM::EngineCore|VLLM::Worker|ray::RayWorker'", root=True)

    def power(self, *hosts: str) -> None:
        for host in hosts:
            self.lab("power-cut", host)
        for host in hosts:
            self.lab("power-on", host)

    def pull(self, seconds: float) -> None:
        self.lab("cable-pull", WORKER)
        time.sleep(seconds)
        self.lab("cable-plug", WORKER)


FAULTS = (
    Fault("SIGKILL of PID 1, worker", lambda group: group.kill_supervisor(WORKER), LEASE_S),
    Fault("SIGKILL of PID 1, head", lambda group: group.kill_supervisor(HEAD), LEASE_S),
    Fault("SIGKILL of a process, worker", lambda group: group.kill_a_process(WORKER), None),
    Fault("SIGKILL of a process, head", lambda group: group.kill_a_process(HEAD), None),
    Fault("power cut, worker", lambda group: group.power(WORKER), LEASE_S + 30),
    Fault("power cut, head", lambda group: group.power(HEAD), LEASE_S + 30),
    Fault("power cut, both", lambda group: group.power(HEAD, WORKER), LEASE_S + 60),
    Fault("cable pulled for 10 s", lambda group: group.pull(RIDDEN_OUT_S), None, restarts=None),
    Fault("cable pulled for 3 min", lambda group: group.pull(LONG_PULL_S), LEASE_S),
    Fault("SIGSTOP of the engine", lambda group: group.freeze_engine(HEAD), None),
)


def restart(group: Group) -> float:
    """Seconds of a restart that was asked for, to its first completion: the measure."""
    before, start = int(group.status()["generation"]["n"]), time.monotonic()
    python = 'exec "$(readlink /proc/1/exe)" /opt/spark-vllm/runtime.pyz restart'
    group.on(HEAD, f"docker exec {group.container(HEAD)} sh -c '{python}'")
    return until_serving(group, before, start, restarts=True)[1]


def until_serving(group: Group, before: int, start: float, *, restarts: bool | None) -> tuple[float, float]:
    """(seconds until the head knew, seconds until a completion came back); exits if it never does."""
    known: float | None = None
    quiet_since: float | None = None
    while time.monotonic() - start < PATIENCE_S:
        with contextlib.suppress(OSError, ValueError, KeyError, subprocess.SubprocessError):
            status = group.status()
            new = int(status["generation"]["n"]) > before
            if known is None and (new or status["phase"] != "serving"):
                known = time.monotonic() - start
            serves = status["phase"] == "serving" and time.time() - float(status["updated"]) < 5
            if serves and (new or not restarts) and group.answers():
                if new or restarts is False:
                    return known or 0.0, time.monotonic() - start
                # Ridden out, unless it is only found later: watched for a lease time.
                quiet_since = quiet_since or time.monotonic()
                if time.monotonic() - quiet_since > LEASE_S:
                    return 0.0, quiet_since - start
        time.sleep(0.5)
    sys.exit(f"not serving {PATIENCE_S:.0f} s after the fault: {json.dumps(group.status())[:2000]}")


def measure(group: Group, fault: Fault, plain_s: float, canary_s: float) -> dict[str, Any]:
    """One fault, and its bound."""
    before = int(group.status()["generation"]["n"])
    start = time.monotonic()
    fault.do(group)
    done_s = time.monotonic() - start  # the time that power and cables were gone is the fault's own
    known, served = until_serving(group, before, start, restarts=fault.restarts)
    found = fault.found_within_s if fault.found_within_s is not None else canary_s
    bound = done_s + found + MARGIN_S + AT_MOST * plain_s
    entry = {"fault": fault.name, "known_s": round(known, 1), "served_s": round(served, 1), "bound_s": round(bound, 1)}
    print(
        f"{fault.name:32} known after {known:6.1f} s, answers after {served:6.1f} s, bound {bound:6.1f} s", flush=True
    )
    return {**entry, "plain_s": round(plain_s, 1), "ok": served <= bound}


def holdings(group: Group) -> dict[str, int]:
    """What the containers hold, summed: it must not grow."""
    sums = {"processes": 0, "sockets": 0, "shm_files": 0, "memory_mib": 0}
    for host in (HEAD, WORKER):
        inside = "ls -d /proc/[0-9]* | wc -l; ls -l /proc/[0-9]*/fd 2>/dev/null | grep -c socket:; ls /dev/shm | wc -l"
        lines = group.on(host, f"docker exec {group.container(host)} sh -c '{inside}'").split()
        used = "awk '/MemTotal/{t=$2} /MemAvailable/{a=$2} END{print int((t-a)/1024)}' /proc/meminfo"
        for name, value in zip(sums, [*lines, group.on(host, used).strip()], strict=True):
            sums[name] += int(value)
    return sums


def soak(group: Group, count: int, seed: int, canary_s: float) -> dict[str, Any]:
    """Random faults one after another, and what has grown in the end."""
    rng = random.Random(seed)  # noqa: S311 (to be repeated)
    plain, first = restart(group), holdings(group)
    entries = [measure(group, rng.choice(FAULTS), plain, canary_s) for _ in range(count)]
    last = holdings(group)
    grown = {name: (first[name], last[name]) for name in first if last[name] > first[name] * 1.2 + 20}
    print(f"soak: {count} faults, held before {first}, after {last}", flush=True)
    broken = [entry for entry in entries if not entry["ok"]]
    return {"faults": count, "seed": seed, "before": first, "after": last, "grown": grown, "broken": broken}


def main() -> int:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--stack", default="dev")
    parser.add_argument("--instance", default="dev")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[fault.name for fault in FAULTS])
    parser.add_argument("--soak", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    group = Group.of(options.stack, options.instance)
    argv = group.on(HEAD, f"docker inspect -f '{{{{json .Args}}}}' {group.container(HEAD)}")
    words = json.loads(argv)
    backend = words[words.index("--backend") + 1]
    canary_s = 30.0 + float(words[words.index("--canary-timeout-s") + 1])
    entries, plains = [], []
    for _ in range(options.rounds):
        for fault in (fault for fault in FAULTS if fault.name in options.only):
            plains.append(restart(group))
            entries.append(measure(group, fault, plains[-1], canary_s))
    soaked = soak(group, options.soak, options.seed, canary_s) if options.soak else {"broken": [], "grown": {}}
    result = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "command": " ".join(["python -m bench.faults", *sys.argv[1:]]),
        "plain_median_s": round(statistics.median(plains), 1) if plains else None,
        "entries": entries,
        "soak": soaked if options.soak else None,
    }
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**document, backend: result}, indent=1) + "\n")
    return 1 if soaked["broken"] or soaked["grown"] or any(not entry["ok"] for entry in entries) else 0


if __name__ == "__main__":
    sys.exit(main())
