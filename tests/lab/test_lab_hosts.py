"""The emulated hosts themselves, before anything is deployed on them.

Only this shows that the lab's hosts behave as machines do: that what is written survives a power cut, that a
pulled cable is one, and that nothing of a lab stays on the machine. It needs root on Linux and some minutes
(the first time also a download); it uses a lab of its own, `t-hosts`, and never touches another one.

To clean up after an aborted run: ``python -m lab down --instance t-hosts``.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab import instance, paths

PROJECT = Path(__file__).resolve().parent.parent.parent
INSTANCE = "t-hosts"
FABRIC = "enp1s0f1np1"
TWIN = "enP2p1s0f1np1"


def _unable() -> str | None:
    """Why this machine cannot hold a lab, or None."""
    if platform.system() != "Linux":
        return f"the lab needs Linux, this is {platform.system()}"
    if os.geteuid() != 0:
        return "the lab needs root"
    return None


pytestmark = pytest.mark.lab


def lab(*arguments: str, check: bool = True, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a command of the lab as a person would."""
    command, *rest = arguments
    done = subprocess.run(
        [sys.executable, "-m", "lab", command, "--instance", INSTANCE, *rest],
        cwd=PROJECT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done


def folder() -> Path:
    """The lab's folder."""
    return paths.instance_dir(INSTANCE)


def on(host: str, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command on a host as the deploy user, over SSH."""
    return subprocess.run(
        ["ssh", "-F", str(folder() / "ssh_config"), "-o", "BatchMode=yes", *options, host, command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def output(host: str, command: str) -> str:
    """What a command on a host prints; it must succeed."""
    done = on(host, command)
    assert done.returncode == 0, f"{host}: {command}: {done.stderr}"
    return done.stdout.strip()


def as_root(host: str, command: str) -> str:
    """Run a shell command as root with the deploy user's sudo password."""
    password = (folder() / "sudo_password").read_text()
    done = subprocess.run(
        ["ssh", "-F", str(folder() / "ssh_config"), host, f"sudo -S -p '' sh -c '{command}'"],
        input=password,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{host}: {command}: {done.stderr}"
    return done.stdout.strip()


def traces(tag: str) -> dict[str, list[str]]:
    """Everything on this machine that carries the tag or the folder of the lab."""
    found: dict[str, list[str]] = {"namespaces": [], "links": [], "mounts": [], "groups": [], "processes": []}
    if Path("/run/netns").is_dir():
        found["namespaces"] = [entry.name for entry in Path("/run/netns").iterdir() if tag in entry.name]
    found["links"] = [entry.name for entry in Path("/sys/class/net").iterdir() if tag in entry.name]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if tag in line or f"/{INSTANCE}/" in line:
            found["mounts"].append(line)
    for top in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir()):
        if top.is_dir():
            found["groups"] += [str(entry) for entry in top.glob(f"*{tag}*")]
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                groups = (process / "cgroup").read_text()
            except OSError:
                continue
            of_lab = "lab.power" in words and INSTANCE in words
            of_agent = words[0].endswith("ssh-agent") and any(f"/{INSTANCE}/" in word for word in words)
            if of_lab or of_agent or tag in groups:
                found["processes"].append(f"{process.name} {' '.join(words)}")
    return found


def address(host: str) -> str:
    """Management address of a host."""
    return instance.require(INSTANCE).address(host)


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[None]:
    """A lab of two hosts, removed at the end."""
    reason = _unable()
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must be able to run the lab: {reason}")
        pytest.skip(reason)
    lab("down")
    lab("up", "--hosts-only", timeout_s=1800)
    yield
    lab("down")


@pytest.fixture(autouse=True)
def _needs_two_hosts(two_hosts: None) -> None:
    """Every test here finds the lab up."""
    if not folder().exists():
        lab("up", "--hosts-only")


def test_the_pinned_key_gets_in_and_systemd_runs() -> None:
    assert output("spark-a", "hostname; id -un") == "spark-a\nspark"
    assert output("spark-b", "systemctl is-system-running; cat /proc/1/comm") == "running\nsystemd"


def test_another_key_is_refused(tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(stranger)], check=True)
    alone = tmp_path / "config"
    alone.write_text(
        f"Host spark-a\n  HostName {address('spark-a')}\n  User spark\n"
        f"  IdentityFile {stranger}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {folder() / 'known_hosts'}\n  StrictHostKeyChecking yes\n"
    )
    refused = subprocess.run(
        ["ssh", "-F", str(alone), "-o", "BatchMode=yes", "spark-a", "true"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert refused.returncode == 255
    assert "Permission denied (publickey" in refused.stderr


def test_another_host_key_is_refused(tmp_path: Path) -> None:
    known = (folder() / "known_hosts").read_text().splitlines()
    key_of_b = known[1].split()[1:]
    (tmp_path / "known").write_text(f"{address('spark-a')} {' '.join(key_of_b)}\n")
    done = on("spark-a", "true", "-o", f"UserKnownHostsFile={tmp_path / 'known'}")
    assert done.returncode == 255
    assert "verification failed" in done.stderr.lower()


def test_sudo_needs_the_password() -> None:
    assert on("spark-a", "sudo -n true").returncode != 0
    assert as_root("spark-a", "id -u") == "0"


def test_docker_loads_and_runs_a_container_on_the_hosts_network() -> None:
    # The host's own files make an image: nothing is fetched.
    as_root("spark-a", "tar -C / -c usr/bin usr/lib usr/lib64 bin lib lib64 etc/passwd | docker import - tiny:1")
    assert output("spark-a", "docker run --rm --network host tiny:1 cat /proc/1/comm") == "cat"
    output("spark-a", "docker run -d --name kept --restart always --network host tiny:1 sleep 100000")
    assert output("spark-a", "docker exec kept hostname") == "spark-a"
    output("spark-a", "docker rm -f kept && docker rmi tiny:1")
    assert output("spark-a", "docker info --format '{{.Driver}}'") == "overlay2"


def test_hosts_look_like_sparks() -> None:
    assert 'DGX_NAME="DGX Spark"' in output("spark-a", "cat /etc/dgx-release")
    assert output("spark-a", "nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader") == "NVIDIA GB10, 12.1"
    assert f"rocep1s0f1 port 1 ==> {FABRIC} (Up)" in output("spark-a", "ibdev2netdev")


def test_fabric_has_a_link_and_no_address_until_it_is_given_one() -> None:
    for interface in (FABRIC, TWIN):
        assert output("spark-a", f"cat /sys/class/net/{interface}/carrier") == "1"
        assert output("spark-a", f"ip -br address show {interface}").split()[2:] == []
        assert output("spark-a", f"cat /sys/class/net/{interface}/mtu") == "1500"
    for number, host in ((12, "spark-a"), (13, "spark-b")):
        as_root(host, f"ip address replace 192.168.200.{number}/24 dev {FABRIC}")
        as_root(host, f"ip address replace 192.168.201.{number}/24 dev {TWIN}")
        as_root(host, f"ip link set {FABRIC} mtu 9000")
    assert "0% packet loss" in output("spark-a", "ping -c 2 -i 0.2 -M do -s 8972 192.168.200.13")
    assert "0% packet loss" in output("spark-a", "ping -c 1 192.168.201.13")


def test_netplan_configures_the_fabric_and_leaves_management_alone() -> None:
    plan = (
        "network: {version: 2, ethernets: {" + FABRIC + ": {mtu: 9000, link-local: [], "
        "addresses: [192.168.200.12/24]}}}"
    )
    as_root("spark-a", f'umask 077; echo "{plan}" > /etc/netplan/40-fabric.yaml; netplan apply')
    time.sleep(1)
    assert "192.168.200.12/24" in output("spark-a", f"ip -br address show {FABRIC}")
    assert output("spark-a", f"cat /sys/class/net/{FABRIC}/mtu") == "9000"
    as_root("spark-a", "rm /etc/netplan/40-fabric.yaml; netplan apply")


def test_management_and_fabric_are_separate_and_there_is_no_way_out() -> None:
    routes = output("spark-a", "ip route")
    assert "default" not in routes
    as_root("spark-a", f"ip address replace 192.168.200.12/24 dev {FABRIC}")
    reachable = (
        subprocess.run(["ping", "-c", "1", "-W", "1", "192.168.200.12"], capture_output=True, check=False)
        if Path("/usr/bin/ping").exists() or Path("/bin/ping").exists()
        else None
    )
    assert reachable is None or reachable.returncode != 0
    names = output("spark-a", "ls /sys/class/net").split()
    assert {"eth0", FABRIC, TWIN} <= set(names)


def test_machine_wide_settings_cannot_be_changed_from_a_host() -> None:
    before = Path("/proc/sys/vm/swappiness").read_text()
    password = (folder() / "sudo_password").read_text()
    done = subprocess.run(
        ["ssh", "-F", str(folder() / "ssh_config"), "spark-a", "sudo -S -p '' sysctl -w vm.swappiness=7"],
        input=password,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode != 0 or "error" in done.stderr.lower() or "Read-only" in done.stderr
    assert Path("/proc/sys/vm/swappiness").read_text() == before
    as_root("spark-a", "sysctl -w net.ipv4.tcp_fin_timeout=33")
    assert Path("/proc/sys/net/ipv4/tcp_fin_timeout").read_text().strip() != "33"


def test_a_power_cut_keeps_what_was_written() -> None:
    output("spark-b", "echo before > kept; sync")
    key = output("spark-b", "cat /etc/ssh/ssh_host_ed25519_key.pub")
    lab("power-cut", "spark-b")
    status = json.loads(lab("status", "--json").stdout)["hosts"]
    assert [host["power"] for host in status] == [True, False]
    assert status[0]["carrier"][FABRIC] is False, "the other end of the cable has no power"
    lab("power-on", "spark-b")
    assert output("spark-b", "cat kept") == "before"
    assert output("spark-b", "cat /etc/ssh/ssh_host_ed25519_key.pub") == key
    assert output("spark-a", f"cat /sys/class/net/{FABRIC}/carrier") == "1"


def test_a_reboot_forgets_what_was_only_set_by_hand() -> None:
    output("spark-b", "echo before > kept")
    as_root("spark-b", f"ip address replace 192.168.200.13/24 dev {FABRIC}")
    started = output("spark-b", "cat /proc/1/stat").split()[21]
    lab("reboot", "spark-b")
    assert output("spark-b", "cat /proc/1/stat").split()[21] != started
    assert output("spark-b", "cat kept") == "before"
    assert output("spark-b", f"ip -br address show {FABRIC}").split()[2:] == []
    assert output("spark-b", "ip -br address show eth0").split()[2:] != []


def test_a_reboot_sets_the_declared_kernel_parameters_of_the_host_and_none_of_the_machine() -> None:
    before = Path("/proc/sys/vm/swappiness").read_text()
    as_root("spark-b", "echo net.ipv4.tcp_keepalive_time=120 > /etc/sysctl.d/60-test.conf")
    as_root("spark-b", "echo vm.swappiness=7 >> /etc/sysctl.d/60-test.conf")
    lab("reboot", "spark-b")
    assert output("spark-b", "cat /proc/sys/net/ipv4/tcp_keepalive_time") == "120"
    assert Path("/proc/sys/vm/swappiness").read_text() == before
    as_root("spark-b", "rm /etc/sysctl.d/60-test.conf; echo 7200 > /proc/sys/net/ipv4/tcp_keepalive_time")


def test_a_reboot_from_inside_brings_the_host_and_its_containers_back() -> None:
    as_root("spark-b", "tar -C / -c usr/bin usr/lib usr/lib64 bin lib lib64 etc/passwd | docker import - tiny:1")
    output("spark-b", "docker run -d --name kept --restart always --network host tiny:1 sleep 100000")
    started = output("spark-b", "cat /proc/1/stat").split()[21]
    password = (folder() / "sudo_password").read_text()
    subprocess.run(
        ["ssh", "-F", str(folder() / "ssh_config"), "spark-b", "sudo -S -p '' systemctl reboot"],
        input=password,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    end = time.monotonic() + 60
    while time.monotonic() < end:
        done = on("spark-b", "cat /proc/1/stat", "-o", "ConnectTimeout=2")
        if done.returncode == 0 and done.stdout.split()[21] != started:
            break
        time.sleep(0.5)
    end = time.monotonic() + 30
    names = ""
    while "kept" not in names and time.monotonic() < end:
        names = on("spark-b", "docker ps --format '{{.Names}}'").stdout
        time.sleep(0.5)
    assert "kept" in names
    output("spark-b", "docker rm -f kept && docker rmi tiny:1")


def test_a_pulled_cable_takes_the_carrier_at_both_ends() -> None:
    lab("cable-pull", "spark-a")
    for host in ("spark-a", "spark-b"):
        assert output(host, f"cat /sys/class/net/{FABRIC}/carrier /sys/class/net/{TWIN}/carrier") == "0\n0"
        assert "NO-CARRIER" in output(host, f"ip link show {FABRIC}")
    lab("reboot", "spark-b")
    assert output("spark-b", f"cat /sys/class/net/{FABRIC}/carrier") == "0", "a reboot plugs nothing in"
    lab("cable-plug", "spark-a")
    for host in ("spark-a", "spark-b"):
        assert output(host, f"cat /sys/class/net/{FABRIC}/carrier /sys/class/net/{TWIN}/carrier") == "1\n1"


def test_half_a_cable_can_fail() -> None:
    lab("cable-pull", "spark-a", "--twin")
    assert output("spark-b", f"cat /sys/class/net/{FABRIC}/carrier /sys/class/net/{TWIN}/carrier") == "1\n0"
    lab("cable-plug", "spark-a", "--twin")


def test_a_second_up_is_quick_and_changes_nothing() -> None:
    before = output("spark-a", "cat /proc/1/stat").split()[21]
    start = time.monotonic()
    lab("up", "--hosts-only")
    assert time.monotonic() - start < 15
    assert output("spark-a", "cat /proc/1/stat").split()[21] == before


def test_another_shape_is_refused() -> None:
    done = lab("up", "--hosts-only", "--hosts", "3", check=False)
    assert done.returncode == 1
    assert "has --hosts 2, not 3" in done.stderr


def test_an_unknown_host_is_named() -> None:
    done = lab("power-cut", "spark-z", check=False)
    assert done.returncode == 2
    assert done.stderr == f"lab: lab {INSTANCE} has no host spark-z: it has spark-a, spark-b\n"


def test_down_leaves_nothing_and_works_twice() -> None:
    where, tag = folder(), instance.tag_of(folder())
    assert traces(tag)["namespaces"], "the search finds a running lab"
    assert traces(tag)["processes"]
    lab("down")
    assert traces(tag) == {"namespaces": [], "links": [], "mounts": [], "groups": [], "processes": []}
    assert not where.exists()
    again = lab("down")
    assert "was not up" in again.stderr
    assert lab("status", check=False).returncode == 2


@pytest.mark.parametrize("after_s", [0.3, 0.8])
def test_a_killed_up_is_repaired_by_the_next(after_s: float) -> None:
    lab("down")
    killed = subprocess.Popen(
        [sys.executable, "-m", "lab", "up", "--instance", INSTANCE, "--hosts-only"],
        cwd=PROJECT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    time.sleep(after_s)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    lab("up", "--hosts-only")
    assert output("spark-a", "hostname") == "spark-a"


def test_a_killed_power_supply_is_a_power_cut_and_up_repairs_it() -> None:
    supply = int((folder() / "hosts" / "spark-a" / "power.lock").read_text())
    os.kill(supply, signal.SIGKILL)
    end = time.monotonic() + 10
    while json.loads(lab("status", "--json").stdout)["hosts"][0]["power"] and time.monotonic() < end:
        time.sleep(0.2)
    lab("up", "--hosts-only")
    assert output("spark-a", "systemctl is-system-running") == "running"
