"""Weights go once from the controller, then over the fabric; real programs, real sockets, on loopback."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_core.errors import ObservationError, SparkError
from spark_core.transfer import distribution
from spark_core.transfer.look import Look, Place, look_at
from spark_core.transfer.manifest import Manifest
from spark_core.weights import local_manifest
from tests.scripted_transport import ScriptedTransport
from tests.unit.transfer.conftest import BIG, BIG_BYTES, Site, contents
from tests.unit.transfer.live_node import LiveNode

pytestmark = pytest.mark.slow

NAMES = st.sampled_from(["config.json", "model.safetensors", "a/b/tokenizer.json", "with blank.txt"])
FOLDERS = st.dictionaries(NAMES, st.binary(max_size=40), max_size=4)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def total(site: Site) -> int:
    return site.wanted.total_bytes


def test_the_controller_sends_once_and_each_node_passes_it_on(site: Site) -> None:
    site.up()
    assert site.whole()
    assert site.told == [
        "weights: 0.01 GB from the controller to spark-a, and from there over the fabric to spark-b, spark-c"
    ]
    [outcomes] = site.rounds
    assert [outcomes[f"spark-{letter}"].received for letter in "abc"] == [total(site)] * 3
    assert [outcomes[f"spark-{letter}"].sent for letter in "abc"] == [total(site), total(site), 0]
    assert max(outcome.memory for outcome in outcomes.values()) < 300e6


def test_what_is_whole_costs_one_look_and_reads_no_file(site: Site) -> None:
    site.up()
    for node in site.nodes:
        node.asked.clear()
    start = time.monotonic()
    site.up()
    assert time.monotonic() - start < 3
    assert site.rounds == []
    assert [len(node.asked) for node in site.nodes] == [1, 1, 1]


def test_a_node_that_has_the_weights_is_the_source(site: Site) -> None:
    site.up("b")
    shutil.rmtree(site.source / "tokenizer")
    copy = contents(site["b"].target)
    site.up()
    assert site.told == ["weights: 0.01 GB from spark-b over the fabric to spark-a, spark-c"]
    assert [contents(site[letter].target) for letter in "ac"] == [copy, copy]


def test_who_has_most_of_it_gets_the_rest_from_the_controller(site: Site) -> None:
    site["c"].target.mkdir(parents=True)
    shutil.copy(site.source / BIG, site["c"].target / BIG)
    site.up()
    assert site.whole()
    assert site.received("c") == total(site) - (site.source / BIG).stat().st_size
    assert "to spark-c, and from there over the fabric to spark-a, spark-b" in site.told[0]


def test_links_arrive_as_what_they_lead_to(site: Site, tmp_path: Path) -> None:
    shutil.copytree(site.source, tmp_path / "blobs")
    for name in site.wanted.files:
        (site.source / name).unlink()
        (site.source / name).symlink_to(tmp_path / "blobs" / name)
    site.up("a")
    target = site["a"].target
    shutil.move(target, tmp_path / "store")
    for name in site.wanted.files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).symlink_to(tmp_path / "store" / name)
    site.up()
    assert "from spark-a over the fabric" in site.told[0]
    for letter in "bc":
        assert contents(site[letter].target) == contents(site.source)
        assert not any(path.is_symlink() for path in site[letter].target.rglob("*"))


def test_nothing_is_visible_before_it_is_whole(slow: Site) -> None:
    seen: list[bool] = []

    def check() -> None:
        for letter in "bc":
            target = slow[letter].target
            if target.exists():
                seen.append(local_manifest(str(target)) == slow.wanted)

    slow.up(check=check)
    assert seen and all(seen)


def test_an_altered_file_is_replaced_alone_and_the_folder_stays(site: Site, tmp_path: Path) -> None:
    site.up()
    altered = site["b"].target / BIG
    altered.write_bytes(b"rotten")
    (site["b"].target / "extra.py").write_text("import os")
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deep" / "kept.txt").write_text("not ours")
    (site["b"].target / "linked").symlink_to(tmp_path / "elsewhere")
    kept = (site["b"].target / "config.json").stat().st_ino, site["b"].target.stat().st_ino
    site.up()
    assert site.whole()
    assert (tmp_path / "elsewhere" / "deep" / "kept.txt").read_text() == "not ours"
    assert not (site["b"].target / "linked").is_symlink()
    assert site.received("b") == (site.source / BIG).stat().st_size
    assert kept == ((site["b"].target / "config.json").stat().st_ino, site["b"].target.stat().st_ino)


def test_nodes_without_a_fabric_each_get_it_from_the_controller(site: Site) -> None:
    site["b"].address = ""
    site.up("ab")
    assert site.whole("ab")
    assert site.told == [
        "weights: 0.01 GB from the controller to spark-a",
        "weights: 0.01 GB from the controller to spark-b, not over the fabric, since spark-b has no address on it",
    ]


@pytest.mark.parametrize("missing", ["address of who takes", "address of who gives"])
def test_a_node_that_the_fabric_does_not_reach_gets_it_from_the_controller(site: Site, missing: str) -> None:
    site.up("a")
    site["b" if missing == "address of who takes" else "a"].address = "192.0.2.1"
    site.up()
    assert site.whole()
    told = " ".join(site.told)
    assert "from spark-a over the fabric to spark-b, spark-c" in told
    assert (
        "from the controller to spark-b, not over the fabric, since spark-b cannot be reached over it "
        "(Cannot assign requested address)" in told
    )


@pytest.mark.parametrize("second", ["at the same moment", "while the first one copies"])
def test_two_runs_at_once_copy_it_once(slow: Site, second: str) -> None:
    failed: list[BaseException] = []

    def up(letters: str) -> None:
        try:
            places = [slow[letter].place() for letter in letters]
            distribution.distribute(str(slow.source), places, slow.wanted, slow.told.append)
        except BaseException as error:
            failed.append(error)

    slow.rounds.clear()
    runs = [threading.Thread(target=up, args=(letters,)) for letters in ("abc", "acb")]
    for run in runs:
        run.start()
        if second == "while the first one copies":
            slow["b"].wait_for(1 << 20)
    for run in runs:
        run.join()
    assert failed == []
    assert slow.whole()
    assert [slow.received(letter) for letter in "bc"] == [total(slow)] * 2
    if second == "while the first one copies":
        assert any(re.fullmatch(r"weights: wait for process \d+ of spark-[bc], .*", line) for line in slow.told)


def test_names_of_any_kind_arrive_and_every_container_may_read_them(site: Site) -> None:
    for name in (" before.txt", "after.txt ", "two\nlines.txt", "back\\slash.txt", "-dash", "é.txt"):
        (site.source / name).write_text(name)
    site.wanted = local_manifest(str(site.source))
    site.up("ab")
    assert site.whole("ab")
    for path in site["b"].target.rglob("*"):
        assert path.stat().st_mode & 0o044 == 0o044
    assert site["b"].target.stat().st_mode & 0o055 == 0o055


@settings(max_examples=3, deadline=None)
@given(wanted=FOLDERS, before=FOLDERS, partial=FOLDERS, incoming=FOLDERS)
def test_a_folder_converges_from_whatever_was_there(
    wanted: dict[str, bytes],
    before: dict[str, bytes],
    partial: dict[str, bytes],
    incoming: dict[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    base = tmp_path_factory.mktemp("converge")
    source = write(base / "source", wanted | {"config.json": b"{}", "w.bin": b"w"})
    nodes = [LiveNode("spark-a", base=base / "a", address="127.0.0.11"), LiveNode("spark-b", base=base / "b")]
    nodes[1].address = "127.0.0.12"
    if before:
        write(nodes[0].target, before)
    write(nodes[1].target.with_name("revision.partial"), partial)
    write(nodes[1].target.with_name("revision.incoming"), incoming)
    manifest = local_manifest(str(source))
    for _ in range(3):  # what is left of another content is found out, and gone the next time
        try:
            distribution.distribute(str(source), [node.place() for node in nodes], manifest, lambda _: None)
            break
        except SparkError as error:
            assert "found other content in what came from" in error.line
    assert [contents(node.target) for node in nodes] == [contents(source)] * 2


def test_an_answer_that_is_no_look_is_not_understood() -> None:
    for answer in (
        "",
        "[]",
        '{"files": {}}',
        '{"files": {}, "staged": 3, "parts": {}, "moved": 0, "free": 0, "held": 0}',
    ):
        with pytest.raises(ObservationError):
            look_at(Place(ScriptedTransport("spark-a", lambda _, answer=answer: answer), "/w", "/r"))  # type: ignore[misc]


def test_the_page_cache_is_given_back(site: Site) -> None:
    if shutil.which("fincore") is None:
        pytest.skip("fincore tells what is in the page cache")
    site.up("a")
    site.up()
    for node in site.nodes:
        done = subprocess.run(["fincore", "-nbo", "res", node.target / BIG], capture_output=True, text=True, check=True)
        assert int(done.stdout) < BIG_BYTES / 2, node.node  # a socket may still hold some of what it has sent


def test_a_lock_that_a_killed_process_left_holds_up_nobody(site: Site) -> None:
    for node in site.nodes:
        node.target.parent.mkdir(parents=True)
        node.target.with_name("revision.lock").write_text("1")
    site.up()
    assert site.whole()


def test_another_run_that_does_not_go_on_is_named(slow: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distribution, "STALL_S", 0.5)
    monkeypatch.setattr(distribution, "_WAIT_S", 0.1)
    other = threading.Thread(target=slow.up, args=("ab",))
    other.start()
    slow["b"].wait_for(1 << 20)
    process = slow["b"].program()
    slow["a"].kill(19)
    with pytest.raises(SparkError) as failed:
        places = [slow[letter].place() for letter in "ab"]
        distribution.distribute(str(slow.source), places, slow.wanted, print)
    slow["a"].kill(18)
    other.join()
    assert failed.value.line == (
        f"spark-b: expected process {process} to go on filling spark-b's folder, found no byte in 0 s"
    )


def test_space_is_asked_for_before_the_first_byte_and_for_what_is_missing_only(site: Site) -> None:
    wanted = Manifest({"a": (100 * 10**9, "x"), "b": (10 * 10**9, "y")})
    place = Place(site["a"], "/w", "/r")
    there = Look(None, Manifest({"b": (10 * 10**9, "y")}), {"a": 40 * 10**9}, 0, 60 * 10**9, None)
    with pytest.raises(SparkError) as failed:
        distribution.require_space([place], {"spark-a": there}, wanted)
    assert failed.value.line == ("spark-a (node_root): expected 60.0 GB of free space for the weights, found 60.0 GB")
    enough = Look(None, there.staged, there.parts, 0, 62 * 10**9, None)
    distribution.require_space([place], {"spark-a": enough}, wanted)


def test_a_directory_that_changes_meanwhile_is_never_published(site: Site) -> None:
    (site.source / BIG).write_bytes(bytes((site.source / BIG).stat().st_size))
    with pytest.raises(SparkError) as failed:
        site.up()
    assert failed.value.line == (
        f"spark-a: expected {BIG} with the SHA-256 of its manifest, "
        "found other content in what came from the controller"
    )
    assert not any(node.target.exists() for node in site.nodes)
    (site.source / BIG).unlink()
    with pytest.raises(SparkError) as failed:
        site.up()
    assert failed.value.line == (
        f"model.source: expected to read {site.source}/{BIG} to its end, found: No such file or directory"
    )


def test_no_secret_is_an_argument(site: Site) -> None:
    site.up()
    words = [word for node in site.nodes for cmd in node.asked for word in cmd.argv]
    assert not any(re.search(r"\b[0-9a-f]{64}\b", word) for word in words)
