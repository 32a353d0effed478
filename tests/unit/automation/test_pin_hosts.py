"""``pin-hosts``: what a person sees, what is written, and how it ends."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from automation.__main__ import main
from automation.schemas import schema_of
from spark_core.transport.keys import fingerprint
from tests.config_cases import load_base
from tests.fake_ssh import FakeSsh

KEY_A = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAaBcDeF"
KEY_B = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBbBcDeF"
OLD = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIZZZZZZZ"


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSsh]:
    with FakeSsh(tmp_path / "ssh", ["spark-a", "spark-b"]) as fake:
        monkeypatch.setenv("PATH", f"{fake.programs}{os.pathsep}{os.environ['PATH']}")
        fake.offer("spark-a", KEY_A)
        fake.offer("spark-b", KEY_B)
        yield fake


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "Pulumi.t.yaml"
    monkeypatch.setenv("PULUMI_OPTION_CONFIG_FILE", str(path))
    return path


def write(file: Path, **changes: dict[str, Any]) -> None:
    """A stack's file with unpinned nodes, changed by name."""
    raw = load_base()
    for node in raw["nodes"]:
        del node["host_key"]
        node["management_address"] = node["name"]
        node.update(changes.get(node["name"].replace("-", "_"), {}))
    file.write_text(yaml.safe_dump({"config": {f"spark-vllm:{key}": value for key, value in raw.items()}}))


def pins(file: Path) -> dict[str, str | None]:
    nodes = yaml.safe_load(file.read_text())["config"]["spark-vllm:nodes"]
    return {node["name"]: node.get("host_key") for node in nodes}


def pin(*words: str) -> int:
    return main(["pin-hosts", "--stack", "t", *words])


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Someone at a terminal says this."""
    terminal = io.StringIO(text)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)


def test_all_keys_are_shown_and_written_after_one_question(
    ssh: FakeSsh, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file)
    answer(monkeypatch, "y\n")
    assert pin() == 0
    assert pins(file) == {"spark-a": KEY_A, "spark-b": KEY_B}
    shown = capsys.readouterr().out
    assert shown.startswith(
        f"spark-a  spark-a  ssh-ed25519  {fingerprint(KEY_A)}  unpinned\n"
        f"spark-b  spark-b  ssh-ed25519  {fingerprint(KEY_B)}  unpinned\n"
    )
    assert f"Pin 2 host keys in {file}? [y/N] pinned spark-a, spark-b in {file}" in shown
    assert pin() == 0
    assert capsys.readouterr().out.count("  pinned\n") == 2
    assert (ssh.lines("spark-a"), ssh.masters("spark-a")) == ([], [])


@pytest.mark.usefixtures("ssh")
@pytest.mark.parametrize("said", ["\n", "no\n"])
def test_nothing_is_written_without_a_yes(said: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(file)
    before = file.read_bytes()
    answer(monkeypatch, said)
    assert pin() == 4
    assert file.read_bytes() == before


@pytest.mark.usefixtures("ssh")
def test_where_nobody_can_be_asked_nothing_is_written_without_the_option(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert pin() == 4
    assert "--yes writes without asking" in capsys.readouterr().err
    assert pin("--json") == 4
    assert pins(file) == {"spark-a": None, "spark-b": None}
    assert pin("--yes") == 0
    assert pins(file) == {"spark-a": KEY_A, "spark-b": KEY_B}


def test_a_pin_that_differs_is_never_replaced_unless_the_node_is_named(
    ssh: FakeSsh, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, spark_a={"host_key": OLD})
    assert pin("--yes") == 3
    assert pins(file) == {"spark-a": OLD, "spark-b": KEY_B}
    assert f"different (the stack's file has ssh-ed25519 {fingerprint(OLD)})" in capsys.readouterr().out
    assert pin("--yes", "--replace", "spark-b") == 3
    assert pin("--yes", "--replace", "spark-a") == 0
    assert pins(file) == {"spark-a": KEY_A, "spark-b": KEY_B}


def test_an_entry_of_known_hosts_counts_as_a_pin(ssh: FakeSsh, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(file)
    known = ssh.know("spark-a", OLD)
    assert pin("--yes") == 3
    assert pins(file) == {"spark-a": None, "spark-b": KEY_B}
    assert f"different ({known} has ssh-ed25519 {fingerprint(OLD)})" in capsys.readouterr().out
    ssh.know("spark-a", KEY_A)
    assert pin("--yes") == 0
    assert f"unpinned (the same is in {known})" in capsys.readouterr().out
    assert pins(file)["spark-a"] == KEY_A


def test_a_node_that_shows_no_key_does_not_keep_the_others_from_their_pins(
    ssh: FakeSsh, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file)
    ssh.kill("spark-a")
    assert pin("--yes") == 1
    assert pins(file) == {"spark-a": None, "spark-b": KEY_B}
    told = f"silent (connect (TCP): expected sshd at 127.0.0.1 port {ssh.port('spark-a')}, found: connection refused)"
    assert told in capsys.readouterr().out


def test_json_says_everything_and_what_was_written(
    ssh: FakeSsh, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, spark_a={"host_key": KEY_A})
    ssh.kill("spark-b")
    assert pin("--json", "--yes") == 1
    told = json.loads(capsys.readouterr().out)
    jsonschema.validate(told, schema_of("pin-hosts"))
    assert (told["stack"], told["file"], told["written"], told["exit_code"]) == ("t", str(file), [], 1)
    assert told["nodes"][0] == {
        "name": "spark-a",
        "address": "spark-a",
        "state": "pinned",
        "type": "ssh-ed25519",
        "fingerprint": fingerprint(KEY_A),
        "host_key": KEY_A,
        "remark": "",
    }
    assert (told["nodes"][1]["state"], told["nodes"][1]["host_key"]) == ("silent", None)


def test_a_node_behind_another_is_asked_through_it_once_that_one_has_shown_its_key(ssh: FakeSsh, file: Path) -> None:
    write(file, spark_b={"via": "spark-a"})
    assert pin("--yes") == 0
    assert pins(file) == {"spark-a": KEY_A, "spark-b": KEY_B}
    [through] = [words for words in ssh.proxies("spark-b") if words]
    assert f"KnownHostsCommand=/bin/echo %%H {KEY_A}" in through


def test_a_node_behind_one_that_shows_another_key_is_not_asked(
    ssh: FakeSsh, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, spark_a={"host_key": OLD}, spark_b={"via": "spark-a"})
    assert pin("--yes") == 3
    assert pins(file) == {"spark-a": OLD, "spark-b": None}
    assert "silent (spark-a, which it is reached through, does not show its pinned key)" in capsys.readouterr().out
    assert ssh.proxies("spark-b") == []
    assert pin("--yes", "--replace", "spark-a") == 0
    assert pins(file) == {"spark-a": KEY_A, "spark-b": KEY_B}


@pytest.mark.usefixtures("ssh")
def test_what_cannot_be_done_is_told_in_words(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pin() == 1
    assert f"{file}: expected the file of the stack t, found: No such file or directory" in capsys.readouterr().err
    write(file, spark_b={"usr": "x"})
    assert pin() == 1
    assert "nodes[1].usr: found an unknown key" in capsys.readouterr().err
    write(file)
    assert pin("--replace", "spark-z") == 1
    assert "--replace: expected names of nodes, found spark-z" in capsys.readouterr().err


def test_the_help_says_how_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["pin-hosts", "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "exit status:" in told
    assert "3  a node shows another key than the pinned one" in told


def test_the_sudoers_lines_of_a_node_are_printed_and_an_unknown_one_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file)
    assert main(["sudoers", "--stack", "t", "spark-a"]) == 0
    assert capsys.readouterr().out.startswith("# spark-vllm: what aurora may run as root on spark-a for the stack t.")
    assert main(["sudoers", "--stack", "t", "spark-z"]) == 1
    assert f"{file} (nodes): expected one of spark-a, spark-b, found 'spark-z'" in capsys.readouterr().err
