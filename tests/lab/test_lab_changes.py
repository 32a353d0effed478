"""Emulated hosts that are replaced, moved, or show what real Sparks showed.

Only this shows that a reinstalled host has another key, that a moved one answers at its new address, that recordings
show where tools are asked, and how rings, switches and eight hosts are cabled. It needs root on Linux and about a
minute; it uses a lab of its own, ``t-changes``.

To clean up after an aborted run: ``SPARK_VLLM_HOME=… python -m lab down --instance t-changes``.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.deployment import PROJECT, Deployment

pytestmark = pytest.mark.lab

RECORDINGS = PROJECT / "tests" / "fixtures" / "spark"
FABRIC = "enp1s0f1np1"


def started(home: Path, *options: str) -> Deployment:
    """A lab without a stack."""
    lab = Deployment("t-changes", home, hosts_only=True, lab_options=options)
    lab.home.mkdir(parents=True, exist_ok=True)
    lab.stop()
    lab.lab("up", "--hosts-only", *options)
    return lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = started(tmp_path_factory.mktemp("home"))
    yield made
    made.stop()


def pinned(lab: Deployment, host: str) -> str:
    """The key that the lab's known_hosts has for a host."""
    lines = (lab.folder / "known_hosts").read_text().splitlines()
    return next(line.split(" ", 1)[1] for line in lines if line.startswith(f"{host},"))


def test_a_reinstalled_host_has_another_key_and_nothing_of_what_was_written(lab: Deployment) -> None:
    lab.on("spark-b", "echo mine > kept; tar -c /bin/true | docker import - some:1")
    before, address, boot = pinned(lab, "spark-b"), lab.addresses["spark-b"], lab.on("spark-a", "cat /etc/machine-id")
    lab.lab("reimage", "spark-b", "--keep-known-hosts")
    assert pinned(lab, "spark-b") == before
    refused = subprocess.run(
        ["ssh", "-F", str(lab.folder / "ssh_config"), "-o", "BatchMode=yes", "spark-b", "true"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert refused.returncode == 255 and "IDENTIFICATION HAS CHANGED" in refused.stderr
    lab.lab("up", "--hosts-only")
    assert pinned(lab, "spark-b") != before
    assert lab.addresses["spark-b"] == address
    assert lab.on("spark-b", "hostname; ls ~; docker images -q; docker ps -aq").split() == ["spark-b"]
    again = pinned(lab, "spark-b")
    lab.lab("reimage", "spark-b")
    assert pinned(lab, "spark-b") not in (before, again)
    assert lab.on("spark-a", "cat /etc/machine-id") == boot


def test_a_host_gets_another_address_and_its_first_one_back(lab: Deployment) -> None:
    first, key = lab.addresses["spark-b"], pinned(lab, "spark-b")
    lab.lab("readdress", "spark-b")
    moved = lab.addresses["spark-b"]
    assert moved != first and moved != lab.addresses["spark-a"]
    assert pinned(lab, "spark-b") == key
    assert f" {moved}/24" in lab.on("spark-b", "ip -4 address show eth0")
    assert first not in lab.on("spark-b", "ip -4 address show")
    lab.lab("reboot", "spark-b")
    assert f" {moved}/24" in lab.on("spark-b", "ip -4 address show eth0")
    lab.lab("up", "--hosts-only")
    assert lab.addresses["spark-b"] == moved
    lab.lab("readdress", "spark-b")
    assert lab.addresses["spark-b"] == first


def test_tools_and_files_show_recordings_until_told_to_stop(lab: Deployment) -> None:
    release = RECORDINGS / "dgx-release" / "hp-zgx-unquoted.txt"
    machine = RECORDINGS / "uname-m" / "aarch64.txt"
    before = lab.on("spark-a", "uname -m; cat /etc/dgx-release")
    lab.lab("pretend", "spark-a", "/etc/dgx-release", str(release))
    lab.lab("pretend", "spark-a", "uname", str(machine), "--arguments=-m")
    lab.lab("pretend", "spark-a", "rdma", str(release), "--status", "3")
    assert lab.on("spark-a", "cat /etc/dgx-release") == release.read_text()
    assert lab.on("spark-a", "uname -m").strip() == machine.read_text().strip()
    assert lab.on("spark-a", "uname -s") == "Linux\n"
    assert lab.on("spark-a", "rdma link > x || echo $?; cat x; rm x") == "3\n" + release.read_text()
    lab.lab("reboot", "spark-a")
    assert lab.on("spark-a", "uname -m").strip() == "aarch64"
    lab.lab("pretend", "spark-a", "--stop")
    assert lab.on("spark-a", "uname -m; cat /etc/dgx-release") == before
    assert "NETLINK_RDMA" in lab.on("spark-a", "rdma link 2>&1 || true")  # the real one again


def test_setting_gpu_clocks_needs_root_and_is_noted_until_the_next_boot(lab: Deployment) -> None:
    assert "permission" in lab.on("spark-a", "nvidia-smi -lgc 0,2150 || test $? = 4")
    lab.on("spark-a", "nvidia-smi -lgc 0,2150; nvidia-smi -rgc", root=True)
    assert lab.on("spark-a", "cat /run/spark-lab/gpu-commands") == "-lgc 0,2150\n-rgc\n"
    lab.lab("reboot", "spark-a")
    assert lab.on("spark-a", "cat /run/spark-lab/gpu-commands || echo none").strip() == "none"


def test_rdma_devices_show_the_interfaces_as_they_are_and_netplan_still_works(lab: Deployment) -> None:
    lab.on("spark-a", f"ip address replace 192.168.200.12/24 dev {FABRIC}", root=True)
    lab.lab("rdma", "spark-a")
    port = "/sys/class/infiniband/rocep1s0f1/ports/1"
    assert lab.on("spark-a", f"cat {port}/state {port}/gids/3 {port}/gid_attrs/types/3 {port}/gid_attrs/ndevs/3") == (
        f"4: ACTIVE\n0000:0000:0000:0000:0000:ffff:c0a8:c80c\nRoCE v2\n{FABRIC}\n"
    )
    assert "DOWN" in lab.on("spark-a", "cat /sys/class/infiniband/rocep1s0f0/ports/1/state")
    assert lab.on("spark-a", f"ls /sys/class/net/{FABRIC}/device/infiniband") == "rocep1s0f1\n"
    assert lab.on("spark-a", "ls /sys/class/infiniband/roceP2p1s0f1/device/net") == "enP2p1s0f1np1\n"
    lab.on("spark-a", f"ip link set {FABRIC} mtu 9000", root=True)
    assert lab.on("spark-a", f"cat /sys/class/net/{FABRIC}/mtu") == "9000\n"
    plan = f"network: {{version: 2, ethernets: {{{FABRIC}: {{mtu: 4000, link-local: []}}}}}}"
    lab.on("spark-a", f"umask 077; echo '{plan}' > /etc/netplan/40-x.yaml; netplan apply; sleep 1", root=True)
    assert lab.on("spark-a", f"cat /sys/class/net/{FABRIC}/mtu") == "4000\n"
    lab.on("spark-a", "rm /etc/netplan/40-x.yaml; netplan apply", root=True)
    lab.lab("reboot", "spark-a")
    assert lab.on("spark-a", f"cat {port}/state") == "4: ACTIVE\n"
    lab.lab("rdma", "spark-a", "--hide")
    assert lab.on("spark-a", "ls -d /sys/class/infiniband || echo none").strip() == "none"


@pytest.mark.parametrize(
    ("topology", "pairs"),
    [
        ("ring", [(0, 1, 1, 0), (1, 1, 2, 0), (2, 1, 0, 0)]),
        ("switch", [(0, 1, 1, 1), (1, 1, 2, 1), (2, 1, 0, 1)]),
    ],
)
def test_three_hosts_hear_each_other(topology: str, pairs: list[tuple[int, ...]], tmp_path: Path) -> None:
    lab = started(tmp_path, "--hosts", "3", "--topology", topology)
    try:
        hosts = list(lab.addresses)
        for number, (one, port, other, other_port) in enumerate(pairs):
            for half, infix in enumerate(("enp1s0", "enP2p1s0")):
                subnet = f"10.{number}.{half}"
                lab.on(hosts[one], f"ip address replace {subnet}.1/24 dev {infix}f{port}np{port}", root=True)
                lab.on(
                    hosts[other], f"ip address replace {subnet}.2/24 dev {infix}f{other_port}np{other_port}", root=True
                )
                assert " 0% packet loss" in lab.on(hosts[one], f"ping -q -c 1 -W 2 {subnet}.2")
    finally:
        lab.stop()


def test_eight_hosts_are_up_in_seconds(tmp_path: Path) -> None:
    begin = time.monotonic()
    lab = started(tmp_path, "--hosts", "8")
    try:
        assert time.monotonic() - begin < 60
        status = json.loads(lab.lab("status", "--json").text)
        assert [host["system"] for host in status["hosts"]] == ["running"] * 8
        assert all(host["ssh"] and host["docker"] for host in status["hosts"])
    finally:
        lab.stop()
