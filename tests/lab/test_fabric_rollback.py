"""A real ``netplan apply`` under the host's own rollback: cut off, killed, without power, and undone.

Only this shows that systemd's timer brings a host back that nobody can reach any more, that netplan takes a trial from
/run, and that networkd's links are afterwards what they were. It needs root on Linux and about three minutes; it uses a
lab of its own.

To clean up after an aborted run: ``python -m lab down --instance t-rollback``.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator

import pytest

from spark_core.errors import CommandError, ForeignObjectError
from spark_core.fabric import netplan
from spark_core.fabric.facts import NetworkFacts, observe_network
from spark_core.fabric.netplan import apply_fabric, render_netplan, undo_fabric
from spark_core.journal import close_journal, open_journal
from spark_core.settings import FabricInterface, FabricSettings
from tests.lab.fabric_nodes import FOLDER, FabricNodes, fabric_nodes

pytestmark = pytest.mark.lab
NODE = "spark-a"
BOUND_S = 20
PORT = FabricInterface(netdev="enp1s0f1np1", address="192.168.200.12/24")
TWIN = FabricInterface(netdev="enP2p1s0f1np1", address="192.168.201.12/24")
NETDEVS = [PORT.netdev, TWIN.netdev]
THEIRS = "/etc/netplan/40-cx7.yaml"
MANAGED = FabricSettings(manage=True, rollback_after_s=BOUND_S)
TAKING = FabricSettings(manage=True, rollback_after_s=BOUND_S, take_over=(THEIRS,))
OURS = MANAGED.netplan_file


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the run goes on."""


@pytest.fixture(scope="module")
def lab() -> Iterator[FabricNodes]:
    yield from fabric_nodes("t-rollback", [NODE, "spark-b"])  # a cable needs two ends for a carrier


@pytest.fixture
def nodes(lab: FabricNodes) -> Iterator[FabricNodes]:
    """The host with a journal; afterwards it must be what it was."""
    before = lab.picture(NODE)
    open_journal(lab.transports[NODE], FOLDER, ["main"])
    yield lab
    close_journal(lab.transports[NODE], FOLDER)
    assert lab.picture(NODE) == before
    assert lab.as_root(NODE, "ls /run/netplan; ls /run/spark-vllm 2>/dev/null || true") == ""
    assert lab.as_root(NODE, "systemctl list-timers --all | grep -c spark-vllm || true") == "0"


def network(nodes: FabricNodes) -> NetworkFacts:
    return observe_network(nodes.transports[NODE])


def killed_before_it_counts(monkeypatch: pytest.MonkeyPatch, nodes: FabricNodes, fabric: FabricSettings) -> None:
    """A run that dies while the trial is in force."""

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(netplan, "_finish", die)
        with pytest.raises(Killed):
            apply_fabric(nodes.transports[NODE], FOLDER, [PORT, TWIN], fabric)
    assert network(nodes).links[PORT.netdev].addresses == (PORT.address,)


def test_a_fabric_is_tried_kept_changed_and_undone(nodes: FabricNodes) -> None:
    transport = nodes.transports[NODE]
    apply_fabric(transport, FOLDER, [PORT, TWIN], MANAGED)
    assert nodes.as_root(NODE, f"cat {OURS}") + "\n" == render_netplan([PORT, TWIN], 9000)
    assert nodes.as_root(NODE, f"stat -c '%a %u:%g' {OURS}; ls /run/netplan") == "600 0:0"
    links = network(nodes).links
    assert [(links[i.netdev].addresses, links[i.netdev].mtu_bytes) for i in (PORT, TWIN)] == [
        ((PORT.address,), 9000),
        ((TWIN.address,), 9000),
    ]
    started = time.monotonic()
    apply_fabric(transport, FOLDER, [PORT, TWIN], MANAGED)
    assert time.monotonic() - started < 2  # nothing is tried where nothing differs
    smaller = FabricSettings(manage=True, mtu_bytes=4200, rollback_after_s=BOUND_S)
    apply_fabric(transport, FOLDER, [PORT, TWIN], smaller)
    assert network(nodes).links[PORT.netdev].mtu_bytes == 4200
    undo_fabric(transport, FOLDER, NETDEVS, [OURS])


def test_a_fabric_that_takes_the_way_to_us_away_comes_back_by_itself_within_its_bound(nodes: FabricNodes) -> None:
    transport = nodes.transports[NODE]
    before = network(nodes)
    ours = ipaddress.ip_address(before.controller)
    # A longer prefix wins: the answers to us would go out of the fabric.
    cutting = FabricInterface(netdev=PORT.netdev, address=f"{ours + 1}/30")
    assert ours in cutting.network
    started = time.monotonic()
    with pytest.raises(CommandError) as failed:
        apply_fabric(transport, FOLDER, [cutting], MANAGED)
    assert time.monotonic() - started < 2 * BOUND_S
    assert failed.value.line == (
        f"{NODE} (fabric): expected an answer over a new connection after `netplan apply`, found none; "
        "the node put its earlier network back by itself"
    )
    assert "a subnet of the fabric that covers our address" in failed.value.do
    after = network(nodes)
    assert after.links == before.links
    assert after.netplan == before.netplan
    undo_fabric(transport, FOLDER, [PORT.netdev], [OURS])


def test_a_run_that_is_killed_is_taken_back_by_the_host_alone(
    nodes: FabricNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = network(nodes)
    killed_before_it_counts(monkeypatch, nodes, MANAGED)
    time.sleep(BOUND_S + 3)
    after = network(nodes)
    assert after.links == before.links
    assert after.netplan == before.netplan


def test_the_next_apply_does_not_wait_for_a_killed_one(nodes: FabricNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_before_it_counts(monkeypatch, nodes, MANAGED)
    apply_fabric(nodes.transports[NODE], FOLDER, [PORT], MANAGED)
    links = network(nodes).links
    assert links[PORT.netdev].addresses == (PORT.address,)
    assert links[TWIN.netdev].addresses == ()
    time.sleep(BOUND_S + 3)  # the timer of the killed run is gone too
    assert network(nodes).links[PORT.netdev].addresses == (PORT.address,)


def test_a_power_cut_before_the_change_counts_leaves_a_host_that_the_next_apply_repairs(
    nodes: FabricNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = network(nodes)
    killed_before_it_counts(monkeypatch, nodes, MANAGED)
    nodes.lab("power-cut", NODE)
    nodes.lab("power-on", NODE)
    after = network(nodes)
    assert after.netplan == before.netplan
    assert after.links[PORT.netdev].addresses == ()
    apply_fabric(nodes.transports[NODE], FOLDER, [PORT, TWIN], MANAGED)
    nodes.lab("power-cut", NODE)
    nodes.lab("power-on", NODE)
    links = network(nodes).links
    assert [links[i.netdev].addresses for i in (PORT, TWIN)] == [(PORT.address,), (TWIN.address,)]


def test_a_file_of_others_comes_back_as_it_was_with_what_it_configures(
    lab: FabricNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = lab.transports[NODE]
    text = f"network:\\n  ethernets:\\n    {PORT.netdev}: {{addresses: [192.168.100.10/24], mtu: 4200}}\\n"
    lab.as_root(NODE, f"printf '{text}' > {THEIRS}; chown 0:1000 {THEIRS}; chmod 640 {THEIRS}; netplan apply")
    with_theirs, _, _ = lab.picture(NODE).partition("## home")
    open_journal(transport, FOLDER, ["main"])
    with pytest.raises(ForeignObjectError, match=f"found {THEIRS}"):
        apply_fabric(transport, FOLDER, [PORT, TWIN], MANAGED)
    killed_before_it_counts(monkeypatch, lab, TAKING)
    assert lab.as_root(NODE, f"ls {THEIRS}") == THEIRS  # hidden by the trial, and still there
    apply_fabric(transport, FOLDER, [PORT, TWIN], TAKING)
    assert lab.as_root(NODE, "ls /etc/netplan") == "10-management.yaml\n60-spark-vllm.yaml"
    assert network(lab).links[PORT.netdev].addresses == (PORT.address,)
    close_journal(transport, FOLDER)
    assert lab.picture(NODE).partition("## home")[0] == with_theirs
    # What the file configured stays on the links when it goes, as it does for an owner; the lab goes with this test.
    lab.as_root(NODE, f"rm {THEIRS}")
