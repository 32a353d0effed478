"""How fast weights go from node to node, beside `rsync -a` over ssh, on the lab.

Brings up a lab of four hosts of its own (root on Linux), with the model in memory on one of them, and measures in
turns, so that all see the same noise. Targets: to one other node at least 4 times the speed of rsync, verification
included; to three others, over links of 100 MB/s each, at most 1.3 times the time for one, with at most 1.05 times the
bytes on the source's own link; a look at 100 files that are as they should be below 0.3 s per node; no program of ours
above 300 MB.

    python -m bench.transfer [--runs 3] [--gb 3] [--shaped-gb 2]

Prints the figures and writes them to bench/results/transfer.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results" / "transfer.json"
INSTANCE = "bench"
HOSTS = ("spark-a", "spark-b", "spark-c", "spark-d")
FABRIC = "enp1s0f1np1"
ADDRESSES = {host: f"192.168.200.{number}" for number, host in enumerate(HOSTS, 12)}
ROOT = "/mnt/bench"
"""A tmpfs of each host; logind empties /dev/shm of a user's files once that user has logged out."""
MODEL = f"{ROOT}/weights/model"
RSYNC_TO_OURS = 4.0
AT_MOST = {"three_to_one": 1.3, "sent_once": 1.05, "look_s": 0.3, "memory_mb": 300.0}
_SHAPED = "800mbit"
_LIMIT_S = 900

_OURS = """
import json, sys, time
from spark_core.transfer import distribution
from spark_core.transfer.chain import carry
from spark_core.transfer.look import Place, contents_of, look_at
from spark_core.transfer.node_mover import peak_bytes
from spark_core.transport.connection import ConnectionSpec, resolve
from spark_core.transport.ssh import SshTransport

ask = json.load(sys.stdin)
places = []
for node in ask["nodes"]:
    spec = ConnectionSpec(node["name"], node["name"], "spark", ssh_config=ask["ssh_config"])
    transport = SshTransport(resolve(spec))
    transport.open()
    places.append(Place(transport, ask["folder"], ask["root"], node["address"]))
wanted = contents_of(places[0].transport, ask["folder"], places[0].cache)
outcomes = {}
def kept(*words):
    outcomes.update(carry(*words))
    return outcomes
distribution.carry = kept
start = time.monotonic()
distribution.distribute("/nonexistent", places, wanted, lambda line: print(line, file=sys.stderr))
seconds = time.monotonic() - start
looks = []
for place in places:
    start = time.monotonic()
    assert look_at(place).is_whole(wanted)
    looks.append(time.monotonic() - start)
print(json.dumps({
    "seconds": seconds,
    "looks": looks,
    "memory": {node: outcome.memory for node, outcome in outcomes.items()}
    | {"controller": peak_bytes()},
    "sent": {node: outcome.sent for node, outcome in outcomes.items()},
    "bytes": wanted.total_bytes,
}))
"""
"""Our transfer as `up` does it, with the connections open and the source's hashes known."""


class Lab:
    """The hosts of this measurement."""

    def __init__(self, hosts: int = len(HOSTS)) -> None:
        self.lab("down")
        self.lab("up", "--hosts-only", "--hosts", str(hosts))
        self.folder = Path(json.loads(self.lab("status", "--json"))["folder"])
        self._password = (self.folder / "sudo_password").read_text()

    def lab(self, command: str, *words: str) -> str:
        return run([sys.executable, "-m", "lab", command, "--instance", INSTANCE, *words])

    def on(self, host: str, text: str) -> str:
        """Run shell text on a host as the deploy user, who may log in on the others."""
        config = str(self.folder / "ssh_config")
        return run(["ssh", "-F", config, "-o", "BatchMode=yes", "-o", "ForwardAgent=yes", host, text])

    def as_root(self, host: str, text: str) -> str:
        return run(
            ["ssh", "-F", str(self.folder / "ssh_config"), host, f"sudo -S -p '' sh -c {shlex.quote(text)}"],
            self._password,
        )

    def prepare(self) -> None:
        """Give each host an address on the fabric and a folder in memory."""
        for host in HOSTS:
            self.as_root(
                host,
                f"ip address replace {ADDRESSES[host]}/24 dev {FABRIC}; ip link set {FABRIC} mtu 9000 up; "
                f"mkdir -p {ROOT}; mount -t tmpfs -o mode=777 tmpfs {ROOT}",
            )

    def ours(self, hosts: tuple[str, ...], folder: str = MODEL) -> dict[str, Any]:
        """Bring a folder of the first host to the others."""
        ask = {
            "ssh_config": str(self.folder / "ssh_config"),
            "nodes": [{"name": host, "address": ADDRESSES[host]} for host in hosts],
            "folder": folder,
            "root": ROOT,
        }
        found: dict[str, Any] = json.loads(run([sys.executable, "-c", _OURS], json.dumps(ask)))
        return found

    def rsync(self, giver: str, taker: str) -> float:
        """Seconds that rsync takes for the same, without reading anything back."""
        options = "-o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        self.on(taker, f"mkdir -p {MODEL}")
        start = time.monotonic()
        self.on(giver, f"rsync -a -e 'ssh {options}' {MODEL}/ {ADDRESSES[taker]}:{MODEL}/")
        return time.monotonic() - start

    def remove(self, hosts: tuple[str, ...]) -> None:
        for host in hosts:
            self.on(host, f"rm -rf {ROOT}/*")

    def sent_bytes(self, host: str) -> int:
        """Bytes that a host has sent over its fabric interface, all headers included."""
        return int(self.on(host, f"cat /sys/class/net/{FABRIC}/statistics/tx_bytes"))


def run(words: list[str], stdin: str = "") -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(
        words, input=stdin, cwd=PROJECT, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    if done.returncode != 0:
        told = " ".join(words)[:200]
        sys.exit(f"{told}: expected success, found exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def make_model(lab: Lab, gigabytes: float) -> None:
    """A model of eight shards in the memory of the first host."""
    count = int(gigabytes * 1e9 / 8 / (1 << 20))
    lab.on(
        HOSTS[0],
        f"rm -rf {ROOT}/*; mkdir -p {MODEL}; cd {MODEL}; echo '{{}}' > config.json; "
        f"for n in 1 2 3 4 5 6 7 8; do dd if=/dev/urandom of=$n.safetensors bs=1M count={count} status=none; done",
    )


def figures(values: list[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def one_node(lab: Lab, runs: int, gigabytes: float) -> dict[str, Any]:
    """The first host's model to the second one, by us and by rsync."""
    first, second = HOSTS[:2]
    make_model(lab, gigabytes)
    ours, theirs, found = list[float](), list[float](), dict[str, Any]()
    for _ in range(runs):
        lab.remove((second,))
        theirs.append(lab.rsync(first, second))
        lab.remove((second,))
        found = lab.ours((first, second))
        ours.append(found["seconds"])
    lab.remove((second,))
    mebibytes = found["bytes"] / (1 << 20)
    return {
        "bytes": found["bytes"],
        "ours_s": figures(ours),
        "rsync_s": figures(theirs),
        "ours_mib_per_s": mebibytes / statistics.median(ours),
        "rsync_mib_per_s": mebibytes / statistics.median(theirs),
        "rsync_to_ours": statistics.median(theirs) / statistics.median(ours),
    }


def three_nodes(lab: Lab, runs: int, gigabytes: float) -> dict[str, Any]:
    """The first host's model to one other, and to three others, each with a slow link."""
    make_model(lab, gigabytes)
    for host in HOSTS:
        lab.as_root(host, f"tc qdisc add dev {FABRIC} root tbf rate {_SHAPED} burst 1mb latency 50ms")
    to_one, to_three, found = list[float](), list[float](), dict[str, Any]()
    for _ in range(runs):
        lab.remove(HOSTS[1:])
        to_one.append(lab.ours(HOSTS[:2])["seconds"])
        lab.remove(HOSTS[1:])
        before = lab.sent_bytes(HOSTS[0])
        found = lab.ours(HOSTS)
        on_the_link = lab.sent_bytes(HOSTS[0]) - before
        to_three.append(found["seconds"])
    for host in HOSTS:
        lab.as_root(host, f"tc qdisc delete dev {FABRIC} root")
    return {
        "bytes": found["bytes"],
        "to_one_s": figures(to_one),
        "to_three_s": figures(to_three),
        "three_to_one": statistics.median(to_three) / statistics.median(to_one),
        "sent_once": on_the_link / found["bytes"],
        "memory_mb": {name: value / 1e6 for name, value in found["memory"].items()},
    }


def look(lab: Lab, runs: int) -> dict[str, float]:
    """A folder of 100 files that is as it should be, on each host."""
    folder, seconds = f"{ROOT}/weights/small", list[float]()
    for host in HOSTS:
        lab.on(host, f"mkdir -p {folder}; for n in $(seq 100); do echo $n > {folder}/$n.safetensors; done")
    for _ in range(runs):
        seconds += lab.ours(HOSTS, folder)["looks"]
    return figures(seconds)


def main() -> int:
    """Measure, and take the lab down."""
    parser = argparse.ArgumentParser(description="Weights from node to node, beside rsync over ssh.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--gb", type=float, default=3.0, help="size of the model for the comparison with rsync")
    parser.add_argument("--shaped-gb", type=float, default=2.0, help="size of the model for three nodes")
    options = parser.parse_args()
    lab = Lab()
    try:
        lab.prepare()
        one = one_node(lab, options.runs, options.gb)
        three = three_nodes(lab, options.runs, options.shaped_gb)
        looks = look(lab, options.runs)
    finally:
        lab.lab("down")
    reached = {
        "rsync_to_ours": one["rsync_to_ours"],
        "three_to_one": three["three_to_one"],
        "sent_once": three["sent_once"],
        "look_s": looks["median"],
        "memory_mb": max(three["memory_mb"].values()),
    }
    result = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f} at the end",
        "command": f"python -m bench.transfer --runs {options.runs} --gb {options.gb} --shaped-gb {options.shaped_gb}",
        "one_node": one,
        "three_nodes_of_100_mb_per_s": three,
        "look_at_100_files_s": looks,
        "reached": reached,
        "target": {"rsync_to_ours": ">= 4"} | {name: f"<= {limit}" for name, limit in AT_MOST.items()},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    met = reached["rsync_to_ours"] >= RSYNC_TO_OURS and all(reached[name] <= limit for name, limit in AT_MOST.items())
    print("target met" if met else "target missed")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
