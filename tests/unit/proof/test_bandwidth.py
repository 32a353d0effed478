"""Two nodes are measured: the very ends that run on nodes, on loopback; RDMA's by a stand-in."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from spark_core.errors import ObservationError, UnreachableError
from spark_core.proof import bandwidth, tcp_ends
from spark_core.proof.bandwidth import links_between, measure_pair, pairs_to_measure
from spark_core.proof.idle import Readiness
from spark_core.settings import NodeSettings, Settings, read_settings
from spark_core.transport.base import Command, Result
from tests.config_cases import apply_change, load_base
from tests.local_node import LocalNode, never_asked
from tests.scripted_transport import ScriptedTransport
from tests.unit.proof.nodes import free_ports, rdma_node

pytestmark = pytest.mark.slow

ADDRESSES = {f"nodes[{n}].fabric[{i}].address": f"127.0.{i + 1}.{n + 1}/24" for n in (0, 1) for i in (0, 1)}
ROW = " 65536      882805           0.00               {rate}                0.176554"
WRITER = """#!/bin/bash
here=$(dirname "$0")/..
echo "$*" >> "$here/calls"
last="${!#}"
[ "$last" = --report_gbits ] || cat "$here/answer"
"""


def settings_with(change: Mapping[str, Any] | None = None) -> Settings:
    return read_settings(apply_change(load_base(), ADDRESSES | dict(change or {})))


def ready(*names: str, tools: str = "python3 ib_write_bw", ports: int = 3) -> dict[str, Readiness]:
    return {
        name: Readiness(name, (), 99999, frozenset(tools.split()), tuple(free_ports("127.0.1.2", ports)))
        for name in names
    }


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "TCP_SECONDS", 0.2)


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, LocalNode]:
    """Two nodes with RDMA devices and an ``ib_write_bw`` that says what ``answer`` holds."""
    found = {}
    for n, name in enumerate(("spark-a", "spark-b")):
        devices = {"rocep1s0f1": (3 + n, f"127.0.1.{n + 1}"), "roceP2p1s0f1": (5, f"127.0.2.{n + 1}")}
        found[name] = rdma_node(tmp_path, name, devices)
        found[name].install("ib_write_bw", WRITER)
        answer(found[name], ROW.format(rate="92.57"))
    return found


def answer(node: LocalNode, text: str) -> None:
    (Path(str(node.sandbox)) / "answer").write_text(text + "\n")


def nodes_of(settings: Settings) -> tuple[NodeSettings, NodeSettings]:
    return settings.nodes[0], settings.nodes[1]


@pytest.mark.usefixtures("brief")
def test_tcp_measures_both_directions_over_both_links_and_the_round_trip(pair: dict[str, LocalNode]) -> None:
    first, second = nodes_of(settings_with())
    ports = ready("spark-a", "spark-b", tools="python3")
    found, findings = measure_pair(first, second, pair, ports, rdma="required")
    assert findings == []
    assert (found.first, found.second, found.method, found.links) == ("spark-a", "spark-b", "tcp", 2)
    assert found.forward_gbps > 0.5 and found.backward_gbps > 0.5
    assert 1 < found.round_trip_us < 50_000
    assert found.rate.gbps == min(found.forward_gbps, found.backward_gbps)
    assert str(found).startswith("spark-a - spark-b: ") and "Gb/s by tcp over 2 links, round trip" in str(found)


@pytest.mark.parametrize("change", [{"fabric.rdma": "off"}, {f"nodes[{n}].fabric[1].hca": None for n in (0, 1)}])
@pytest.mark.usefixtures("brief")
def test_rdma_is_not_written_where_it_is_off_or_a_link_has_no_device(
    pair: dict[str, LocalNode], change: dict[str, Any]
) -> None:
    change.setdefault("fabric.rdma", "required")
    fabric = {"fabric": {"rdma": change.pop("fabric.rdma")}}
    settings = settings_with(change | fabric)
    first, second = nodes_of(settings)
    rdma = settings.fabric.rdma or "required"
    found, _ = measure_pair(first, second, pair, ready("spark-a", "spark-b"), rdma=rdma)
    assert found.method == "tcp"
    assert not (Path(str(pair["spark-a"].sandbox)) / "calls").exists()


def test_writes_of_rdma_go_both_ways_over_both_devices_with_each_node_s_own_gid(pair: dict[str, LocalNode]) -> None:
    first, second = nodes_of(settings_with())
    answer(pair["spark-b"], ROW.format(rate="55.00"))
    found, findings = measure_pair(first, second, pair, ready("spark-a", "spark-b"), rdma="required")
    assert findings == []
    assert found.method == "ib_write_bw" and found.links == 2
    assert found.forward_gbps == pytest.approx(185.14) and found.backward_gbps == pytest.approx(110.0)
    assert found.rate.gbps == pytest.approx(110.0)
    assert found.round_trip_us > 0
    for n, node in enumerate(pair.values()):
        words = (Path(str(node.sandbox)) / "calls").read_text()
        assert f"-d rocep1s0f1 -x {3 + n} " in words and "-d roceP2p1s0f1 -x 5 " in words
        assert f"127.0.1.{2 - n}" in words


@pytest.mark.parametrize(("rdma", "severity"), [("required", "fail"), ("preferred", "warn")])
@pytest.mark.usefixtures("brief")
def test_a_write_that_fails_is_told_and_tcp_measures_instead(
    pair: dict[str, LocalNode], rdma: Any, severity: str
) -> None:
    first, second = nodes_of(settings_with())
    answer(pair["spark-a"], "Failed to modify QP 306 to RTR\nUnable to Connect the HCA's through the link")
    found, findings = measure_pair(first, second, pair, ready("spark-a", "spark-b"), rdma=rdma)
    assert found.method == "tcp" and found.forward_gbps > 0
    assert [(one.code, one.severity) for one in findings] == [("rdma-write-failed", severity)]
    assert "Unable to Connect the HCA's through the link" in findings[0].what


def test_a_peer_that_is_not_there_is_named_within_the_bound(
    pair: dict[str, LocalNode], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = tmp_path / "tcp_ends.py"
    impatient.write_text(Path(tcp_ends.__file__).read_text().replace("CONNECT_S = 6.0", "CONNECT_S = 0.5"))
    monkeypatch.setattr(bandwidth, "_TCP_ENDS", impatient)
    first, second = nodes_of(settings_with())
    silent = ScriptedTransport("spark-b", lambda _: '{"error": "Address already in use"}\n')
    begin = time.monotonic()
    with pytest.raises(ObservationError) as failed:
        measure_pair(
            first,
            second,
            {"spark-a": pair["spark-a"], "spark-b": silent},
            ready("spark-a", "spark-b", tools="python3"),
            rdma="off",
        )
    assert time.monotonic() - begin < 5
    assert "spark-b: Address already in use" in failed.value.what
    assert "spark-a: no connection from 127.0.1.1 to 127.0.1.2" in failed.value.what


@pytest.mark.parametrize("said", ["", "Segmentation fault\n", "[]\n", '{"received": []}\n', '{"received": 5}\n'])
def test_an_end_that_says_nothing_of_use_gives_no_rate(said: str) -> None:
    first, second = nodes_of(settings_with())
    ends = {name: ScriptedTransport(name, lambda _: said) for name in ("spark-a", "spark-b")}
    with pytest.raises(ObservationError) as failed:
        measure_pair(first, second, ends, ready("spark-a", "spark-b", tools="python3"), rdma="off")
    assert failed.value.what.startswith("expected")


def test_without_python_or_a_free_port_nothing_is_started() -> None:
    first, second = nodes_of(settings_with())
    ends = {name: ScriptedTransport(name, never_asked) for name in ("spark-a", "spark-b")}
    for here, wanted in (
        (ready("spark-a", "spark-b", tools=""), "python3"),
        (ready("spark-a", "spark-b", tools="python3", ports=0), "port"),
    ):
        with pytest.raises(ObservationError) as failed:
            measure_pair(first, second, ends, here, rdma="off")
        assert wanted in failed.value.what


def test_a_node_that_is_lost_meanwhile_is_not_taken_for_a_slow_link(pair: dict[str, LocalNode]) -> None:
    def lost(_: Command) -> Result:
        raise UnreachableError("expected an answer, found: the connection was lost", node="spark-b", step="session")

    first, second = nodes_of(settings_with())
    ends = {"spark-a": ScriptedTransport("spark-a", lambda _: "{}"), "spark-b": ScriptedTransport("spark-b", lost)}
    with pytest.raises(UnreachableError):
        measure_pair(first, second, ends, ready("spark-a", "spark-b", tools="python3"), rdma="off")


WITH_PEAK = """
import atexit, runpy, sys
def tell():
    with open("/proc/self/status") as status:
        print(next(line.split()[1] for line in status if line.startswith("VmHWM:")), file=sys.stderr)
atexit.register(tell)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program and tells its peak of memory in KiB at its end, as the last line of its errors.

Not by getrusage(2): the peak of a child begins there with that of the process it was forked from.
"""


def run_ends(*options: str, client_options: tuple[str, ...] | None = None) -> tuple[str, str, float]:
    """Both ends as processes; what they printed, and the larger peak of memory in MiB."""
    (port,) = free_ports("127.0.1.2", 1)
    program = [sys.executable, "-c", WITH_PEAK, tcp_ends.__file__]
    server = subprocess.Popen(
        [*program, "server", "20", str(port), *options, "127.0.1.2=127.0.1.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    client = subprocess.run(
        [*program, "client", "20", str(port), *(client_options or options), "127.0.1.1=127.0.1.2"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    heard, errors = server.communicate(timeout=60)
    peaks = [int(text.split()[-1]) / 1024 for text in (errors, client.stderr)]
    return heard, client.stdout, max(peaks)


def test_bytes_and_memory_are_bounded() -> None:
    heard, told, peak_mib = run_ends("2", "5", str(64 << 20))
    assert f'"bytes": {64 << 20}' in heard and f'"bytes": {64 << 20}' in told
    assert peak_mib < 50  # each end takes about 25


def test_an_end_whose_peer_never_comes_ends_by_its_alarm() -> None:
    (port,) = free_ports("127.0.1.2", 1)
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, tcp_ends.__file__, "server", "1", str(port), "1", "1", "1", "127.0.1.2=127.0.1.1"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert time.monotonic() - begin < 10
    assert done.stdout == '{"error": "not done after 1 s; the other end may have gone"}\n'


def test_whoever_is_not_the_peer_is_turned_away() -> None:
    (port,) = free_ports("127.0.1.2", 1)
    server = subprocess.Popen(
        [sys.executable, tcp_ends.__file__, "server", "20", str(port), "0", "0", "0", "127.0.1.2=127.0.1.1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    stranger = tcp_ends.connect("127.0.1.2", port, "127.0.1.9", 255)
    with stranger, contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    peer = tcp_ends.connect("127.0.1.2", port, "127.0.1.1", 255)
    with peer:
        for _ in range(tcp_ends.PINGS):
            peer.sendall(b"p")
            assert peer.recv(1) == b"p"
    assert server.communicate(timeout=30)[0] == '{"received": []}\n'


def three(topology: str, *addresses: tuple[str, ...]) -> Settings:
    raw = load_base()
    raw["nodes"] = [
        {
            "name": f"spark-{'abc'[n]}",
            "management_address": f"10.1.230.18{n}",
            "user": "aurora",
            "host_key": raw["nodes"][0]["host_key"],
            "fabric": [{"netdev": f"fabric{i}", "address": address} for i, address in enumerate(own)],
        }
        for n, own in enumerate(addresses)
    ]
    raw["groups"]["main"] |= {"nodes": ["spark-a", "spark-b", "spark-c"]}
    raw["groups"]["main"]["serving"]["tensor_parallel_size"] = 3
    raw["fabric"] = {"topology": topology}
    return read_settings(raw)


def test_behind_a_switch_each_node_is_measured_with_the_next() -> None:
    settings = three("switch", *[(f"10.0.1.{n}/24", f"10.0.2.{n}/24") for n in (1, 2, 3)])
    pairs = pairs_to_measure(settings.nodes)
    assert [(one.name, other.name) for one, other in pairs] == [("spark-a", "spark-b"), ("spark-b", "spark-c")]
    assert len(links_between(*pairs[0])) == 2


def test_in_a_ring_every_cable_is_measured_once() -> None:
    settings = three(
        "ring", ("10.0.1.1/24", "10.0.3.1/24"), ("10.0.1.2/24", "10.0.2.2/24"), ("10.0.2.3/24", "10.0.3.3/24")
    )
    pairs = pairs_to_measure(settings.nodes)
    assert {(one.name, other.name) for one, other in pairs} == {
        ("spark-a", "spark-b"),
        ("spark-b", "spark-c"),
        ("spark-a", "spark-c"),
    }
    assert [len(links_between(*one)) for one in pairs] == [1, 1, 1]
