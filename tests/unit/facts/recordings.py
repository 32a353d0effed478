"""The recorded outputs, and every parser of facts under a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from spark_core.facts.answer import Answer
from spark_core.facts.clock import parse_clock
from spark_core.facts.containers import parse_containers
from spark_core.facts.disks import parse_df, parse_disks
from spark_core.facts.docker import parse_docker_info, parse_docker_version
from spark_core.facts.gpu import parse_clock_units, parse_driver, parse_gpu_processes, parse_gpus, parse_next_boot
from spark_core.facts.listeners import parse_listeners
from spark_core.facts.login import (
    parse_locked_memory,
    parse_login,
    parse_own_addresses,
    parse_remove_ipc,
    parse_sudo,
)
from spark_core.facts.machine import (
    parse_architecture,
    parse_boot_id,
    parse_dgx_release,
    parse_kernel,
    parse_os,
    parse_product,
)
from spark_core.facts.memory import parse_memory

SPARK = Path(__file__).resolve().parents[2] / "fixtures" / "spark"

FOLDERS = (
    "df-h",
    "dgx-release",
    "dmidecode-product-name",
    "docker-info",
    "docker-ps",
    "docker-version",
    "dpkg-l-nvidia-container",
    "fastos-release",
    "free-h",
    "id",
    "lsb-release",
    "lsb_release-a",
    "lscpu",
    "meminfo",
    "nvidia-ctk",
    "nvidia-smi",
    "nvidia-smi-L",
    "nvidia-smi-q",
    "nvidia-smi-query",
    "nvidia-smi-version",
    "os-release",
    "uname-a",
    "uname-m",
)
"""What a node says of itself; the other folders are of its network."""

RECORDINGS = sorted(
    str(path.relative_to(SPARK))
    for pattern in (*(f"{folder}/*" for folder in FOLDERS), "journal/nv*", "journal/docker-*")
    for path in SPARK.glob(pattern)
)

PARSERS: Mapping[str, Callable[[Answer], object]] = {
    "architecture": parse_architecture,
    "kernel": parse_kernel,
    "os": parse_os,
    "dgx": parse_dgx_release,
    "boot": parse_boot_id,
    "product": parse_product,
    "memory": parse_memory,
    "df": lambda answer: parse_df(answer.text),
    "disks": lambda answer: parse_disks(Answer("path /var/lib/docker\n" + answer.text, answer.status)),
    "clock": lambda answer: parse_clock(answer, 1000.0),
    "gpus": parse_gpus,
    "gpu-processes": parse_gpu_processes,
    "groups": lambda answer: parse_gpu_processes(Answer("1, python, 1"), answer),
    "driver": parse_driver,
    "next-boot": parse_next_boot,
    "clock-units": parse_clock_units,
    "docker-version": lambda answer: parse_docker_version(answer.text),
    "docker": parse_docker_info,
    "containers": parse_containers,
    "listeners": parse_listeners,
    "login": parse_login,
    "sudo": parse_sudo,
    "remove-ipc": lambda answer: parse_remove_ipc(answer, Answer(status=1)),
    "logind": lambda answer: parse_remove_ipc(Answer(status=127), answer),
    "own-name": parse_own_addresses,
    "locked-memory": parse_locked_memory,
}


def recorded(name: str) -> str:
    """The text of a recording."""
    return (SPARK / name).read_text()


def heard(name: str, status: int = 0) -> Answer:
    """A recording as the answer of a node."""
    return Answer(recorded(name), status)
