"""The transport that NCCL chose, from every recorded log."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_core.proof.nccl_log import parse_nccl_log
from tests.unit.proof.nodes import RECORDED

FOLDER = RECORDED / "nccl-log"
F0, F1 = ("rocep1s0f0", "roceP2p1s0f0"), ("rocep1s0f1", "roceP2p1s0f1")
KNOWN: dict[str, tuple[str | None, tuple[str, ...], tuple[str, ...], str]] = {
    "error-modify-qp-timeout-link-local-gid": (None, (), (), "ibv_modify_qp failed with 110 Connection timed out,"),
    "error-unhandled-system-error-wrong-gid": (None, (), (), ""),
    "gdr-disabled-2.30.7-no-host-prefix": ("IB", F1, (), ""),
    "ib-ibext-v11-ngc-26.03-excerpt": ("IBext_v11", F0, (), ""),
    "ib-single-rail-link-local": ("IB", F0[:1], (), ""),
    "socket-fallback-complete-not-spark": ("Socket", (), ("eth0",), "NET/IB : No device found"),
    "socket-fallback-no-dev-infiniband-spark-pair": ("Socket", (), ("enp1s0f0np0",), "NET/IB : No device found"),
    "socket-fallback-plugin-none-spark-pair": (
        *("Socket", (), ("enp1s0f0np0",)),
        "Failed to initialize NET plugin IB",
    ),
    "socket-fallback-vf-no-device-spark": ("Socket", (), ("net1",), "NET/IB : No device found"),
    "two-sparks-channels-via-net-ib-excerpt": ("IB", (), (), ""),
    "two-sparks-dual-rail-ib-2.28.9-excerpt": ("IB", F1, (), ""),
    "vllm-ray-worker-channels-ibext-v10-excerpt": ("IBext_v10", (), (), ""),
    "vllm-ray-worker-ibext-v10-excerpt": ("IBext_v10", F1, (), ""),
    "vllm-ray-worker-init-complete-repeated-excerpt": (None, (), (), ""),
}


def test_every_recording_is_known() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(KNOWN)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_the_transport_of_a_recorded_log_is_read(name: str) -> None:
    found = parse_nccl_log((FOLDER / f"{name}.txt").read_text())
    assert (found.network, found.hcas, found.netdevs, found.reason) == KNOWN[name]
    assert found.rdma == (KNOWN[name][0] or "").startswith("IB")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_a_cut_log_names_no_transport_that_the_whole_one_does_not_have(path: Path) -> None:
    text = path.read_text()
    whole = parse_nccl_log(text)
    for end in range(0, len(text), 11):
        found = parse_nccl_log(text[:end])
        if not whole.rdma:
            assert not found.rdma
        assert set(found.hcas) <= set(whole.hcas) | {name[: len(cut)] for cut in found.hcas for name in whole.hcas}


@pytest.mark.parametrize("text", ["", "\x00\ufffd NET/", "Using network", "via NET//0", "NET/IB : Using", "é ✗ NCCL"])
def test_odd_text_names_no_transport(text: str) -> None:
    assert parse_nccl_log(text).network is None
    assert str(parse_nccl_log(text)) == "unknown"


def test_what_channels_go_over_counts_before_what_was_announced() -> None:
    announced = "NCCL INFO Using network IB\n"
    socket = "NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0\nNCCL INFO Channel 01/0 : x via NET/Socket/0\n"
    assert parse_nccl_log(announced + socket).network == "Socket"
    assert parse_nccl_log("NCCL INFO Using network Socket\nChannel 0 via NET/IBext_v11/0").network == "IBext_v11"


def test_a_device_made_of_two_halves_is_both() -> None:
    line = "NCCL INFO NET/IB : Made virtual device [2] name=rocep1s0f1+roceP2p1s0f1 speed=400000 ndevs=2"
    assert parse_nccl_log(line).hcas == F1


def test_a_transport_is_told_with_what_it_goes_over() -> None:
    assert str(parse_nccl_log((FOLDER / "gdr-disabled-2.30.7-no-host-prefix.txt").read_text())) == (
        "NET/IB over rocep1s0f1, roceP2p1s0f1"
    )
    assert str(parse_nccl_log((FOLDER / "socket-fallback-complete-not-spark.txt").read_text())) == (
        "NET/Socket over eth0"
    )
