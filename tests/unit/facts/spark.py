"""A Spark that is as it should be, as it answers and as facts; with the recorded values where there are any."""

from __future__ import annotations

import json

from spark_core.facts import FactsSpec, NodeFacts, parse_facts
from tests.unit.facts.recordings import recorded

SPEC = FactsSpec(("/home/spark/.spark-vllm",), (30000, 6379, 30001), ("net.core.rmem_max",))
READ_S = 1_000_000.5
ENGINE = {
    "ID": "6f1c7c1e-0000-4000-8000-000000000001",
    "Driver": "overlay2",
    "DriverStatus": [["Backing Filesystem", "extfs"], ["Supports d_type", "true"]],
    "CgroupDriver": "cgroupfs",
    "CgroupVersion": "2",
    "ServerVersion": "29.2.1",
    "Runtimes": {"io.containerd.runc.v2": {"path": "runc"}, "nvidia": {"path": "nvidia-container-runtime"}},
    "DefaultRuntime": "runc",
    "DockerRootDir": "/var/lib/docker",
    "CDISpecDirs": ["/etc/cdi", "/var/run/cdi"],
    "DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}],
    "SecurityOptions": ["name=apparmor", "name=seccomp,profile=builtin", "name=cgroupns"],
}
_DF = "Filesystem 1-blocks Used Available Capacity Mounted on\n/dev/nvme0n1p2 4000000000000 1 3400000000000 3% /\n"
_ANSWERS = {
    "clock": ("1000000.000000 1000000.010000000\n1000000.480000000", 0),
    "machine": (recorded("uname-a/6.17.0-1014.txt"), 0),
    "os": (recorded("os-release/ubuntu-24.04.4.txt"), 0),
    "dgx": (recorded("dgx-release/spark-7.2.3-ota-7.5.0.txt"), 0),
    "boot": ("3f0d9d1e-1111-4222-8333-444444444444", 0),
    "product": ("NVIDIA_DGX_Spark", 0),
    "memory": (
        recorded("meminfo/two-lines-127600748.txt") + "MemFree: 110000000 kB\nCmaTotal: 65536 kB\nCmaFree: 60000 kB",
        0,
    ),
    "login": (recorded("id/user-in-docker-group.txt"), 0),
    "sudo": ("sudo: a password is required", 1),
    "remove-ipc": ("v b false", 0),
    "own-name": ("192.168.1.10    spark-a", 0),
    "logind": ("", 1),
    "clock-units": ("", 1),
    "locked-memory": (
        "Max locked memory         unlimited            unlimited            bytes     \nCapEff:\t000001ffffffffff",
        0,
    ),
    "present": ("python3\nnvidia-ctk\nnvidia-container-runtime-hook", 0),
    "sysctls": ("", 0),
    "programs": ("", 0),
    "listeners": ("", 0),
    "gpus": ("NVIDIA GB10, 580.142, [N/A]", 0),
    "gpu-processes": ("", 0),
    "driver": ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.142  Release Build", 0),
    "next-boot": (
        "6.17.0-1014-nvidia\n/lib/modules/6.17.0-1014-nvidia/kernel/nvidia-580-open/nvidia.ko",
        0,
    ),
    "groups": ("", 0),
    "docker": (json.dumps(ENGINE), 0),
    "containers": ("", 0),
    "disks": (f"path /home/spark/.spark-vllm\n{_DF}path /var/lib/docker\n{_DF}", 0),
}
SECTIONS = {f"f:{name}": f"{text}\n\n--status {status}" for name, (text, status) in _ANSWERS.items()}
"""What such a machine answers."""


def spark() -> NodeFacts:
    """Its facts."""
    return parse_facts(SPEC, SECTIONS, READ_S)
