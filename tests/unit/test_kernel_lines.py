"""The kernel's lines of a generation's window are kept beside its log, where they can be read."""

from __future__ import annotations

from pathlib import Path

from spark_core.kernel_lines import keep_kernel_lines
from tests.fake_host import FakeHost

NOISE = "2026-01-01T00:00:01+0000 spark-b kernel: usb 1-1: new device"
KILL = "2026-01-01T00:00:02+0000 spark-b kernel: Out of memory: Killed process 4242 (VLLM::Worker) total-vm:1kB"
STATUS = {"generation": {"n": 3}, "generation_started": 1767225600.5}


def node_with(tmp_path: Path, journal: str, dmesg: str = "exit 1") -> tuple[FakeHost, Path]:
    host = FakeHost(tmp_path / "host")
    for name, text in (("journalctl", journal), ("dmesg", dmesg)):
        program = host.programs / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)
    folder = tmp_path / "state"
    (folder / "logs" / "3").mkdir(parents=True)
    return host, folder


def test_lines_that_matter_are_kept_and_shown(tmp_path: Path) -> None:
    host, folder = node_with(tmp_path, f"echo \"$@\" > {tmp_path}/asked; printf '%s\\n' '{NOISE}' '{KILL}'")
    assert keep_kernel_lines(host.node, str(folder), 1, STATUS) == [KILL]
    assert (folder / "logs" / "3" / "rank1.kernel.log").read_text() == KILL + "\n"
    assert "--since @1767225600" in (tmp_path / "asked").read_text()


def test_the_ring_stands_in_for_a_journal_that_may_not_be_read(tmp_path: Path) -> None:
    host, folder = node_with(tmp_path, "exit 1", f"echo '{KILL}'")
    assert keep_kernel_lines(host.node, str(folder), 0, STATUS) == [KILL]


def test_where_nothing_can_be_read_or_nothing_matters_nothing_is_kept(tmp_path: Path) -> None:
    host, folder = node_with(tmp_path, f"echo '{NOISE}'")
    assert keep_kernel_lines(host.node, str(folder), 0, STATUS) == []
    assert keep_kernel_lines(host.node, str(folder), 0, {"generation": None}) == []
    assert keep_kernel_lines(host.node, str(tmp_path / "gone"), 0, STATUS) == []
    assert list((folder / "logs" / "3").iterdir()) == []
