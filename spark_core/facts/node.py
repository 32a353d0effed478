"""All facts of a node, from the answers to one fragment of a script."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from spark_core.facts.answer import Answer, Fact, Unread, answer_in
from spark_core.facts.clock import ClockOffset, parse_clock
from spark_core.facts.containers import Container, parse_containers
from spark_core.facts.disks import Disk, parse_disks
from spark_core.facts.docker import Docker, DockerProblem, parse_docker_info
from spark_core.facts.gpu import (
    Gpu,
    GpuProcess,
    NextBoot,
    NoGpu,
    parse_clock_units,
    parse_driver,
    parse_gpu_processes,
    parse_gpus,
    parse_next_boot,
)
from spark_core.facts.listeners import Listener, parse_listeners
from spark_core.facts.login import (
    LockedMemory,
    Login,
    parse_locked_memory,
    parse_login,
    parse_own_addresses,
    parse_remove_ipc,
    parse_sudo,
)
from spark_core.facts.machine import (
    DgxRelease,
    parse_architecture,
    parse_boot_id,
    parse_dgx_release,
    parse_kernel,
    parse_os,
    parse_product,
)
from spark_core.facts.memory import Memory, parse_memory
from spark_core.facts.questions import PREFIX, FactsSpec


@dataclass(frozen=True)
class NodeFacts:
    """What a node is and what it does, as it answered.

    Attributes:
        architecture: In Docker's words, such as ``arm64``.
        kernel: Release of the running kernel.
        os: Name of the distribution.
        dgx: The DGX software; None on other machines.
        boot_id: Id of this boot.
        product: The machine's name from its firmware.
        memory: Memory and swap.
        disks: The disks below the paths that were asked for and Docker's folder.
        clock: Offset to the controller's clock.
        gpus: The GPUs; None if none was asked about.
        gpu_processes: Who holds memory of the GPU.
        driver: Version of the driver in the running kernel; None if none is loaded.
        next_boot: The kernel of the next boot.
        clock_units: Units of systemd that set GPU clocks, ours among them.
        docker: The daemon, or what is in the way of using it.
        containers: All containers; None if Docker cannot be used.
        listeners: Who listens on the ports that were asked for.
        login: The deploy user.
        sudo: ``free`` if any command needs no password, ``asks`` for one or refuses, or wants a ``tty``; None without
            sudo.
        remove_ipc: Whether logind removes a user's shared memory at its last logout.
        own_addresses: What the node's own name resolves to.
        locked_memory: What the Docker daemon can give containers.
        present: Which of ``python3``, ``nvidia-ctk``, ``nvidia-container-runtime-hook`` are on the PATH;
            ``nvidia-cdi`` if a device description names a GPU; ``linger`` if the deploy user lingers.
        missing_sysctls: Kernel parameters that were asked for and do not exist.
        missing_programs: Programs that were asked for and are not on the PATH, nor where root has its own.
    """

    architecture: str | Unread
    kernel: str | Unread
    os: Fact[str]
    dgx: Fact[DgxRelease]
    boot_id: Fact[str]
    product: Fact[str]
    memory: Memory | Unread
    disks: tuple[Disk, ...] | Unread
    clock: ClockOffset | Unread
    gpus: tuple[Gpu, ...] | NoGpu | Unread | None
    gpu_processes: Fact[tuple[GpuProcess, ...]]
    driver: Fact[str]
    next_boot: Fact[NextBoot]
    clock_units: Fact[tuple[str, ...]]
    docker: Docker | DockerProblem | Unread
    containers: Fact[tuple[Container, ...]]
    listeners: Fact[tuple[Listener, ...]]
    login: Login | Unread
    sudo: Fact[Literal["free", "asks", "tty"]]
    remove_ipc: Fact[bool]
    own_addresses: Fact[tuple[str, ...]]
    locked_memory: Fact[LockedMemory]
    present: frozenset[str] | Unread
    missing_sysctls: tuple[str, ...] | Unread
    missing_programs: tuple[str, ...] | Unread

    @property
    def unread(self) -> tuple[Unread, ...]:
        """The facts that could not be read."""
        values = [getattr(self, field.name) for field in fields(self)]
        return tuple(value for value in values if isinstance(value, Unread))


def parse_facts(spec: FactsSpec, sections: Mapping[str, str], read_s: float | None = None) -> NodeFacts:
    """The facts from the answers to :func:`facts_fragment`; never raises.

    Args:
        spec: What was asked.
        sections: The sections of the output.
        read_s: The controller's clock when the output had been read; now by default.
    """
    now_s = time.time() if read_s is None else read_s

    def said(name: str) -> Answer:
        return answer_in(sections, f"{PREFIX}{name}")

    docker = parse_docker_info(said("docker"))
    gpu = spec.gpu
    return NodeFacts(
        architecture=parse_architecture(said("machine")),
        kernel=parse_kernel(said("machine")),
        os=parse_os(said("os")),
        dgx=parse_dgx_release(said("dgx")),
        boot_id=parse_boot_id(said("boot")),
        product=parse_product(said("product")),
        memory=parse_memory(said("memory")),
        disks=parse_disks(said("disks")),
        clock=parse_clock(said("clock"), now_s),
        gpus=parse_gpus(said("gpus")) if gpu else None,
        gpu_processes=parse_gpu_processes(said("gpu-processes"), said("groups")) if gpu else None,
        driver=parse_driver(said("driver")) if gpu else None,
        next_boot=parse_next_boot(said("next-boot")) if gpu else None,
        clock_units=parse_clock_units(said("clock-units")),
        docker=docker,
        containers=parse_containers(said("containers")) if isinstance(docker, Docker) else None,
        listeners=parse_listeners(said("listeners"), said("groups")) if spec.ports else None,
        login=parse_login(said("login")),
        sudo=parse_sudo(said("sudo")),
        remove_ipc=parse_remove_ipc(said("remove-ipc"), said("logind")),
        own_addresses=parse_own_addresses(said("own-name")),
        locked_memory=parse_locked_memory(said("locked-memory")) if gpu else None,
        present=_present(said("present")),
        missing_sysctls=_missing(said("sysctls"), spec.sysctls, "which kernel parameters exist", "/proc/sys"),
        missing_programs=_missing(said("programs"), spec.programs, "which programs are there", "the shell"),
    )


def _present(answer: Answer) -> frozenset[str] | Unread:
    return frozenset(answer.lines) if answer.status == 0 else answer.unread("what is on the PATH", "the shell")


def _missing(answer: Answer, asked: tuple[str, ...], fact: str, source: str) -> tuple[str, ...] | Unread:
    missing = tuple(answer.lines)
    return missing if answer.status == 0 and set(missing) <= set(asked) else answer.unread(fact, source)
