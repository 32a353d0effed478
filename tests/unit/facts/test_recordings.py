"""Every recorded output of a real machine, read by the parser that it concerns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from spark_core.facts.answer import Answer, Unread, version_in
from spark_core.facts.containers import launcher_of, parse_containers
from spark_core.facts.disks import Disk, parse_df, parse_disks
from spark_core.facts.docker import Docker, DockerProblem, parse_docker_info, parse_docker_version
from spark_core.facts.gpu import Gpu, GpuProcess, NoGpu, parse_gpu_processes, parse_gpus
from spark_core.facts.login import Login, parse_login
from spark_core.facts.machine import (
    DgxRelease,
    parse_architecture,
    parse_dgx_release,
    parse_kernel,
    parse_os,
    parse_product,
)
from spark_core.facts.memory import Memory, parse_memory
from tests.unit.facts.recordings import RECORDINGS, heard, recorded

MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

CASES: list[tuple[str, Callable[[Answer], object], object]] = [
    (
        "dgx-release/asus-gx10-four-otas-french-date.txt",
        parse_dgx_release,
        DgxRelease("DGX Spark", "GX10", "7.2.3", "7.6.0"),
    ),
    (
        "dgx-release/dell-blank-serial.txt",
        parse_dgx_release,
        DgxRelease("DGX Spark", "Dell Pro Max with GB10 FCM1253", "7.2.3", "7.5.0"),
    ),
    (
        "dgx-release/hp-zgx-unquoted.txt",
        parse_dgx_release,
        DgxRelease("DGX Spark", "HP ZGX Nano G1n AI Station", "7.2.3", "7.5.0"),
    ),
    (
        "dgx-release/spark-7.2.3-ota-7.3.1.txt",
        parse_dgx_release,
        DgxRelease("DGX Spark", "DGX Server for KVM", "7.2.3", "7.3.1"),
    ),
    (
        "dgx-release/spark-7.2.3-ota-7.5.0.txt",
        parse_dgx_release,
        DgxRelease("DGX Spark", "DGX Server for KVM", "7.2.3", "7.5.0"),
    ),
    ("os-release/ubuntu-24.04.4.txt", parse_os, "Ubuntu 24.04.4 LTS"),
    ("uname-a/6.17.0-1014.txt", parse_architecture, "arm64"),
    ("uname-a/6.17.0-1014.txt", parse_kernel, "6.17.0-1014-nvidia"),
    ("meminfo/gx10-total-and-available.txt", parse_memory, Memory(127535084 * 1024, 14386092 * 1024)),
    ("meminfo/two-lines-127600748.txt", parse_memory, Memory(127600748 * 1024, 118566368 * 1024)),
    (
        "df-h/root-3.7t.txt",
        lambda answer: parse_df(answer.text),
        [Disk("/dev/nvme0n1p2", "/", int(3.7 * TIB), int(3.4 * TIB))],
    ),
    (
        "id/user-in-docker-group.txt",
        parse_login,
        Login(
            "user",
            1000,
            ("user", "adm", "sudo", "audio", "dip", "plugdev", "users", "lpadmin", "docker"),
        ),
    ),
    (
        "docker-info/29.2.1-head-40-no-nvidia-runtime.txt",
        parse_docker_info,
        Docker(
            "29.2.1",
            storage_driver="overlay2",
            image_store="classic",
            cgroup_driver="systemd",
            runtimes=("io.containerd.runc.v2", "runc"),
            default_runtime="runc",
            cdi_directories=("/etc/cdi", "/var/run/cdi"),
        ),
    ),
    (
        "nvidia-smi-query/index-name-bus-driver-cc-memory-noheader.txt",
        lambda answer: parse_gpus(
            answer, ("index", "gpu_name", "pci.bus_id", "driver_version", "compute_cap", "memory.total")
        ),
        (Gpu("NVIDIA GB10", "580.142", None),),
    ),
    (
        "nvidia-smi-query/name-computecap-driver.txt",
        lambda answer: parse_gpus(answer, ("name", "compute_cap", "driver_version")),
        (Gpu("NVIDIA GB10", "580.159.03", None),),
    ),
    (
        "nvidia-smi-query/compute-apps-noheader-nounits.txt",
        lambda answer: parse_gpu_processes(answer, fields=("gpu_uuid", "pid", "process_name", "used_memory")),
        (GpuProcess(114687, "/usr/local/bin/python", 19135 * MIB),),
    ),
    (
        "journal/nvidia-smi-cannot-communicate-not-spark.txt",
        parse_gpus,
        NoGpu(
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the la…",
        ),
    ),
    (
        "journal/nvml-driver-not-loaded-spark.txt",
        parse_gpus,
        NoGpu("nvidia-container-cli: initialization error: nvml error: driver not loaded"),
    ),
    (
        "journal/nvml-library-version-mismatch-not-spark.txt",
        parse_gpus,
        NoGpu("Failed to initialize NVML: Driver/library version mismatch"),
    ),
]
PUT_ASIDE: list[tuple[str, Callable[[Answer], object], object]] = [
    (
        "df-h/home-and-docker-same-disk.txt",
        lambda answer: parse_df(answer.text),
        [Disk("/dev/nvme0n1p2", "/", int(3.7 * TIB), int(2.6 * TIB))] * 2,
    ),
    ("dmidecode-product-name/dgx-spark.txt", parse_product, "NVIDIA_DGX_Spark"),
    ("docker-version/server-format.txt", lambda answer: parse_docker_version(answer.text), "29.2.1"),
    (
        "nvidia-smi-query/name-driver-cc-temp-pstate-memory-noheader.txt",
        lambda answer: parse_gpus(
            answer, ("name", "driver_version", "compute_cap", "temperature.gpu", "pstate", "memory.total")
        ),
        (Gpu("NVIDIA GB10", "580.142", None),),
    ),
    ("uname-a/6.17.0-1021.txt", parse_architecture, "arm64"),
    ("uname-a/6.17.0-1021.txt", parse_kernel, "6.17.0-1021-nvidia"),
    ("uname-m/aarch64.txt", parse_architecture, "arm64"),
    (
        "journal/nvidia-smi-no-devices-exit-6.txt",
        lambda answer: parse_gpus(Answer(answer.text, 6)),
        NoGpu("No devices were found"),
    ),
]
"""Of those in HELD_OUT.txt, the ones that the parsers are made for."""
CASES += PUT_ASIDE


@pytest.mark.parametrize(("name", "parse", "value"), CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(CASES)])
def test_a_recording_is_read_as_what_it_shows(name: str, parse: Callable[[Answer], object], value: object) -> None:
    assert parse(heard(name)) == value


UNREADABLE: list[tuple[str, Callable[[Answer], object], str]] = [
    # The same machine, asked by other means than ours: a plain word instead of a guess.
    ("nvidia-smi-query/name-computecap-noheader.txt", parse_gpus, "NVIDIA GB10, 12.1"),
    (
        "nvidia-smi-query/memory-na-with-units.txt",
        parse_gpus,
        "memory.total [MiB], memory.used [MiB], memory.free [MiB], utilization.gpu [%], power.draw [W], temp…",
    ),
    ("nvidia-smi-query/memory-used-total-util-noheader.txt", parse_gpus, "[N/A], [N/A], 0"),
    ("nvidia-smi/580.142-idle.txt", parse_gpus, "Tue May 5 10:44:29 2026"),
    ("nvidia-smi/580.159.03-desktop-display-on.txt", parse_gpus, "Sun Aug 23 17:26:05 2026"),
    ("nvidia-smi/580.82.09-persistence-off-compute-process.txt", parse_gpus, "Fri Oct 3 23:16:52 2025"),
    ("nvidia-smi/580.95.05-idle.txt", parse_gpus, "Wed Oct 22 09:26:54 2025"),
    (
        "nvidia-smi-L/gb10.txt",
        parse_gpus,
        "GPU 0: NVIDIA GB10 (UUID: GPU-11111111-2222-3333-4444-555555555555)",
    ),
    ("nvidia-smi-q/gx10-580.178.04-excerpt.txt", parse_gpus, "==============NVSMI LOG=============="),
    (
        "nvidia-smi-q/version-lines-610-deprecated-notes.txt",
        parse_gpus,
        "Driver Version : 610.57.04 [Deprecated; will be removed]",
    ),
    ("nvidia-smi-version/580.142.txt", parse_gpus, "NVIDIA-SMI version : 580.142"),
    (
        "journal/docker-dev-infiniband-missing.txt",
        parse_gpus,
        "error gathering device information while adding custom device",
    ),
    ("free-h/119gi-variant.txt", parse_memory, "total used free shared buff/cache available"),
    ("free-h/121gi-busy-78gi-used.txt", parse_memory, "total used free shared buff/cache available"),
    ("free-h/121gi-idle.txt", parse_memory, "total used free shared buff/cache available"),
    ("free-h/121gi-idle-2.txt", parse_memory, "total used free shared buff/cache available"),
    ("lsb-release/ubuntu-24.04.3.txt", parse_os, "DISTRIB_ID=Ubuntu"),
    ("lsb_release-a/ubuntu-24.04.4-spaces.txt", parse_os, "No LSB modules are available."),
    ("fastos-release/customer.txt", parse_os, 'NAME="DGX SPARK FASTOS"'),
    ("lscpu/complete-indented.txt", parse_kernel, "Architecture: aarch64"),
    # Put aside while the parsers were written.
    ("nvidia-smi/580.126.09-idle.txt", parse_gpus, "Sun Mar 29 11:02:47 2026"),
    ("nvidia-smi-q/fb-memory-na-580.142-excerpt.txt", parse_gpus, "FB Memory Usage"),
    (
        "journal/nvrm-no-memory-spark.txt",
        parse_gpus,
        "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY]",
    ),
    ("lsb_release-a/ubuntu-24.04.3.txt", parse_os, "No LSB modules are available."),
    ("lscpu/head-25-wide.txt", parse_kernel, "Architecture: aarch64"),
]


@pytest.mark.parametrize(("name", "parse", "found"), UNREADABLE, ids=[case[0] for case in UNREADABLE])
def test_a_recording_of_another_question_is_told_as_found(
    name: str, parse: Callable[[Answer], object], found: str
) -> None:
    fact = parse(heard(name))
    assert isinstance(fact, Unread)
    assert fact.found == found


def test_of_a_whole_table_of_disks_the_root_is_one_row() -> None:
    disks = parse_df(recorded("df-h/root-1tb-gx10.txt"))
    assert len(disks) == 7
    assert [disk for disk in disks if disk.mount == "/"] == [Disk("/dev/nvme0n1p2", "/", 916 * GIB, 835 * GIB)]
    assert next(disk for disk in disks if disk.mount == "/run/lock").free_bytes == 5 * MIB


def test_a_client_s_own_version_is_not_that_of_a_daemon() -> None:
    said = parse_docker_version(recorded("docker-version/cli-one-line.txt"))
    assert said == DockerProblem("docker-down", "no version but: Docker version 29.2.1, build a5c7197")


def test_a_table_of_containers_for_people_is_told_as_found_and_its_names_are_known_launchers() -> None:
    text = recorded("docker-ps/ray-head-and-worker-rows.txt")
    fact = parse_containers(Answer(text))
    assert isinstance(fact, Unread)
    assert fact.line.startswith("could not read the containers from docker ps, found: 6e37814ad34c nvcr.io/nvidia/vllm")
    assert [launcher_of(line.split()[-1]) for line in text.splitlines()] == ["a Ray launcher", "a Ray launcher"]


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("KMD Version : 610.57.04", "610.57.04"),
        ("Driver Version : 610.57.04 [Deprecated; will be removed]", "610.57.04"),
        ("CUDA Version : 13.3 [Deprecated; use CUDA UMD Version instead]", "13.3"),
        ("CUDA UMD Version : 13.3", "13.3"),
        ("GPU 0000000F:01:00.0", None),
    ],
)
def test_notes_after_a_version_are_no_part_of_it(line: str, version: str | None) -> None:
    assert line in recorded("nvidia-smi-q/version-lines-610-deprecated-notes.txt").splitlines()
    assert version_in(line.partition(":")[2] if " : " in line else "") == version


@pytest.mark.parametrize("name", [name for name in RECORDINGS if name.startswith("dgx-release/")])
def test_no_serial_number_is_ever_shown(name: str) -> None:
    lines = [line for line in recorded(name).splitlines() if "VERSION" not in line]
    serials = [line.partition("=")[2].strip('" ') for line in lines if "SERIAL" in line]
    fact = parse_dgx_release(Answer("\n".join([*(line for line in lines if "SERIAL" in line), *lines])))
    assert isinstance(fact, Unread)
    assert all(serial not in fact.line for serial in serials if serial)


def test_the_same_disk_below_two_paths_is_one_disk() -> None:
    table = recorded("df-h/root-3.7t.txt")
    disks = parse_disks(Answer(f"path /home/spark/.spark-vllm\n{table}path /var/lib/docker\n{table}"))
    assert isinstance(disks, tuple)
    assert [(disk.device, disk.paths) for disk in disks] == [
        ("/dev/nvme0n1p2", ("/home/spark/.spark-vllm", "/var/lib/docker"))
    ]


def test_every_recording_has_a_case() -> None:
    covered = {name for name, *_ in [*CASES, *UNREADABLE]} | {
        "df-h/root-1tb-gx10.txt",
        "docker-ps/ray-head-and-worker-rows.txt",
        "docker-version/cli-one-line.txt",
    }
    no_fact_of_ours = {"dpkg-l-nvidia-container", "nvidia-ctk"}
    assert {name for name in RECORDINGS if name not in covered and name.split("/")[0] not in no_fact_of_ours} == set()


def test_what_was_put_aside_was_chosen_by_its_name() -> None:
    listed = [line for line in recorded("HELD_OUT.txt").splitlines() if not line.startswith("#")]
    chosen = [name for name in RECORDINGS if int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 5 == 0]
    assert sorted(listed) == chosen
    assert len(RECORDINGS) / 6 < len(chosen) < len(RECORDINGS) / 4
