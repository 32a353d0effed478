"""Kernel parameters: read as they are, never taken for absent, set only where they differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_core.errors import CommandError, ObservationError
from spark_core.journal import StackFolder, open_journal, read_journal
from spark_core.transport.base import Result
from spark_core.tuning import Place, Tuning, apply_tuning
from spark_core.tuning.sysctls import observe_sysctls, plan_sysctls
from tests.local_node import LocalNode
from tests.scripted_transport import ScriptedTransport
from tests.tuned_host import TunedHost

CAT = """#!/bin/sh
# Only root, if anybody, reads a parameter that $READABLE does not name.
for path in "$@"; do
  case "$path" in
    */proc/sys/*)
      case " $READABLE " in *" ${path##*/} "*) ;; *) echo "cat: $path: Permission denied" >&2; exit 1 ;; esac ;;
  esac
done
exec /bin/cat "$@"
"""


@pytest.fixture
def host(tmp_path: Path) -> TunedHost:
    host = TunedHost(tmp_path / "host")
    host.set_parameters({"net.ipv4.tcp_rmem": "4096\t131072\t6291456"})
    return host


@pytest.fixture
def place(host: TunedHost) -> Place:
    place = Place(StackFolder(str(host.base / "srv/root"), "dev"), "aurora")
    open_journal(host.node, place.folder)
    return place


def tune(host: TunedHost, place: Place, **values: str) -> None:
    apply_tuning(host.node, place, Tuning({name.replace("__", "."): value for name, value in values.items()}))


def test_parameters_are_read_with_single_blanks_and_absent_ones_told(host: TunedHost) -> None:
    assert observe_sysctls(host.node, ["net.core.rmem_max", "net.ipv4.tcp_rmem", "no.such"]) == {
        "net.core.rmem_max": "212992",
        "net.ipv4.tcp_rmem": "4096 131072 6291456",
        "no.such": None,
    }


def as_user(node: LocalNode, monkeypatch: pytest.MonkeyPatch, user: str, root: str) -> None:
    """Only these parameters can be read by the deploy user and by root."""
    node.install("cat", CAT)
    node.before = lambda cmd: monkeypatch.setenv("READABLE", root if cmd.sudo else user)


def test_a_parameter_that_only_root_reads_is_read_by_root(host: TunedHost, monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(host.node, monkeypatch, "rmem_max", "rmem_max tcp_rmem")
    assert observe_sysctls(host.node, ["net.core.rmem_max", "net.ipv4.tcp_rmem", "no.such"]) == {
        "net.core.rmem_max": "212992",
        "net.ipv4.tcp_rmem": "4096 131072 6291456",
        "no.such": None,
    }
    assert [cmd.argv for cmd in host.node.asked if cmd.sudo] == [("cat", "--", "/proc/sys/net/ipv4/tcp_rmem")]


def test_a_parameter_that_nobody_can_read_is_not_absent(host: TunedHost, monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(host.node, monkeypatch, "", "")
    with pytest.raises(CommandError) as failed:
        observe_sysctls(host.node, ["net.core.rmem_max"])
    assert failed.value.line.startswith(
        "spark-a (host.sysctls): expected to read the kernel parameter net.core.rmem_max: "
    )


@pytest.mark.parametrize("answer", ["", "=== sysctl a.b\n1\n", "rubbish"])
def test_a_cut_answer_about_parameters_is_not_absent(answer: str) -> None:
    with pytest.raises(ObservationError):
        observe_sysctls(ScriptedTransport("spark-a", lambda _: Result(0, answer, "")), ["a.b", "c.d"])


def test_without_declared_parameters_the_node_is_not_asked(host: TunedHost) -> None:
    assert observe_sysctls(host.node, []) == {}
    assert host.node.asked == []


VALUES = st.dictionaries(st.sampled_from(["a.b", "c.d", "e.f"]), st.sampled_from(["1", "2", "1 2 3"]))


@given(wanted=VALUES)
def test_a_plan_for_what_is_already_so_is_empty(wanted: dict[str, str]) -> None:
    assert plan_sysctls(wanted, dict(wanted)) == []


@given(wanted=VALUES, found=VALUES)
def test_a_plan_brings_everything_to_its_wanted_value(wanted: dict[str, str], found: dict[str, str]) -> None:
    after: dict[str, str | None] = dict(found)
    for cmd in plan_sysctls(wanted, after):
        name, _, value = cmd.argv[-1].partition("=")
        after[name] = value
        assert cmd.sudo
    assert plan_sysctls(wanted, after) == []
    assert {name: after[name] for name in wanted} == wanted


def test_applying_records_the_old_value_first_and_is_done_once(host: TunedHost, place: Place) -> None:
    tune(host, place, net__core__rmem_max="67108864")
    assert [(entry.target, entry.old) for entry in read_journal(host.node, place.folder)] == [
        ("net.core.rmem_max", "212992")
    ]
    host.node.asked.clear()
    tune(host, place, net__core__rmem_max="67108864")
    assert [cmd for cmd in host.node.asked if cmd.sudo or cmd.stdin] == []
    assert host.parameter("net.core.rmem_max") == "67108864"


def test_a_drift_that_was_repaired_does_not_pass_for_the_old_value(host: TunedHost, place: Place) -> None:
    host.set_parameters({"net.core.rmem_max": "120"})
    tune(host, place, net__core__rmem_max="120")
    host.set_parameters({"net.core.rmem_max": "77"})
    tune(host, place, net__core__rmem_max="120")
    assert host.parameter("net.core.rmem_max") == "120"
    assert [entry.old for entry in read_journal(host.node, place.folder)] == ["120"]
    tune(host, place)
    assert host.parameter("net.core.rmem_max") == "120"


def test_a_second_value_keeps_the_first_old_one(host: TunedHost, place: Place) -> None:
    for value in ("1", "2"):
        tune(host, place, net__core__rmem_max=value)
    tune(host, place)
    assert host.parameter("net.core.rmem_max") == "212992"
    assert read_journal(host.node, place.folder) == []


def test_a_parameter_that_is_not_there_changes_nothing(host: TunedHost, place: Place) -> None:
    with pytest.raises(CommandError) as failed:
        tune(host, place, net__core__rmem_max="1", no__such="1")
    assert failed.value.line == "spark-a (host.sysctls): expected the kernel parameter no.such, found none of that name"
    assert host.parameter("net.core.rmem_max") == "212992"
    assert read_journal(host.node, place.folder) == []
