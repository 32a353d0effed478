"""The command line in the container: ``run`` (PID 1), and beside it ``status``, ``health``, ``restart``, ``diagnose``.

``probe`` is the command of a container of its own, before a group's first start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from spark_runtime import collective_probe, health, logs, signatures, sockets
from spark_runtime.first_error import FirstError, explained, find_first_error
from spark_runtime.head import Head
from spark_runtime.health import DEFAULT_STATE_DIR
from spark_runtime.observations import Limits
from spark_runtime.rank import Rank, Settings
from spark_runtime.ray_node import DEFAULT_OBJECT_STORE_BYTES
from spark_runtime.vllm_server import refused_arguments
from spark_runtime.worker import Worker

RESTART_TIMEOUT_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Everything behind the first "--" is vLLM's, whatever it looks like.
    split = given.index("--") if "--" in given else len(given)
    parser = _parser()
    options = parser.parse_args(given[:split])
    serve_args = given[split + 1 :]
    if options.command == "probe":
        return collective_probe.run(options)
    if options.command != "run":
        return int(options.do(options.state_dir))
    refused = refused_arguments(serve_args)
    if refused:
        parser.error("these arguments may not be passed on to vllm: " + "; ".join(refused))
    values = {name: value for name, value in vars(options).items() if name not in ("command", "do")}
    settings = Settings(**values, serve_args=serve_args)
    if not 0 <= settings.rank < settings.nodes:
        parser.error(f"rank {settings.rank}: expected 0 to {settings.nodes - 1}")
    if settings.rank == 0 and settings.head_address != settings.node_address:
        parser.error("rank 0 is the head: --head-address and --node-address must be equal")
    return _run(Head(settings) if settings.rank == 0 else Worker(settings))


def _run(rank: Head | Worker) -> int:
    try:
        return rank.run()
    except Exception as fault:
        # A fault of our own: leave nothing running, say what it was, and let Docker start this rank anew.
        traceback.print_exc()
        _give_up(rank, fault)
        return 1


def _give_up(rank: Rank, fault: Exception) -> None:
    with contextlib.suppress(Exception):
        rank.end_everything()
        lines = traceback.format_exc().splitlines()[-30:]
        text = f"fault of the supervisor: {type(fault).__name__}: {fault}"
        rank.first_error = FirstError(time.time(), "supervisor", text, [], lines)
        rank.set_phase("failed", text)


def _status(state_dir: Path) -> int:
    document = health.read_json(state_dir / "status.json")
    if document is None:
        print(f"no status in {state_dir}", file=sys.stderr)
        return 2
    json.dump(document, sys.stdout, indent=1)
    print()
    alive = time.time() - float(document.get("updated") or 0) <= health.STALE_AFTER_S
    return 0 if document.get("phase") == "serving" and alive else 1


def _diagnose(state_dir: Path) -> int:
    """What the log of the present generation says so far, and every socket of this container that matters."""
    document = health.read_json(state_dir / "status.json") or {}
    rank, number = document.get("rank"), (document.get("generation") or {}).get("n")
    lines = list(logs.read_lines(state_dir / "logs" / str(number), int(rank or 0)))
    error = find_first_error(lines)
    error = explained(error, lines) if error else None
    report = {
        "rank": rank,
        "phase": document.get("phase"),
        "first_error": error.as_json() if error else None,
        "hints": [hint.as_json() for hint in signatures.hints(line.text for line in lines)],
        "sockets": [each.as_json() for each in sockets.own_sockets() if each.state != "established"],
        "last_lines": [f"{line.source} | {line.text[:600]}" for line in lines[-20:]],
    }
    json.dump(report, sys.stdout, indent=1)
    print()
    return 0


def _listeners(state_dir: Path) -> int:
    """One line for each listening socket of this container: where, which port, whose."""
    own = str((health.read_json(state_dir / "status.json") or {}).get("address") or "")
    named = {own: "fabric", "0.0.0.0": "all interfaces", "::": "all interfaces", "127.0.0.1": "loopback"}  # noqa: S104
    for each in sockets.own_sockets():
        if each.state == "listening":
            print(f"{named.get(each.address, each.address):16} {each.port:5} {each.process}")
    return 0


def _restart(state_dir: Path) -> int:
    request = state_dir / "restart.request"
    request.touch()
    deadline = time.monotonic() + RESTART_TIMEOUT_S
    while time.monotonic() < deadline:
        if not request.exists():
            print("a new generation has been asked for")
            return 0
        time.sleep(0.1)
    with contextlib.suppress(OSError):
        request.unlink()
    print(f"the supervisor did not take the request within {RESTART_TIMEOUT_S:.0f} s", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="spark-vllm", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, do, text in (
        ("status", _status, "print this rank's status as JSON; exit code 0 when it is serving"),
        ("health", health.tell, "exit code 0 when serving or on the way to it, 1 when failed or stuck"),
        ("restart", _restart, "ask for a new generation of the group"),
        ("listeners", _listeners, "print what listens where in this container"),
        ("diagnose", _diagnose, "print what this generation's log says so far, and this rank's sockets, as JSON"),
    ):
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("--state-dir", type=Path, default=DEFAULT_STATE_DIR)
        command.set_defaults(do=do)
    probe = commands.add_parser(
        "probe", help="prove a collective between all ranks, without a model", allow_abbrev=False
    )
    collective_probe.add_options(probe)
    run = commands.add_parser("run", help="supervise this rank (PID 1 of the container)", allow_abbrev=False)
    _add_run(run)
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    for name in ("group", "deployment", "head-address", "node-address", "model", "served-model-name"):
        run.add_argument(f"--{name}", required=True)
    run.add_argument("--ray-port", type=int, default=6379, help="of Ray's control store on the head; backend ray")
    run.add_argument(
        "--ray-token", choices=("auto", "off"), default="off", help="auto: Ray asks for a token if this image's can"
    )
    run.add_argument("--master-port", type=int, default=29501, help="where the ranks meet on the head; backend mp")
    for name in ("rank", "nodes", "gpus-per-node", "status-port", "serve-port"):
        run.add_argument(f"--{name}", type=int, required=True)
    run.add_argument("--backend", choices=("ray", "mp"), required=True)
    run.add_argument("--serve-host", required=True)
    run.add_argument("--node-names", default="", help="of all ranks in order, separated by commas; for people")
    run.add_argument(
        "--heal",
        choices=("restart", "report"),
        default="restart",
        help="what the head does when a generation has failed: begin the next one, or stay failed until asked",
    )
    run.add_argument(
        "--rdma",
        choices=("required", "preferred", "off"),
        default="preferred",
        help="whether a rank without an active RDMA port may start",
    )
    run.add_argument("--api-key-file", type=Path, help="one key a line; without it the API is open")
    run.add_argument("--state-dir", type=Path, default=DEFAULT_STATE_DIR, help="a folder of the host")
    run.add_argument("--ray-arg", action="append", default=[], help="for `ray start`; repeatable")
    run.add_argument("--object-store-bytes", type=int, default=DEFAULT_OBJECT_STORE_BYTES)
    run.add_argument("--ray-folder", type=Path, default=Path("/tmp/ray"))  # noqa: S108 (the container's own)
    run.add_argument("--join-timeout-s", type=float, default=600, help="for ranks, and for Ray")
    run.add_argument("--start-timeout-s", type=float, default=3600, help="loading without any progress")
    run.add_argument("--canary-timeout-s", type=float, default=120)
    run.add_argument("--canary-interval-s", type=float, default=60)
    run.add_argument("--lease-interval-s", type=float, default=Limits.lease_interval_s)
    run.add_argument("--lease-timeout-s", type=float, default=Limits.lease_timeout_s)
    run.add_argument("--stop-grace-s", type=float, default=30, help="between SIGTERM and SIGKILL for vllm")
    run.add_argument("--log-limit-bytes", type=int, default=64 * 1024 * 1024, help="of one generation")
    run.add_argument("--keep-generations", type=int, default=10)
