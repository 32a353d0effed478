"""What breaks a transfer is named by file and node, and the next run sends only what is needed. Real faults."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spark_core.errors import SparkError, UnreachableError
from spark_core.transfer import chain
from spark_core.transfer.look import look_at
from spark_core.transport.base import Command
from tests.unit.transfer.conftest import BIG, BIG_BYTES, SMALL, Site, is_root
from tests.unit.transfer.live_node import Cable

pytestmark = pytest.mark.slow

SOME = 2 << 20


def broken(site: Site, harm: Callable[[], object], when: str = "b", letters: str = "abc") -> SparkError:
    """The error of a run to which harm is done once some bytes are on a node."""
    failed: list[BaseException] = []

    def up() -> None:
        try:
            site.up(letters)
        except BaseException as error:
            failed.append(error)

    run = threading.Thread(target=up)
    run.start()
    try:
        site[when].wait_for(SOME)
        harm()
    finally:
        run.join()
    [error] = failed
    assert isinstance(error, SparkError), error
    return error


def goes_on(site: Site, letters: str, arrived: dict[str, int]) -> None:
    """The next run ends well, and sends a node only the bytes that it did not have."""
    for letter in letters:
        site[letter].cable = None
    site.up()
    assert site.whole()
    for letter, before in arrived.items():
        assert site.received(letter) <= site.wanted.total_bytes - before, letter


def arrived(site: Site, letters: str = "bc") -> dict[str, int]:
    found = {letter: site[letter].arrived() for letter in letters}
    assert not any(site[letter].target.exists() for letter in letters)
    return found


def test_a_killed_giver(slow: Site) -> None:
    error = broken(slow, slow["a"].kill)
    assert error.line.startswith(f"spark-b: expected {BIG} whole from spark-a, found the connection cut after 0.0")
    assert error.line.endswith("of 0.01 GB: spark-a was killed by signal 9")
    assert error.evidence == ()
    there = arrived(slow)
    assert there["b"] >= SOME
    goes_on(slow, "bc", there)


def test_a_killed_taker(slow: Site) -> None:
    error = broken(slow, slow["b"].kill, letters="ab")
    assert (
        error.line == f"spark-b: expected the transfer of {BIG} to go on, found that its program was killed by signal 9"
    )
    there = arrived(slow, "b")
    assert there["b"] >= SOME
    goes_on(slow, "bc", there)


def test_a_killed_forwarder(slow: Site) -> None:
    error = broken(slow, slow["b"].kill, when="c")
    assert error.line.startswith(f"spark-c: expected {BIG} whole from spark-b, found the connection cut after 0.0")
    assert error.line.endswith("of 0.01 GB: spark-b was killed by signal 9")
    there = arrived(slow)
    assert there["c"] >= SOME
    goes_on(slow, "bc", there)


def test_a_killed_last_node_holds_up_none_before_it(slow: Site) -> None:
    error = broken(slow, slow["c"].kill, when="c")
    assert (
        error.line == f"spark-c: expected the transfer of {BIG} to go on, found that its program was killed by signal 9"
    )
    assert slow.whole("b")
    goes_on(slow, "bc", {"b": slow.wanted.total_bytes, "c": slow["c"].arrived()})


def test_a_cut_cable(slow: Site) -> None:
    cable = slow["b"].cable
    assert cable is not None
    error = broken(slow, cable.cut)
    assert error.line.startswith(f"spark-b: expected {BIG} whole from spark-a, found the connection cut after 0.0")
    goes_on(slow, "bc", arrived(slow))


def test_a_flipped_bit_on_the_way_costs_one_file(slow: Site) -> None:
    slow["b"].cable = Cable(flip_at=BIG_BYTES // 2)
    slow["c"].cable = None
    with pytest.raises(SparkError) as failed:
        slow.up()
    assert failed.value.line in [
        f"spark-b: expected {name} with the SHA-256 of its manifest, found other content in what came from spark-a"
        for name in (BIG, SMALL)
    ]
    assert failed.value.evidence == ()
    name = failed.value.what.split()[1]
    goes_on(slow, "b", {})
    size = (slow.source / name).stat().st_size
    assert [slow.received(letter) for letter in "bc"] == [size, size]


def test_a_bit_that_rotted_on_the_giver_s_disk_is_found_there(slow: Site) -> None:
    look_at(slow["a"].place())
    path = slow["a"].target / SMALL
    content = path.read_bytes()
    path.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    cache = slow["a"].base / "root/cache/hashes.json"  # as if no time of the file had changed
    known, status = json.loads(cache.read_text()), path.stat()
    known[str(path)][0] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    cache.write_text(json.dumps(known))
    slow["b"].cable = slow["c"].cable = None
    with pytest.raises(SparkError) as failed:
        slow.up()
    assert failed.value.line.startswith(f"spark-b: expected {SMALL} with the SHA-256 of its manifest")
    assert f"spark-a: expected {SMALL} as it was verified, found other content on its disk" in failed.value.evidence
    slow.up()
    assert slow.whole()
    assert [slow.received(letter) for letter in "abc"] == [len(content)] * 3


def test_a_file_that_is_cut_short_on_the_giver(slow: Site) -> None:
    error = broken(slow, lambda: os.truncate(slow["a"].target / BIG, SOME))
    assert error.line == f"spark-a: expected {BIG} as it was verified, found it changed (it became shorter)"
    for letter in "bc":
        slow[letter].cable = None
    slow.up()
    assert slow.whole()


def test_a_node_that_goes_dead_is_named_with_the_file(slow: Site) -> None:
    original = slow["b"].stream

    def lost(*args: object) -> object:
        original(*args)  # type: ignore[arg-type]
        raise UnreachableError("the connection was lost", node="spark-b", step="session")

    slow["b"].stream = lost  # type: ignore[assignment,method-assign]
    error = broken(slow, slow["b"].kill, letters="ab")
    assert error.line == (
        f"spark-b: expected the transfer of {BIG} to go on, "
        "found that its program does not answer any more (session: the connection was lost)"
    )


def test_a_program_that_cannot_start_is_told(site: Site, tmp_path: Path) -> None:
    site["b"].programs = tmp_path / "programs"
    site["b"].install("bash", "#!/bin/sh\necho no memory >&2; exit 5\n")
    site.up("a")
    with pytest.raises(SparkError) as failed:
        site.up("ab")
    assert failed.value.line == (
        "spark-b: expected the transfer of the weights to go on, found that its program ended with status 5 (no memory)"
    )


def test_who_stands_still_is_named_and_let_go(slow: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "STALL_S", 2.0)
    stopped: list[int] = []

    def stop() -> None:
        stopped.append(slow["a"].program())
        os.kill(stopped[0], signal.SIGSTOP)

    try:
        error = broken(slow, stop)
    finally:
        os.kill(stopped[0], signal.SIGCONT)
        for process in slow["a"].streams:
            process.wait()
    assert error.line == f"spark-b: expected {BIG} to go on, found no byte in 2 s"


@pytest.fixture
def small_disk(slow: Site) -> Iterator[Path]:
    """spark-b's folder on a disk of its own."""
    if not is_root():
        pytest.skip("only root can mount a small disk")
    folder = slow["b"].base
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], check=False)
    if done.returncode:
        pytest.skip("this machine lets nobody mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_meanwhile(slow: Site, small_disk: Path) -> None:
    hog = small_disk / "hog"

    def fill() -> None:
        hog.touch()
        with pytest.raises(OSError, match="No space"), hog.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))

    error = broken(slow, fill)
    assert error.line.startswith(f"spark-b (node_root): expected to write {BIG}, found: No space left on device after")
    there = arrived(slow)
    assert there["b"] >= SOME
    assert not slow["b"].target.exists()
    with pytest.raises(SparkError) as failed:
        slow.up()
    assert failed.value.line.startswith("spark-b (node_root): expected 0.0 GB of free space for the weights")
    assert slow.rounds == []
    hog.unlink()
    goes_on(slow, "bc", there)


@pytest.mark.parametrize("phase", ["over the fabric", "from the controller"])
def test_ctrl_c_ends_it_within_seconds_on_all_nodes_and_the_next_run_goes_on(slow: Site, phase: str) -> None:
    if phase == "from the controller":
        shutil.rmtree(slow["a"].target)

    def check() -> None:
        if slow["b"].has_arrived(SOME):
            raise SparkError("interrupted; what has arrived is kept")

    with pytest.raises(SparkError) as failed:
        slow.up(check=check)
    assert failed.value.line == "interrupted; what has arrived is kept"
    ended = time.monotonic()
    for node in slow.nodes:
        for process in node.streams:
            process.wait(5)
    assert time.monotonic() - ended < 5
    goes_on(slow, "bc", arrived(slow))


def test_ctrl_c_while_nodes_hash_does_not_wait_for_them(site: Site, tmp_path: Path) -> None:
    def hang(_: Command) -> None:
        time.sleep(3)

    site["b"].before = hang

    def check() -> None:
        raise SparkError("interrupted")

    start = time.monotonic()
    with pytest.raises(SparkError, match="interrupted"):
        site.up(check=check)
    assert time.monotonic() - start < 1


def test_a_controller_that_is_killed_takes_the_programs_with_it(slow: Site, tmp_path: Path) -> None:
    text = f"""
import sys
from pathlib import Path
from spark_core.transfer.distribution import distribute
from spark_core.weights import local_manifest
from tests.unit.transfer.live_node import Cable, LiveNode
base = Path({str(tmp_path)!r})
nodes = [LiveNode(f"spark-{{l}}", base=base / l, address=f"127.0.0.{{n}}") for n, l in enumerate("abc", 11)]
nodes[1].cable = Cable(bytes_per_s=3e6)
distribute({str(slow.source)!r}, [node.place() for node in nodes], local_manifest({str(slow.source)!r}), print)
"""
    controller = subprocess.Popen([sys.executable, "-c", text], cwd=Path(__file__).parents[3])
    slow["b"].wait_for(SOME)
    controller.kill()
    controller.wait()
    there = slow["b"].arrived()
    end = time.monotonic() + 5
    lock = slow["b"].target.with_name("revision.lock")
    while time.monotonic() < end and subprocess.run(["flock", "-n", str(lock), "true"], check=False).returncode:
        time.sleep(0.1)
    assert time.monotonic() < end
    goes_on(slow, "bc", {"b": there})
