"""Errors that are known, in one table: how each looks in a log, what it means, what to do. Pure.

``cause``: the line is a cause by itself, wherever it stands. ``consequence``: it only says that somebody else failed,
or hides what did. ``hint``: no error, often logged as information; it explains a start that stands still or is slow,
and is told beside the cause or when there is none. ``hopeless``: it follows from settings, model and image alone, so
that no second try can cure it.

The reports behind the rows are named by repository and number in docs/explanation/diagnosis.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

Layer = Literal["fabric", "host", "ray", "vllm", "image", "weights"]
Kind = Literal["cause", "consequence", "hint"]


@dataclass(frozen=True)
class Diagnosis:
    """What an error means and what to do about it, for people."""

    code: str
    layer: Layer
    text: str
    do: str

    def as_json(self) -> dict[str, Any]:
        """The form used in the status file."""
        return dict(self.__dict__)


@dataclass(frozen=True)
class Signature:
    """One known error. ``text`` may name groups of the pattern as ``{0}``."""

    code: str
    layer: Layer
    pattern: str
    text: str
    do: str
    kind: Kind = "cause"
    hopeless: bool = False


SIGNATURES: tuple[Signature, ...] = (
    # fabric
    Signature(
        "ray-address-differs",
        "fabric",
        r"No available node types can fulfill resource request .*'node:([^']+)'",
        "vLLM asks Ray for the node {0}, and Ray knows no node by that address: the two took different interfaces",
        "let VLLM_HOST_IP of each rank be its fabric address (nodes[].fabric), one address family for all nodes",
    ),
    Signature(
        "addresses-not-unique",
        "fabric",
        r"Every node should have a unique IP address\. Got (\d+) nodes with (\d+) unique",
        "vLLM counts {1} addresses on {0} nodes: a rank announces an address of another interface",
        "set no VLLM_HOST_IP by hand; it follows from nodes[].fabric in each container",
        hopeless=True,
    ),
    Signature(
        "gloo-loopback",
        "fabric",
        r"connectFullMesh failed.*remote=\[(127\.[\d.]+|::1)\]",
        "Gloo took the loopback address {0}: the node's name resolves to it, or no interface is named",
        "name the fabric interface (nodes[].fabric), and look at /etc/hosts of the node",
    ),
    Signature(
        "gloo-unreachable",
        "fabric",
        r"connectFullMesh failed",
        "Gloo cannot connect all ranks with each other",
        "check cable, addresses and packet filters of the fabric on both nodes: up with fabric.proof: always",
    ),
    Signature(
        "gid-wrong",
        "fabric",
        r"ibv_modify_qp.*(?:failed with error|err(?:or|no)?)\W*(?:61\b|No data available)",
        "an RDMA connection was given a GID that the other end does not have (error 61): the index differs per node "
        "and moves",
        "let NCCL_IB_GID_INDEX be unset; compare `show_gids` of both nodes",
    ),
    Signature(
        "cabling",
        "fabric",
        r"ibv_modify_qp.*(?:failed with error|err(?:or|no)?)\W*(?:110\b|Connection timed out)",
        "an RDMA connection finds nobody at the other end (error 110): a port is cabled to another one than expected",
        "look at the preflight's picture of neighbours, and at an NCCL configuration file in the image",
    ),
    Signature(
        "mtu-differs",
        "fabric",
        r"local access violation work queue error|IBV_WC_LOC_LEN_ERR|IBV_WC_RETRY_EXC_ERR",
        "RDMA packets are lost or too long for one end: the MTU differs between the ends, or the link is bad",
        "give both ends the same MTU (fabric.mtu_bytes); a firmware update can reset it",
    ),
    Signature(
        "memory-not-registered",
        "fabric",
        r"ibv_reg_mr\w* failed with error Cannot allocate memory|ibv_create_cq\(.*failed",
        "the adapter may not pin memory",
        "",
    ),
    Signature(
        "nccl-system-error",
        "fabric",
        r"unhandled system error",
        "NCCL cannot set up its connections: an interface or GID that this node does not have",
        "check nodes[].fabric (netdev and hca are per node); serving.nccl_debug: INFO shows NCCL's own lines",
    ),
    Signature(
        "rdma-not-used",
        "fabric",
        r"NCCL INFO (?:Using network Socket|NET/Socket : Using)",
        "NCCL talks over TCP and not over RDMA: it serves, slowly",
        "check /dev/infiniband, IPC_LOCK, memlock and NCCL_IB_HCA on this node; fabric.rdma: required refuses this",
        kind="hint",
    ),
    Signature(
        "name-is-loopback",
        "fabric",
        r"Unable to resolve hostname to a \(local\) address\. Using the loopback address as fallback",
        "the node's own name resolves to loopback; without a named interface Gloo announces that to the others",
        "name the fabric interface (nodes[].fabric)",
        kind="hint",
    ),
    Signature(
        "spans-nodes",
        "fabric",
        r"CustomAllreduce is disabled because this process group spans across nodes",
        "both ranks met, and one waits for the other: if nothing follows, a message queue announced an address that is "
        "not on the fabric",
        "read `diagnose` of each rank: it lists its sockets that are not on the fabric",
        kind="hint",
    ),
    Signature(
        "collective-timeout",
        "fabric",
        r"Watchdog caught collective operation timeout|watchdog got stuck|heartbeat monitor.*timed? ?out",
        "a collective of all ranks did not end: one rank stands still, or the link does",
        "compare the other rank's log of this minute; if it comes back under load, NCCL's builds of both images",
    ),
    # host
    Signature(
        "memory-at-start",
        "host",
        r"Free memory on device (\S+) \(([\d.]+)/([\d.]+) GiB\) on startup is less than desired.*?\(([\d.]+), ([\d.]+)",
        "{1} of {2} GiB are free on this node, and gpu_memory_utilization {3} asks for {4}; on unified memory the page "
        "cache counts as used",
        "free memory on this node (page cache, other programs), or lower serving.gpu_memory_utilization",
    ),
    Signature(
        "memory-at-start",
        "host",
        r"Available memory on node (\S+) .*is less than (?:desired|requested)",
        "less memory is free on this node than vLLM is told to take",
        "free memory on this node, or lower serving.gpu_memory_utilization or serving.kv_cache_memory_bytes",
    ),
    Signature(
        "driver-no-memory",
        "host",
        r"NV_ERR_NO_MEMORY|_memdescAllocInternal",
        "the NVIDIA driver could not allocate memory; nodes have wedged after this",
        "lower serving.gpu_memory_utilization; if the node answers ping and not ssh, power-cycle it",
    ),
    Signature(
        "driver-not-loaded",
        "host",
        r"nvml error: driver not loaded|NVIDIA-SMI has failed because it couldn't communicate",
        "the NVIDIA driver is not loaded on this node: its kernel and driver packages do not match",
        "install the driver of the running kernel, or boot the kernel that has one",
        hopeless=True,
    ),
    Signature(
        "devices-taken-away",
        "host",
        r"Failed to initialize NVML: Unknown Error|CUDA error: operation not permitted|current platform None does not",
        "the container has lost its GPU while it ran: a daemon-reload under Docker's systemd cgroup driver takes "
        "injected devices away",
        "let the container be made anew (up), and set Docker's cgroup driver to cgroupfs (host.docker_cgroup_driver)",
    ),
    Signature(
        "memory-unbalanced",
        "host",
        r"The memory capacity is unbalanced",
        "memory of earlier, hard-stopped runs has not come back on one node",
        "reboot that node",
    ),
    Signature(
        "killed-for-memory",
        "host",
        r"the kernel has killed (\d+) process\(es\) of this node for memory",
        "the node ran out of memory and the kernel killed a process",
        "lower serving.gpu_memory_utilization or max_model_len, or stop other programs of this node",
    ),
    Signature(
        "disk-full",
        "host",
        r"No space left on device",
        "a disk of this node, or /dev/shm of the container, is full",
        "make room; for /dev/shm raise serving.shm_size_mib",
    ),
    # ray
    Signature(
        "ray-version",
        "ray",
        r"Version mismatch: The cluster was started with",
        "head and worker run different versions of Ray or Python: two images",
        "let both nodes run the same image; the preflight compares them",
        hopeless=True,
    ),
    Signature(
        "ray-memory-monitor",
        "ray",
        r"worker(?:s|\(s\))? were killed due to the node running low on memory|killed due to memory pressure",
        "Ray's memory monitor killed a worker at its share of the node's memory",
        "lower serving.gpu_memory_utilization; the monitor is off by default (RAY_memory_monitor_refresh_ms)",
    ),
    Signature(
        "ray-heartbeats",
        "ray",
        r"missed too many heartbeats|mistakenly been marked as dead",
        "Ray gave a node up that was still there: packets pass one way only, or the node was overloaded",
        "check the fabric in both directions (fabric.proof: always) and the load of that node",
    ),
    Signature(
        "ray-no-placement",
        "ray",
        r"Cannot provide a placement group|Tensor parallel size \(\d+\) exceeds available GPUs",
        "Ray has fewer GPUs than ranks: a node is not in it, or brings none",
        "read the other rank's log; `status` of the head counts nodes and GPUs",
    ),
    Signature(
        "ray-auth",
        "ray",
        r"InvalidAuthToken|AuthenticationError.*[Rr]ay|Unauthenticated.*token",
        "a rank came to Ray without the group's token, or with another one",
        "run up: the token's file is written anew on every node",
    ),
    Signature(
        "ray-not-supported",
        "ray",
        r"current platform (\w+) does not support ray",
        "this vLLM does not run over Ray on platform {0}",
        "serving.backend: mp, or another image",
        hopeless=True,
    ),
    Signature(
        "ray-old-session",
        "ray",
        r"ActorHandleNotFoundError|created in job \w+, but the current job",
        "a worker of an earlier Ray session; the error that ended that one stands further up",
        "read the earliest error",
        kind="consequence",
    ),
    Signature(
        "ray-store-on-disk",
        "ray",
        r"The object store is using \S+ instead of \S+ because",
        "the container's shared memory is too small for Ray's object store, which now lies on disk",
        "raise serving.shm_size_mib, or lower serving.object_store_bytes",
        kind="hint",
    ),
    Signature(
        "ray-placement-waits",
        "ray",
        r"Waiting for creating a placement group",
        "Ray waits for a node that can take a rank",
        "compare the addresses that it asks for with those of the nodes",
        kind="hint",
    ),
    # vllm
    Signature(
        "unknown-flag",
        "vllm",
        r"unrecognized arguments: (.+)",
        "this image's vLLM does not know: {0}",
        "leave it out, or take an image that knows it",
        hopeless=True,
    ),
    Signature(
        "bad-flag",
        "vllm",
        r"\berror: argument (.+)",
        "this image's vLLM refuses a value: {0}",
        "correct the setting",
        hopeless=True,
    ),
    Signature(
        "does-not-divide",
        "vllm",
        r"(must be divisible by .+)",
        "the model cannot be split that way: {0}",
        "choose tensor_parallel_size and pipeline_parallel_size that divide its heads and layers",
        hopeless=True,
    ),
    Signature(
        "context-too-long",
        "vllm",
        r"To serve at least one request with .*?\(([\d.]+)\), \(([\d.]+) GiB KV cache is needed.*?\(([\d.]+) GiB\)"
        r"(?:.*?estimated maximum model length is (\d+))?",
        "one request of {0} tokens needs {1} GiB of KV cache, and {2} are there",
        "set max_model_len to at most {3}, or raise gpu_memory_utilization",
        hopeless=True,
    ),
    Signature(
        "context-too-long",
        "vllm",
        r"To serve at least one request with|max_model_len \(\d+\) is greater than the derived max_model_len",
        "the context is longer than the model or its KV cache allows",
        "lower max_model_len",
        hopeless=True,
    ),
    Signature(
        "no-cache-blocks",
        "vllm",
        r"No available memory for the cache blocks",
        "after the weights nothing is left for the KV cache",
        "raise gpu_memory_utilization or kv_cache_memory_bytes, or take a smaller model",
    ),
    Signature(
        "out-of-memory",
        "vllm",
        r"CUDA out of memory|OutOfMemoryError",
        "the GPU's (unified) memory of this node is full",
        "lower gpu_memory_utilization, max_num_seqs or max_num_batched_tokens",
    ),
    Signature(
        "start-timeout",
        "vllm",
        r"Timed out waiting for engine",
        "vLLM gave the start up before it had ended: kernels are tuned anew after a change of layout, which takes long",
        "raise VLLM_ENGINE_READY_TIMEOUT_S in serving.environment",
    ),
    Signature(
        "rpc-timeout",
        "vllm",
        r"RPC call to \w+ timed out",
        "a rank did not answer the engine in time: it stands still, often for memory",
        "look at the memory of each node at that minute, and at the other rank's log",
    ),
    Signature(
        "no-compiler",
        "vllm",
        r"No working C\+\+ compiler found",
        "the image has no C++ compiler, which torch needs at the first completion",
        "take an image with one, or set TORCHDYNAMO_DISABLE: 1 in serving.environment",
        hopeless=True,
    ),
    Signature(
        "model-path",
        "vllm",
        r"HFValidationError|Repo id must be in the form",
        "there is no model at the path that vLLM was given",
        "check model.source and the mounts",
        hopeless=True,
    ),
    Signature(
        "empty-answer",
        "vllm",
        r"the completion came back empty",
        "the answer has neither content nor reasoning: the reasoning parser does not fit the model's template",
        "choose the reasoning_parser of the model, or none",
    ),
    Signature(
        "port-in-use",
        "vllm",
        r"Address already in use",
        "a port is held by another program of this node",
        "stop it, or choose another port (serving.port, ray_port, master_port)",
    ),
    Signature(
        "layouts-differ",
        "vllm",
        r"Workers disagree on supported KV cache layouts",
        "the stages of the pipeline have layers of different kinds, and this vLLM wants one layout for all",
        "use tensor_parallel_size instead of pipeline_parallel_size for this model",
        hopeless=True,
    ),
    Signature(
        "crashed",
        "vllm",
        r"Segmentation fault|SIGSEGV|core dumped",
        "a native library crashed",
        "read what ran just before; if it comes back, another image or other flags",
    ),
    Signature(
        "peer-gone",
        "vllm",
        r"Connection (?:closed|reset) by peer|recvValue failed|Connection was likely closed|remote process exited",
        "another rank ended first",
        "read the other rank's first error",
        kind="consequence",
    ),
    # image and weights, where the log of a rank is what tells them
    Signature(
        "no-executable",
        "image",
        r"cannot start `(\S+)` in this image",
        "the image has no {0}",
        "take an image that has it; for ray also serving.backend: mp",
        hopeless=True,
    ),
    Signature(
        "architecture-unknown",
        "image",
        r"does not recognize this architecture|Model architectures \[.*\] (?:are not supported|failed to be inspected)",
        "the image's vLLM or Transformers is too old for this model",
        "take a newer image",
        hopeless=True,
    ),
    Signature(
        "ptx-version",
        "image",
        r"cudaErrorUnsupportedPtxVersion|provided PTX was compiled with an unsupported toolchain",
        "the image is built for a newer CUDA than the node's driver; its own entrypoint would have switched to its "
        "compatibility libraries",
        "update the driver, or an image of the driver's CUDA",
        hopeless=True,
    ),
    Signature(
        "kernels-missing",
        "image",
        r"Failed to open: \S*sm_?12\d\S*|no kernel image is available for execution",
        "the image has no kernels for this GPU (sm_121)",
        "take an image built for it",
        hopeless=True,
    ),
    Signature(
        "operators-twice",
        "image",
        r"Inferred operator schema|operator \S+ does not exist",
        "torch and torchvision of the image do not belong together",
        "take another image",
        hopeless=True,
    ),
    Signature(
        "weights-incomplete",
        "weights",
        r"Weight files referenced in index but missing|SafetensorError: (.+)",
        "weights on this node are not whole or cannot be read",
        "run up: weights are verified and copied anew; with node:/DIR check sizes and hashes yourself",
    ),
)
_COMPILED = [(signature, re.compile(signature.pattern, re.IGNORECASE)) for signature in SIGNATURES]


def _any(keep: Callable[[Signature], bool]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{s.pattern})" for s in SIGNATURES if keep(s)), re.IGNORECASE)


CAUSE = _any(lambda signature: signature.kind == "cause")
CONSEQUENCE = _any(lambda signature: signature.kind == "consequence")
HINT = _any(lambda signature: signature.kind == "hint")
HOPELESS = _any(lambda signature: signature.hopeless)


def diagnose(line: str, memlock_unlimited: bool = False) -> Diagnosis | None:
    """What a line means; None if it is not known. The first row that fits counts.

    Args:
        memlock_unlimited: Whether this rank may lock any amount of memory, which tells two kinds of ENOMEM apart.
    """
    for signature, pattern in _COMPILED:
        match = pattern.search(line)
        if match is not None:
            if signature.code == "memory-not-registered":
                return _not_registered(memlock_unlimited)
            groups = [group if group is not None else "?" for group in match.groups()]
            text, do = signature.text.format(*groups), signature.do.format(*groups)
            return Diagnosis(signature.code, signature.layer, text, do)
    return None


def hints(lines: Iterable[str]) -> list[Diagnosis]:
    """What of a log explains a slow or standing start, each once."""
    found: dict[str, Diagnosis] = {}
    for line in lines:
        if HINT.search(line):
            diagnosis = diagnose(line)
            if diagnosis is not None:
                found.setdefault(diagnosis.code, diagnosis)
    return list(found.values())


def _not_registered(memlock_unlimited: bool) -> Diagnosis:
    if memlock_unlimited:
        return Diagnosis(
            "memory-pinned",
            "host",
            "the adapter cannot pin memory although the limit is open: long-lived pins block the kernel's own area",
            "reboot the node; if CmaFree in /proc/meminfo is above CmaTotal, boot another kernel",
        )
    return Diagnosis(
        "memlock",
        "fabric",
        "the adapter cannot pin memory: the container's memlock limit or IPC_LOCK is missing",
        "hardware: spark gives both; look at Docker's own limits on this node",
    )
