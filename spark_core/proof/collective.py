"""A collective between all ranks in the serving image, before any weights load.

Each node starts one throw-away container that is the rank's own but for its command and its mounts: same image,
devices, capabilities, limits, environment and network, taken from the very :class:`~spark_core.group.RankContainer`
that will serve, so that the two cannot differ. It sees no weights, no key and no state, its memory is bounded, and it
carries a label by which a later run finds what a killed one left.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import csv
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from spark_core.errors import SparkError
from spark_core.group import KEY_TARGET, LABEL, STATE_TARGET, RankContainer
from spark_core.proof.idle import PROBE_LABEL
from spark_core.proof.rank_proof import ENDED, RankProof, parse_probe
from spark_core.transport.base import Command, Result, Transport, script

DEADLINE_S = 150
"""From the start of the program in the container; loading torch from a cold disk is most of it."""
MEMORY_MIB = 4096
"""What the container may use of the node's memory; torch with CUDA takes about half of it."""
_START_S = 60
_LOOK_EVERY_S = 0.5
_GRACE_TURNS = 6
"""How many looks the other ranks may still take after one has failed: their own words may say more."""
_DECIDES = ("NCCL_", "GLOO_", "TP_SOCKET", "UCX_", "TORCH_NCCL", "TORCH_DISTRIBUTED", "VLLM_HOST_IP", "LD_", "CUDA_")
"""Prefixes of the variables that decide how ranks talk."""

_RUN = """
name=$1 label=$2 limit=$3; shift 3
remove() {
  docker ps -aq --filter "name=^/$name\\$" --filter "label=$label" | xargs -r docker rm -f >/dev/null 2>&1 || true
}
remove; trap remove EXIT
set +e; timeout -k 5 "$limit" docker run --name "$name" --label "$label" "$@" 2>&1; echo "=== status $?"
"""
_REMOVE = """
docker ps -aq --filter "name=^/$1\\$" --filter "label=$2" | xargs -r docker rm -f >/dev/null
"""


def probe_name(container: RankContainer) -> str:
    """Name of a rank's throw-away container."""
    return f"{container.name}-probe"


def probe_arguments(container: RankContainer, image_id: str, weights: str, command: Sequence[str]) -> list[str]:
    """Arguments of ``docker run`` for a rank's throw-away container, after its name and label.

    Args:
        weights: Path of the weights in the container, which the probe does not get.
        command: What it runs instead of serving.
    """
    left_out = {STATE_TARGET, KEY_TARGET.rpartition("/")[0], weights}
    words = ["--rm", "--pull", "never", "--restart", "no", "--network", "host", "--ipc", "private"]
    words += ["--memory", f"{MEMORY_MIB}m", "--memory-swap", f"{MEMORY_MIB}m"]
    words += ["--shm-size", f"{container.shm_size_mib}m", "--log-driver", "none"]
    # By the stack's label destroy finds it too. As PID 1 the program would not be ended by SIGTERM.
    words += ["--label", f"{LABEL}.stack={container.labels[f'{LABEL}.stack']}", "--stop-signal", "KILL"]
    words += ["--gpus", container.gpus] if container.gpus else []
    for device in container.devices:
        words += ["--device", device]
    for capability in container.capabilities:
        words += ["--cap-add", capability]
    words += ["--ulimit", "memlock=-1:-1"] if container.memlock_unlimited else []
    for variable in container.environment:
        words += ["--env", variable]
    for mount in container.mounts:
        if mount.target not in left_out:
            words += ["--mount", _mount(mount.source, mount.target)]
    program, *before = container.entrypoint
    return [*words, "--entrypoint", program, image_id, *before, *command]


def environment_digest(containers: Sequence[RankContainer]) -> str:
    """A hash of what decides how the ranks talk: another one means that the proof has to be made again."""
    parts = [
        [
            [name for name in one.environment if name.startswith(_DECIDES) and not name.startswith("NCCL_DEBUG")],
            *(list(one.devices), one.gpus, list(one.capabilities), one.memlock_unlimited),
        ]
        for one in containers
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def run_collective(
    containers: Sequence[RankContainer],
    arguments: Mapping[str, Sequence[str]],
    transports: Mapping[str, Transport],
    pause: Callable[[float], None],
) -> list[RankProof]:
    """Run one container per node at the same time and wait for all of them.

    Once one rank has failed the others are ended: they would only wait for it until their deadline.

    Args:
        arguments: For each node the words of ``docker run`` that :func:`probe_arguments` gave.
        pause: Waits a moment; what it raises ends the containers and goes on up.

    Raises:
        UnreachableError: a node does not answer; the containers on the others are ended first.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=2 * len(containers)) as pool:

        def end(which: Sequence[RankContainer]) -> None:
            list(pool.map(lambda one: _end(transports[one.node], one), which))

        running = [(one, pool.submit(transports[one.node].run, _start(one, arguments[one.node]))) for one in containers]
        try:
            ended = _wait(running, end, pause)
        except BaseException:
            # Again and again: a container that Docker is just about to start cannot be removed yet.
            while left := [one for one, future in running if not future.done()]:
                end(left)
                concurrent.futures.wait([future for _, future in running], timeout=_LOOK_EVERY_S)
            raise
    proofs = [parse_probe(one.node, one.rank, future.result().stdout) for one, future in running]
    return [
        replace(proof, error=ENDED) if proof.rank in ended and not proof.done and not proof.error else proof
        for proof in proofs
    ]


def _start(container: RankContainer, arguments: Sequence[str]) -> Command:
    label = f"{PROBE_LABEL}={container.labels[f'{LABEL}.stack']}"
    limit = _START_S + DEADLINE_S
    return script(
        _RUN,
        probe_name(container),
        label,
        str(limit),
        *arguments,
        timeout_s=limit + 30,
        purpose="expected the end of a collective in the serving image",
    )


def _end(transport: Transport, container: RankContainer) -> None:
    label = f"{PROBE_LABEL}={container.labels[f'{LABEL}.stack']}"
    # The container ends by its own deadline too, so that a node that cannot be told is not a second failure.
    with contextlib.suppress(SparkError):
        transport.run(script(_REMOVE, probe_name(container), label))


def _wait(
    running: Sequence[tuple[RankContainer, concurrent.futures.Future[Result]]],
    end: Callable[[Sequence[RankContainer]], None],
    pause: Callable[[float], None],
) -> set[int]:
    """Wait for all; the ranks that had to be ended because another one had failed."""
    ended: set[int] = set()
    patience = _GRACE_TURNS
    while left := [one for one, future in running if not future.done()]:
        if any(_has_failed(one, future) for one, future in running if future.done()):
            patience -= 1
        if patience <= 0:
            ended |= {one.rank for one in left}
            end(left)
        pause(_LOOK_EVERY_S)
    return ended


def _has_failed(container: RankContainer, future: concurrent.futures.Future[Result]) -> bool:
    if future.exception() is not None:
        return True
    return not parse_probe(container.node, container.rank, future.result().stdout).done


def _mount(source: str, target: str) -> str:
    """A value of ``--mount``, which is a row of CSV."""
    row = io.StringIO()
    csv.writer(row, lineterminator="").writerow(["type=bind", f"source={source}", f"target={target}", "readonly"])
    return row.getvalue()
