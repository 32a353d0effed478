"""How fast an image goes from one node's Docker to another's, beside `docker load` of a local file, on the lab.

Brings up a lab of two hosts of its own (root on Linux) whose Docker keeps everything in memory, and measures in turns,
so that both see the same noise. Targets: an image to one other node within 1.2 times a `docker load` of the same image
from a file in memory; after a change of its top layer of 20 MB at most 1.2 times those bytes on the link, headers of
all layers of the network included; no program of ours above 300 MB.

    python -m bench.image [--runs 3] [--mb 3000]

Prints the figures and writes them to bench/results/image.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.transfer import ADDRESSES, FABRIC, HOSTS, Lab, figures, run

RESULTS = Path(__file__).resolve().parent / "results" / "image.json"
ROOT = "/mnt/bench"
AT_MOST = {"ours_to_load": 1.2, "changed_sent": 1.2, "memory_mb": 300.0}
TOP_MB = 20
_NAME = "bench/image"

_MAKE = """
import hashlib, io, json, random, sys, tarfile
out, sizes, changed, only_top = sys.argv[1], [int(word) for word in sys.argv[2].split(",")], sys.argv[3], sys.argv[4]
block, diff_ids = random.Random(1).randbytes(1 << 20), []
class Hashed:
    def __init__(self, file): self.file, self.digest = file, hashlib.sha256()
    def write(self, data): self.digest.update(data); return self.file.write(data)
def layer(number, file):
    sink = Hashed(file)
    with tarfile.open(fileobj=sink, mode="w|") as tar:
        for mib in range(sizes[number]):
            small = mib % 10 == 0
            for part in range(100 if small else 1):
                data = f"{number} {mib} {part} {changed if number == len(sizes) - 1 else ''}".encode()
                data += block[: (10240 if small else 1 << 20) - len(data)]
                member = tarfile.TarInfo(f"layer{number}/{mib}-{part}.py"); member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return "sha256:" + sink.digest.hexdigest()
class Nothing:
    def write(self, data): return len(data)
with tarfile.open(out, "w") as outer:
    def add(name, data):
        member = tarfile.TarInfo(name); member.size = len(data); outer.addfile(member, io.BytesIO(data))
    for number in range(len(sizes)):
        if only_top == "yes" and number < len(sizes) - 1:
            diff_ids.append(layer(number, Nothing())); continue
        header = outer.offset; outer.fileobj.write(bytes(512)); begin = outer.fileobj.tell()
        diff_ids.append(layer(number, outer.fileobj)); end = outer.fileobj.tell()
        member = tarfile.TarInfo(f"{number}.tar"); member.size = end - begin
        outer.fileobj.seek(header); outer.fileobj.write(member.tobuf()); outer.fileobj.seek(end)
        outer.offset = end
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs":
        {"type": "layers", "diff_ids": diff_ids}}).encode()
    name = hashlib.sha256(config).hexdigest()
    add(name + ".json", config)
    add("manifest.json", json.dumps([{"Config": name + ".json", "RepoTags": [sys.argv[5]],
        "Layers": [f"{number}.tar" for number in range(len(sizes))]}]).encode())
print("sha256:" + name)
"""
"""Writes a docker-save archive: files of 1 MiB and, a tenth of the bytes, of 10 KiB; no two have the same content."""

_OURS = """
import json, sys, time
from pathlib import Path
from spark_core.image import Bringing, ImageNode, bring_image, spread
from spark_core.settings import ImageSettings
from spark_core.transfer.node_mover import peak_bytes
from spark_core.transport.connection import ConnectionSpec, resolve
from spark_core.transport.ssh import SshTransport

ask, nodes, outcomes, carry = json.load(sys.stdin), [], {}, spread.carry
for node in ask["nodes"]:
    transport = SshTransport(resolve(ConnectionSpec(node["name"], node["name"], "spark", ssh_config=ask["ssh_config"])))
    transport.open()
    nodes.append(ImageNode(transport, ask["root"], node["address"]))
def kept(*words):
    found = carry(*words)
    outcomes.update(found)
    return found
spread.carry = kept
say = lambda line: print(line, file=sys.stderr)
start = time.monotonic()
settings = ImageSettings(local_id=ask["image"])
bring_image(Bringing(settings, nodes, Path.cwd(), ask["image"], "", say, lambda: None))
print(json.dumps({
    "seconds": time.monotonic() - start,
    "memory": {node: outcome.memory for node, outcome in outcomes.items()} | {"controller": peak_bytes()},
}))
"""
"""Our distribution as `up` does it, with the connections open; looks before and after are part of the time."""


class ImageLab(Lab):
    """Two hosts with Docker in memory, and an image on the first one."""

    hosts = HOSTS[:2]

    def prepare(self) -> None:
        for host in self.hosts:
            self.as_root(
                host,
                f"ip address replace {ADDRESSES[host]}/24 dev {FABRIC}; ip link set {FABRIC} mtu 9000 up; "
                f"mkdir -p {ROOT}; mount -t tmpfs -o mode=777,size=90% tmpfs {ROOT}; "
                f"systemctl stop docker.socket docker; mkdir -p {ROOT}/docker; "
                f'sed -i \'s#{{#{{"data-root": "{ROOT}/docker",#\' /etc/docker/daemon.json; systemctl start docker',
            )

    def make(self, host: str, sizes: list[int], *, changed: str = "", only_top: bool = False) -> str:
        """Write the archive of an image on a host; its id."""
        words = [
            f"{ROOT}/image.tar",
            ",".join(map(str, sizes)),
            changed,
            "yes" if only_top else "no",
            f"{_NAME}:{changed}1",
        ]
        config = str(self.folder / "ssh_config")
        quoted = " ".join(f"'{word}'" for word in words)
        return run(["ssh", "-F", config, host, f"python3 - {quoted}"], _MAKE).strip()

    def load(self, host: str) -> float:
        """Seconds of a `docker load` of the archive."""
        start = time.monotonic()
        self.on(host, f"docker load --quiet --input {ROOT}/image.tar")
        return time.monotonic() - start

    def forget(self, host: str) -> None:
        self.on(host, "docker image prune --all --force")

    def bring(self, image: str) -> dict[str, Any]:
        """Bring an image of the first host to the second one."""
        nodes = [{"name": host, "address": ADDRESSES[host]} for host in self.hosts]
        ask = {"ssh_config": str(self.folder / "ssh_config"), "root": f"{ROOT}/root", "nodes": nodes, "image": image}
        found: dict[str, Any] = json.loads(run([sys.executable, "-c", _OURS], json.dumps(ask)))
        return found


def sizes_of(total_mb: int) -> list[int]:
    """Layers of an image as serving images have them: a base, a few large ones, small ones on top; in MiB."""
    large = total_mb - 200 - 3 * TOP_MB
    return [200, large * 2 // 5, large * 2 // 5, large - 2 * (large * 2 // 5), TOP_MB, TOP_MB, TOP_MB]


def main() -> int:
    """Measure, and take the lab down."""
    parser = argparse.ArgumentParser(description="An image from node to node, beside docker load of a local file.")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--mb", type=int, default=3000, help="size of the image in MiB")
    options = parser.parse_args()
    sizes, loads, ours, memory = sizes_of(options.mb), list[float](), list[float](), dict[str, int]()
    lab = ImageLab(2)
    try:
        lab.prepare()
        giver, taker = lab.hosts
        image = lab.make(giver, sizes)
        lab.load(giver)
        lab.on(giver, f"rm {ROOT}/image.tar")
        if lab.make(taker, sizes) != image:
            sys.exit("expected the same image on both hosts, found two")
        for _ in range(options.runs):
            loads.append(lab.load(taker))
            lab.forget(taker)
            found = lab.bring(image)
            ours.append(found["seconds"])
            memory = {name: max(value, memory.get(name, 0)) for name, value in found["memory"].items()}
            lab.forget(taker)
        lab.load(taker)
        lab.on(taker, f"rm {ROOT}/image.tar")
        changed = lab.make(giver, sizes, changed="b", only_top=True)
        lab.load(giver)
        before = lab.sent_bytes(giver)
        found = lab.bring(changed)
        sent = lab.sent_bytes(giver) - before
    finally:
        lab.lab("down")
    reached = {
        "ours_to_load": statistics.median(ours) / statistics.median(loads),
        "changed_sent": sent / (TOP_MB << 20),
        "memory_mb": max(memory.values()) / 1e6,
    }
    result = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f} at the end",
        "command": f"python -m bench.image --runs {options.runs} --mb {options.mb}",
        "image_store": "classic, overlay2 on tmpfs, Docker of Debian 12",
        "layers_mb": sizes,
        "docker_load_s": figures(loads),
        "ours_s": figures(ours),
        "changed_layer": {"seconds": found["seconds"], "bytes_on_the_link": sent},
        "memory_mb": {name: value / 1e6 for name, value in memory.items()},
        "reached": reached,
        "target": {name: f"<= {limit}" for name, limit in AT_MOST.items()},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    met = all(reached[name] <= limit for name, limit in AT_MOST.items())
    print("target met" if met else "target missed")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
