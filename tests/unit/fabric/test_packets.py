"""The packets that prove an MTU: what is sent, and what its answers mean. They are sent here over loopback."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from spark_core.errors import CommandError
from spark_core.fabric import proof
from spark_core.fabric.packets import (
    CLOSED_PORT,
    Outcome,
    PacketProof,
    ends_of,
    packet_probe,
    parse_packets,
    probe_nodes,
)
from spark_core.findings import Finding
from spark_core.settings import Settings
from spark_core.transport.base import Command, Result, compose, parse_sections
from tests.local_node import LocalNode
from tests.scripted_transport import ScriptedTransport
from tests.unit.fabric.conftest import Clock
from tests.unit.fabric.networks import PORT, TWIN, settings_with

linux = pytest.mark.skipif(sys.platform != "linux", reason="the probe runs on the nodes, which are Linux")


def loopback(own: str, peer: str, mtu_bytes: int = 9000) -> Settings:
    """A pair whose one fabric interface is this machine's loopback."""
    return settings_with(
        {
            "hardware": "cpu",
            "fabric": {"mtu_bytes": mtu_bytes},
            "nodes[0].fabric": [{"netdev": "lo", "address": f"{own}/8"}],
            "nodes[1].fabric": [{"netdev": "lo", "address": f"{peer}/8"}],
        }
    )


def probe(settings: Settings, node: int = 0) -> tuple[PacketProof, ...]:
    chosen = settings.nodes[node]
    result = LocalNode().run(compose(packet_probe(settings, chosen)))
    assert result.stderr == ""
    return parse_packets(settings, chosen, parse_sections(result.stdout))


@linux
def test_a_packet_to_a_closed_port_is_answered_in_both_directions() -> None:
    settings = loopback("127.0.0.12", "127.0.0.13")
    assert probe(settings) == (PacketProof("spark-a", "lo", "spark-b", "127.0.0.13", "arrived"),)
    assert probe(settings, 1) == (PacketProof("spark-b", "lo", "spark-a", "127.0.0.12", "arrived"),)


@linux
def test_a_packet_that_the_own_interface_does_not_carry_is_too_long() -> None:
    settings = loopback("127.0.0.12", "127.0.0.13")
    fragment = packet_probe(settings, settings.nodes[0])
    text, _, *rest = fragment.args
    result = LocalNode().run(compose(replace(fragment, args=(text, "65600", *rest))))
    assert parse_sections(result.stdout)["packets"] == "lo\tspark-b\t127.0.0.13\ttoo-long"


@linux
def test_without_its_own_address_a_node_sends_nothing() -> None:
    assert [found.outcome for found in probe(loopback("198.51.100.12", "198.51.100.13"))] == ["absent"]


@linux
def test_a_peer_that_takes_packets_and_says_nothing_is_not_taken_for_one_that_answers() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.13", CLOSED_PORT))
        # Loopback has no neighbours, so that a silent peer looks like one that is not there.
        assert [found.outcome for found in probe(loopback("127.0.0.12", "127.0.0.13"))] == ["no-neighbour"]


def test_each_interface_is_paired_with_those_of_peers_on_its_subnet() -> None:
    settings = settings_with()
    assert [(own.netdev, peer.name, far.address) for own, peer, far in ends_of(settings, settings.nodes[0])] == [
        (PORT, "spark-b", "192.168.200.13/24"),
        (TWIN, "spark-b", "192.168.201.13/24"),
    ]


def test_the_probe_is_given_its_values_as_arguments() -> None:
    settings = settings_with({"fabric": {"mtu_bytes": 4200}})
    fragment = packet_probe(settings, settings.nodes[1])
    assert fragment.args[1:] == (
        *("4200", str(CLOSED_PORT)),
        *(PORT, "192.168.200.13", "spark-a", "192.168.200.12"),
        *(TWIN, "192.168.201.13", "spark-a", "192.168.201.12"),
    )
    assert "192.168" not in fragment.text


def test_where_no_fabric_is_declared_nothing_is_sent() -> None:
    settings = settings_with(remove=["nodes[0].fabric", "nodes[1].fabric"])
    fragment = packet_probe(settings, settings.nodes[0])
    assert fragment.args == ()
    assert parse_packets(settings, settings.nodes[0], {"packets": ""}) == ()


@pytest.mark.parametrize(
    ("text", "outcomes"),
    [
        (
            f"{PORT}\tspark-b\t192.168.200.13\tarrived\n{TWIN}\tspark-b\t192.168.201.13\tlarge-lost",
            ["arrived", "large-lost"],
        ),
        (f"{PORT}\tspark-b\t192.168.200.13\tarrived", ["arrived", "unread"]),
        ("python3: command not found", ["unread", "unread"]),
        (f"{PORT}\tspark-b\t192.168.200.13\tflew", ["unread", "unread"]),
        (f"{PORT}\tspark-b\t192.168.200.13", ["unread", "unread"]),
        ("", ["unread", "unread"]),
    ],
)
def test_an_answer_that_is_not_understood_proves_nothing(text: str, outcomes: list[Outcome]) -> None:
    settings = settings_with()
    found = parse_packets(settings, settings.nodes[0], {"packets": text})
    assert [one.outcome for one in found] == outcomes
    assert [one.outcome for one in parse_packets(settings, settings.nodes[0], {})] == ["unread", "unread"]


def test_a_node_without_python_proves_nothing_and_says_so(tmp_path: Any) -> None:
    node = LocalNode(programs=tmp_path)
    node.install("python3", "#!/bin/sh\nexit 127\n")
    settings = settings_with()
    result = node.run(compose(packet_probe(settings, settings.nodes[0])))
    assert "failed-0" not in result.stdout
    found = parse_packets(settings, settings.nodes[0], parse_sections(result.stdout))
    assert [one.outcome for one in found] == ["unread", "unread"]


def test_all_nodes_send_and_a_silent_one_is_an_error() -> None:
    settings = settings_with()

    def dead(cmd: Command) -> Result | str:
        raise CommandError("no answer in 20 s", where="spark-b")

    nodes = {
        "spark-a": ScriptedTransport("spark-a", lambda _: "=== packets\n"),
        "spark-b": ScriptedTransport("spark-b", dead),
    }
    with pytest.raises(CommandError, match="no answer in 20 s"):
        probe_nodes(nodes, settings)
    networks, packets = probe_nodes({"spark-a": nodes["spark-a"]}, settings)
    assert set(networks) == set(packets) == {"spark-a"}


@pytest.fixture
def outcome_of(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Callable[[list[list[Finding]]], list[bool]]:
    """Let the rounds of the proof find this; whether each was judged as a managed fabric."""

    def rounds(found: list[list[Finding]]) -> list[bool]:
        managed: list[bool] = []
        left = list(found)
        monkeypatch.setattr(proof, "probe_nodes", lambda transports, settings: ({}, {}))

        def judge(settings: Settings, *_: object) -> list[Finding]:
            managed.append(settings.fabric.manage)
            return left.pop(0) if len(left) > 1 else left[0]

        monkeypatch.setattr(proof, "fabric_cluster_findings", judge)
        return managed

    return rounds


LOST = Finding("peer-unreachable", "spark-a", "expected packets")


def test_after_up_nothing_is_excused_and_a_link_that_restarts_is_waited_for(
    outcome_of: Callable[[list[list[Finding]]], list[bool]],
) -> None:
    managed = outcome_of([[LOST], [LOST], []])
    assert proof.prove_packets({}, settings_with({"fabric": {"manage": True}})) == []
    assert managed == [False, False, False]


def test_what_stays_lost_is_told_in_the_end(
    outcome_of: Callable[[list[list[Finding]]], list[bool]], clock: Clock
) -> None:
    outcome_of([[LOST]])
    assert proof.prove_packets({}, settings_with()) == [LOST]
    assert clock.now < 1000 + proof.SETTLE_S + 3
