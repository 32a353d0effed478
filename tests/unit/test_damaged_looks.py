"""Whatever a node answers to the look, damaged in any way, becomes findings and never a traceback."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

import pytest

from spark_core.errors import UnreachableError
from spark_core.findings import KINDS
from spark_core.preflight.look import look_at_nodes
from spark_core.settings import NodeSettings, read_settings
from spark_core.transport.base import Command, Result
from tests.config_cases import apply_change, load_base
from tests.scripted_transport import ScriptedTransport
from tests.unit.facts.spark import SECTIONS

HOST = {
    "gpu_clock_cap_mhz": 2150,
    "remove_ipc": False,
    "docker_cgroup_driver": "cgroupfs",
    "memory_floor_mib": 4096,
    "swap": "off",
    "watchdog": True,
}
UNIT = "LoadState=loaded\nActiveState=active\nUnitFileState=enabled\nNeedDaemonReload=no"
OTHERS = {
    "net-links": '[{"ifname": "enp1s0f1np1", "mtu": 9000, "flags": ["UP"], "address": "02:00:5e:00:0c:02", '
    '"addr_info": [{"family": "inet", "local": "192.168.200.12", "prefixlen": 24}]}]',
    "net-ssh": "10.1.230.7 50000 10.1.230.180 22",
    "net-devices": "netdev=enp1s0f1np1 carrier=1 speed=200000 phys_port_name=p1 phys_switch_id= pci=0000:01:00.1",
    "net-rdma": "link rocep1s0f1/1 state ACTIVE physical_state LINK_UP netdev enp1s0f1np1 rate 200 Gb/sec (4X HDR)",
    "net-gids": "rocep1s0f1\t1\t3\t0000:0000:0000:0000:0000:ffff:c0a8:c80c\t\tv2\tenp1s0f1np1",
    "net-neighbours": '[{"dst":"192.168.200.13","dev":"enp1s0f1np1","lladdr":"02:00:5e:00:0d:02","state":["STALE"]}]',
    "net-netplan": "open etc/netplan/40-cx7.yaml\n|network: {ethernets: {enp1s0f1np1: {mtu: 9000}}}\n"
    "closed etc/netplan/x.yaml",
    "packets": "enp1s0f1np1\tspark-b\t192.168.200.13\tarrived",
    "live docker": "systemd",
    "live containers": "rank0|dev\nollama|",
    "live logind": "b true",
    "live watchdog": "there\nt 0",
    "live swap": "Filename Type Size Used Priority\n/swap.img file 8388604 0 -2",
    "live unit:spark-vllm-clock-cap.service": UNIT,
    "live unit:spark-vllm-swap-off.service": UNIT,
    "live unit:spark-vllm-memory-floor-dev.service": UNIT,
    **{f"file {number}": "81a4 0:0\nb2xk" for number in range(8)},
    f"journal {'0' * 64} stays other/journal/sysctl-0.json": '{"kind": "sysctl", "target": "a.b", "old": "1"}',
    "journals read": "",
}
ODD = ["", "-1", "null", "[]", "{}", "\0", "ü", "9" * 40, "=== net-links", "|", "NaN", "1e999", "[[", "\t", "x|y", "="]


def damaged(text: str, chance: random.Random) -> str:
    """The text with some lines lost, doubled, swapped, cut off or changed."""
    lines = text.split("\n")
    for _ in range(chance.randint(1, 25)):
        place, other = chance.randrange(len(lines)), chance.randrange(len(lines))
        line, words = lines[place], lines[place].split(" ")
        words[chance.randrange(len(words))] = chance.choice(ODD)
        match chance.randrange(7):
            case 0:
                lines[place : place + 1] = []
            case 1:
                lines.insert(place, lines[other])
            case 2:
                lines[place] = line[: chance.randrange(len(line) + 1)]
            case 3:
                lines[place] = chance.choice(ODD)
            case 4:
                lines[place] = " ".join(words)
            case 5:
                lines[place], lines[other] = lines[other], line
            case _:
                lines[place] = re.sub(r'"[^"]*"|\d+', lambda found: chance.choice([found[0], *ODD]), line)
        lines = lines or [""]
    return "\n".join(lines)


@pytest.mark.parametrize("change", [{}, {"nodes[0].fabric": [], "nodes[1].fabric": []}], ids=["declared", "discovered"])
@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_answer_becomes_findings(seed: int, change: Mapping[str, Any]) -> None:
    settings = read_settings(apply_change(load_base(), {"host": HOST, "fabric": {"manage": True}, **change}))
    text = "".join(f"=== {name}\n{body}\n" for name, body in (SECTIONS | OTHERS).items())
    chance = random.Random(seed)  # noqa: S311

    def answer(_: Command) -> Result:
        return Result(0, damaged(text, chance), "")

    found = look_at_nodes(settings, "dev", lambda node: ScriptedTransport(node.name, answer))
    assert all(finding.code in KINDS and finding.what and "\n" not in finding.what for finding in found.findings)


def test_a_node_that_is_lost_after_the_fabric_was_discovered_takes_no_finding_away() -> None:
    undeclared: dict[str, Any] = {"nodes[0].fabric": [], "nodes[1].fabric": []}
    settings = read_settings(apply_change(load_base(), {"fabric": {"rdma": "off"}, **undeclared}))
    asked: list[str] = []

    def open_node(node: NodeSettings) -> ScriptedTransport:
        def answer(_: Command) -> Result:
            asked.append(node.name)
            if asked.count("spark-b") == 2:
                raise UnreachableError("expected an answer", node="spark-b", step="session", code="connection-lost")
            number = {"spark-a": "12", "spark-b": "13"}[node.name]
            text = "".join(f"=== {name}\n{body}\n" for name, body in (SECTIONS | OTHERS).items())
            return Result(0, text.replace("192.168.200.12", f"192.168.200.{number}"), "")

        return ScriptedTransport(node.name, answer)

    found = look_at_nodes(settings, "dev", open_node)
    assert sorted(asked) == ["spark-a", "spark-a", "spark-b", "spark-b"]
    assert found.findings[0].line.startswith("spark-b, session: expected an answer [connection-lost]")
    assert "memory-unknown" in {finding.code for finding in found.findings[1:]}
    assert len(found.discovered) == 2
