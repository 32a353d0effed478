"""Declared tuning against the real systemd, logind, sudo and Docker of two emulated hosts.

The GPU's clock is a stand-in that notes what it is told; swap, panics, limits and the watchdog belong to the machine
that holds the hosts and are left to the unit tests. The lab is one of its own, `t-tuning`; it needs root on Linux and
some minutes.

To clean up after an aborted run: ``python -m lab down --instance t-tuning``.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lab import instance, paths
from lab.host import Host
from spark_core.errors import CommandError, UnreachableError
from spark_core.journal import close_journal, open_journal, read_journal
from spark_core.privilege import sudoers_text
from spark_core.settings import Settings, read_settings
from spark_core.transport.base import Command, Result, command
from spark_core.transport.connection import ConnectionSpec, resolve
from spark_core.transport.ssh import SshTransport
from spark_core.tuning import Place, Tuning, apply_tuning, observe_tuning, place_of, tuning_of, values_of
from tests.config_cases import apply_change, load_base
from tests.lab.deployment import FABRIC
from tests.lab.runs import run_lab

SNAPSHOT = Path(__file__).with_name("snapshot.sh").read_text()
INSTANCE = "t-tuning"
USER = "spark"
CAP_UNIT = "spark-vllm-clock-cap.service"
SYSCTLS = {"net.core.somaxconn": "5000"}
DECLARED: dict[str, Any] = {
    "sysctls": SYSCTLS,
    "gpu_clock_cap_mhz": 2150,
    "memlock_unlimited": True,
    "remove_ipc": False,
    "docker_cgroup_driver": "systemd",
    "memory_floor_mib": 256,
    "files": [{"source": "LICENSE", "target": "/etc/owner/license", "mode": "0640"}],
}

pytestmark = pytest.mark.lab


lab = partial(run_lab, INSTANCE)
"""Run a command of the lab as a person would."""


def as_root(name: str, shell: str, *words: str) -> str:
    """Run shell text as root inside a host, without its sshd."""
    return (
        Host(instance.require(INSTANCE), name).change(shell, *words, what="a step of the test", timeout_s=120).strip()
    )


def password() -> str:
    return (paths.instance_dir(INSTANCE) / "sudo_password").read_text().strip()


@pytest.fixture(scope="module", autouse=True)
def two_hosts() -> Iterator[None]:
    """A lab of two hosts, removed at the end."""
    reason = None
    if platform.system() != "Linux":
        reason = f"the lab needs Linux, this is {platform.system()}"
    elif os.geteuid() != 0:
        reason = "the lab needs root"
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must be able to run the lab: {reason}")
        pytest.skip(reason)
    lab("down")
    lab("up", "--hosts-only")
    for name in ("spark-a", "spark-b"):
        # Debian's sudo leaves a file in the home of who uses it for the first time.
        assert transport(name).run(command("true", sudo=True)).ok
    yield
    lab("down")


@pytest.fixture(scope="module")
def tiny_image(two_hosts: None) -> str:
    """An image on spark-a that can sleep."""
    as_root("spark-a", "tar -C / -c usr/bin usr/lib usr/lib64 bin lib lib64 etc/passwd | docker import - tiny:1")
    return "tiny:1"


class CutNode(SshTransport):
    """A carrier over which a run ends before one of its commands as root, as if it was killed.

    Attributes:
        left: Commands as root until then; None for no end.
    """

    left: int | None = None

    def run(self, cmd: Command) -> Result:
        if cmd.sudo and self.left is not None:
            if self.left == 0:
                raise UnreachableError("the run was cut", node=self.node, step="session")
            self.left -= 1
        return super().run(cmd)


def transport(name: str = "spark-a", *, with_password: bool = True) -> CutNode:
    lab_of_test = instance.require(INSTANCE)
    key = as_root(name, "cat /etc/ssh/ssh_host_ed25519_key.pub").split()[:2]
    config = str(paths.instance_dir(INSTANCE) / "ssh_config")
    spec = ConnectionSpec(name, lab_of_test.address(name), USER, host_key=" ".join(key), ssh_config=config)
    return CutNode(resolve(spec), password if with_password else lambda: None)


def settings_of(**host: Any) -> Settings:
    users = {f"nodes[{number}].user": USER for number in (0, 1)}
    return read_settings(apply_change(load_base(), {**users, "hardware": "cpu", "host": host}))


def snapshot(name: str = "spark-a") -> list[str]:
    """What a host is: files, units, kernel parameters, filters, users, containers."""
    return as_root(name, SNAPSHOT).splitlines()


def gpu_commands(name: str = "spark-a") -> list[str]:
    """What the GPU was told since the host was switched on."""
    return as_root(name, "cat /run/spark-lab/gpu-commands 2>/dev/null || true").splitlines()


def remove_ipc(name: str = "spark-a") -> str:
    where = "org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager"
    return as_root(name, f"busctl get-property {where} RemoveIPC")


def docker_driver(name: str = "spark-a") -> str:
    return as_root(name, "docker info --format '{{.CgroupDriver}}'")


def opened(node: SshTransport, stack: str = "dev") -> Place:
    settings = settings_of()
    place = place_of(settings, stack, settings.nodes[0])
    open_journal(node, place.folder)
    return place


def values(node: SshTransport, place: Place, tuning: Tuning) -> dict[str, str]:
    return values_of(place, list(tuning.items), observe_tuning(node, place, tuning))


def test_tuning_is_applied_and_undone_through_the_real_systemd() -> None:
    before, ipc, driver = snapshot(), remove_ipc(), docker_driver()
    assert (ipc, driver) == ("b true", "cgroupfs")
    node, tuning = transport(), tuning_of(settings_of(**DECLARED))
    place = opened(node)
    apply_tuning(node, place, tuning)
    assert gpu_commands() == ["-lgc 200,2150"]
    assert remove_ipc() == "b false"
    assert docker_driver() == "systemd"
    assert as_root("spark-a", "sysctl -n net.core.somaxconn") == "5000"
    assert as_root("spark-a", f"systemctl is-enabled {CAP_UNIT}; systemctl is-active {CAP_UNIT}") == "enabled\nactive"
    assert as_root("spark-a", "ps -o user= -p $(systemctl show -P MainPID spark-vllm-memory-floor-dev)") == USER
    assert as_root("spark-a", "stat -c '%a %U:%G' /etc/owner/license") == "640 root:root"
    assert values(node, place, tuning) == dict(tuning.items)
    entries = read_journal(node, place.folder)
    started = as_root("spark-a", "systemctl show -P ActiveEnterTimestampMonotonic docker")
    apply_tuning(node, place, tuning)  # also what a create does once the state is lost
    assert read_journal(node, place.folder) == entries
    assert as_root("spark-a", "systemctl show -P ActiveEnterTimestampMonotonic docker") == started
    close_journal(node, place.folder)
    assert gpu_commands() == ["-lgc 200,2150", "-rgc"]
    assert (remove_ipc(), docker_driver()) == (ipc, driver)
    assert snapshot() == before
    assert as_root("spark-a", "systemctl list-units --all --plain --no-legend 'spark-vllm-*'") == ""


def test_a_clock_cap_outlives_a_reboot_changes_and_goes() -> None:
    before = snapshot("spark-b")
    node = transport("spark-b")
    place = opened(node)
    apply_tuning(node, place, Tuning({}, {"gpu_clock_cap_mhz": "2150"}))
    lab("reboot", "spark-b")
    assert gpu_commands("spark-b") == ["-lgc 200,2150"]
    node = transport("spark-b")
    tuning = Tuning({}, {"gpu_clock_cap_mhz": "2000"})
    apply_tuning(node, place, tuning)  # systemd knows the unit of before the boot, and must read it anew
    assert gpu_commands("spark-b") == ["-lgc 200,2150", "-rgc", "-lgc 200,2000"]
    assert values(node, place, tuning) == {"gpu_clock_cap_mhz": "2000"}
    lab("reboot", "spark-b")
    assert gpu_commands("spark-b") == ["-lgc 200,2000"]
    node = transport("spark-b")
    close_journal(node, place.folder)
    assert gpu_commands("spark-b") == ["-lgc 200,2000", "-rgc"]
    assert snapshot("spark-b") == before
    lab("reboot", "spark-b")
    assert gpu_commands("spark-b") == []


@pytest.mark.parametrize("done", [3, 9, 15, 21])
def test_a_power_cut_in_the_middle_of_applying_is_repaired_by_the_next_up(done: int) -> None:
    before = snapshot("spark-b")
    node, tuning = transport("spark-b"), tuning_of(settings_of(**DECLARED))
    place = opened(node)
    node.left = done
    with pytest.raises(UnreachableError):
        apply_tuning(node, place, tuning)
    lab("power-cut", "spark-b")
    lab("power-on", "spark-b")
    node = transport("spark-b")
    apply_tuning(node, place, tuning)
    assert values(node, place, tuning) == dict(tuning.items)
    assert (remove_ipc("spark-b"), docker_driver("spark-b")) == ("b false", "systemd")
    assert gpu_commands("spark-b")[-1] == "-lgc 200,2150"
    node.left = done // 2
    with pytest.raises(UnreachableError):
        close_journal(node, place.folder)
    lab("power-cut", "spark-b")
    lab("power-on", "spark-b")
    close_journal(transport("spark-b"), place.folder)
    assert snapshot("spark-b") == before
    assert (remove_ipc("spark-b"), docker_driver("spark-b")) == ("b true", "cgroupfs")


def test_docker_is_restarted_beside_others_only_with_consent_and_their_containers_come_back(tiny_image: str) -> None:
    as_root("spark-a", f"docker run -d --name theirs --restart always --network host {tiny_image} sleep 100000")
    node = transport()
    place = opened(node)
    tuning = Tuning({}, {"docker_cgroup_driver": "systemd"})
    with pytest.raises(CommandError) as refused:
        apply_tuning(node, place, tuning)
    assert "host.disturb_others" in refused.value.where
    assert "found theirs" in refused.value.what
    assert (docker_driver(), read_journal(node, place.folder)) == ("cgroupfs", [])
    apply_tuning(node, place, replace(tuning, disturb_others=True))
    assert docker_driver() == "systemd"
    with pytest.raises(CommandError):
        close_journal(node, place.folder)
    close_journal(node, place.folder, disturb_others=True)
    assert docker_driver() == "cgroupfs"
    end = time.monotonic() + 30
    while as_root("spark-a", "docker ps --format '{{.Names}}'") != "theirs" and time.monotonic() < end:
        time.sleep(0.5)
    assert as_root("spark-a", "docker ps --format '{{.Names}}'") == "theirs"
    as_root("spark-a", "docker rm -f theirs")


def test_the_memory_floor_kills_the_stack_s_newest_container_and_no_other(tiny_image: str) -> None:
    for name, stack in (("first", "dev"), ("newest", "dev"), ("of-prod", "prod")):
        label = f"--label spark-vllm.stack={stack}"
        as_root("spark-a", f"docker run -d --name {name} {label} --network host {tiny_image} sleep 100000")
    node = transport()
    place = opened(node)
    apply_tuning(node, place, Tuning({}, {"memory_floor_mib": "999999999"}))
    log, end = f"{place.folder.path}/state/memory_floor.log", time.monotonic() + 40
    while not as_root("spark-a", f"cat {log} 2>/dev/null || true") and time.monotonic() < end:
        time.sleep(0.5)
    assert as_root("spark-a", f"head -1 {log}").endswith("floor 999999999 MiB: killed newest")
    running = as_root("spark-a", "docker ps --format '{{.Names}}'").split()
    assert "of-prod" in running
    assert "newest" not in running
    close_journal(node, place.folder)
    as_root("spark-a", "docker rm -f first newest of-prod")


def test_two_stacks_at_the_same_time_hold_together_what_both_declare() -> None:
    before = snapshot()
    tuning = Tuning(SYSCTLS, {"gpu_clock_cap_mhz": "2150", "remove_ipc": "false"})
    nodes = {stack: transport() for stack in ("dev", "prod")}
    placed = {stack: opened(node, stack) for stack, node in nodes.items()}
    errors: list[BaseException] = []

    def apply(stack: str) -> None:
        try:
            for _ in range(3):  # one of two that begin together may be told to run again
                try:
                    apply_tuning(nodes[stack], placed[stack], tuning)
                    return
                except CommandError as error:
                    assert "just now" in error.what
            pytest.fail("refused three times")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=apply, args=(stack,)) for stack in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with pytest.raises(CommandError) as refused:
        apply_tuning(nodes["prod"], placed["prod"], Tuning(SYSCTLS, {**tuning.items, "gpu_clock_cap_mhz": "2000"}))
    assert "[setting-contradicted]" in refused.value.what
    assert gpu_commands()[-1] == "-lgc 200,2150"
    told = close_journal(nodes["dev"], placed["dev"].folder)
    assert {line.split()[0] for line in told} == {"left"}
    assert (remove_ipc(), gpu_commands()[-1]) == ("b false", "-lgc 200,2150")
    close_journal(nodes["prod"], placed["prod"].folder)
    assert (remove_ipc(), gpu_commands()[-1]) == ("b true", "-rgc")
    assert snapshot() == before


def test_the_sudoers_drop_in_alone_is_enough_and_allows_nothing_else() -> None:
    settings = settings_of(**DECLARED)
    rules = sudoers_text(settings, "dev", settings.nodes[0])
    as_root(
        "spark-a",
        'printf %s "$1" > /etc/sudoers.d/spark-vllm; chmod 440 /etc/sudoers.d/spark-vllm; visudo -c >/dev/null; '
        "gpasswd -d spark sudo >/dev/null",
        rules,
    )
    try:
        before = snapshot()
        node = transport(with_password=False)
        place = opened(node)
        tuning = tuning_of(settings)
        apply_tuning(node, place, tuning)
        assert values(node, place, tuning) == dict(tuning.items)
        as_root("spark-a", "chmod 0700 /etc/owner")  # what only root can see is asked by listed commands too
        apply_tuning(node, place, tuning_of(settings_of(**{**DECLARED, "gpu_clock_cap_mhz": 2000})))
        as_root("spark-a", "chmod 0755 /etc/owner")
        for line in (("true",), ("systemctl", "restart", "ssh.service"), ("cat", "/etc/shadow")):
            with pytest.raises(UnreachableError) as refused:
                node.run(command(*line, sudo=True))
            assert refused.value.code == "sudo-refused"
        close_journal(node, place.folder)
        assert snapshot() == before
    finally:
        as_root("spark-a", "rm -f /etc/sudoers.d/spark-vllm; gpasswd -a spark sudo >/dev/null")


def test_a_stack_with_nothing_declared_never_asks_for_root() -> None:
    as_root("spark-a", "gpasswd -d spark sudo >/dev/null")
    try:
        node = transport(with_password=False)
        place = opened(node)
        apply_tuning(node, place, tuning_of(settings_of()))
        close_journal(node, place.folder)
        assert as_root("spark-a", f"ls -d {place.folder.root} 2>/dev/null || echo gone") == "gone"
    finally:
        as_root("spark-a", "gpasswd -a spark sudo >/dev/null")


LISTEN = """
python3 -c '
import socket, time
ports = [socket.create_server(("0.0.0.0", port)) for port in (6379, 6450, 30000, 30001)]
ports.append(socket.create_server(("192.168.200.12", 41000)))
time.sleep(300)
' >/dev/null 2>&1 & echo $!
"""
REACH = """
for place in "$@"; do
  timeout 2 bash -c "exec 3<>/dev/tcp/${place%:*}/${place#*:}" 2>/dev/null && echo "$place open" || echo "$place shut"
done
"""


def address_on_fabric(name: str, address: str) -> None:
    """The address that a fabric of ours would give a host; a reboot takes it away."""
    as_root(name, f"ip address replace {address}/24 dev {FABRIC}; ip link set {FABRIC} up")


@pytest.mark.campaign
def test_the_packet_filter_lets_ray_in_from_the_fabric_only_over_a_reboot_and_goes_again() -> None:
    before = snapshot()
    node = transport()
    place = opened(node)
    tuning = tuning_of(settings_of(packet_filter=True))
    apply_tuning(node, place, tuning)
    assert values(node, place, tuning) == dict(tuning.items)
    lab("reboot", "spark-a")
    node = transport()
    assert values(node, place, tuning) == dict(tuning.items)
    address_on_fabric("spark-a", "192.168.200.12")
    address_on_fabric("spark-b", "192.168.200.13")
    listener = as_root("spark-a", LISTEN).splitlines()[-1]
    time.sleep(2)
    assert as_root("spark-a", f"kill -0 {listener} && echo there") == "there"
    management = instance.require(INSTANCE).address("spark-a")
    fabric = "192.168.200.12"
    places = [f"{address}:{port}" for address in (management, fabric) for port in (6379, 6450, 30001, 30000, 22)]
    found = dict(line.split(" ") for line in as_root("spark-b", REACH, *places).splitlines())
    shut = [f"{management}:{port}" for port in (6379, 6450, 30001)]
    assert found == {at: "shut" if at in shut else "open" for at in places}
    # A rank's own port on the fabric address, asked for by the other network.
    as_root("spark-b", f"ip route add 192.168.200.12/32 via {management} dev eth0")
    assert as_root("spark-b", REACH, f"{fabric}:41000", f"{fabric}:30000").splitlines() == [
        f"{fabric}:41000 shut",
        f"{fabric}:30000 shut",
    ]
    as_root("spark-b", "ip route del 192.168.200.12/32")
    assert as_root("spark-b", REACH, f"{fabric}:41000") == f"{fabric}:41000 open"
    close_journal(node, place.folder)
    assert as_root("spark-b", REACH, f"{management}:6379") == f"{management}:6379 open"
    lab("reboot", "spark-a")
    assert snapshot() == before
    as_root("spark-b", f"ip address del 192.168.200.13/24 dev {FABRIC}")
