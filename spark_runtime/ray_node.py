"""Ray on this node: the commands, and the count of nodes and GPUs before anything is served.

Ray nodes are asked for with ``ray.nodes()`` in a process of the image's own python, because `ray status` says
how many GPUs there are but not where: a worker started on the head by mistake shows as two GPUs on one host,
and both shards would land there.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DEFAULT_OBJECT_STORE_BYTES = 1024**3
"""vLLM passes little through Ray's store; the default of 30 % of unified memory would cost the model."""
PORTS_FROM, PORTS_TO = 6400, 6499
"""Ray's ports beside its control store are fixed, so that a packet filter can name them: it listens on all interfaces.
spark_core/packet_filter.py names the same range."""
_METRIC_PORTS = ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")
"""Ports of the head's two other servers of metrics, for which `ray start` has no argument (ray._private.constants)."""
TOKEN_FILE = Path("/tmp/spark-vllm-ray-token")  # noqa: S108 (the container's own)
NUM_CPUS = 2
"""vLLM's Ray actors ask for no CPU; a small count keeps Ray from starting an idle worker for each core."""
PROBE_MARK = "spark-vllm-nodes:"

_PROBE = f"""
import json, signal, sys, time
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # Ray's own handler prints a stack
while True:
    alive = [node for node in ray.nodes() if node["Alive"]]
    nodes = [[node["NodeManagerAddress"], node.get("Resources", {{}}).get("GPU", 0)] for node in alive]
    print("{PROBE_MARK}" + json.dumps(nodes), flush=True)
    time.sleep(1)
"""


@dataclass(frozen=True)
class RayCount:
    """What Ray's node list means: complete, incomplete (wait), or wrong in a way that waiting cannot cure."""

    complete: bool
    hopeless: bool
    text: str


def start_argv(
    *,
    head: bool,
    head_address: str,
    node_address: str,
    port: int,
    gpus: int,
    folder: Path,
    object_store_bytes: int,
    extra: Sequence[str],
) -> list[str]:
    """``ray start`` for this node. It blocks, so that its end tells that a part of Ray has died here."""
    if head:
        where = ["--head", "--port", str(port), "--include-dashboard=false", "--temp-dir", str(folder)]
    else:
        where = ["--address", f"{head_address}:{port}"]
    return [
        *("ray", "start", "--block", *where, "--node-ip-address", node_address, *_fixed_ports()),
        *("--num-gpus", str(gpus), "--num-cpus", str(NUM_CPUS), "--disable-usage-stats"),
        *("--object-store-memory", str(object_store_bytes), *extra),
    ]


def _fixed_ports() -> list[str]:
    names = (
        "node-manager",
        "object-manager",
        "runtime-env-agent",
        "dashboard-agent-listen",
        "dashboard-agent-grpc",
        "metrics-export",
    )
    words = [word for offset, name in enumerate(names) for word in (f"--{name}-port", str(PORTS_FROM + offset))]
    return [*words, "--min-worker-port", str(PORTS_FROM + 10), "--max-worker-port", str(PORTS_TO)]


def start_env(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of ``ray start``, which vLLM's worker processes inherit."""
    # A RAY_ADDRESS would make `ray start` think of another cluster.
    kept = {name: value for name, value in environ.items() if name != "RAY_ADDRESS"}
    return kept | {name: str(PORTS_FROM + 6 + offset) for offset, name in enumerate(_METRIC_PORTS)}


def knows_tokens() -> bool:
    """Whether this image's Ray can ask for a token; found by its files, since importing it takes seconds."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec("ray")
        folders = spec.submodule_search_locations if spec else None
        return any((Path(folder) / "_private" / "authentication").is_dir() for folder in folders or ())
    return False


def token_env(token: str, file: Path = TOKEN_FILE) -> dict[str, str]:
    """Put a generation's token where Ray reads it, mode 600, and say so; nothing without a token. Raises OSError."""
    if not token:
        return {}
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as opened:
        opened.write(token)
    beside.replace(file)
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}


def probe_argv(address: str) -> list[str]:
    """A process that prints Ray's alive nodes every second."""
    return [sys.executable, "-c", _PROBE, address]


def read_probe(text: str) -> list[tuple[str, float]] | None:
    """(address, GPUs) of every alive Ray node from a line of the probe; None for any other line."""
    if not text.startswith(PROBE_MARK):
        return None
    try:
        return [(str(address), float(gpus)) for address, gpus in json.loads(text[len(PROBE_MARK) :])]
    except (ValueError, TypeError):
        return None


def address_asked_by_vllm(env: Mapping[str, str]) -> tuple[str, str]:
    """(the address by which vLLM asks Ray for this node, where it has it from), as vLLM's own get_ip finds it."""
    given = env.get("VLLM_HOST_IP", "")
    if given:
        return given, "VLLM_HOST_IP"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("8.8.8.8", 80))  # sends nothing: the kernel picks the route
            return str(probe.getsockname()[0]), "the default route, since VLLM_HOST_IP is not set"
    except OSError:
        return "0.0.0.0", "no default route, and VLLM_HOST_IP is not set"  # noqa: S104 (what vLLM takes then)


def address_mismatch(env: Mapping[str, str], registered: str, over_ray: bool = True) -> str:
    """Why the other ranks could never find vLLM here; empty if both mean the same address.

    vLLM asks Ray for ``node:<its own address>``. If that is not the one that Ray has registered, it waits for ever for
    a placement group (eugr/spark-vllm-docker#227), or counts more addresses than nodes (vllm-project/vllm PR 43095).
    """
    asked, source = address_asked_by_vllm(env)
    if asked == registered:
        return ""
    if not over_ray:
        return (
            f"vLLM would announce this rank at {asked} (from {source}), but its address on the fabric is {registered}: "
            "the ranks could not find each other; set VLLM_HOST_IP of this rank to its fabric address"
        )
    return (
        f"vLLM would ask Ray for the node {asked} (from {source}), but Ray registers this node as {registered}: "
        "no placement could be met; set VLLM_HOST_IP of this rank to its fabric address"
    )


def count_nodes(found: Sequence[tuple[str, float]], ranks: Mapping[int, str], gpus_per_node: int) -> RayCount:
    """Hold Ray's alive nodes against the ranks (rank -> address): N nodes, each with its G GPUs."""
    wrong, missing = [], []
    addresses = [address for address, _ in found]
    if len(set(ranks.values())) < len(ranks):
        wrong.append("two ranks run on one node: " + ", ".join(f"rank {r} ({a})" for r, a in sorted(ranks.items())))
    for address in sorted(set(addresses)):
        gpus = sum(count for where, count in found if where == address)
        if addresses.count(address) > 1 or gpus > gpus_per_node:
            wrong.append(
                f"{addresses.count(address)} Ray nodes with {gpus:g} GPUs on {address},"
                f" expected 1 with {gpus_per_node} (is another rank running there?)"
            )
        elif address not in ranks.values():
            wrong.append(f"a Ray node at {address}, which is the address of no rank")
    for rank, address in sorted(ranks.items()):
        if address not in addresses:
            missing.append(f"rank {rank} ({address}) is not in Ray")
        elif sum(count for where, count in found if where == address) < gpus_per_node:
            missing.append(f"rank {rank} ({address}) brings fewer than {gpus_per_node} GPUs")
    total = sum(count for _, count in found)
    head = f"Ray has {len(found)} of {len(ranks)} nodes, {total:g} of {len(ranks) * gpus_per_node} GPUs"
    complete = len(found) == len(ranks) and not wrong and not missing
    return RayCount(complete, bool(wrong), "; ".join([head, *wrong, *missing]))


def look_at_node(address: str, port: int, ssh_port: int = 22) -> Literal["answers", "wedged", "silent"]:
    """What is left of a node whose rank is silent.

    Refusing a connection is an answer. A kernel that still accepts connections for an sshd that never speaks is that of
    a node which has wedged (NVIDIA/open-gpu-kernel-modules#1358: ping answers, programs do not).
    """
    try:
        with socket.create_connection((address, ssh_port), timeout=1) as connection:
            connection.settimeout(3)
            return "answers" if connection.recv(1) else "silent"
    except TimeoutError:
        return "wedged" if _refuses(address, port) else "silent"
    except ConnectionRefusedError:
        return "answers"
    except OSError:
        return "silent"


def _refuses(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=1):
            return True
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def is_listening(address: str, port: int) -> bool:
    """Whether a TCP connection is accepted there."""
    try:
        with socket.create_connection((address, port), timeout=2):
            return True
    except OSError:
        return False
