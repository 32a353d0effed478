"""The layers of an image between nodes: real programs and sockets, and a Docker that is a fake with a real store."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import pytest

from spark_core.errors import SparkError
from spark_core.image import spread
from spark_core.settings import ImageSettings
from tests.moving_files import bytes_below
from tests.unit.image.conftest import MIB, Site, layer_tar, write_archive
from tests.unit.transfer.live_node import Cable

pytestmark = pytest.mark.slow


def test_an_image_on_one_node_comes_to_all_others_with_its_very_id(site: Site) -> None:
    site.load("a")
    assert site.bring().image_id == site.image_id
    assert site.is_clean()
    assert site.told[0] == "image: 3 of 3 layers, 0.01 GB, from spark-a over the fabric to spark-b, spark-c"
    assert f"spark-vllm/image:{site.image_id[7:19]}" in (site["c"].base / "docker-root/tags.json").read_text()


def test_the_source_sends_once(site: Site) -> None:
    site.load("a")
    site.bring()
    total = sum(len(layer) for layer in site.layers)
    assert site.rounds[0]["spark-a"].sent == total
    assert site.rounds[0]["spark-b"].sent == total
    assert max(outcome.memory for outcome in site.rounds[0].values()) < 300 * MIB


def test_only_the_layers_that_a_node_lacks_are_sent(site: Site) -> None:
    site.load("a")
    site.bring()
    changed = [*site.layers[:2], layer_tar("other top", MIB)]
    site.image_id = write_archive(site.folder / "changed.tar", changed)
    site.load("b", site.folder / "changed.tar")
    site.bring()
    assert site.told[0].startswith("image: 1 of 3 layers, ")
    assert site.received("a") == site.received("c") == len(changed[2])


def test_nodes_that_lack_different_layers_get_what_each_one_lacks(site: Site) -> None:
    write_archive(site.folder / "lower.tar", site.layers[:2])
    site.load("b", site.folder / "lower.tar")
    site.load("a")
    site.bring()
    assert site.received("b") == len(site.layers[2])
    assert site.received("c") == sum(len(layer) for layer in site.layers)
    assert site.image_id in site.images("b") & site.images("c")


def test_an_image_of_which_only_the_configuration_lacks_sends_nothing(site: Site) -> None:
    site.load("a")
    site.bring("ab")
    site.image_id = write_archive(site.folder / "again.tar", site.layers, inside={"Env": ["A=1"]})
    site.load("a", site.folder / "again.tar")
    site.bring("ab")
    assert site.rounds == []
    assert site.image_id in site.images("b")


def test_an_archive_comes_from_the_controller_to_one_node_and_from_there_to_the_others(site: Site) -> None:
    settings = ImageSettings(archive=str(site.archive))
    site.bring(settings=settings)
    assert site.is_clean()
    assert "from the controller to spark-a, and from there over the fabric to spark-b, spark-c" in site.told[0]
    site.bring(settings=settings)
    assert site.told == []


def test_nothing_is_done_where_all_nodes_have_it(site: Site) -> None:
    for letter in "abc":
        site.load(letter)
    calls = (site["a"].base / "docker-calls").read_text().count("\n")
    site.bring()
    assert site.told == []
    assert site.rounds == []
    after = (site["a"].base / "docker-calls").read_text().splitlines()[calls:]
    assert {line.split()[0] for line in after} <= {"image", "version"}


def run_in_background(site: Site, letters: str = "abc") -> tuple[threading.Thread, list[BaseException]]:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            site.bring(letters)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, failed


def wait_for_bytes(site: Site, letter: str, count: int) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        folder = site[letter].base / "root" / "images"
        if bytes_below(folder, "*.tar") >= count:
            return
        time.sleep(0.01)
    raise AssertionError(f"{count} bytes did not come to {letter}")


def test_a_killed_taker_is_named_and_the_next_run_goes_on_within_the_layer(site: Site) -> None:
    site.load("a")
    site["b"].cable = Cable(bytes_per_s=1.5e6)
    thread, failed = run_in_background(site, "ab")
    wait_for_bytes(site, "b", 4 * MIB)
    site["b"].kill(signal.SIGKILL)
    thread.join(30)
    [error] = failed
    assert isinstance(error, SparkError)
    assert error.where == "spark-b"
    assert "was killed by signal 9" in error.what
    site["b"].cable.cut()
    site["b"].cable = None
    site.bring("ab")
    assert site.received("b") < sum(len(layer) for layer in site.layers) - 3 * MIB
    assert site.is_clean("ab")


def test_an_interrupt_ends_it_within_five_seconds_and_what_came_is_kept(site: Site) -> None:
    site.load("a")
    site["b"].cable = Cable(bytes_per_s=1.5e6)
    stop: list[float] = []

    def check() -> None:
        if stop:
            raise SparkError("interrupted")

    def interrupt() -> None:
        wait_for_bytes(site, "b", 3 * MIB)
        stop.append(time.monotonic())

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SparkError, match="interrupted"):
        site.bring("ab", check=check)
    assert time.monotonic() - stop[0] < 5
    thread.join()
    site["b"].cable.cut()
    site["b"].cable = None
    site.bring("ab")
    assert site.received("b") < sum(len(layer) for layer in site.layers) - 2 * MIB
    assert site.is_clean("ab")


def test_a_bit_that_flipped_on_the_way_is_found_named_and_only_that_layer_is_sent_again(site: Site) -> None:
    site.load("a")
    site["b"].cable = Cable(flip_at=5 * MIB)
    with pytest.raises(SparkError) as failed:
        site.bring("ab")
    assert "with its own id, found other content in what came from spark-a" in failed.value.render()
    assert failed.value.where.startswith("spark-b")
    site.bring("ab")
    assert site.received("b") <= len(site.layers[1])
    assert site.is_clean("ab")


def test_a_full_disk_of_docker_is_told_in_its_own_words(site: Site) -> None:
    site.load("a")
    (site["b"].base / "load-error").write_text("write /layer.tar: no space left on device")
    with pytest.raises(SparkError) as failed:
        site.bring("ab")
    assert failed.value.where == "spark-b (docker)"
    assert "write /layer.tar: no space left on device" in failed.value.what
    (site["b"].base / "load-error").unlink()
    site.bring("ab")
    assert site.received("b") == 0
    assert site.is_clean("ab")


def test_too_little_space_is_told_before_the_first_byte(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.load("a")
    monkeypatch.setattr(spread, "_SPARE_SPACE", 1e9)
    with pytest.raises(SparkError) as failed:
        site.bring()
    assert "spark-b" in failed.value.where
    assert "of free space for the layers of the image, found" in failed.value.what
    assert "spark-c" in failed.value.render()
    assert site.rounds == []


def test_a_layer_that_is_damaged_on_its_source_is_named_there(site: Site) -> None:
    site.load("a")
    [large] = (site["a"].base / "docker-root/overlay2").glob("*/diff/middle/large.bin")
    large.unlink()
    with pytest.raises(SparkError) as failed:
        site.bring("ab")
    assert failed.value.where == "spark-a"
    assert "large.bin" in failed.value.what


def test_a_damaged_byte_on_the_source_is_found_by_the_taker(site: Site) -> None:
    site.load("a")
    [large] = (site["a"].base / "docker-root/overlay2").glob("*/diff/middle/large.bin")
    content = bytearray(large.read_bytes())
    content[1000] ^= 1
    large.write_bytes(content)
    with pytest.raises(SparkError) as failed:
        site.bring("ab")
    assert "found other content in what came from spark-a" in failed.value.render()
    assert site.image_id not in site.images("b")


def test_nodes_that_the_fabric_does_not_join_use_their_management_addresses(site: Site) -> None:
    site.load("a")
    site["b"].address = "192.0.2.1"  # of a network that is nowhere
    site.management = {"a": "127.0.0.31", "b": "127.0.0.32"}
    site.bring("ab")
    assert site.is_clean("ab")
    assert any("over the management network, since the fabric does not reach spark-b" in line for line in site.told)


def test_a_node_that_no_other_reaches_is_named_with_both_reasons(site: Site) -> None:
    site.load("a")
    site["b"].address = "192.0.2.1"
    site.management = {"a": "127.0.0.31", "b": "name.example"}
    with pytest.raises(SparkError) as failed:
        site.bring("ab")
    assert failed.value.where == "spark-b (fabric)"
    assert "expected spark-a, which has the image, to reach spark-b, found " in failed.value.what


def test_an_archive_reaches_nodes_without_any_address_one_by_one(site: Site) -> None:
    for letter in "ab":
        site[letter].address = ""
    site.bring("ab", settings=ImageSettings(archive=str(site.archive)))
    assert site.is_clean("a")
    assert site.image_id in site.images("b")


def test_the_containerd_store_is_refused_in_one_line(site: Site) -> None:
    site.load("a")
    (site["b"].base / "containerd").touch()
    with pytest.raises(SparkError) as failed:
        site.bring("ab")
    assert failed.value.line.startswith("spark-b (docker): expected the classic image store on overlay2")
    assert "found the containerd store" in failed.value.line


def test_two_runs_bring_an_image_once(site: Site) -> None:
    site.load("a")
    site["b"].cable = Cable(bytes_per_s=1e6)
    thread, failed = run_in_background(site, "ab")
    wait_for_bytes(site, "b", MIB // 2)
    other = Site(site.folder, site.nodes, site.layers, site.archive, site.image_id)
    other.bring("ab")
    thread.join(30)
    assert failed == []
    assert any("wait for process" in line for line in other.told)
    assert len(other.told) == 1
    assert site.is_clean("ab")


def test_the_image_of_an_archive_that_changed_meanwhile_is_refused(site: Site, tmp_path: Path) -> None:
    changed = tmp_path / "other.tar"
    write_archive(changed, site.layers[:1])
    with pytest.raises(SparkError) as failed:
        site.bring(settings=ImageSettings(archive=str(changed)))
    assert "the archive changed while this ran" in failed.value.render()
