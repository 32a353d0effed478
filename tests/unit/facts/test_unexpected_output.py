"""Whatever a node says, a parser gives a value or says what it could not read; it never raises."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_core.facts import FactsSpec, parse_facts
from spark_core.facts.answer import Answer, Unread, answer_in
from spark_core.facts.disks import parse_df
from spark_core.facts.docker import DockerProblem, docker_problem
from spark_core.facts.gpu import NoGpu
from spark_core.facts.login import Login, parse_login
from tests.unit.facts.recordings import PARSERS, RECORDINGS, recorded
from tests.unit.facts.spark import SECTIONS

CUTS = 40
OTHER_LANGUAGES = {
    "df, German": "Dateisystem  1B-Blöcke  Benutzt Verfügbar Verw% Eingehängt auf\n/dev/sda1 100 50 50 50% /",
    "df, French": "Sys. de fichiers blocs de 1O  Utilisé Disponible Capacité Monté sur\n/dev/sda1 100 50 50 50% /",
    "id, German": "uid=1000(user) gid=1000(user) Gruppen=1000(user),988(docker)",
    "id, French": "uid=1000(user) gid=1000(user) groupes=1000(user),988(docker)",
    "id, Japanese": "uid=1000(user) gid=1000(user) 所属グループ=1000(user),988(docker)",
    "sudo, German": "sudo: Ein Passwort ist notwendig",
    "cat, French": "cat: /etc/dgx-release: Aucun fichier ou dossier de ce nom",
    "bash, German": "bash: Zeile 1: nvidia-smi: Kommando nicht gefunden.",
    "free, German": "          gesamt    benutzt     frei      gemns.  verfügbar\nSpeicher: 121Gi 3Gi 116Gi",
    "date, French": "mer. 16 sept. 2026 17:08:05 CEST",
}
ODD = {
    "empty": "",
    "blank": "\n \n\t\n",
    "zero bytes": "\0\0\0\n\0",
    "not UTF-8, as it is decoded": b"\xff\xfe\x00MemTotal: 1 kB".decode(errors="replace"),
    "one long line": "x" * 100_000,
    "deep JSON": "[" * 50_000,
    "half an object": '{"ServerVersion": "29.2.1", "Driver": "over',
    "an object of other types": '{"ServerVersion": 29, "Driver": [], "Runtimes": "x", "DriverStatus": {"a": 1}}',
    "other types below": '{"ServerVersion": "1", "DriverStatus": [1, null, [2]], "DiscoveredDevices": [1, {"ID": 2}]}',
    "a list": "[1, 2]",
    "a number": "1",
    "null": "null",
    "huge numbers": "MemTotal: " + "9" * 400 + " kB\nMemAvailable: 1 kB",
    "other digits": "MemTotal: ٢٢٣ kB\nMemAvailable: ٢ kB\nuid=٢(a) gid=٢(a) groups=٢(a)",
    "escape codes": "\x1b[31mError\x1b[0m: \x1b]0;title\x07 failed",
    "HTML": "<html><head><title>502 Bad Gateway</title></head></html>",
    "page of a proxy": "HTTP/1.1 407 Proxy Authentication Required\r\nServer: squid\r\n\r\n",
    "a kernel's complaint": "Message from syslogd@spark-a:\n kernel:[1.2] watchdog: BUG: soft lockup - CPU#3 stuck!",
    "a shell's greeting": "Welcome to DGX Spark\nLast login: Mon\n",
    "out of memory": "bash: fork: retry: Resource temporarily unavailable",
}


def line_of(parser: str, text: str, status: int | None = 0) -> str:
    """What a person reads of what a parser makes of a text; nothing of a value."""
    value = PARSERS[parser](Answer(text, status))
    if isinstance(value, Unread):
        assert re.fullmatch(r"could not read .+ from .+, found: .+", value.line)
        return value.line
    return value.found if isinstance(value, NoGpu | DockerProblem) else ""


def plain(line: str) -> bool:
    """Whether a line is short, and changes nothing at a terminal."""
    return len(line) < 250 and (line.isprintable() or not line)


@pytest.mark.parametrize("parser", PARSERS)
def test_recordings_cut_off_anywhere(parser: str) -> None:
    for name in RECORDINGS:
        text = recorded(name)
        for cut in {len(text) * n // CUTS for n in range(CUTS + 1)}:
            assert plain(line_of(parser, text[:cut]))
            assert plain(line_of(parser, text[cut:]))


@pytest.mark.parametrize("parser", PARSERS)
def test_recordings_with_lines_shuffled_dropped_doubled_and_changed(parser: str) -> None:
    chance = random.Random(parser)  # noqa: S311
    for name in RECORDINGS:
        lines = recorded(name).splitlines(keepends=True)
        for _ in range(6):
            chosen = [line for line in lines if chance.random() > 0.3]
            chance.shuffle(chosen)
            assert plain(line_of(parser, "".join(chosen)))
            assert plain(line_of(parser, "".join(chosen + chosen)))
            letters = list("".join(lines))
            for place in chance.sample(range(len(letters)), min(5, len(letters))):
                letters[place] = chance.choice("\0\x1b\ufffd9,={}[]\"'\n\r\t é")
            assert plain(line_of(parser, "".join(letters)))


@pytest.mark.parametrize("parser", PARSERS)
def test_odd_and_foreign_output_with_every_exit_status(parser: str) -> None:
    for text in [*ODD.values(), *OTHER_LANGUAGES.values()]:
        for status in (0, 1, 2, 124, 126, 127, 137, 255, -1, None):
            assert plain(line_of(parser, text, status))


@pytest.mark.parametrize("parser", PARSERS)
@given(text=st.text(max_size=300), status=st.sampled_from([0, 1, 124, 127, None]))
def test_any_text(parser: str, text: str, status: int | None) -> None:
    assert plain(line_of(parser, text, status))


@pytest.mark.parametrize("parser", PARSERS)
@given(data=st.binary(max_size=300), name=st.sampled_from(RECORDINGS), place=st.floats(0, 1))
def test_any_bytes_in_the_middle_of_a_recording(parser: str, data: bytes, name: str, place: float) -> None:
    text = recorded(name).encode()
    cut = int(len(text) * place)
    assert plain(line_of(parser, (text[:cut] + data + text[cut:]).decode(errors="replace")))


@pytest.mark.parametrize("parser", sorted(set(PARSERS) - {"df", "docker-version", "groups", "remove-ipc"}))
def test_silence_is_told_and_is_no_absence(parser: str) -> None:
    for status in (-1, None):
        value = PARSERS[parser](Answer("", status))
        assert isinstance(value, Unread), value


@pytest.mark.parametrize("name", ["df, German", "df, French"])
def test_a_table_of_disks_is_read_in_other_languages(name: str) -> None:
    assert [disk.free_bytes for disk in parse_df(OTHER_LANGUAGES[name])] == [50]


@pytest.mark.parametrize("name", ["id, German", "id, French", "id, Japanese"])
def test_a_login_is_read_in_other_languages(name: str) -> None:
    assert parse_login(Answer(OTHER_LANGUAGES[name])) == Login("user", 1000, ("user", "docker"))


def test_a_section_that_was_cut_off_holds_nothing() -> None:
    whole = "MemTotal: 100 kB\nMemAvailable: 50 kB\n\n--status 0\n"
    assert answer_in({"x": whole}, "x").status == 0
    for cut in range(len(whole) - 2):
        found = answer_in({"x": whole[:cut]}, "x")
        assert (found.text, found.status) == ("", -1)
    assert answer_in({}, "x").status is None


@given(st.data())
def test_a_node_whose_whole_answer_is_damaged_is_told_and_nothing_is_raised(data: st.DataObject) -> None:
    sections = dict(SECTIONS)
    for name in data.draw(st.sets(st.sampled_from(sorted(sections)))):
        kind = data.draw(st.sampled_from(["gone", "cut", "other", "noise"]))
        text = sections.pop(name)
        if kind == "cut":
            sections[name] = text[: data.draw(st.integers(0, len(text)))]
        elif kind == "other":
            sections[name] = data.draw(st.sampled_from(sorted(SECTIONS.values())))
        elif kind == "noise":
            sections[name] = data.draw(st.text(max_size=100)) + "\n--status 0"
    facts = parse_facts(FactsSpec(("/home/spark/.spark-vllm",), (30000,)), sections, 1000.0)
    assert all(unread.line.isprintable() for unread in facts.unread)
    docker_problem("spark-a", facts.docker)
