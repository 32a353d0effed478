"""Tuning on a host with systemd, logind and Docker: applied once, observed, put back, repaired after any cut."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from spark_core.errors import CommandError, SparkError, UnreachableError
from spark_core.journal import StackFolder, close_journal, open_journal, read_journal
from spark_core.transport.base import Command
from spark_core.tuning import ManagedFile, Place, Tuning, apply_tuning, observe_tuning, values_of
from spark_core.tuning.items import ITEMS
from tests.tuned_host import RepeatingNode, TunedHost

pytestmark = pytest.mark.slow

ALL = {
    "sysctls_at_boot": "net.core.rmem_max = 67108864",
    "gpu_clock_cap_mhz": "2150",
    "swap": "off",
    "memlock_unlimited": "true",
    "remove_ipc": "false",
    "docker_cgroup_driver": "cgroupfs",
    "memory_floor_mib": "4096",
    "packet_filter": "enP2p1s0f1np1,enp1s0f1np1 192.168.200.12,192.168.200.13 30001,6379,6400-6499",
    "watchdog": "true",
}
OWNERS = ManagedFile("/etc/owner/notes.conf", b"a = 1\n", "0640", makes_folder=True)


@pytest.fixture
def host(tmp_path: Path) -> TunedHost:
    return TunedHost(tmp_path / "host")


@pytest.fixture
def place(host: TunedHost) -> Place:
    return place_on(host)


def place_on(host: TunedHost, stack: str = "dev") -> Place:
    place = Place(StackFolder(str(host.base / "srv/root"), stack), "aurora")
    host.file("/etc/owner").mkdir(exist_ok=True)
    host.file("/etc/owner").rmdir()
    open_journal(host.node, place.folder)
    return place


def values(host: TunedHost, place: Place, names: Mapping[str, str]) -> dict[str, str]:
    return values_of(place, list(names), observe_tuning(host.node, place, Tuning({}, names)))


def changes(host: TunedHost) -> list[Command]:
    """The commands that root ran, and files that the deploy user staged or recorded."""
    return [cmd for cmd in host.node.asked if cmd.sudo or cmd.stdin]


@pytest.mark.parametrize("name", ITEMS)
def test_an_item_is_applied_once_seen_by_its_value_and_put_back(name: str, host: TunedHost, place: Place) -> None:
    before = host.picture()
    wanted = {name: ALL[name]}
    assert values(host, place, wanted)[name] == "absent"
    apply_tuning(host.node, place, Tuning({}, wanted))
    assert values(host, place, wanted) == wanted
    host.node.asked.clear()
    apply_tuning(host.node, place, Tuning({}, wanted))
    assert changes(host) == []
    apply_tuning(host.node, place, Tuning())
    assert read_journal(host.node, place.folder) == []
    shutil.rmtree(host.base / "srv/root/stacks/dev/staging")
    open_journal(host.node, place.folder)
    assert host.picture() == before


def test_what_each_item_does_to_the_running_system(host: TunedHost, place: Place) -> None:
    apply_tuning(host.node, place, Tuning({"net.core.rmem_max": "67108864"}, ALL, [OWNERS]))
    assert host.parameter("net.core.rmem_max") == "67108864"
    assert host.says("cap") == "2150"
    assert len(host.file("/proc/swaps").read_text().splitlines()) == 1
    assert host.says("remove-ipc") == "false"
    assert host.says("docker") == "cgroupfs"
    assert host.says("watchdog") == "30000000"
    assert host.file("/etc/security/limits.d/60-spark-vllm-memlock.conf").read_text().splitlines()[1:] == [
        "aurora soft memlock unlimited",
        "aurora hard memlock unlimited",
    ]
    assert '"bip": "10.9.0.1/24"' in host.file("/etc/docker/daemon.json").read_text()
    assert host.file("/etc/owner/notes.conf").read_bytes() == b"a = 1\n"
    assert host.count("docker-restarts") == 1
    assert host.count("reloads") == 0, "units that systemd does not know yet need no reload"


def test_all_of_it_outlives_a_power_cut(host: TunedHost, place: Place) -> None:
    apply_tuning(host.node, place, Tuning({}, ALL))
    host.boot()
    assert values(host, place, ALL) == ALL
    assert host.says("cap") == "2150"


@pytest.mark.parametrize(
    ("name", "damage", "seen"),
    [
        ("gpu_clock_cap_mhz", "etc/systemd/system/spark-vllm-clock-cap.service", "absent"),
        ("gpu_clock_cap_mhz", "machine/units/spark-vllm-clock-cap.service.active", "2150, not active"),
        (
            "gpu_clock_cap_mhz",
            "etc/systemd/system/multi-user.target.wants/spark-vllm-clock-cap.service",
            "2150, not at boot",
        ),
        ("memory_floor_mib", "machine/units/spark-vllm-memory-floor-dev.service.active", "4096, not active"),
        ("remove_ipc", "etc/systemd/logind.conf.d/60-spark-vllm.conf", "absent"),
        ("docker_cgroup_driver", "etc/docker/daemon.json", "absent"),
        ("memlock_unlimited", "etc/security/limits.d/60-spark-vllm-memlock.conf", "absent"),
    ],
)
def test_a_drift_shows_by_the_item_s_name_and_is_repaired(
    name: str, damage: str, seen: str, host: TunedHost, place: Place
) -> None:
    wanted = {name: ALL[name]}
    apply_tuning(host.node, place, Tuning({}, wanted))
    (host.base / damage).unlink()
    assert values(host, place, wanted) == {name: seen}
    apply_tuning(host.node, place, Tuning({}, wanted))
    assert values(host, place, wanted) == wanted


def test_what_the_running_system_alone_has_lost_shows_too(host: TunedHost, place: Place) -> None:
    wanted = {name: ALL[name] for name in ("remove_ipc", "docker_cgroup_driver", "watchdog", "swap")}
    apply_tuning(host.node, place, Tuning({}, wanted))
    host.be("remove-ipc", "true")
    host.be("docker", "systemd")
    host.be("watchdog", "0")
    with host.file("/proc/swaps").open("a") as file:
        file.write("/swap.img file 1 0 -2\n")
    assert values(host, place, wanted) == {
        "remove_ipc": "false, but logind still removes it",
        "docker_cgroup_driver": "cgroupfs, but Docker has systemd",
        "watchdog": "true, not set before the next boot",
        "swap": "off, but /swap.img is in use",
    }


@pytest.mark.parametrize("name", [name for name in ITEMS if name != "docker_cgroup_driver"])
def test_a_file_that_somebody_altered_is_not_taken_for_ours(name: str, host: TunedHost, place: Place) -> None:
    wanted = {name: ALL[name]}
    apply_tuning(host.node, place, Tuning({}, wanted))
    path = ITEMS[name].files(place, ALL[name])[-1].path
    host.file(path).write_text(host.file(path).read_text() + "\n; altered\n")
    assert values(host, place, wanted)[name] in ("altered", "net.core.rmem_max = 67108864; ; altered")
    apply_tuning(host.node, place, Tuning({}, wanted))
    assert values(host, place, wanted) == wanted


def test_another_value_is_changed_in_place_and_the_first_old_one_stands(host: TunedHost, place: Place) -> None:
    before = host.says("cap")
    for cap in ("2150", "2000"):
        apply_tuning(host.node, place, Tuning({}, {"gpu_clock_cap_mhz": cap}))
        assert host.says("cap") == cap
    [entry] = read_journal(host.node, place.folder)
    assert entry.old is None
    assert (entry.wanted or "").startswith("gpu_clock_cap_mhz: 2000 (content ")
    apply_tuning(host.node, place, Tuning())
    assert host.says("cap") == before


def test_a_driver_that_docker_has_already_is_pinned_without_a_restart(host: TunedHost, place: Place) -> None:
    host.runs("theirs")
    apply_tuning(host.node, place, Tuning({}, {"docker_cgroup_driver": "systemd"}))
    assert '"native.cgroupdriver=systemd"' in host.file("/etc/docker/daemon.json").read_text()
    apply_tuning(host.node, place, Tuning())
    assert host.count("docker-restarts") == 0


@pytest.mark.parametrize("undone", [False, True])
def test_docker_is_not_restarted_beside_containers_of_others_without_consent(
    undone: bool, host: TunedHost, place: Place
) -> None:
    wanted = Tuning({}, {"docker_cgroup_driver": "cgroupfs"})
    if undone:
        apply_tuning(host.node, place, wanted)
    host.runs("ours", "dev")
    host.runs("theirs")
    host.runs("of-another-stack", "prod")
    before = host.picture()
    with pytest.raises(CommandError) as refused:
        apply_tuning(host.node, place, Tuning() if undone else wanted)
    assert refused.value.line == (
        "spark-a (host.disturb_others): expected no containers of others while Docker is restarted, "
        "found of-another-stack, theirs"
    )
    assert host.picture() == before
    apply_tuning(host.node, place, Tuning({}, {} if undone else wanted.items, disturb_others=True))
    assert host.says("docker") == ("systemd" if undone else "cgroupfs")


def test_a_docker_that_does_not_start_with_the_driver_gets_its_configuration_back(
    host: TunedHost, place: Place
) -> None:
    before = host.file("/etc/docker/daemon.json").read_bytes()
    host.be("docker-refuses", "cgroupfs")
    with pytest.raises(CommandError) as failed:
        apply_tuning(host.node, place, Tuning({}, {"docker_cgroup_driver": "cgroupfs"}))
    assert "its earlier configuration is back" in failed.value.line
    assert host.file("/etc/docker/daemon.json").read_bytes() == before
    assert host.says("docker") == "systemd"
    assert read_journal(host.node, place.folder) == []


def test_what_others_write_into_docker_s_configuration_after_us_stays(host: TunedHost, place: Place) -> None:
    path = host.file("/etc/docker/daemon.json")
    apply_tuning(host.node, place, Tuning({}, {"docker_cgroup_driver": "cgroupfs"}))
    path.write_text(path.read_text().replace('"runtimes": {}', '"runtimes": {"nvidia": {"path": "x"}}'))
    apply_tuning(host.node, place, Tuning())
    assert '"nvidia"' in path.read_text()
    assert "cgroupdriver" not in path.read_text()
    assert host.says("docker") == "systemd"


def test_systemd_is_reloaded_only_where_it_knows_an_earlier_unit(host: TunedHost, place: Place) -> None:
    apply_tuning(host.node, place, Tuning({}, {"gpu_clock_cap_mhz": "2150"}, gpu=True))
    host.runs("rank-0", "dev")
    host.runs("theirs")
    with pytest.raises(CommandError) as refused:
        apply_tuning(host.node, place, Tuning({}, {"gpu_clock_cap_mhz": "2000"}, gpu=True))
    assert refused.value.line == (
        "spark-a (host.disturb_others): expected no containers of others while systemd is reloaded, which takes "
        "their GPU, found theirs"
    )
    assert (host.says("cap"), host.count("reloads")) == ("2150", 0)
    apply_tuning(host.node, place, Tuning({}, {"gpu_clock_cap_mhz": "2000"}, gpu=True, disturb_others=True))
    assert (host.says("cap"), host.count("reloads")) == ("2000", 1)
    assert host.says("container-restarts").endswith(" rank-0"), "ours get their GPU back, others are left alone"


def test_a_watchdog_without_a_device_is_refused_before_anything_changes(host: TunedHost, place: Place) -> None:
    host.file("/dev/watchdog").unlink()
    before = host.picture()
    with pytest.raises(CommandError) as refused:
        apply_tuning(host.node, place, Tuning({"net.core.rmem_max": "1"}, {"watchdog": "true", "swap": "off"}))
    assert refused.value.line == "spark-a (host.watchdog): expected /dev/watchdog, found none"
    assert host.picture() == before


def test_a_link_in_the_place_of_a_file_is_refused(host: TunedHost, place: Place) -> None:
    target = host.file("/etc/docker/daemon.json")
    target.rename(target.with_suffix(".real"))
    target.symlink_to(target.with_suffix(".real"))
    with pytest.raises(CommandError) as refused:
        apply_tuning(host.node, place, Tuning({}, {"docker_cgroup_driver": "cgroupfs"}))
    assert refused.value.line == (
        "spark-a (host.docker_cgroup_driver): expected a plain file or none at /etc/docker/daemon.json, found a link"
    )
    assert target.is_symlink()


def test_a_unit_that_does_not_start_is_told_with_its_setting(host: TunedHost, place: Place) -> None:
    host.be("fails-spark-vllm-clock-cap.service", "yes")
    with pytest.raises(CommandError) as failed:
        apply_tuning(host.node, place, Tuning({}, {"gpu_clock_cap_mhz": "2150"}))
    assert failed.value.line.startswith(
        "spark-a (host.gpu_clock_cap_mhz): expected to start spark-vllm-clock-cap.service: "
    )


@pytest.mark.parametrize("old", [None, b"theirs\n", b"", b"\xff\x00 no text"])
def test_a_file_of_the_owner_is_put_and_what_was_there_comes_back(
    old: bytes | None, host: TunedHost, place: Place
) -> None:
    path = host.file(OWNERS.path)
    if old is not None:
        path.parent.mkdir()
        path.write_bytes(old)
        path.chmod(0o604)
    apply_tuning(host.node, place, Tuning({}, {}, [OWNERS]))
    assert (path.read_bytes(), f"{path.stat().st_mode:o}"[-3:]) == (b"a = 1\n", "640")
    apply_tuning(host.node, place, Tuning())
    if old is None:
        assert not path.parent.exists()
    else:
        assert (path.read_bytes(), f"{path.stat().st_mode:o}"[-3:]) == (old, "604")


def test_a_file_whose_folder_s_folder_is_missing_is_refused(host: TunedHost, place: Place) -> None:
    file = ManagedFile("/etc/owner/deep/er.conf", b"x", makes_folder=True)
    with pytest.raises(CommandError) as refused:
        apply_tuning(host.node, place, Tuning({}, {}, [file]))
    assert refused.value.line == (
        "spark-a (host.files: /etc/owner/deep/er.conf): expected the folder /etc/owner/deep or the one above it, "
        "found none"
    )


def test_a_lost_state_adopts_what_the_journal_says_and_restarts_nothing(host: TunedHost, place: Place) -> None:
    before = host.picture()
    tuning = Tuning({"net.core.rmem_max": "67108864"}, ALL, [OWNERS])
    apply_tuning(host.node, place, tuning)
    host.node.asked.clear()
    apply_tuning(host.node, place, tuning)  # what create does with a journal there
    assert changes(host) == []
    close_journal(host.node, place.folder)
    after = host.picture()
    assert {k: v for k, v in before.items() if not k.startswith("srv")} == {
        k: v for k, v in after.items() if not k.startswith("srv")
    }


def test_what_only_the_journal_knows_of_is_put_back_by_the_next_up(host: TunedHost, place: Place) -> None:
    apply_tuning(host.node, place, Tuning({"net.core.rmem_max": "1"}, {"remove_ipc": "false"}))
    apply_tuning(host.node, place, Tuning({}, {"gpu_clock_cap_mhz": "2000"}))  # with no state of the first
    assert host.parameter("net.core.rmem_max") == "212992"
    assert host.says("remove-ipc") == "true"
    assert [entry.target for entry in read_journal(host.node, place.folder)] == [
        "/etc/systemd/system/spark-vllm-clock-cap.service"
    ]


def test_every_command_may_be_repeated_after_its_answer_was_lost(host: TunedHost, place: Place) -> None:
    before = host.picture()
    repeating = RepeatingNode("spark-a", programs=host.base / "programs", sandbox=host.base)
    prod = place_on(host, "prod")
    own = {"memory_floor_mib", "sysctls_at_boot"}
    tuning = Tuning({"net.core.rmem_max": "7"}, ALL, [OWNERS, ManagedFile("/etc/docker/other.conf", b"ours")])
    shared = Tuning(tuning.sysctls, {k: v for k, v in ALL.items() if k not in own}, tuning.files)
    apply_tuning(repeating, place, tuning)
    apply_tuning(repeating, prod, shared)
    assert values(host, place, ALL) == ALL
    told = close_journal(repeating, place.folder)
    assert sum(line.startswith("left ") for line in told) == 9
    assert values(host, prod, shared.items) == dict(shared.items)
    close_journal(repeating, prod.folder)
    assert outside(host.picture()) == outside(before)


CUT = [
    ("parameters", Tuning({"net.core.rmem_max": "67108864", "kernel.panic": "9"}, {"sysctls_at_boot": "a.b = 1"})),
    *((name, Tuning({}, {name: ALL[name]})) for name in ("gpu_clock_cap_mhz", "swap", "remove_ipc", "watchdog")),
    *((name, Tuning({}, {name: ALL[name]})) for name in ("docker_cgroup_driver", "memory_floor_mib")),
    ("files", Tuning({}, {}, [OWNERS, ManagedFile("/etc/docker/other.conf", b"ours", "0600")])),
]


def pictures_at_each_command(host: TunedHost, tmp_path: Path, work: object) -> list[Path]:
    """Copies of the host as it is before each command of a piece of work."""
    saved: list[Path] = []

    def save(_: Command) -> None:
        saved.append(tmp_path / f"at-{len(saved)}")
        host.save(saved[-1])

    host.node.before = save
    assert callable(work)
    work()
    host.node.before = lambda _: None
    return saved


NO_STATE = ("parameters", "files")
"""What a boot forgets nothing of."""


@pytest.mark.parametrize(
    ("power", "name", "tuning"),
    [(power, name, tuning) for name, tuning in CUT for power in (False, True) if not (power and name in NO_STATE)],
    ids=lambda value: {True: "power cut", False: "run killed"}.get(value, "") if isinstance(value, bool) else value,
)
def test_a_run_cut_before_any_of_its_commands_is_undone_or_finished(
    power: bool, name: str, tuning: Tuning, host: TunedHost, place: Place, tmp_path: Path
) -> None:
    if name == "files":
        host.file("/etc/docker/other.conf").write_text("theirs")
    if power:
        host.boot()
    before = host.picture()
    saved = pictures_at_each_command(host, tmp_path, lambda: apply_tuning(host.node, place, tuning))
    done = host.picture()
    assert len(saved) >= 4
    for at in saved:
        host.restore(at)
        if power:
            host.boot()
        apply_tuning(host.node, place, tuning)
        assert without_counts(host.picture()) == without_counts(done), f"finished from {at.name}"
        host.restore(at)
        if power:
            host.boot()
        close_journal(host.node, place.folder)
        assert outside(host.picture()) == outside(before), f"undone from {at.name}"


@pytest.mark.parametrize(("name", "tuning"), CUT, ids=[name for name, _ in CUT])
def test_an_undo_cut_before_any_of_its_commands_is_finished_by_the_next(
    name: str, tuning: Tuning, host: TunedHost, place: Place, tmp_path: Path
) -> None:
    if name == "files":
        host.file("/etc/docker/other.conf").write_text("theirs")
    before = host.picture()
    apply_tuning(host.node, place, tuning)
    done = host.picture()
    saved = pictures_at_each_command(host, tmp_path, lambda: close_journal(host.node, place.folder))
    for at in saved:
        host.restore(at)
        close_journal(host.node, place.folder)
        assert outside(host.picture()) == outside(before), f"from {at.name}"
        if not (at / "srv/root/stacks/dev/journal").exists():
            continue
        host.restore(at)
        apply_tuning(host.node, place, tuning)  # up instead of destroy
        # A copy that was not renamed any more waits for the end of the stack.
        now = {path: text for path, text in outside(host.picture()).items() if not path.endswith(".new")}
        assert now == outside(done), f"up from {at.name}"


def outside(picture: Mapping[str, str]) -> dict[str, str]:
    """A host without our own folder."""
    return {name: text for name, text in picture.items() if not name.startswith("srv")}


def without_counts(picture: Mapping[str, str]) -> dict[str, str]:
    """A host without the times in journal entries."""
    return {name: text for name, text in picture.items() if "/journal/" not in name}


def test_a_connection_that_breaks_is_told_as_such(host: TunedHost, place: Place) -> None:
    def lost(cmd: Command) -> None:
        if cmd.sudo:
            raise UnreachableError("connection lost", node="spark-a", step="session")

    host.node.before = lost
    with pytest.raises(UnreachableError):
        apply_tuning(host.node, place, Tuning({"net.core.rmem_max": "1"}))
    host.node.before = lambda _: None
    with pytest.raises(SparkError) as limited:
        host.be("limit", "77")
        apply_tuning(host.node, place, Tuning({"net.core.rmem_max": "1"}))
    assert limited.value.line == "spark-a (host.sysctls): expected net.core.rmem_max = 1, found 77 after setting it"
