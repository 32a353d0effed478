"""Every known error is found inside thousands of lines of other ranks' noise, with its cause and its node."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from spark_core.gate import Rank, RankState, failure_of
from spark_runtime.first_error import FirstError, explained, find_first_error, is_hopeless
from spark_runtime.logs import Line
from spark_runtime.signatures import SIGNATURES, diagnose, hints
from tests.scripted_transport import ScriptedTransport

NOISE_LINES = 4000
ADDRESSES = {0: "192.168.200.12", 1: "192.168.200.13"}
WORKER_TAG = "(EngineCore pid=10) (RayWorkerProc pid=285, ip=192.168.200.13) ERROR 04-20 18:08:14 [worker.py:10] "
CORE_TAG = "(EngineCore pid=10) ERROR 04-20 18:08:14 [core.py:1100] "
TRACE = "Traceback (most recent call last):"


@dataclass(frozen=True)
class Case:
    """One error as a rank prints it: the lines, where they stand, and what is to be told."""

    code: str
    lines: tuple[str, ...]
    rank: int = 0
    """Whose fault it is."""
    relayed: bool = False
    """Whether a worker's line stands in the head's log, as Ray relays it."""
    memlock_unlimited: bool = False


def raised(text: str, tag: str = CORE_TAG) -> tuple[str, ...]:
    """An exception as vLLM prints it."""
    return tuple(tag + line for line in (TRACE, '  File "worker.py", line 1, in load', text))


def by_worker(text: str) -> tuple[str, ...]:
    """The same of rank 1, in the head's log."""
    return raised(text, WORKER_TAG)


CASES = [
    Case(
        "ray-address-differs",
        (
            CORE_TAG + "No available node types can fulfill resource request "
            "{'node:10.1.230.180': 0.001, 'GPU': 1.0}. Add suitable node types to this cluster.",
        ),
    ),
    Case(
        "addresses-not-unique",
        raised("RuntimeError: Every node should have a unique IP address. Got 2 nodes with 3 unique IP addresses."),
    ),
    Case(
        "gloo-loopback",
        by_worker("RuntimeError: Gloo connectFullMesh failed with [...] timed out connecting: remote=[127.0.0.1]:4321"),
        1,
        relayed=True,
    ),
    Case("gloo-unreachable", raised("RuntimeError: Gloo connectFullMesh failed with [...] Connection refused"), 1),
    Case(
        "gid-wrong",
        ("spark-b:285:312 [0] NCCL WARN Call to ibv_modify_qp failed with error No data available, errno 61",),
        1,
    ),
    Case(
        "cabling",
        ("spark-b:285:312 [0] NCCL WARN Call to ibv_modify_qp failed with error Connection timed out errno 110",),
        1,
    ),
    Case(
        "mtu-differs",
        (
            "spark-b:285:312 [0] NCCL WARN NET/IB: Got completion from peer 192.168.200.12<4791> with status=1 "
            "(IBV_WC_LOC_LEN_ERR)",
        ),
        1,
    ),
    Case("mtu-differs", ("NCCL WARN NET/IB : Got completion with error 12 IBV_WC_RETRY_EXC_ERR(12), vendor err 129",)),
    Case(
        "memlock",
        ("spark-b:285:312 [0] NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",),
        1,
    ),
    Case(
        "memory-pinned",
        ("spark-b:285:312 [0] NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",),
        1,
        memlock_unlimited=True,
    ),
    Case(
        "nccl-system-error",
        by_worker("torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error"),
        1,
        relayed=True,
    ),
    Case(
        "collective-timeout",
        (
            "[rank1]:[E1120 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=51, OpType=ALLREDUCE) ran for 600033 milliseconds before timing out.",
        ),
        1,
    ),
    Case(
        "memory-at-start",
        by_worker(
            "ValueError: Free memory on device cuda:0 (49.56/121.69 GiB) on startup is less than desired GPU memory "
            "utilization (0.9, 109.52 GiB). Decrease GPU memory utilization."
        ),
        1,
        relayed=True,
    ),
    Case(
        "memory-at-start",
        raised(
            "ValueError: Available memory on node 0 (7.89/14.59 GiB) on startup is less than desired CPU memory "
            "utilization (0.99, 14.44 GiB)."
        ),
    ),
    Case("driver-no-memory", ("NVRM: Out of memory [NV_ERR_NO_MEMORY] (0x51) _memdescAllocInternal",), 1),
    Case("driver-not-loaded", ("nvidia-container-cli: initialization error: nvml error: driver not loaded",), 1),
    Case("devices-taken-away", by_worker("RuntimeError: CUDA error: operation not permitted"), 1, relayed=True),
    Case("devices-taken-away", ("Failed to initialize NVML: Unknown Error",), 1),
    Case("memory-unbalanced", raised("RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied"), 1),
    Case("disk-full", raised("OSError: [Errno 28] No space left on device: '/dev/shm/psm_1'"), 1),
    Case("ray-version", raised("RuntimeError: Version mismatch: The cluster was started with:", ""), 1),
    Case(
        "ray-memory-monitor",
        (
            "ray.exceptions.OutOfMemoryError: 1 worker(s) were killed due to the node running low on memory. "
            "Memory on the node (IP: 192.168.200.13, ID: ab) was 115.6GB / 121.6GB (0.950345)",
        ),
        1,
        relayed=True,
    ),
    Case(
        "ray-heartbeats",
        ("The node with node id: ab has been marked dead because the detector has missed too many heartbeats",),
    ),
    Case("ray-no-placement", raised("RuntimeError: Cannot provide a placement group with specs within 1800 seconds.")),
    Case("ray-auth", raised("ray.exceptions.AuthenticationError: InvalidAuthToken: bad token", ""), 1),
    Case("ray-not-supported", raised("ValueError: current platform cpu does not support ray.")),
    Case("unknown-flag", ("vllm: error: unrecognized arguments: --enable-prompt-tokens-details",)),
    Case("bad-flag", ("vllm serve: error: argument --kv-cache-dtype: invalid choice: 'fp9'",)),
    Case(
        "does-not-divide",
        raised(
            "ValueError: Total number of attention heads (64) must be divisible by tensor parallel size (3).",
            "(APIServer pid=9) ",
        ),
    ),
    Case(
        "context-too-long",
        by_worker(
            "ValueError: To serve at least one request with the model's max seq len (262144), (23.25 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (22.5 GiB). Based on the available memory, "
            "the estimated maximum model length is 253440. Try increasing `gpu_memory_utilization`"
        ),
        1,
        relayed=True,
    ),
    Case("no-cache-blocks", raised("ValueError: No available memory for the cache blocks. Try increasing"), 0),
    Case("out-of-memory", by_worker("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate"), 1, relayed=True),
    Case("start-timeout", raised("TimeoutError: Timed out waiting for engines to send initial message")),
    Case("rpc-timeout", raised("TimeoutError: RPC call to sample_tokens timed out.")),
    Case("no-compiler", raised("InductorError: RuntimeError: No working C++ compiler found in torch._inductor")),
    Case("model-path", raised("huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name'")),
    Case("port-in-use", raised("OSError: [Errno 98] Address already in use", "(APIServer pid=9) ")),
    Case("layouts-differ", raised("AssertionError: Workers disagree on supported KV cache layouts: [['A'], ['B']].")),
    Case("crashed", ("!!!!!!! Segmentation fault encountered !!!!!!!",), 1),
    Case(
        "architecture-unknown",
        raised(
            "ValueError: The checkpoint has model type `qwen3_5_moe` but Transformers "
            "does not recognize this architecture."
        ),
    ),
    Case("ptx-version", by_worker("torch.AcceleratorError: cudaErrorUnsupportedPtxVersion: the provided PTX"), 1, True),
    Case("kernels-missing", by_worker("RuntimeError: Failed to open: /opt/x/sm121_fp8_mqa_logits.cuh"), 1, True),
    Case("operators-twice", raised("RuntimeError: operator torchvision::nms does not exist")),
    Case(
        "weights-incomplete", by_worker("ValueError: Weight files referenced in index but missing: {'l-22'}"), 1, True
    ),
    Case(
        "weights-incomplete", by_worker("SafetensorError: Error while deserializing header: EOF while parsing"), 1, True
    ),
]
"""The lines are those of the reports, shortened."""
BY_THE_SUPERVISOR = {"killed-for-memory", "empty-answer", "no-executable"}
"""Told by the supervisor itself, not by a log: see below."""


def noise(rng: random.Random, count: int) -> Iterator[str]:
    """What healthy ranks print, tracebacks that do no harm included."""
    kinds = [
        ("(EngineCore pid=10) INFO 04-20 18:08:01 [loader.py:1] Loading safetensors checkpoint shards: 3/41",),
        ("(EngineCore pid=10) (RayWorkerProc pid=285, ip=192.168.200.13) INFO 04-20 18:08:02 [x.py:2] all good",),
        ("(APIServer pid=9) WARNING 04-20 18:08:02 [importing.py:30] Triton is not installed",),
        (
            "(APIServer pid=9) WARNING 04-20 18:08:02 [importing.py:30] Traceback (most recent call last):",
            '(APIServer pid=9) WARNING 04-20 18:08:02 [importing.py:30]   File "importing.py", line 3, in <module>',
            "(APIServer pid=9) WARNING 04-20 18:08:02 [importing.py:30] ModuleNotFoundError: No module named 'kernels'",
        ),
        ("spark-a:10:20 [0] NCCL INFO Channel 00/02 : 0 1",),
        ("2026-01-01 00:00:00,123\tINFO worker.py:1852 -- Connecting to existing Ray cluster",),
        ("Exception ignored in: <function x at 0x7f>", TRACE, '  File "x.py", line 1', "RuntimeError: shutting down"),
        ('INFO:     127.0.0.1:5000 - "GET /health HTTP/1.1" 200 OK',),
    ]
    printed = 0
    while printed < count:
        chosen = rng.choice(kinds)
        printed += len(chosen)
        yield from chosen


def log_of(rng: random.Random, error: tuple[str, ...], afterwards: tuple[str, ...]) -> list[Line]:
    """Noise, the error somewhere in it, what follows from it, and noise again."""
    before = list(noise(rng, rng.randrange(NOISE_LINES // 2, NOISE_LINES)))
    text = [*before, *error, *noise(rng, 300), *afterwards, *noise(rng, 200)]
    return [Line(1000.0 + number / 100, "vllm", line) for number, line in enumerate(text)]


HEAD_AFTERWARDS = (
    *raised("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}", ""),
    *raised("ray.exceptions.ActorHandleNotFoundError: created in job 01000000, but the current job is 02000000"),
    *raised("RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
)
PEER_AFTERWARDS = raised("torch.distributed.DistBackendError: recvValue failed: Connection was likely closed", "")


def account(error: FirstError | None) -> dict[str, Any] | None:
    return error.as_json() if error else None


def failed(rank: int, error: dict[str, Any] | None) -> RankState:
    status = {
        "phase": "failed",
        "first_error": error,
        "generation": {"head_incarnation": "h", "n": 1},
        "ranks": {str(number): {"address": address} for number, address in ADDRESSES.items()},
        "exit_codes": {"vllm": 1},
    }
    return RankState(("spark-a", "spark-b")[rank], rank, "id", True, 0, False, "2026-01-01T00:00:00Z", status)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.code)
def test_a_known_error_is_told_with_cause_and_node_among_noise(case: Case) -> None:
    rng = random.Random(case.code + case.lines[0])  # noqa: S311 (to be repeated)
    in_head = case.rank == 0 or case.relayed
    found = {}
    for rank in (0, 1):
        own = case.lines if (rank == 0) == in_head else ()
        lines = log_of(rng, own, HEAD_AFTERWARDS if rank == 0 else PEER_AFTERWARDS)
        if not own:  # the other rank notices later
            lines = [Line(line.at + 100, line.source, line.text) for line in lines]
        error = find_first_error(lines)
        assert error is not None
        found[rank] = explained(error, lines, case.memlock_unlimited)
    teller = found[0 if in_head else 1]
    assert teller.diagnosis is not None and teller.diagnosis.code == case.code, teller.line
    states = [failed(rank, account(error)) for rank, error in found.items()]
    ranks = [Rank(ScriptedTransport(s.node, lambda _: ""), s.rank, "c", "/state") for s in states]
    told = failure_of(states, ranks)
    assert told is not None
    assert told.where == ("spark-a, rank 0", "spark-b, rank 1")[case.rank]
    assert f"this means: {teller.diagnosis.text}" in told.evidence
    assert teller.diagnosis.do in str(told)
    other = found[1 if in_head else 0]
    assert other.diagnosis is None or other.diagnosis.code in ("peer-gone", "ray-old-session")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("vllm ended with signal 9; the kernel has killed 1 process(es) of this node for memory meanwhile",
         "killed-for-memory"),
        ("vllm answered /health with 200, but the completion came back empty: neither content nor reasoning",
         "empty-answer"),
        ("cannot start `ray` in this image: No such file or directory", "no-executable"),
    ],
)  # fmt: skip
def test_what_the_supervisor_says_itself_is_diagnosed_too(line: str, code: str) -> None:
    found = diagnose(line)
    assert found is not None and found.code == code


def test_every_row_of_the_table_has_a_case() -> None:
    causes = {signature.code for signature in SIGNATURES if signature.kind == "cause"}
    shown = {case.code for case in CASES} | BY_THE_SUPERVISOR
    assert causes - shown == {"memory-not-registered"}  # becomes memlock or memory-pinned


def test_hints_explain_a_start_that_stands_still() -> None:
    lines = [
        "spark-b:285:312 [0] NCCL INFO Using network Socket",
        "[W1] Unable to resolve hostname to a (local) address. Using the loopback address as fallback.",
        "WARNING [x.py:1] CustomAllreduce is disabled because this process group spans across nodes.",
        "The object store is using /tmp instead of /dev/shm because /dev/shm has only 67108864 bytes available.",
        "INFO 04-20 [ray_utils.py:1] Waiting for creating a placement group of specs for 160 seconds.",
    ]
    rng = random.Random(1)  # noqa: S311
    text = [*noise(rng, 2000), *lines, *noise(rng, 2000), *lines]
    codes = [hint.code for hint in hints(text)]
    assert codes == ["rdma-not-used", "name-is-loopback", "spans-nodes", "ray-store-on-disk", "ray-placement-waits"]
    assert find_first_error([Line(1.0, "vllm", line) for line in text]) is None


def test_noise_alone_is_no_error() -> None:
    rng = random.Random(2)  # noqa: S311
    assert find_first_error([Line(1.0, "vllm", line) for line in noise(rng, NOISE_LINES)]) is None


def test_only_what_no_second_try_can_cure_is_hopeless() -> None:
    assert is_hopeless("vllm: error: unrecognized arguments: --x")
    assert not is_hopeless("torch.OutOfMemoryError: CUDA out of memory")
    assert not is_hopeless("RuntimeError: Connection closed by peer")
