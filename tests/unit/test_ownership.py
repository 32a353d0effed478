"""Two stacks on one host: the same value is held together, another one is refused, whoever leaves last restores."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_core.errors import CommandError, ObservationError
from spark_core.journal import (
    JournalEntry,
    StackFolder,
    close_journal,
    contradictions,
    open_journal,
    read_journal,
    read_journals,
    record,
    record_file,
    record_many,
    record_setup,
    undo,
)
from spark_core.journal.ownership import Held, plan_records
from spark_core.transport.base import Command
from tests.local_node import LocalNode
from tests.tuned_host import TunedHost


def on_host(host: TunedHost, stack: str) -> StackFolder:
    folder = StackFolder(str(host.base / "srv/root"), stack)
    open_journal(host.node, folder)
    return folder


@pytest.fixture
def host(tmp_path: Path) -> TunedHost:
    return TunedHost(tmp_path / "host")


@pytest.fixture
def dev(host: TunedHost) -> StackFolder:
    return on_host(host, "dev")


@pytest.fixture
def prod(host: TunedHost) -> StackFolder:
    return on_host(host, "prod")


def wanting(value: str, old: str = "212992") -> JournalEntry:
    return JournalEntry("sysctl", "net.core.rmem_max", old, wanted=value, domain="host")


def set_to(host: TunedHost, value: str) -> None:
    host.set_parameters({"net.core.rmem_max": value})


@pytest.mark.parametrize("first", ["dev", "prod"])
def test_whoever_leaves_last_restores_what_was_there_at_first(
    first: str, host: TunedHost, dev: StackFolder, prod: StackFolder
) -> None:
    record(host.node, dev, wanting("7"))
    set_to(host, "7")
    held = record(host.node, prod, wanting("7", old="7"))
    assert held.old == "212992", "what is there now is the other stack's"
    leaver, last = (dev, prod) if first == "dev" else (prod, dev)
    assert undo(host.node, leaver) == [f"left sysctl net.core.rmem_max, which the stack {last.stack} declares too"]
    assert host.parameter("net.core.rmem_max") == "7"
    assert close_journal(host.node, last) == ["put back sysctl net.core.rmem_max"]
    assert host.parameter("net.core.rmem_max") == "212992"
    close_journal(host.node, leaver)
    assert not Path(dev.root).exists()


def test_another_value_is_refused_and_nothing_is_written(host: TunedHost, dev: StackFolder, prod: StackFolder) -> None:
    record(host.node, dev, wanting("7"))
    other = JournalEntry("sysctl", "kernel.panic", "0", wanted="9")
    with pytest.raises(CommandError) as refused:
        record_many(host.node, prod, [other, wanting("8", old="7")])
    assert refused.value.line == (
        "spark-a: expected sysctl net.core.rmem_max = 8 for the stack prod, "
        "found that the stack dev declares 7 [setting-contradicted]"
    )
    assert read_journal(host.node, prod) == []


def test_a_value_that_changes_while_another_stack_holds_it_is_refused(
    host: TunedHost, dev: StackFolder, prod: StackFolder
) -> None:
    for folder in (dev, prod):
        record(host.node, folder, wanting("7"))
    with pytest.raises(CommandError):
        record(host.node, dev, wanting("8"))
    undo(host.node, prod)
    assert record(host.node, dev, wanting("8", old="7")).old == "212992"


def test_a_preview_tells_the_same_without_writing(host: TunedHost, dev: StackFolder, prod: StackFolder) -> None:
    record(host.node, dev, wanting("7"))
    host.node.asked.clear()
    journals = read_journals(host.node, prod.root)
    assert [(cmd.sudo, cmd.stdin) for cmd in host.node.asked] == [(False, b"")]
    key = ("sysctl", "net.core.rmem_max")
    [finding] = contradictions("prod", {key: "8"}, journals, "spark-a")  # type: ignore[dict-item]
    assert (finding.code, finding.where) == ("setting-contradicted", "spark-a")
    assert "= 8 for the stack prod, found that the stack dev declares 7" in finding.what
    assert contradictions("prod", {key: "7"}, journals, "spark-a") == []  # type: ignore[dict-item]
    assert contradictions("dev", {key: "8"}, journals, "spark-a") == [], "a stack does not contradict itself"  # type: ignore[dict-item]


def test_entries_of_an_older_version_say_nothing_of_what_is_wanted(
    host: TunedHost, dev: StackFolder, prod: StackFolder
) -> None:
    record(host.node, dev, replace(wanting("7"), wanted=None))
    assert record(host.node, prod, wanting("8", old="7")).old == "212992"


def test_a_thing_that_another_stack_is_just_undoing_is_not_taken_over(
    host: TunedHost, dev: StackFolder, prod: StackFolder
) -> None:
    record(host.node, dev, wanting("7"))
    set_to(host, "7")
    refused: list[str] = []

    def meanwhile(cmd: Command) -> None:
        if cmd.argv[0] == "sysctl":
            host.node.before = lambda _: None
            with pytest.raises(CommandError) as error:
                record(host.node, prod, wanting("7", old="7"))
            refused.append(error.value.line)

    host.node.before = meanwhile
    undo(host.node, dev)
    assert refused == [
        "spark-a: expected sysctl net.core.rmem_max to change, found that the stack dev is just undoing it"
    ]
    assert record(host.node, prod, wanting("7")).old == "212992"


def test_an_undo_that_was_killed_is_taken_up_by_its_own_stack(
    host: TunedHost, dev: StackFolder, prod: StackFolder
) -> None:
    record(host.node, dev, wanting("7"))
    set_to(host, "7")

    class KilledError(Exception):
        pass

    def killed(cmd: Command) -> None:
        if cmd.argv[0] == "sysctl":
            raise KilledError

    host.node.before = killed
    with pytest.raises(KilledError):
        undo(host.node, dev)
    host.node.before = lambda _: None
    with pytest.raises(CommandError):
        record(host.node, prod, wanting("7", old="7"))
    assert record(host.node, dev, wanting("7", old="7")).old == "212992"
    assert record(host.node, prod, wanting("7", old="7")).old == "212992"


def test_a_file_that_two_stacks_hold_comes_back_once(host: TunedHost, dev: StackFolder, prod: StackFolder) -> None:
    path = host.file("/etc/docker/daemon.json")
    old = path.read_bytes()
    record_file(host.node, dev, "/etc/docker/daemon.json", wanted="ours")
    path.write_bytes(b"ours")
    record_file(host.node, prod, "/etc/docker/daemon.json", wanted="ours")
    close_journal(host.node, dev)
    assert path.read_bytes() == b"ours"
    close_journal(host.node, prod)
    assert path.read_bytes() == old


def test_setup_commands_of_one_name_are_each_stack_s_own(
    host: TunedHost, dev: StackFolder, prod: StackFolder, tmp_path: Path
) -> None:
    for folder in (dev, prod):
        record_setup(host.node, folder, {"motd": f"echo {folder.stack} >> {tmp_path}/undone"})
    for folder in (dev, prod):
        close_journal(host.node, folder)
    assert (tmp_path / "undone").read_text().split() == ["dev", "prod"]


def test_another_stack_s_entry_that_cannot_be_read_stops_everything(
    host: TunedHost, dev: StackFolder, prod: StackFolder
) -> None:
    (Path(dev.journal) / "sysctl-0.json").write_text("{")
    with pytest.raises(ObservationError) as failed:
        record(host.node, prod, wanting("7"))
    assert failed.value.line == (
        "spark-a: expected a journal entry of the stack dev in sysctl-0.json, found no whole JSON"
    )
    assert read_journal(host.node, prod) == [], "its own are another matter"


def test_a_record_that_met_another_stack_in_between_is_refused(
    host: TunedHost, dev: StackFolder, prod: StackFolder
) -> None:
    def meanwhile(cmd: Command) -> None:
        if cmd.stdin:
            host.node.before = lambda _: None
            record(host.node, dev, wanting("7"))

    host.node.before = meanwhile
    with pytest.raises(CommandError) as refused:
        record(host.node, prod, wanting("7", old="7"))
    assert refused.value.line == (
        "spark-a: expected to record the old value of net.core.rmem_max, "
        "found that another stack has changed its own record of it just now"
    )
    assert record(host.node, prod, wanting("7", old="7")).old == "212992"


def test_an_old_value_seen_while_another_stack_held_the_thing_is_never_taken(
    host: TunedHost, dev: StackFolder, prod: StackFolder
) -> None:
    record(host.node, dev, wanting("7"))
    set_to(host, "7")
    journals = read_journals(host.node, prod.root)
    seen = wanting("7", old=host.parameter("net.core.rmem_max"))
    undo(host.node, dev)
    with pytest.raises(CommandError):
        record_many(host.node, prod, [seen], journals)
    assert read_journal(host.node, prod) == []


def test_two_runs_at_a_time_never_lose_the_first_value(host: TunedHost) -> None:
    """Two stacks tune and leave the same parameter again and again, at the same time."""
    folders = [on_host(host, stack) for stack in ("dev", "prod")]
    errors: list[BaseException] = []
    refused = []

    def come_and_go(folder: StackFolder) -> None:
        node = LocalNode("spark-a", programs=host.base / "programs", sandbox=host.base)
        try:
            for _ in range(10):
                try:
                    journals = read_journals(node, folder.root)
                    record_many(node, folder, [wanting("7", old=host.parameter("net.core.rmem_max"))], journals)
                except CommandError as error:
                    refused.append(error.what)
                    continue
                set_to(host, "7")
                undo(node, folder)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=come_and_go, args=(folder,)) for folder in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all("is just undoing it" in text or "just now" in text for text in refused)
    assert host.parameter("net.core.rmem_max") == "212992"


def test_a_lock_that_is_held_for_too_long_is_told(host: TunedHost, dev: StackFolder) -> None:
    host.node.install("flock", "#!/bin/sh\nexit 1\n")
    with pytest.raises(CommandError) as failed:
        record(host.node, dev, wanting("7"))
    assert f"another run holds the lock of {dev.root} for 20 s" in failed.value.line


NAMES = st.sampled_from(["a", "a-b", "b", "b.c"])
VALUES = st.sampled_from([None, "1", "2"])


@given(
    others=st.dictionaries(NAMES, st.tuples(VALUES, st.booleans())),
    own=st.none() | st.tuples(VALUES, st.booleans()),
    wanted=st.sampled_from(["1", "2"]),
)
def test_a_plan_keeps_the_oldest_value_or_refuses(
    others: dict[str, tuple[str | None, bool]], own: tuple[str | None, bool] | None, wanted: str
) -> None:
    journals = {
        stack: {
            ("sysctl", "a.b"): Held(JournalEntry("sysctl", "a.b", "first", wanted=value, at=1.0), "0" * 64, leaving)
        }
        for stack, (value, leaving) in others.items()
    }
    if own is not None:
        entry = JournalEntry("sysctl", "a.b", "own first", wanted=own[0], at=1.0)
        journals["me"] = {("sysctl", "a.b"): Held(entry, "0" * 64, own[1])}
    asked = JournalEntry("sysctl", "a.b", "now", wanted=wanted)
    refused = any(value not in (None, wanted) or leaving for value, leaving in others.values())
    if refused:
        with pytest.raises(CommandError):
            plan_records("spark-a", "me", [asked], journals)  # type: ignore[arg-type]
        return
    [(standing, write)] = plan_records("spark-a", "me", [asked], journals)  # type: ignore[arg-type]
    assert standing.old == ("own first" if own is not None else "first" if others else "now")
    assert standing.wanted == wanted
    assert write == (own is None or own != (wanted, False))
