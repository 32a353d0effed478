"""`vllm serve` on this rank: its command, its environment, and what its user may not set.

Over Ray only the head runs it. Without Ray every rank does: rank 0 serves, the others are ``--headless`` and meet it
at the master port of the head's fabric address.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

PER_NODE_VARIABLES = (
    "VLLM_HOST_IP",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_IB_GID_INDEX",
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "UCX_NET_DEVICES",
    "OMPI_MCA_btl_tcp_if_include",
    "MN_IF_NAME",
    "RAY_NODE_IP_ADDRESS",
    "RAY_OVERRIDE_NODE_IP_ADDRESS",
)
"""Interface variables: vLLM copies its own environment to the Ray workers, where these would be wrong."""

MIDDLEWARE = "spark_runtime.auth.ApiKeyMiddleware"
KEY_FILE_VARIABLE = "SPARK_VLLM_API_KEY_FILE"

_OURS = {
    "--host": "set by --serve-host",
    "--port": "set by --serve-port",
    "--uds": "the port is what is watched",
    "--model": "set by --model",
    "--served-model-name": "set by --served-model-name",
    "--distributed-executor-backend": "set by --backend",
    "--nnodes": "set by --nodes",
    "-n": "set by --nodes",
    "--node-rank": "set by --rank",
    "-r": "set by --rank",
    "--master-addr": "set by --head-address",
    "--master-port": "set by --master-port",
    "--headless": "set by --rank",
    "--api-key": "it would show in the process list; use --api-key-file",
}


def refused_arguments(arguments: Sequence[str]) -> list[str]:
    """Those of the further arguments that belong to the supervisor, each with the reason."""
    names = [argument.split("=", 1)[0].replace("_", "-") for argument in arguments]
    return [f"{name}: {_OURS[name]}" for name in names if name in _OURS]


def backend_args(backend: str, *, rank: int, nodes: int, master_address: str, master_port: int) -> list[str]:
    """How the ranks are distributed, said explicitly: newer versions do not infer it."""
    if backend == "ray":
        return ["--distributed-executor-backend", "ray"]
    if nodes == 1:
        return ["--distributed-executor-backend", "uni"]
    return [
        *("--distributed-executor-backend", "mp", "--nnodes", str(nodes), "--node-rank", str(rank)),
        *("--master-addr", master_address, "--master-port", str(master_port)),
        *(("--headless",) if rank else ()),
    ]


def serve_argv(
    *, model: str, served_model_name: str, listen: tuple[str, int] | None, keyed: bool, extra: Sequence[str]
) -> list[str]:
    """``vllm serve``. ``listen`` is host and port of the API; None on a rank that has none."""
    return [
        *("vllm", "serve", model, "--served-model-name", served_model_name),
        *(("--host", listen[0], "--port", str(listen[1])) if listen else ()),
        *(("--middleware", MIDDLEWARE) if keyed else ()),
        *extra,
    ]


def serve_env(
    environ: Mapping[str, str], *, ray_address: str | None, package_root: Path, api_key_file: Path | None
) -> dict[str, str]:
    """The environment of ``vllm serve``: the container's own, Ray's address, and where the key check is."""
    env = {name: value for name, value in environ.items() if name != "RAY_ADDRESS"}
    if ray_address is not None:
        env["RAY_ADDRESS"] = ray_address
    if api_key_file is not None:
        env.pop("VLLM_API_KEY", None)  # one authority on keys
        env[KEY_FILE_VARIABLE] = str(api_key_file)
        # Last, so that no module of the image is hidden by one of ours.
        env["PYTHONPATH"] = ":".join(filter(None, (environ.get("PYTHONPATH"), str(package_root))))
    return env


def write_per_node_variables(config_root: Path) -> None:
    """List the interface variables in the file of names that vLLM does not copy; other names in it stay."""
    path = config_root / "ray_non_carry_over_env_vars.json"
    names = set(PER_NODE_VARIABLES)
    with contextlib.suppress(OSError, ValueError, TypeError):
        names |= {str(name) for name in json.loads(path.read_text())}
    config_root.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(sorted(names)) + "\n")
