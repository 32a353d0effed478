"""``ib_write_bw``: what it prints is read, and both of its ends are run as on two nodes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spark_core.errors import ObservationError
from spark_core.proof.perftest import Endpoint, parse_write_bandwidth, read_run, run_write_bandwidth
from tests.local_node import LocalNode
from tests.unit.proof.nodes import RECORDED, rdma_node, write_gid

FOLDER = RECORDED / "ib_write_bw"


@pytest.mark.parametrize(
    ("name", "gbps", "rows", "device", "index"),
    [
        ("92gbps-cpu-util", 92.57, 1, "roceP2p1s0f0", 3),
        ("run-infinitely-rail0-92gbps", 92.57, 5, "rocep1s0f0", 3),
        ("run-infinitely-rail1-97gbps", 97.28, 6, "roceP2p1s0f0", 3),
        ("result-rows-degraded-13gbps", 13.23, 2, None, None),
    ],
)
def test_the_rate_of_a_recorded_run_is_read(name: str, gbps: float, rows: int, device: str | None, index: int) -> None:
    found = parse_write_bandwidth((FOLDER / f"{name}.txt").read_text())
    assert (found.gbps, found.rows, found.device, found.gid_index) == (gbps, rows, device, index)


def test_the_two_halves_of_a_recorded_port_are_what_the_guide_says() -> None:
    rates = [parse_write_bandwidth(path.read_text()).gbps for path in sorted(FOLDER.glob("run-infinitely-*"))]
    assert sum(rates) == pytest.approx(189.85)


def test_a_wrong_gid_index_is_no_result_although_its_exit_status_is_0() -> None:
    with pytest.raises(ObservationError) as failed:
        parse_write_bandwidth((FOLDER / "wrong-gid-index-error.txt").read_text())
    assert list(failed.value.evidence) == [
        "Failed to modify QP 306 to RTR",
        "Unable to Connect the HCA's through the link",
    ]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_a_cut_output_gives_a_recorded_rate_or_says_that_there_is_none(path: Path) -> None:
    text = path.read_text()
    whole = {float(row.split()[3]) for row in text.splitlines() if row.split()[:1] and row.split()[0].isdigit()}
    for end in range(0, len(text), 7):
        try:
            found = parse_write_bandwidth(text[:end])
        except ObservationError as error:
            assert error.what == "expected a result row of ib_write_bw, found none"
        else:
            assert found.gbps in whole


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "bash: ib_write_bw: command not found",
        " #bytes #iterations BW peak[Gb/sec] BW average[Gb/sec] MsgRate[Mpps]\n 65536 882805 0.00 nan 0.1",
        " 65536 882805 0,00 92,57 0,176554",
        "Zeile 1: Gerät nicht gefunden ✗\x00\ufffd",
    ],
)
def test_odd_output_is_no_rate(text: str) -> None:
    with pytest.raises(ObservationError):
        parse_write_bandwidth(text)


def test_rates_in_mebibytes_are_turned_into_gigabits() -> None:
    text = " #bytes #iterations BW peak[MiB/sec] BW average[MiB/sec] MsgRate[Mpps]\n 65536 5000 0.00 11035.00 0.17\n"
    assert parse_write_bandwidth(text).gbps == pytest.approx(92.57, abs=0.01)


ROW = " 65536      882805           0.00               {rate}                0.176554"
PROGRAM = """#!/bin/bash
here=$(dirname "$0")/..
echo "$*" >> "$here/calls"
last="${!#}"
case "$last" in --report_gbits) echo "waiting"; exit 0 ;; esac
if [ ! -e "$here/listening-$2" ]; then touch "$here/listening-$2"; echo "Couldn't connect to $last:1" >&2; exit 1; fi
cat "$here/answer"
"""


@pytest.fixture
def node(tmp_path: Path) -> LocalNode:
    found = rdma_node(tmp_path, "spark-a", {"rocep1s0f1": (5, "192.168.200.12"), "roceP2p1s0f1": (3, "192.168.201.12")})
    found.install("ib_write_bw", PROGRAM)
    (tmp_path / "spark-a" / "answer").write_text(ROW.format(rate="92.57") + "\n")
    return found


ENDS = [
    Endpoint("rocep1s0f1", "192.168.200.12", 18001, "192.168.200.13"),
    Endpoint("roceP2p1s0f1", "192.168.201.12", 18002, "192.168.201.13"),
]


def calls(node: LocalNode) -> list[str]:
    path = Path(str(node.sandbox)) / "calls"
    return sorted(path.read_text().splitlines()) if path.exists() else []


def test_the_client_looks_the_gid_up_waits_for_the_server_and_measures_both_devices(node: LocalNode) -> None:
    done = node.run(run_write_bandwidth("client", ENDS))
    assert done.status == 0, done.stderr
    assert {name: found.gbps for name, found in read_run(done.stdout, ENDS).items()} == {
        "rocep1s0f1": 92.57,
        "roceP2p1s0f1": 92.57,
    }
    words = "-s 65536 -D 1 -F --report_gbits"
    assert set(calls(node)) == {
        f"-d rocep1s0f1 -x 5 -p 18001 {words} 192.168.200.13",
        f"-d roceP2p1s0f1 -x 3 -p 18002 {words} 192.168.201.13",
    }
    assert len(calls(node)) == 4  # each met nobody at first


def test_the_server_listens_on_every_device_and_ends(node: LocalNode) -> None:
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(node.run, run_write_bandwidth("server", ENDS)).result(timeout=30)
    assert done.status == 0
    assert calls(node) == [
        "-d roceP2p1s0f1 -x 3 -p 18002 -s 65536 -D 1 -F --report_gbits",
        "-d rocep1s0f1 -x 5 -p 18001 -s 65536 -D 1 -F --report_gbits",
    ]


def test_a_device_without_a_roce_v2_entry_for_its_address_is_named(node: LocalNode) -> None:
    write_gid(Path(str(node.sandbox)), "roceP2p1s0f1", 3, "192.168.201.12", kind="IB/RoCE v1")
    done = node.run(run_write_bandwidth("client", ENDS))
    with pytest.raises(ObservationError) as failed:
        read_run(done.stdout, ENDS)
    assert failed.value.what == (
        "expected a result of ib_write_bw over roceP2p1s0f1, found: no RoCE v2 entry for 192.168.201.12 on roceP2p1s0f1"
    )


def test_the_error_of_a_run_is_what_is_told(node: LocalNode) -> None:
    answer = Path(str(node.sandbox)) / "answer"
    answer.write_text((FOLDER / "wrong-gid-index-error.txt").read_text())
    done = node.run(run_write_bandwidth("client", ENDS))
    with pytest.raises(ObservationError) as failed:
        read_run(done.stdout, ENDS)
    assert failed.value.what.endswith("found: Unable to Connect the HCA's through the link")
