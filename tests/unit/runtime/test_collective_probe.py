"""A rank's part in a collective, as its container runs it, against a stand-in for torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spark_runtime.collective_probe import read_counters
from tests.unit.runtime.runtime_group import FAKES

pytestmark = pytest.mark.slow


class Ranks:
    """Probes against the stand-in for torch."""

    def __init__(self, mount: Path, folder: Path) -> None:
        self.mount, self.folder = mount, folder

    def start(self, rank: int, *options: str, **env: str) -> subprocess.Popen[str]:
        argv = [sys.executable, str(self.mount), "probe", "--rank", str(rank), "--world", "2", "--backend", "gloo"]
        argv += ["--address", "127.0.0.1", "--port", "1", "--rdma", "off", "--deadline-s", "20", *options]
        environ = {**os.environ, "PYTHONPATH": str(FAKES / "probe"), "FAKE_FOLDER": str(self.folder), **env}
        return subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def ranks(mount: Path, tmp_path: Path) -> Ranks:
    return Ranks(mount, tmp_path)


def said(process: subprocess.Popen[str]) -> list[dict[str, object]]:
    """The lines of a probe, once it has ended."""
    text, _ = process.communicate(timeout=60)
    mark = "spark-vllm-probe: "
    lines: list[dict[str, object]] = [
        json.loads(line.removeprefix(mark)) for line in text.splitlines() if line.startswith(mark)
    ]
    assert lines, text
    return lines


def test_probes_meet_check_their_sums_and_tell_what_was_sent(ranks: Ranks) -> None:
    processes = [ranks.start(0), ranks.start(1)]
    for process in processes:
        *stages, last = said(process)
        assert process.returncode == 0
        assert last["done"] is True and last["missing"] == [] and last["torch"] == "2.fake"
        assert isinstance(last["moved_bytes"], int) and isinstance(last["sent_bytes"], dict)
        assert "lo" in last["sent_bytes"]
        assert [stage["stage"] for stage in stages][-2:] == ["first all-reduce", "large all-reduce"]


def test_a_probe_names_the_rank_that_never_came(ranks: Ranks) -> None:
    process = ranks.start(0, "--deadline-s", "2")
    last = said(process)[-1]
    assert process.returncode == 3
    assert (last["stage"], last["missing"]) == ("waiting for the other ranks", [1])
    assert last["error"] == "not done within 2 s"


def test_a_probe_that_hangs_says_in_what_at_its_deadline(ranks: Ranks) -> None:
    processes = [ranks.start(rank, "--deadline-s", "3", FAKE_TORCH="hang") for rank in (0, 1)]
    for process in processes:
        last = said(process)[-1]
        assert process.returncode == 3
        assert (last["stage"], last["missing"]) == ("initialising gloo", [])


@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("no-import", "ImportError: libcudart.so.13: cannot open shared object file"),
        ("wrong", "RuntimeError: an all-reduce of 1024 values came back with 7 wrong ones"),
    ],
)
def test_what_goes_wrong_in_a_probe_is_told_in_its_own_words(ranks: Ranks, mode: str, error: str) -> None:
    processes = [ranks.start(rank, FAKE_TORCH=mode) for rank in (0, 1)]
    for process in processes:
        last = said(process)[-1]
        assert process.returncode == 1 and last["error"] == error and "done" not in last


def test_a_probe_filters_the_devices_as_the_rank_does(ranks: Ranks) -> None:
    process = ranks.start(0, "--rdma", "required", NCCL_IB_HCA="=no-such-device")
    assert "no RDMA device of this node has an active port" in str(said(process)[-1]["error"])
    assert process.returncode == 1


def test_a_probe_over_nccl_needs_a_gpu(ranks: Ranks) -> None:
    process = ranks.start(0, "--backend", "nccl")
    assert said(process)[-1]["error"] == "RuntimeError: torch sees no GPU in this container"


def test_what_interfaces_have_sent_is_read_and_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    for name, text in (("enp1s0f1np1", "4096\n"), ("eth0", "x\n")):
        (tmp_path / name / "statistics").mkdir(parents=True)
        (tmp_path / name / "statistics" / "tx_bytes").write_text(text)
    assert read_counters(tmp_path) == {"enp1s0f1np1": 4096}
