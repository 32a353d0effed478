"""The GPU, its driver, and the processes that hold its memory.

On GB10 the memory is the machine's own: ``nvidia-smi`` gives none ([N/A]), though what each process holds is told.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from spark_core.facts.answer import NO_ANSWER, Answer, Fact, Unread, excerpt, version_in
from spark_core.facts.containers import containers_by_pid

GPU_FIELDS = ("name", "driver_version", "memory.total")
APP_FIELDS = ("pid", "process_name", "used_memory")

_NO_GPU = re.compile(
    r"no devices were found|NVIDIA-SMI has failed|couldn.t communicate with the NVIDIA driver"
    r"|initialize NVML|nvml error|Unable to determine the device handle",
    re.IGNORECASE,
)
_MIB = re.compile(r"(\d{1,9})( MiB)?", re.ASCII)


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver shows it.

    Args:
        name: Its name, such as ``NVIDIA GB10``.
        driver: Version of the driver.
        memory_bytes: Memory of its own, or None where it shares the machine's.
    """

    name: str
    driver: str
    memory_bytes: int | None = None


@dataclass(frozen=True)
class NoGpu:
    """No GPU answers.

    Args:
        found: What ``nvidia-smi`` says.
        installed: Whether there is an ``nvidia-smi`` at all.
    """

    found: str
    installed: bool = True


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of the GPU.

    Args:
        pid: Its number on the node.
        name: Its program.
        memory_bytes: What it holds, or None if that is not told.
        container: Id of the container that it runs in, or None.
    """

    pid: int
    name: str
    memory_bytes: int | None = None
    container: str | None = None


@dataclass(frozen=True)
class NextBoot:
    """The kernel that the next boot will most likely start.

    Args:
        kernel: Its release.
        module: Whether it has a module of the NVIDIA driver.
    """

    kernel: str
    module: bool


def parse_gpus(answer: Answer, fields: Sequence[str] = GPU_FIELDS) -> tuple[Gpu, ...] | NoGpu | Unread:
    """The GPUs from ``nvidia-smi --query-gpu=FIELDS --format=csv``, with or without a heading and units."""
    if answer.absent:
        return NoGpu("no nvidia-smi on the PATH of a non-interactive shell", installed=False)
    gpus = []
    for row in _rows(answer.text, fields):
        name = row.get("name", row.get("gpu_name", ""))
        driver = version_in(row.get("driver_version", ""))
        if driver and name and name.isprintable():
            gpus.append(Gpu(name, driver, _mib(row.get("memory.total", ""))))
    if gpus:
        return tuple(gpus)
    if not answer.timed_out and _NO_GPU.search(answer.text):
        return NoGpu(excerpt(answer.text))
    return answer.unread("the GPU", "nvidia-smi")


def parse_gpu_processes(
    answer: Answer, groups: Answer = NO_ANSWER, fields: Sequence[str] = APP_FIELDS
) -> Fact[tuple[GpuProcess, ...]]:
    """The processes from ``nvidia-smi --query-compute-apps=FIELDS --format=csv``.

    Args:
        answer: What nvidia-smi said; nothing at all means that there are none.
        groups: The control groups of these processes, from /proc.
        fields: The fields that were asked for.
    """
    if answer.absent or _NO_GPU.search(answer.text):
        return None
    processes, containers = [], containers_by_pid(groups)
    for row in _rows(answer.text, fields):
        pid, name = row.get("pid", ""), row.get("process_name", row.get("name", ""))
        if re.fullmatch(r"\d{1,9}", pid, re.ASCII):
            processes.append(GpuProcess(int(pid), excerpt(name), _mib(row.get("used_memory", "")), containers.get(pid)))
    if answer.status == 0 and len(processes) == len(answer.lines):
        return tuple(processes)
    return answer.unread("the processes on the GPU", "nvidia-smi")


def parse_driver(answer: Answer) -> Fact[str]:
    """Version of the driver in the running kernel, from /proc/driver/nvidia/version or the module's own file."""
    if answer.absent:
        return None
    return version_in(answer.text) or answer.unread("the loaded driver", "/proc/driver/nvidia/version")


def parse_next_boot(answer: Answer) -> Fact[NextBoot]:
    """The kernel of the next boot: a line with its release, and a line with the path of its nvidia module if any."""
    if answer.absent:
        return None
    source = "/boot/vmlinuz and /lib/modules"
    kernel, *rest = answer.lines or [""]
    if not re.fullmatch(r"\d+\.\d+[\w.+~-]*", kernel, re.ASCII) or answer.status != 0:
        return answer.unread("the kernel of the next boot", source)
    if not rest:
        return NextBoot(kernel, module=False)
    if re.search(r"/nvidia\.ko(\.\w+)?$", rest[0]):
        return NextBoot(kernel, module=True)
    return Answer("\n".join(rest)).unread("the kernel of the next boot", source)


def parse_clock_units(answer: Answer) -> Fact[tuple[str, ...]]:
    """Units of systemd that set GPU clocks, from the names of the files that do."""
    # grep: 1 is "none", 2 "a file could not be read".
    files = all(re.fullmatch(r"/[\w@.:\\/-]+\.service", line, re.ASCII) for line in answer.lines)
    if not files or answer.status not in (0, 1, 2):
        return answer.unread("the units that set GPU clocks", "/etc/systemd/system")
    return tuple(sorted({line.rpartition("/")[2] for line in answer.lines}))


def _rows(text: str, fields: Sequence[str]) -> list[dict[str, str]]:
    """Rows by field; a program's name may hold commas, so it takes what is left over."""
    found = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        extra = len(values) - len(fields)
        if extra < 0 or (extra and "process_name" not in fields):
            continue
        place = list(fields).index("process_name") if extra else 0
        merged = [*values[:place], ", ".join(values[place : place + extra + 1]), *values[place + extra + 1 :]]
        found.append(dict(zip(fields, merged, strict=True)))
    return found


def _mib(value: str) -> int | None:
    found = _MIB.fullmatch(value)
    return int(found.group(1)) * 1024**2 if found else None
