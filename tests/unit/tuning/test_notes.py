"""What a preview tells of the tuning, without root and without a change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spark_core.journal import StackFolder, open_journal
from spark_core.settings import Settings, read_settings
from spark_core.transport.base import compose, parse_sections, run_checked
from spark_core.tuning import apply_tuning, place_of, tuning_findings, tuning_look, tuning_notes, tuning_of
from tests.config_cases import apply_change, load_base
from tests.tuned_host import TunedHost


@pytest.fixture
def host(tmp_path: Path) -> TunedHost:
    host = TunedHost(tmp_path / "host")
    for stack in ("dev", "prod"):
        open_journal(host.node, StackFolder(str(host.base / "srv/root"), stack))
    return host


def settings_of(host: TunedHost, **values: Any) -> Settings:
    return read_settings(apply_change(load_base(), {"node_root": str(host.base / "srv/root"), "host": values}))


def apply(host: TunedHost, settings: Settings, stack: str = "dev") -> None:
    apply_tuning(host.node, place_of(settings, stack, settings.nodes[0]), tuning_of(settings))


def look(host: TunedHost, settings: Settings, stack: str = "dev") -> dict[str, str]:
    """The answer to the look, which must leave the host as it is."""
    before = host.picture()
    host.node.asked.clear()
    text = run_checked(host.node, compose(*tuning_look(settings, stack, settings.nodes[0])), purpose="x")
    assert not any(cmd.sudo for cmd in host.node.asked)
    assert host.picture() == before
    return parse_sections(text)


def notes(host: TunedHost, settings: Settings) -> list[str]:
    return tuning_notes(settings, "dev", settings.nodes[0], look(host, settings))


def test_nothing_declared_and_nothing_held_needs_no_note(host: TunedHost) -> None:
    assert notes(host, settings_of(host)) == []


def test_a_driver_that_changes_restarts_docker_and_one_that_stays_does_not(host: TunedHost) -> None:
    assert notes(host, settings_of(host, docker_cgroup_driver="systemd")) == []
    wanted = settings_of(host, docker_cgroup_driver="cgroupfs")
    assert notes(host, wanted) == [
        "spark-a: host.docker_cgroup_driver: systemd becomes cgroupfs: Docker is restarted, and serving with it"
    ]
    apply(host, wanted)
    assert notes(host, wanted) == []
    [note] = notes(host, settings_of(host))
    assert note.startswith("spark-a: host.docker_cgroup_driver is no longer declared: ")


def test_a_unit_that_changes_beside_containers_restarts_serving_under_systemd_s_driver(host: TunedHost) -> None:
    apply(host, settings_of(host, gpu_clock_cap_mhz=2150))
    changed = settings_of(host, gpu_clock_cap_mhz=2000)
    assert notes(host, changed) == [], "no container runs"
    host.runs("rank-0", "dev")
    [note] = notes(host, changed)
    assert note.startswith("spark-a: host.gpu_clock_cap_mhz: systemd is reloaded, which takes the GPU")
    assert notes(host, settings_of(host, gpu_clock_cap_mhz=2150)) == []
    host.be("docker", "cgroupfs")
    assert notes(host, changed) == []


def test_a_new_unit_needs_no_reload(host: TunedHost) -> None:
    host.runs("rank-0", "dev")
    assert notes(host, settings_of(host, gpu_clock_cap_mhz=2150, memory_floor_mib=4096)) == []


def test_a_docker_that_does_not_answer_is_told_as_such(host: TunedHost) -> None:
    (host.machine / "docker").unlink()
    assert notes(host, settings_of(host, docker_cgroup_driver="cgroupfs")) == [
        "spark-a: host.docker_cgroup_driver: no answer becomes cgroupfs: Docker is restarted, and serving with it"
    ]


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        ({"gpu_clock_cap_mhz": 2150}, {"gpu_clock_cap_mhz": 2000}, "gpu_clock_cap_mhz: 2150"),
        ({"sysctls": {"net.core.rmem_max": "1"}}, {"sysctls": {"net.core.rmem_max": "2"}}, "declares 1"),
        ({"panic_reboot_s": 5}, {"sysctls": {"kernel.panic": "6"}}, "declares 5"),
        ({"docker_cgroup_driver": "systemd"}, {"docker_cgroup_driver": "cgroupfs"}, "docker_cgroup_driver: systemd"),
        (
            {"files": [{"source": "README.md", "target": "/etc/owner/x"}]},
            {"files": [{"source": "LICENSE", "target": "/etc/owner/x"}]},
            "files: content ",
        ),
    ],
    ids=["cap", "sysctl", "panic", "docker", "file"],
)
def test_what_another_stack_declares_otherwise_is_told_before_up(
    theirs: dict[str, Any], ours: dict[str, Any], said: str, host: TunedHost
) -> None:
    apply(host, settings_of(host, **theirs), "prod")
    settings = settings_of(host, **ours)
    [finding] = tuning_findings(settings, "dev", settings.nodes[0], look(host, settings))
    assert (finding.code, finding.where) == ("setting-contradicted", "spark-a")
    assert said in finding.what
    same = settings_of(host, **theirs)
    assert tuning_findings(same, "dev", same.nodes[0], look(host, same)) == []


def test_what_the_fabric_claims_is_compared_too(host: TunedHost) -> None:
    settings = settings_of(host)
    assert tuning_findings(settings, "dev", settings.nodes[0], look(host, settings), {("link", "x"): "mtu 1"}) == []


def test_what_each_stack_has_for_itself_is_no_contradiction(host: TunedHost) -> None:
    apply(host, settings_of(host, memory_floor_mib=4096, sysctls={"net.core.rmem_max": "1"}), "prod")
    settings = settings_of(host, memory_floor_mib=8192)
    assert tuning_findings(settings, "dev", settings.nodes[0], look(host, settings)) == []


def found(host: TunedHost, settings: Settings, stack: str = "dev") -> list[str]:
    """What is told of the tuning, one line each."""
    findings = tuning_findings(settings, stack, settings.nodes[0], look(host, settings, stack))
    return [f"{finding.code} {finding.where}: {finding.what}" for finding in findings]


def test_what_up_would_refuse_is_a_finding_and_all_of_it_is_told(host: TunedHost) -> None:
    host.file("/dev/watchdog").unlink()
    link = host.file("/etc/systemd/logind.conf.d/60-spark-vllm.conf")
    link.parent.mkdir(parents=True)
    link.symlink_to("/dev/null")
    host.runs("others", "")
    wanted = settings_of(host, watchdog=True, remove_ipc=False, docker_cgroup_driver="cgroupfs")
    assert found(host, wanted) == [
        "tuning-refused spark-a (host.watchdog): expected /dev/watchdog, found none",
        "tuning-refused spark-a (host.remove_ipc): expected a plain file or none at "
        "/etc/systemd/logind.conf.d/60-spark-vllm.conf, found a link",
        "tuning-refused spark-a (host.disturb_others): expected no containers of others while Docker is restarted, "
        "found others",
    ]


def test_containers_of_others_are_no_finding_where_they_may_be_disturbed_or_nothing_changes(host: TunedHost) -> None:
    host.runs("others", "")
    wanted = settings_of(host, docker_cgroup_driver="cgroupfs", disturb_others=True)
    assert found(host, wanted) == []
    apply(host, wanted)
    assert found(host, settings_of(host, docker_cgroup_driver="cgroupfs")) == []


def test_a_daemon_json_that_nobody_can_read_is_a_finding(host: TunedHost) -> None:
    host.file("/etc/docker/daemon.json").parent.mkdir(parents=True, exist_ok=True)
    host.file("/etc/docker/daemon.json").write_text("{")
    assert found(host, settings_of(host, docker_cgroup_driver="cgroupfs")) == [
        "tuning-refused spark-a (host.docker_cgroup_driver): expected an object of JSON in /etc/docker/daemon.json, "
        "found something else"
    ]
