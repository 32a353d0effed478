"""Parsers of what no recording shows: memory areas, disks, the clock, the driver, ports, the login."""

from __future__ import annotations

import pytest

from spark_core.facts.answer import Answer, Unread, excerpt, version_in
from spark_core.facts.clock import ClockOffset, certain_skew_s, parse_clock
from spark_core.facts.disks import Disk, parse_disks
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
from spark_core.facts.listeners import Listener, listener_filter, parse_listeners
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

ID = "ab12" * 16
ABSENT = Answer(status=127)
HEAD = "Filesystem 1-blocks Used Available Capacity Mounted on\n"


@pytest.mark.parametrize(
    ("text", "architecture"),
    [
        ("Linux x86_64 6.1.0-18-amd64 #1 SMP Debian 6.1.76-1 (2024-02-01) x86_64 GNU/Linux", "amd64"),
        ("Linux aarch64 6.8 #1 SMP x86_64 GNU/Linux", "amd64"),
        ("x86_64", "amd64"),
        ("ppc64le", "ppc64le"),
        ("armv7l", "armv7l"),
    ],
)
def test_the_architecture_is_in_docker_s_words_whatever_the_host_is_called(text: str, architecture: str) -> None:
    assert parse_architecture(Answer(text)) == architecture


def test_the_kernel_is_the_release_and_not_the_build() -> None:
    assert parse_kernel(Answer("Linux host 6.1.0-18-amd64 #1 SMP Debian 6.1.76-1 x86_64 GNU/Linux")) == "6.1.0-18-amd64"
    assert parse_kernel(Answer("Darwin host 23.1 x")) == Unread("the kernel release", "uname", "Darwin host 23.1 x")


def test_files_that_do_not_exist_are_absent_and_not_unreadable() -> None:
    for parse in (parse_os, parse_dgx_release, parse_boot_id, parse_product, parse_driver, parse_next_boot):
        assert parse(ABSENT) is None
    assert (parse_locked_memory(ABSENT), parse_sudo(ABSENT), parse_own_addresses(ABSENT)) == (None, None, None)


def test_what_is_unreadable_is_one_line() -> None:
    fact = parse_os(Answer("cat: /etc/os-release: Permission denied\n", 1))
    assert isinstance(fact, Unread)
    assert fact.line == (
        "could not read the operating system from /etc/os-release, found: cat: /etc/os-release: Permission denied"
    )
    for status, found in ((None, "no answer"), (-1, "an answer that is cut off"), (124, "no answer in time")):
        assert parse_kernel(Answer("", status)) == Unread("the kernel release", "uname", found)
    assert parse_memory(ABSENT) == Unread("the memory", "/proc/meminfo", "no such program or file")


def test_an_excerpt_is_short_and_printable() -> None:
    assert excerpt("\n \x1b[31m a\tb\x00 \nc") == "?[31m a b?"
    assert len(excerpt("x" * 500)) == 100
    assert excerpt(" \n") == "nothing"


@pytest.mark.parametrize(
    ("text", "version"),
    [("580.142", "580.142"), ("v1.2", None), ("a 1.2.3 4.5", "1.2.3"), ("1", None), ("1.2.x", None), ("", None)],
)
def test_a_version_is_dotted_and_stands_alone(text: str, version: str | None) -> None:
    assert version_in(text) == version


def test_a_machine_that_never_had_an_update_runs_what_it_was_built_with() -> None:
    assert parse_dgx_release(Answer('DGX_NAME="DGX Spark"\nDGX_SWBUILD_VERSION="7.2.3"\n')) == DgxRelease(
        "DGX Spark", None, "7.2.3", "7.2.3"
    )
    assert isinstance(parse_dgx_release(Answer('DGX_NAME="DGX Spark"')), Unread)


def test_the_boot_id_and_the_product() -> None:
    assert parse_boot_id(Answer("3f0d9d1e-1111-4222-8333-444444444444\n")) == "3f0d9d1e-1111-4222-8333-444444444444"
    assert isinstance(parse_boot_id(Answer("3f0d9d1e")), Unread)
    assert parse_product(Answer("NVIDIA_DGX_Spark\n")) == "NVIDIA_DGX_Spark"
    assert isinstance(parse_product(Answer("a\nb")), Unread)


def test_memory_with_swap_and_the_contiguous_area() -> None:
    lines = [
        "MemTotal: 100",
        "MemFree: 10",
        "MemAvailable: 60",
        "SwapTotal: 16",
        "SwapFree: 8",
        "CmaTotal: 4",
        "CmaFree: 5",
    ]
    assert parse_memory(Answer("".join(f"{line} kB\n" for line in lines))) == Memory(
        100 * 1024, 60 * 1024, 10 * 1024, 16 * 1024, 8 * 1024, 4 * 1024, 5 * 1024
    )


@pytest.mark.parametrize(
    "text",
    [
        "MemTotal: 100 kB",
        "MemAvailable: 1 kB",
        "MemTotal: 100 kB\nMemAvailable: 101 kB",
        "MemTotal: 0 kB\nMemAvailable: 0 kB",
    ],
)
def test_memory_that_cannot_be_is_not_believed(text: str) -> None:
    assert isinstance(parse_memory(Answer(text)), Unread)


def test_two_disks_are_two_and_file_systems_without_a_device_are_told_apart_by_their_place() -> None:
    text = (
        f"path /a\n{HEAD}/dev/sda1 100 40 60 40% /\npath /b\n{HEAD}overlay 200 0 200 0% /b\n"
        f"path /c\n{HEAD}overlay 300 0 300 0% /c d\npath /e\n{HEAD}/dev/sda1 100 40 60 40% /e\n"
    )
    assert parse_disks(Answer(text)) == (
        Disk("/dev/sda1", "/", 100, 60, ("/a", "/e")),
        Disk("overlay", "/b", 200, 200, ("/b",)),
        Disk("overlay", "/c d", 300, 300, ("/c",)),
    )


def test_a_disk_that_df_cannot_tell_is_named() -> None:
    text = f"path /a\n{HEAD}/dev/sda1 100 40 60 40% /\npath /mnt\ndf: /mnt: Stale file handle\n"
    assert parse_disks(Answer(text)) == Unread("the free space of /mnt", "df", "df: /mnt: Stale file handle")


def test_the_clock_lies_between_two_bounds_however_slow_the_round_trip() -> None:
    # Asked at 100 by the controller, whose clock is right; the node is 5 s ahead; 1 s to it, 2 s there, 3 s back.
    assert parse_clock(Answer("100.000000 106.000000000\n108.000000000"), 106.0) == ClockOffset(2.0, 6.0)
    assert isinstance(parse_clock(Answer("100.0 106.0"), 106.0), Unread)
    assert isinstance(parse_clock(Answer("100.0 106.0 999.0"), 106.0), Unread)
    assert isinstance(parse_clock(Answer("100.0 106.0 date: invalid"), 106.0), Unread)


@pytest.mark.parametrize(
    ("one", "other", "skew"),
    [
        (ClockOffset(-1, 1), ClockOffset(-1, 1), 0.0),
        (ClockOffset(-1, 1), ClockOffset(0.5, 9), 0.0),
        (ClockOffset(-1, 1), ClockOffset(4, 5), 3.0),
        (ClockOffset(4, 5), ClockOffset(-1, 1), 3.0),
    ],
)
def test_a_skew_is_what_no_round_trip_can_explain(one: ClockOffset, other: ClockOffset, skew: float) -> None:
    assert certain_skew_s(one, other) == skew


def test_gpus_with_memory_of_their_own_and_with_that_of_the_machine() -> None:
    assert parse_gpus(Answer("NVIDIA GB10, 580.142, [N/A]\n")) == (Gpu("NVIDIA GB10", "580.142"),)
    assert parse_gpus(Answer("NVIDIA H100, 580.142, 81559\nNVIDIA H100, 580.142, 81559 MiB\n")) == (
        Gpu("NVIDIA H100", "580.142", 81559 << 20),
        Gpu("NVIDIA H100", "580.142", 81559 << 20),
    )
    assert parse_gpus(ABSENT) == NoGpu("no nvidia-smi on the PATH of a non-interactive shell", installed=False)
    assert parse_gpus(Answer("", 124)) == Unread("the GPU", "nvidia-smi", "no answer in time")


def test_processes_on_the_gpu_and_the_containers_that_they_run_in() -> None:
    text = "114687, /usr/local/bin/python, 19135\n7, /opt/a, b/server, [N/A]\n"
    groups = f"114687 0::/system.slice/docker-{ID}.scope\n7 12:pids:/user.slice 0::/\n"
    assert parse_gpu_processes(Answer(text), Answer(groups)) == (
        GpuProcess(114687, "/usr/local/bin/python", 19135 << 20, ID),
        GpuProcess(7, "/opt/a, b/server", None, None),
    )
    assert parse_gpu_processes(Answer("")) == ()
    assert parse_gpu_processes(ABSENT) is None
    assert isinstance(parse_gpu_processes(Answer("pid, name\n1, a, 2")), Unread)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.142  Release Build  (x)\nGCC version:",
            "580.142",
        ),
        ("580.159.03\n", "580.159.03"),
    ],
)
def test_the_driver_of_the_running_kernel(text: str, version: str) -> None:
    assert parse_driver(Answer(text)) == version


def test_the_kernel_of_the_next_boot_and_its_module() -> None:
    kernel = "6.17.0-1021-nvidia"
    module = f"{kernel}\n/lib/modules/{kernel}/updates/dkms/nvidia.ko.zst\n"
    assert parse_next_boot(Answer(module)) == NextBoot(kernel, module=True)
    assert parse_next_boot(Answer(f"{kernel}\n")) == NextBoot(kernel, module=False)
    for odd in (Answer(kernel, 124), Answer(f"{kernel}\nfind: permission denied"), Answer("\n")):
        assert isinstance(parse_next_boot(odd), Unread)


def test_units_that_set_clocks_are_told_by_name() -> None:
    assert parse_clock_units(Answer("/etc/systemd/system/b@.service\n/etc/systemd/system/a.service\n", 2)) == (
        "a.service",
        "b@.service",
    )
    assert parse_clock_units(Answer("", 1)) == ()
    assert isinstance(parse_clock_units(Answer("grep: unrecognized option", 2)), Unread)


def test_who_listens_is_told_as_far_as_the_host_shows_it() -> None:
    lines = [
        'LISTEN 0 128 0.0.0.0:30000 0.0.0.0:* users:(("python3",pid=7,fd=3)) uid:1000 ino:1 cgroup:/a.scope <->',
        f"LISTEN 0 4096 *:6379 *:* ino:2 sk:2 cgroup:/system.slice/docker-{ID}.scope v6only:0 <->",
        "LISTEN 0 128 [::]:8000 [::]:* uid:33 ino:3 sk:3 cgroup:/system.slice/nginx.service <->",
        "LISTEN 0 128 127.0.0.1%lo:9000 0.0.0.0:*",
    ]
    assert parse_listeners(Answer("\n".join(lines)), Answer(f"7 3:cpu:/docker/{ID} 0::/")) == (
        Listener(30000, "python3", 1000, container=ID),
        Listener(6379, None, 0, container=ID),
        Listener(8000, None, 33, unit="nginx.service"),
        Listener(9000),
    )
    assert parse_listeners(Answer("")) == ()
    assert parse_listeners(ABSENT) == Unread("the listening ports", "ss", "no such program or file")
    assert listener_filter((1, 2)) == "sport = :1 or sport = :2"


def test_the_login_with_and_without_names() -> None:
    assert parse_login(Answer("uid=0(root) gid=0(root) groups=0(root)")) == Login("root", 0, ("root",))
    login = parse_login(Answer("uid=1001 gid=1001 groups=1001,988(docker)\n"))
    assert login == Login("1001", 1001, ("1001", "docker"))
    assert (Login("root", 0, ()).is_system, Login("user", 1000, ()).is_system) == (True, False)


def test_sudo_is_free_or_asks() -> None:
    assert [parse_sudo(Answer(status=status)) for status in (0, 1)] == ["free", "asks"]
    assert parse_sudo(Answer("sudo: sorry, you must have a tty to run sudo\n", 1)) == "tty"
    assert isinstance(parse_sudo(Answer(status=124)), Unread)


@pytest.mark.parametrize(
    ("bus", "files", "value"),
    [
        (Answer("v b true\n"), Answer("/etc/systemd/logind.conf:RemoveIPC=no\n"), True),
        (Answer("b false\n"), Answer("", 1), False),
        (Answer("Failed to connect to bus: Permission denied", 1), Answer("", 1), True),
        (ABSENT, Answer("", 2), True),
        (ABSENT, Answer("/etc/systemd/logind.conf:RemoveIPC=no"), False),
        (ABSENT, Answer("/etc/systemd/logind.conf:RemoveIPC="), True),
        (ABSENT, Answer("/x/logind.conf.d/a.conf:RemoveIPC=no\n/etc/systemd/logind.conf:RemoveIPC=yes"), False),
        (ABSENT, Answer("/x/logind.conf.d/a.conf:RemoveIPC=no\n/y/logind.conf.d/b.conf: RemoveIPC = on"), True),
        (ABSENT, Answer("/etc/l.conf.d/a.conf:RemoveIPC=no\n/usr/l.conf.d/a.conf:RemoveIPC=yes"), False),
        (ABSENT, Answer("/etc/systemd/logind.conf:RemoveIPC=no\n/etc/systemd/logind.conf:RemoveIPC=yes"), True),
        (ABSENT, ABSENT, None),
        (
            Answer("Call failed: The name org.freedesktop.login1 was not provided by any .service files", 1),
            Answer("", 1),
            None,
        ),
    ],
)
def test_remove_ipc_is_what_logind_uses(bus: Answer, files: Answer, value: bool | None) -> None:
    assert parse_remove_ipc(bus, files) is value


def test_a_value_of_remove_ipc_that_is_none_is_told() -> None:
    line = "/etc/systemd/logind.conf:RemoveIPC=perhaps"
    assert parse_remove_ipc(ABSENT, Answer(line)) == Unread("RemoveIPC", "logind.conf", line)


def test_what_the_node_s_own_name_resolves_to() -> None:
    assert parse_own_addresses(Answer("127.0.1.1       spark-a spark-a.local\n")) == ("127.0.1.1",)
    assert parse_own_addresses(Answer("fe80::1%eth0 spark-a\n10.0.0.1 spark-a")) == ("fe80::1", "10.0.0.1")
    assert parse_own_addresses(Answer("", 2)) is None
    assert isinstance(parse_own_addresses(Answer("getent: unknown database", 1)), Unread)


@pytest.mark.parametrize(
    ("limit", "rights", "found"),
    [
        ("unlimited", "000001ffffffffff", LockedMemory(None, True)),
        ("8388608", "00000000a80425fb", LockedMemory(8388608, False)),
        ("65536", "0000000001000000", LockedMemory(65536, True)),
    ],
)
def test_locked_memory_that_docker_can_give(limit: str, rights: str, found: LockedMemory) -> None:
    text = f"Max locked memory         65536                {limit}            bytes     \nCapEff:\t{rights}\n"
    assert parse_locked_memory(Answer(text)) == found
    assert isinstance(parse_locked_memory(Answer(text.partition("\n")[0])), Unread)
