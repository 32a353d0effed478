"""What is wrong with one node, from its facts: Docker, the machine, and who already uses it. Pure."""

from __future__ import annotations

import ipaddress

from spark_core.facts import FactsSpec, NodeFacts, Unread, known
from spark_core.facts.docker import Docker, docker_problem
from spark_core.facts.gpu import NoGpu
from spark_core.findings import Finding
from spark_core.preflight.in_use import in_use_findings, ports_of
from spark_core.privilege import root_commands
from spark_core.settings import NodeSettings, Settings

MINIMUM_FREE_BYTES = 2_000_000_000
_BAD_DRIVERS = {"590": "580.x: 590.x hangs in CUDA graph capture on GB10 (eugr/spark-vllm-docker)"}
"""By the first number of their version, what to use instead and why."""
_OUR_UNITS = "spark-vllm"


def facts_spec(settings: Settings, stack: str, node: NodeSettings) -> FactsSpec:
    """What to ask a node, so that its findings can be told."""
    return FactsSpec(
        paths=(settings.root_of(node),),
        ports=tuple(ports_of(settings, node)),
        sysctls=tuple(sorted(settings.host.parameters)),
        gpu=settings.hardware == "spark",
        programs=tuple(sorted(_programs(settings, stack, node))),
    )


def _programs(settings: Settings, stack: str, node: NodeSettings) -> dict[str, str]:
    """The programs that the node must have, beside a shell's own, and what each is for."""
    as_root = {cmd.argv[0]: "what is done as root" for cmd in root_commands(settings, stack, node)}
    ranks = any(node.name in group.nodes for group in settings.groups.values())
    own = {"python3": "weights and the proof of the fabric"} if ranks or settings.host.memory_floor_mib else {}
    return {"flock": "the journal"} | as_root | own


def node_findings(
    settings: Settings, stack: str, node: NodeSettings, facts: NodeFacts, *, sudo_password: bool = True
) -> list[Finding]:
    """What is wrong with one node; what our own group uses of it is not.

    Args:
        sudo_password: Whether the settings have a password for sudo.
    """
    findings = [
        Finding("fact-unreadable", node.name, unread.line, "what depends on it was not checked")
        for unread in facts.unread
    ]
    problem = docker_problem(node.name, facts.docker)
    if problem:
        findings.append(problem)
    findings += _host(settings, stack, node, facts)
    findings += _sudo(settings, stack, node, facts, sudo_password)
    if settings.hardware == "spark":
        findings += _spark(node, facts)
        if isinstance(facts.docker, Docker):
            findings += _docker_of_spark(settings, node, facts.docker, facts)
    return findings + in_use_findings(settings, stack, node, facts)


def _host(settings: Settings, stack: str, node: NodeSettings, facts: NodeFacts) -> list[Finding]:
    findings = [
        Finding(
            "disk-space",
            f"{node.name} (node_root)" if settings.root_of(node) in disk.paths else f"{node.name}, docker",
            f"expected {MINIMUM_FREE_BYTES / 1e9:.0f} GB of free space on {disk.mount} (for {', '.join(disk.paths)}), "
            f"found {disk.free_bytes / 1e9:.1f} GB",
            "free some space on that disk",
        )
        for disk in known(facts.disks) or ()
        if disk.free_bytes < MINIMUM_FREE_BYTES
    ]
    findings += [
        Finding(
            "sysctl-missing",
            f"{node.name} (host.sysctls)",
            f"expected the kernel parameter {name}, found none of that name",
            "correct the name; a module that is not loaded has no parameters yet",
        )
        for name in known(facts.missing_sysctls) or ()
    ]
    uses = _programs(settings, stack, node)
    findings += [
        Finding(
            "program-missing",
            node.name,
            f"expected the program {name} (for {uses.get(name, 'the settings')}), found none",
            "install it, or leave out the settings that need it",
        )
        for name in known(facts.missing_programs) or ()
    ]
    addresses = known(facts.own_addresses) or ()
    if len(settings.nodes) > 1 and addresses and ipaddress.ip_address(addresses[0]).is_loopback:
        findings.append(
            Finding(
                "hostname-loopback",
                node.name,
                f"expected the node's own name to resolve to an address that other nodes reach, found {addresses[0]}",
                "give the name its management address in /etc/hosts; programs that look themselves up tell others "
                "the address that they find",
            )
        )
    return [*findings, *_remove_ipc(settings, node, facts), *_other_clock_units(settings, node, facts)]


def _sudo(settings: Settings, stack: str, node: NodeSettings, facts: NodeFacts, password: bool) -> list[Finding]:
    login = known(facts.login)
    can = facts.sudo == "free" or isinstance(facts.sudo, Unread) or (facts.sudo == "asks" and password)
    if can or login is None or login.uid == 0:
        return []
    needs = root_commands(settings, stack, node)
    if not needs:
        return []
    return [
        Finding(
            "sudo-refused",
            f"{node.name} (sudo_password)",
            f"expected root for {len(needs)} commands of the settings, found "
            + {"asks": "that sudo asks for a password", "tty": "that sudo wants a terminal (requiretty)"}.get(
                str(facts.sudo), "no sudo"
            ),
            f"`Defaults:{node.user} !requiretty` in its sudoers lets the deploy user do without"
            if facts.sudo == "tty"
            else "set the secret sudo_password (or sudo_password_file), or allow the commands in sudoers "
            "(`python -m automation sudoers` prints the lines)",
        )
    ]


def _remove_ipc(settings: Settings, node: NodeSettings, facts: NodeFacts) -> list[Finding]:
    login, present = known(facts.login), known(facts.present)
    if facts.remove_ipc is not True or login is None or login.is_system or present is None or "linger" in present:
        return []
    if settings.host.remove_ipc is False:
        return []  # up sets it
    # Our containers have a /dev/shm of their own, which logind never sees; only a mount of the host's is in danger.
    mounts = [
        mount.source for group in settings.groups.values() if node.name in group.nodes for mount in group.serving.mounts
    ]
    shared = [source for source in mounts if f"{source}/".startswith("/dev/shm/")]  # noqa: S108
    return [
        Finding(
            "remove-ipc",
            f"{node.name} (serving.mounts)" if shared else node.name,
            f"expected shared memory to outlive logins, found RemoveIPC=yes: what {login.user} has in /dev/shm is "
            "removed at its last logout",
            f"set host.remove_ipc: false, or `sudo loginctl enable-linger {login.user}`",
            told_as=None if shared else "ignore",
        )
    ]


def _other_clock_units(settings: Settings, node: NodeSettings, facts: NodeFacts) -> list[Finding]:
    others = [unit for unit in known(facts.clock_units) or () if not unit.startswith(_OUR_UNITS)]
    if not others:
        return []
    return [
        Finding(
            "clock-cap-elsewhere",
            f"{node.name} (host.gpu_clock_cap_mhz)",
            f"expected GPU clocks to be set by nobody else, found {', '.join(others)}",
            "whichever unit starts last decides: disable that one, or leave the setting out",
            told_as="ignore" if settings.host.gpu_clock_cap_mhz is None else None,
        )
    ]


def _spark(node: NodeSettings, facts: NodeFacts) -> list[Finding]:
    findings = []
    if not isinstance(facts.architecture, Unread) and facts.architecture != "arm64":
        findings.append(
            Finding(
                "architecture",
                f"{node.name} (hardware)",
                f"expected a DGX Spark (arm64), found {facts.architecture}",
                "correct management_address, or set hardware: cpu for hosts without GPU",
            )
        )
    findings += _gpu(node, facts)
    boot = known(facts.next_boot)
    if boot is not None and not boot.module:
        findings.append(
            Finding(
                "driver-next-boot",
                node.name,
                f"expected an nvidia module for {boot.kernel}, which the next boot starts, found none",
                f"install linux-modules-nvidia for {boot.kernel} before a reboot (kernel and driver are phased apart)",
            )
        )
    memory = known(facts.memory)
    if memory and memory.cma_total_bytes is not None and (memory.cma_free_bytes or 0) > memory.cma_total_bytes:
        findings.append(
            Finding(
                "memory-cma",
                node.name,
                f"expected CmaFree below CmaTotal ({_mib(memory.cma_total_bytes)}), "
                f"found {_mib(memory.cma_free_bytes or 0)}",
                "reboot if memory registrations fail with ENOMEM (eugr/spark-vllm-docker#392)",
            )
        )
    return findings


def _gpu(node: NodeSettings, facts: NodeFacts) -> list[Finding]:
    if isinstance(facts.gpus, NoGpu):
        if facts.gpus.installed and facts.driver is None:
            boot = known(facts.next_boot)
            cure = f"; a reboot starts {boot.kernel}, which has one" if boot and boot.module else ""
            return [
                Finding(
                    "driver-not-loaded",
                    node.name,
                    f"expected the NVIDIA driver in the running kernel {known(facts.kernel) or ''}, found none "
                    f"({facts.gpus.found})",
                    f"install linux-modules-nvidia for the running kernel{cure}",
                )
            ]
        return [
            Finding(
                "gpu-missing",
                node.name,
                f"expected a GPU from nvidia-smi, found none ({facts.gpus.found})",
                "`nvidia-smi` and `sudo dmesg | grep NVRM` on that node tell more; a driver that was updated needs a "
                "reboot; hosts without GPU need hardware: cpu",
            )
        ]
    if not isinstance(facts.gpus, tuple):
        return []
    bad = [(gpu, _BAD_DRIVERS.get(gpu.driver.partition(".")[0])) for gpu in facts.gpus]
    return [
        Finding(
            "driver-known-bad", node.name, f"expected a driver that is known to work, found {gpu.driver}", f"use {use}"
        )
        for gpu, use in bad
        if use
    ]


def _docker_of_spark(settings: Settings, node: NodeSettings, docker: Docker, facts: NodeFacts) -> list[Finding]:
    findings = []
    where = f"{node.name}, docker"
    present = known(facts.present)
    if present is not None:
        described = any(device.startswith("nvidia.com/gpu") for device in docker.cdi_devices) or (
            bool(docker.cdi_directories) and "nvidia-cdi" in present
        )
        # --gpus needs no runtime of that name: the daemon finds the hook by itself, or takes the device description.
        if "nvidia" not in docker.runtimes and not described and "nvidia-container-runtime-hook" not in present:
            findings.append(
                Finding(
                    "docker-runtime-missing",
                    where,
                    f"expected the nvidia runtime or a CDI device, found the runtimes {', '.join(docker.runtimes)} "
                    "and no description of a GPU",
                    "`sudo nvidia-ctk runtime configure --runtime=docker`, then restart Docker"
                    if "nvidia-ctk" in present
                    else "install nvidia-container-toolkit, then restart Docker",
                )
            )
    if docker.cgroup_driver == "systemd" and settings.host.docker_cgroup_driver is None:
        findings.append(
            Finding(
                "docker-cgroup-driver",
                where,
                "expected the cgroup driver cgroupfs, found systemd: any `systemctl daemon-reload` takes the GPU from "
                "running containers",
                "set host.docker_cgroup_driver: cgroupfs (up then restarts Docker), or to systemd to leave it so",
            )
        )
    locked = known(facts.locked_memory)
    # Without root's rights in the first user namespace a daemon cannot lift a limit, whatever its capabilities say.
    if locked and locked.limit_bytes is not None and (docker.rootless or not locked.may_raise):
        findings.append(
            Finding(
                "memlock-limit",
                where,
                "expected a Docker daemon that can give containers unlimited locked memory, found one that is limited "
                f"to {locked.limit_bytes} bytes itself and may not go above that",
                "run Docker as root, with LimitMEMLOCK=infinity; RDMA registers memory that must stay in place",
            )
        )
    return findings


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
