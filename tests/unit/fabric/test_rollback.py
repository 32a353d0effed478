"""A network change that takes itself back: what a cut, a kill and a slow run leave on a host."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from spark_core.errors import CommandError, SparkError, UnreachableError
from spark_core.fabric import netplan
from spark_core.fabric.facts import Link
from spark_core.fabric.netplan import apply_fabric, render_netplan, undo_fabric
from spark_core.fabric.rollback import NetplanFile, change_netplan, render_rollback
from spark_core.journal import StackFolder, read_journal
from spark_core.settings import FabricInterface, FabricSettings
from spark_core.transport.base import Command
from tests.fake_host import FakeHost
from tests.unit.fabric.conftest import Clock

pytestmark = pytest.mark.slow

PORT = FabricInterface(netdev="enp1s0f1np1", address="192.168.200.12/24")
MANAGED = FabricSettings(manage=True)
OURS = MANAGED.netplan_file


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the run goes on."""


def trial_files(host: FakeHost) -> list[str]:
    return sorted(path.name for path in (host.base / "run/netplan").iterdir())


def cut_by_the_change(host: FakeHost, clock: Clock, *, after_s: float) -> None:
    """The node answers nobody while the trial is in force; its timer ends it."""
    host.node.answers = lambda: trial_files(host) == []
    clock.due[clock.now + after_s] = host.let_timers_end


def test_a_change_that_cuts_the_node_off_comes_back_by_itself_and_is_told(
    host: FakeHost, folder: StackFolder, clock: Clock
) -> None:
    before = host.links()
    cut_by_the_change(host, clock, after_s=45)
    with pytest.raises(CommandError) as failed:
        apply_fabric(host.node, folder, [PORT], MANAGED)
    assert failed.value.line == (
        "spark-a (fabric): expected an answer over a new connection after `netplan apply`, found none; "
        "the node put its earlier network back by itself"
    )
    assert "nodes[].fabric" in failed.value.do
    assert host.links() == before
    assert not host.netplan_path.exists()
    assert trial_files(host) == []
    assert host.read()["timers"] == {}


def test_a_node_that_is_away_for_a_moment_only_keeps_the_change(
    host: FakeHost, folder: StackFolder, clock: Clock
) -> None:
    answers = iter([False, False, True, True])
    host.node.answers = lambda: next(answers)
    apply_fabric(host.node, folder, [PORT], MANAGED)
    assert host.netplan_path.read_text() == render_netplan([PORT], 9000)
    assert next(answers, "all used") == "all used"


def test_a_node_that_never_comes_back_is_told_with_what_a_power_cycle_does(
    host: FakeHost, folder: StackFolder, clock: Clock
) -> None:
    host.node.answers = lambda: False
    with pytest.raises(CommandError) as failed:
        apply_fabric(host.node, folder, [PORT], MANAGED)
    assert failed.value.line.startswith("spark-a: expected the node back after its own rollback, found no answer")
    assert "a power cycle starts with that" in failed.value.do
    assert clock.now < 1000 + 45 + 60


def test_a_connection_that_breaks_off_during_the_apply_is_no_loss_if_a_new_one_is_answered(
    host: FakeHost, folder: StackFolder, clock: Clock
) -> None:
    dropped = iter([True])

    def drop(cmd: Command) -> None:
        if cmd.argv[:2] == ("netplan", "apply") and next(dropped, False):
            raise UnreachableError("expected an answer, found: the connection was lost", node="spark-a", step="session")

    host.node.before = drop
    apply_fabric(host.node, folder, [PORT], MANAGED)
    assert PORT.address in host.addresses(PORT.netdev)


def test_a_run_that_takes_longer_than_the_bound_changes_nothing(
    host: FakeHost, folder: StackFolder, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = host.links()
    finish = netplan._finish

    def slowly(*args: object) -> None:
        finish(*args)  # type: ignore[arg-type]
        host.let_timers_end()

    monkeypatch.setattr(netplan, "_finish", slowly)
    with pytest.raises(CommandError, match="the node put its earlier network back by itself"):
        apply_fabric(host.node, folder, [PORT], MANAGED)
    assert host.links() == before
    assert not host.netplan_path.exists()


def test_a_rollback_that_begins_while_it_is_asked_for_is_seen_to_its_end(
    host: FakeHost, folder: StackFolder, clock: Clock
) -> None:
    """Killed in its trial; the timer fires between the next run's look at it and the request to begin."""
    before = host.links()
    host.node.before = killed_in("systemctl stop")
    with pytest.raises(Killed):
        apply_fabric(host.node, folder, [PORT], MANAGED)

    def fire(cmd: Command) -> None:
        if "systemctl start" in " ".join(cmd.argv):
            host.node.before = lambda _: None
            host.let_timers_end()

    host.node.before = fire
    undo_fabric(host.node, folder, [PORT.netdev], [OURS])
    assert host.links() == before
    assert trial_files(host) == []


def killed_in(step: str, count: int = 1) -> Callable[[Command], None]:
    """A run that is killed just before a command of root."""
    left = [count]

    def kill(cmd: Command) -> None:
        if cmd.sudo and step in " ".join(cmd.argv):
            left[0] -= 1
            if left[0] == 0:
                raise Killed

    return kill


@pytest.mark.parametrize(
    "step", ["systemd-run", "60-spark-vllm.yaml.new", "netplan apply", "mtu 9000", "systemctl stop"]
)
def test_a_run_that_is_killed_before_the_change_counts_leaves_what_was_there(
    step: str, host: FakeHost, folder: StackFolder, clock: Clock
) -> None:
    before = host.links()
    host.node.before = killed_in(step)
    with pytest.raises(Killed):
        apply_fabric(host.node, folder, [PORT], MANAGED)
    host.node.before = lambda _: None
    host.let_timers_end()
    assert host.links() == before
    assert trial_files(host) == []
    assert not host.netplan_path.exists()


@pytest.mark.parametrize(
    ("step", "again"),
    [
        ("systemd-run", "up"),
        ("netplan apply", "destroy"),
        ("mtu 9000", "up"),
        ("systemctl stop", "destroy"),
        ("/etc/netplan/60-spark-vllm.yaml.new", "up"),
        ("/etc/netplan/60-spark-vllm.yaml.new", "destroy"),
        ("rm -f", "up"),
    ],
)
def test_what_a_killed_run_left_is_repaired_by_the_next_one(
    step: str, again: str, host: FakeHost, folder: StackFolder, clock: Clock
) -> None:
    before = host.links()
    host.node.before = killed_in(step)
    with pytest.raises(Killed):
        apply_fabric(host.node, folder, [PORT], MANAGED)
    host.node.before = lambda _: None
    if again == "up":
        apply_fabric(host.node, folder, [PORT], MANAGED)
        assert host.netplan_path.read_text() == render_netplan([PORT], 9000)
        assert host.link(PORT.netdev)["mtu"] == 9000
        assert trial_files(host) == []
        assert host.read().get("timers", {}) == {}
    undo_fabric(host.node, folder, [PORT.netdev], [OURS])
    assert host.links() == before
    assert not host.netplan_path.exists()
    assert trial_files(host) == []
    assert read_journal(host.node, folder) == []


def test_undoing_is_protected_too(host: FakeHost, folder: StackFolder, clock: Clock) -> None:
    apply_fabric(host.node, folder, [PORT], MANAGED)
    with_ours = host.links()
    cut_by_the_change(host, clock, after_s=45)
    with pytest.raises(SparkError, match="the node put its earlier network back by itself"):
        undo_fabric(host.node, folder, [PORT.netdev], [OURS])
    assert host.links() == with_ours
    assert host.netplan_path.read_text() == render_netplan([PORT], 9000)
    assert {entry.key for entry in read_journal(host.node, folder)} == {("file", OURS), ("link", PORT.netdev)}


def test_the_rollback_gives_links_their_addresses_state_and_parameters_back(host: FakeHost, clock: Clock) -> None:
    parameter = host.base / "proc/sys/net/ipv4/conf/enp1s0f1np1/promote_secondaries"
    parameter.parent.mkdir(parents=True)
    parameter.write_text("0\n")

    def change() -> None:
        host.set_link(PORT.netdev, 9000, "192.168.200.12/24", "172.16.0.1/24")
        parameter.write_text("1\n")
        raise CommandError("expected better", where="spark-a")

    file = NetplanFile(OURS, b"network: {}\n")
    with pytest.raises(CommandError, match="expected better; the earlier network was put back"):
        change_netplan(host.node, "dev", f"{host.base}/staging", [file], [PORT.netdev], change)
    assert host.link(PORT.netdev) == {"mtu": 1500, "addresses": ["169.254.35.62/16"]}
    assert parameter.read_text() == "0\n"


def test_the_script_of_the_rollback_needs_nobody() -> None:
    links = {"enp1s0f1np1": Link(1500, ("169.254.35.62/16",), True), "enP2p1s0f1np1": Link(9000, (), False, False)}
    parameters: dict[str, dict[str, str]] = {
        "enp1s0f1np1": {"ipv4/conf/enp1s0f1np1/forwarding": "0"},
        "enP2p1s0f1np1": {},
        "gone": {},
    }
    text = render_rollback(["/run/netplan/60-spark-vllm.yaml", "/run/netplan/it's.yaml"], links, parameters)
    assert text.splitlines()[-5:] == [
        "rm -f -- /run/netplan/60-spark-vllm.yaml '/run/netplan/it'\"'\"'s.yaml'",
        "timeout 30 netplan apply",
        "put_back enp1s0f1np1 1500 up 169.254.35.62/16 ipv4/conf/enp1s0f1np1/forwarding=0",
        "put_back enP2p1s0f1np1 9000 down ''",
        'rm -f -- "$0"',
    ]
