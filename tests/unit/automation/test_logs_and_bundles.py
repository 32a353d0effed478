"""Logs by generation, rank and time, as the nodes keep them; and a bundle without secrets."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from automation import redaction
from automation.doctor import Visit, told, without_secrets, write_bundle
from automation.exit_codes import Exit
from automation.logs import Wanted, lines_of
from automation.reports import CheckReport, DoctorReport
from spark_core.errors import SparkError
from spark_core.gate import Rank
from spark_core.wanted import STOPPED, want_running, want_stopped, wanted_state
from tests.local_node import LocalNode

SECRET_MARK = "4dabf18193072939515e22adb298388d"


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    """A rank with two generations; the log of the second lies in three files."""
    for number, name, lines in (
        (1, "rank0.log", ["100.000 supervisor | old"]),
        (12, "rank0.log", ["200.000 supervisor | begun", "201.500 vllm | with | a bar", "no line of ours"]),
        (12, "rank0.tail.1.log", ["300.000 ray | middle"]),
        (12, "rank0.tail.log", ["400.000 vllm | Authorization: Bearer abcdefgh12345678"]),
        (12, "rank1.log", ["200.000 supervisor | another rank's"]),
    ):
        folder = tmp_path / "logs" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(f"{line}\n" for line in lines))
    return Rank(LocalNode("spark-a"), 0, "rank0", str(tmp_path))


def texts(rank: Rank, **wanted: Any) -> list[str]:
    return [line.text for line in lines_of(rank, Wanted(**wanted))]


def test_the_last_generation_is_read_in_order_of_its_files_and_without_secrets(rank: Rank) -> None:
    assert texts(rank) == ["begun", "with | a bar", "middle", "Authorization: Bearer [redacted]"]
    first = lines_of(rank, Wanted())[0]
    assert (first.at, first.node, first.rank, first.generation, first.source) == (200.0, "spark-a", 0, 12, "supervisor")


def test_generations_and_times_are_chosen_and_the_newest_lines_kept(rank: Rank) -> None:
    assert texts(rank, generation="1") == ["old"]
    assert texts(rank, generation="all")[:2] == ["old", "begun"]
    assert texts(rank, since=201.0, until=300.0) == ["with | a bar", "middle"]
    assert texts(rank, lines=1) == ["Authorization: Bearer [redacted]"]
    assert texts(rank, generation="7") == []


def test_a_rank_that_never_ran_has_no_lines(tmp_path: Path) -> None:
    assert texts(Rank(LocalNode("spark-a"), 0, "rank0", str(tmp_path))) == []


def test_the_wish_to_stop_is_a_file_on_the_head_that_start_takes_away(tmp_path: Path) -> None:
    docker = tmp_path / "bin"
    docker.mkdir()
    (docker / "docker").write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/asked"\n[ "$1" != ps ] || echo id\n')
    (docker / "docker").chmod(0o755)
    head = Rank(LocalNode("spark-a", programs=docker), 0, "rank0", str(tmp_path))
    assert wanted_state(head) == "running"
    want_stopped(head)
    assert (tmp_path / "desired").read_text() == "stopped\n" and wanted_state(head) == STOPPED
    want_running([head])
    assert not (tmp_path / "desired").exists() and wanted_state(head) == "running"
    assert (docker / "asked").read_text().splitlines()[-1] == "start rank0"


def test_a_state_keeps_no_ciphertext() -> None:
    state = {
        "deployment": {
            "secrets_providers": {"state": {"salt": "v1:abc"}},
            "resources": [
                {
                    "outputs": {
                        "api_key": {SECRET_MARK: "1b47061264138c4ac30d75fd1eb44270", "ciphertext": "v1:xyz"},
                        "n": 1,
                    }
                }
            ],
        }
    }
    kept = without_secrets(state)
    assert "v1:" not in json.dumps(kept)
    assert kept["deployment"]["resources"][0]["outputs"] == {"api_key": "[redacted]", "n": 1}


def test_a_bundle_is_readable_by_its_owner_only_and_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", {"marker-value-1"})
    path = tmp_path / "bundle.tar.gz"
    write_bundle(path, {"a/b.txt": "x marker-value-1 hf_abcdefghijklmnop", "c.txt": "plain"})
    assert path.stat().st_mode & 0o777 == 0o600
    with tarfile.open(path) as bundle:
        files = {member.name: bundle.extractfile(member) for member in bundle.getmembers()}
        content = {name: file.read().decode() for name, file in files.items() if file}
    assert content == {"spark-vllm-doctor/a/b.txt": "x [redacted] [redacted]", "spark-vllm-doctor/c.txt": "plain"}


def test_a_look_that_fails_is_told_and_the_others_go_on() -> None:
    visit = Visit()

    def fails() -> str:
        raise SparkError("expected an answer, found none", where="spark-b", do="look at it")

    assert not visit.check("nodes", fails)
    assert visit.check("engine", lambda: "3.276.0")
    report = DoctorReport(
        command="doctor", stack="dev", exit_code=Exit.FAILED, checks=visit.checks, findings=[], bundle=None
    )
    assert visit.checks[1] == CheckReport(name="engine", ok=True, text="3.276.0")
    assert "BAD  nodes: spark-b: expected an answer, found none" in told(report)
