"""Causes found in logs. The lines are from public reports of vLLM and Ray, and from runs on CPU."""

from __future__ import annotations

import pytest

from spark_runtime.first_error import bare, find_first_error
from spark_runtime.logs import Line

LAST = (
    "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above."
    " Failed core proc(s): {'EngineCore': 1}"
)


def found(text: str, source: str = "vllm") -> str | None:
    """The cause in a log of one source."""
    lines = [Line(float(number), source, line) for number, line in enumerate(text.splitlines())]
    error = find_first_error([*lines, Line(99.0, "vllm", LAST)] if source == "vllm" else lines)
    return error.line if error else None


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (
            "(EngineCore_DP0 pid=6940) ValueError: Free memory on device cuda:1 (19.77/22.05 GiB) on"
            " startup is less than desired GPU memory utilization (0.9, 19.84 GiB).",
            "ValueError: Free memory on device cuda:1",
        ),
        (
            "(EngineCore_DP0 pid=89) ERROR 04-20 18:08:14 [core.py:1100] ValueError: Cannot provide a"
            " placement group requiring 4.0 GPUs (placement_group_specs=[]) within 1800 seconds.",
            "ValueError: Cannot provide a placement group",
        ),
        ("vllm: error: unrecognized arguments: --enable-x", "vllm: error: unrecognized arguments"),
        ("ValueError: current platform cpu does not support ray.", "ValueError: current platform cpu"),
        (
            "ValueError: To serve at least one request with the model's max seq len (196608), 23.25 GiB",
            "ValueError: To serve at least one request",
        ),
        (
            "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
            "ray.exceptions.OutOfMemoryError: Task",
        ),
        ("RayWorkerProc rank=[1] died unexpectedly, shutting down executor.", "RayWorkerProc rank=[1] died"),
    ],
)
def test_known_causes_are_found_above_the_useless_last_line(line: str, cause: str) -> None:
    noise = "INFO 04-20 18:08:01 [a.py:1] ValueError: not one\nloading\n"
    assert (found(noise + line + "\nmore") or "").startswith(cause)


def test_the_last_line_is_named_only_when_there_is_nothing_else() -> None:
    assert (found("all well") or "").startswith("RuntimeError: Engine core initialization failed")
    assert found("all well", source="ray") is None
    assert found("", source="ray") is None


def test_interleaved_tracebacks_are_kept_apart() -> None:
    text = """\
(Worker_TP0 pid=2) ERROR 04-20 18:08:14 [w.py:1] Traceback (most recent call last):
(Worker_TP1 pid=3) ERROR 04-20 18:08:14 [w.py:1] Traceback (most recent call last):
(Worker_TP0 pid=2) ERROR 04-20 18:08:14 [w.py:1]   File "a.py", line 1, in f
(APIServer pid=1) INFO 04-20 18:08:14 [x.py:1] Done: yes
(Worker_TP1 pid=3) ERROR 04-20 18:08:14 [w.py:1] torch.OutOfMemoryError: CUDA out of memory.
(Worker_TP0 pid=2) ERROR 04-20 18:08:14 [w.py:1] RuntimeError: second"""
    assert found(text) == "torch.OutOfMemoryError: CUDA out of memory."


def test_a_chain_of_exceptions_starts_with_its_cause() -> None:
    text = """\
Traceback (most recent call last):
  File "a.py", line 1, in f
ModuleNotFoundError: No module named 'torchvision'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 1, in g
ValueError: Model architectures ['Qwen3_5MoeForConditionalGeneration'] failed to be inspected"""
    assert found(text) == "ModuleNotFoundError: No module named 'torchvision'"


def test_harmless_tracebacks_are_noise() -> None:
    text = """\
WARNING 04-20 18:08:02 [importing.py:30] Traceback (most recent call last):
WARNING 04-20 18:08:02 [importing.py:30]   File "importing.py", line 3, in <module>
WARNING 04-20 18:08:02 [importing.py:30] ModuleNotFoundError: No module named 'optional'
Exception ignored in: <function Pool.__del__ at 0x7f>
Traceback (most recent call last):
  File "pool.py", line 271, in __del__
ResourceWarning: unclosed running multiprocessing pool
(EngineCore pid=3) ERROR 04-20 18:08:02 [core.py:1] something is wrong
KeyError: 'but this line belongs to no traceback'"""
    assert found(text) == "something is wrong"


def test_a_version_mismatch_of_ray_is_found_in_ray() -> None:
    text = """\
Traceback (most recent call last):
  File "/usr/lib/ray/_private/node.py", line 1, in check_version_info
RuntimeError: Version mismatch: The cluster was started with:
    Ray: 2.59.0
    Python: 3.12.3"""
    assert found(text, source="ray") == "RuntimeError: Version mismatch: The cluster was started with:"


def test_rays_long_story_of_a_dead_worker_is_told_in_short() -> None:
    text = (
        "(raylet) A worker died or was killed while executing a task by an unexpected system error. To"
        " troubleshoot the problem, check the logs for the dead worker. Lease ID: 02 Worker ID: 6 Node ID: 2"
        " Worker IP address: 10.77.0.2 Worker port: 11568 Worker PID: 144 Worker exit type: SYSTEM_ERROR"
        " Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file."
        " Some common causes include: (1) SIGSEGV"
    )
    assert found(text) == (
        "a Ray worker process died on 10.77.0.2: Worker unexpectedly exits with a connection error code 2. End of file."
    )


def test_our_own_lines_are_no_causes() -> None:
    assert found("failed: out of memory", source="supervisor") is None
    assert found("Traceback (most recent call last):\nConnectionError: no", source="ray-probe") is None


def test_the_surroundings_and_the_end_are_shown() -> None:
    lines = [Line(float(n), "vllm", f"line {n}") for n in range(100)]
    lines[50] = Line(50.0, "vllm", "CUDA error: an illegal memory access")
    error = find_first_error(lines, context=2, last=3)
    assert error is not None and error.at == 50.0
    assert error.lines == ["line 48", "line 49", "CUDA error: an illegal memory access", "line 51", "line 52"]
    assert error.last_lines == ["vllm | line 97", "vllm | line 98", "vllm | line 99"]
    shown = {"at", "source", "line", "lines", "last_lines", "address", "diagnosis", "hints"}
    assert set(error.as_json()) == shown


def test_prefixes_are_split_off() -> None:
    line = "(EngineCore_DP0 pid=1) (RayWorkerWrapper pid=2, ip=192.0.2.1) ERROR 02-05 23:19:21 [a.py:12]   text"
    assert bare(line) == ("(EngineCore_DP0 pid=1)(RayWorkerWrapper pid=2, ip=192.0.2.1)", "ERROR", "  text")
    assert bare("2025-04-29 13:37:11,525 ERROR scripts.py:904 -- text") == ("", "ERROR", "text")
    assert bare("(pid=252) text") == ("(pid=252)", "", "text")
    assert bare("plain (text)") == ("", "", "plain (text)")
