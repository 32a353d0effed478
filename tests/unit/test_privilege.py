"""What runs as root is what is listed: by preview for people, and in sudoers for sudo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spark_core import root_commands as root
from spark_core.journal import StackFolder, close_journal, open_journal
from spark_core.journal.file_state import FileState, complete
from spark_core.privilege import allowed_by, privileged_lines, root_commands, sudo_rule, sudoers_text
from spark_core.settings import Settings, read_settings
from spark_core.transport.base import Command, Result, command, script
from spark_core.tuning import apply_tuning, place_of, tuning_of
from tests.config_cases import apply_change, load_base
from tests.scripted_transport import ScriptedTransport
from tests.tuned_host import TunedHost

EVERYTHING: dict[str, Any] = {
    "sysctls": {"net.core.rmem_max": "67108864"},
    "gpu_clock_cap_mhz": 2150,
    "swap": "off",
    "memlock_unlimited": True,
    "remove_ipc": False,
    "docker_cgroup_driver": "cgroupfs",
    "memory_floor_mib": 4096,
    "watchdog": True,
    "panic_reboot_s": 10,
    "files": [
        {"source": "LICENSE", "target": "/etc/owner/a+b.conf"},
        {"source": "LICENSE", "target": "/home/aurora/mine", "sudo": False},
    ],
}


def settings_of(host: dict[str, Any], **changes: Any) -> Settings:
    return read_settings(apply_change(load_base(), {"host": host, **changes}))


def rules_of(settings: Settings, stack: str = "dev") -> list[str]:
    return [sudo_rule(cmd) for cmd in root_commands(settings, stack, settings.nodes[0])]


def test_a_stack_with_nothing_declared_needs_no_root() -> None:
    settings = settings_of({"setup": [{"name": "motd", "create": "true", "delete": "true"}]})
    for node in settings.nodes:
        assert root_commands(settings, "dev", node) == []
        assert privileged_lines(settings, "dev", node) == []
        assert all(line.startswith("#") for line in sudoers_text(settings, "dev", node).splitlines())


def test_files_that_the_deploy_user_owns_need_no_root() -> None:
    assert rules_of(settings_of({"files": [{"source": "LICENSE", "target": "/home/aurora/x", "sudo": False}]})) == []


@pytest.fixture
def host(tmp_path: Path) -> TunedHost:
    return TunedHost(tmp_path / "host")


def test_everything_that_tuning_runs_as_root_is_listed(host: TunedHost) -> None:
    declared = {**EVERYTHING, "files": EVERYTHING["files"][:1]}
    settings = settings_of(declared, node_root=str(host.base / "srv/root"))
    place = place_of(settings, "dev", settings.nodes[0])
    open_journal(host.node, place.folder)
    other = settings_of({**declared, "gpu_clock_cap_mhz": 2000}, node_root=str(host.base / "srv/root"))
    for wanted in (settings, other, settings):
        apply_tuning(host.node, place, tuning_of(wanted))
        host.file("/etc/systemd/logind.conf.d/60-spark-vllm.conf").unlink()
    Path(f"{host.file('/etc/docker/daemon.json')}.new").touch()
    close_journal(host.node, place.folder)
    ran = [cmd for cmd in host.node.asked if cmd.sudo]
    assert {cmd.argv[0] for cmd in ran} >= {"install", "mv", "rm", "rmdir", "sysctl", "systemctl", "busctl", "swapon"}
    rules = rules_of(settings)
    assert [cmd.argv for cmd in ran if not allowed_by(rules, cmd)] == []


def test_what_only_root_can_see_is_asked_by_listed_commands() -> None:
    settings = settings_of({"files": [{"source": "LICENSE", "target": "/etc/owner/a+b.conf"}]})
    node = ScriptedTransport(
        "spark-a", lambda cmd: Result(0, "41c0 0:0\n8180 0:0\n" if cmd.argv[0] == "stat" else "", "")
    )
    complete(node, FileState("/etc/owner/a+b.conf", None))
    assert len(node.asked) == 2
    rules = rules_of(settings)
    assert all(cmd.sudo and allowed_by(rules, cmd) for cmd in node.asked)


STAGING = "/home/aurora/.spark-vllm/stacks/dev/staging"
INSTALLED = ("install", "-m", "0644", "-o", "0", "-g", "0", "-T", "--")


@pytest.mark.parametrize(
    "argv",
    [
        ("sysctl", "-q", "-w", "net.core.wmem_max=1"),
        ("sysctl", "-q", "-w", "net.core.rmem_max=1", "kernel.core_pattern=|/tmp/x"),
        ("sysctl", "-q", "-w", "net.core.rmem_max=1", "-p", "/tmp/x"),
        ("sysctl", "-q", "-w", "net.core.rmem_max=1", "--system"),
        ("sysctl", "-q", "-w", "net.core.rmem_max=1\nkernel.panic=1"),
        ("sysctl", "-q", "-w", "netxcore.rmem_max=1"),
        (*INSTALLED, f"{STAGING}/etc_shadow", "/etc/shadow.new"),
        (*INSTALLED, "/tmp/x", "/etc/docker/daemon.json.new"),
        ("install", "-m", "0644", "-o", "0", "-g", "0", "-T", "--", "/etc/shadow", f"{STAGING}/x"),
        ("mv", "-f", "-T", "--", "/etc/shadow", "/etc/docker/daemon.json"),
        ("rm", "-f", "--", "/etc/docker/daemon.json", "/etc/shadow"),
        ("rm", "-rf", "--", "/etc/docker/daemon.json", "/etc/docker/daemon.json.new"),
        ("systemctl", "start", "other.service"),
        ("systemctl", "restart", "docker.service", "sshd.service"),
        ("base64", "-w0", "--", "/etc/shadow"),
        ("swapon", "--", "/dev/sda2 /dev/sda3"),
        ("bash", "-c", "true"),
        ("true",),
    ],
    ids=" ".join,
)
def test_nothing_beside_it_is_allowed(argv: tuple[str, ...]) -> None:
    assert not allowed_by(rules_of(settings_of(EVERYTHING)), command(*argv, sudo=True))


@pytest.mark.parametrize("value", ["0", "-1", "4096 131072 6291456", "4096\t1", "fq_codel", "1-3,5", "0.5"])
def test_values_that_kernels_have_are_allowed(value: str) -> None:
    cmd = root.set_parameter("net.core.rmem_max", " ".join(value.split()))
    assert allowed_by(rules_of(settings_of(EVERYTHING)), cmd)


def test_no_script_is_ever_run_as_root() -> None:
    with pytest.raises(KeyError):
        sudo_rule(script("true", sudo=True))


def test_a_managed_fabric_lists_what_writes_applies_and_undoes_it() -> None:
    settings = settings_of({}, fabric={"manage": True, "take_over": ["/etc/netplan/40-cx7.yaml"]})
    rules = rules_of(settings)
    folder = StackFolder(settings.root_of(settings.nodes[0]), "dev")
    expected: list[Command] = [root.apply_netplan()]
    for path in ("/etc/netplan/60-spark-vllm.yaml", "/etc/netplan/40-cx7.yaml"):
        expected += [*root.install_file(folder.staging, path, b"x", mode="0600")[1:], root.remove_file(path)]
        expected += [root.read_file(path), root.look_at_file(path)]
    for netdev in ("enp1s0f1np1", "enP2p1s0f1np1"):
        expected += [root.set_link_mtu(netdev, 9000), root.set_link_state(netdev, "down")]
        expected += [root.add_address(netdev, "10.0.0.1/24"), root.delete_address(netdev, "192.168.200.12/24")]
        expected += [root.set_parameter(f"net/ipv4/conf/{netdev}/rp_filter", "2")]
    assert [cmd.argv for cmd in expected if not allowed_by(rules, cmd)] == []
    assert not allowed_by(rules, root.set_link_mtu("eth0", 9000))


def test_people_read_paths_and_commands() -> None:
    settings = settings_of({"gpu_clock_cap_mhz": 2150, "sysctls": {"net.core.rmem_max": "1"}})
    lines = privileged_lines(settings, "dev", settings.nodes[0])
    assert lines[:2] == [
        "read, remove, write /etc/sysctl.d/60-spark-vllm-dev.conf",
        "read, remove, write /etc/systemd/system/spark-vllm-clock-cap.service",
    ]
    assert "run sysctl -q -w net.core.rmem_max=<value>" in lines
    assert "run systemctl start spark-vllm-clock-cap.service" in lines
    assert not any(root.OPEN in line for line in lines)


def test_the_drop_in_has_one_rule_for_each_command_and_says_what_it_is_worth() -> None:
    settings = settings_of(EVERYTHING)
    text = sudoers_text(settings, "dev", settings.nodes[0])
    rules = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(rules) == len(root_commands(settings, "dev", settings.nodes[0]))
    assert all(line.startswith("aurora ALL=(root) NOPASSWD: /usr/") for line in rules)
    assert all(line.count(" ^") == 1 and line.endswith("$") for line in rules)
    assert text.isascii()
    assert "can" in text and "become root" in text


def test_root_itself_needs_no_rules() -> None:
    settings = settings_of(EVERYTHING, **{"nodes[0].user": "root"})
    assert all(line.startswith("#") for line in sudoers_text(settings, "dev", settings.nodes[0]).splitlines())
