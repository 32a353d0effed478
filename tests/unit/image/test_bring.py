"""Where an image comes from: a registry, a build, a node; and what is refused before anything is sent."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from spark_core.errors import SettingsError, SparkError
from spark_core.image import archive_image_id
from spark_core.image.sources import BuildContext
from spark_core.settings import ImageSettings
from spark_core.settings.image import BuildSettings
from tests.unit.image.conftest import Site, layer_tar, write_archive

pytestmark = pytest.mark.slow

NAME = "registry.example/vllm:latest"


def publish(site: Site, letter: str, archive: Path) -> None:
    """Let a node's registry have an image under the name."""
    folder = site[letter].base / "registry"
    folder.mkdir(exist_ok=True)
    shutil.copy(archive, folder / "registry.example_vllm_latest.tar")


def calls(site: Site, letter: str, verb: str) -> list[str]:
    path = site[letter].base / "docker-calls"
    return [line for line in path.read_text().splitlines() if line.split()[0] == verb] if path.exists() else []


def test_a_registry_is_asked_by_one_node_only_and_the_others_get_it_over_the_fabric(site: Site) -> None:
    publish(site, "a", site.archive)
    found = site.bring("ab", settings=ImageSettings(registry=NAME), image_id="")
    assert found.image_id == site.image_id
    assert site.image_id in site.images("b")
    assert len(calls(site, "a", "pull")) == 1
    assert calls(site, "b", "pull") == []
    assert site.told[0] == f"image: spark-a pulls {NAME}"


def test_a_floating_tag_stays_what_it_was_at_the_first_run(site: Site) -> None:
    publish(site, "a", site.archive)
    site.bring("ab", settings=ImageSettings(registry=NAME), image_id="")
    other = site.folder / "other.tar"
    other_id = write_archive(other, [layer_tar("newer", 5000)])
    site.load("b", other)
    (site["b"].base / "docker-root/tags.json").write_text(f'{{"{NAME}": "{other_id}"}}')
    found = site.bring("ab", settings=ImageSettings(registry=NAME), image_id="", recorded=site.image_id)
    assert found.image_id == site.image_id


def test_a_tag_whose_recorded_image_is_gone_everywhere_is_pulled_again_and_told(site: Site) -> None:
    publish(site, "a", site.archive)
    gone = "sha256:" + "0" * 64
    site.bring("a", settings=ImageSettings(registry=NAME), image_id="", recorded=gone)
    assert site.told[-1].startswith(f"image: {NAME} was {gone[:19]}, which no node has any more, and is now sha256:")


def test_two_nodes_with_different_images_under_one_tag_are_refused_and_both_ids_told(site: Site) -> None:
    other = site.folder / "other.tar"
    other_id = write_archive(other, [layer_tar("newer", 5000)])
    for letter, archive, image in (("a", site.archive, site.image_id), ("b", other, other_id)):
        site.load(letter, archive)
        (site[letter].base / "docker-root/tags.json").write_text(f'{{"{NAME}": "{image}"}}')
    with pytest.raises(SparkError) as failed:
        site.bring("ab", settings=ImageSettings(registry=NAME), image_id="")
    assert site.image_id[:19] in failed.value.line
    assert other_id[:19] in failed.value.line
    assert site.rounds == []


def test_a_name_that_the_registry_does_not_know_is_told_with_its_setting(site: Site) -> None:
    with pytest.raises(SparkError) as failed:
        site.bring("ab", settings=ImageSettings(registry=NAME), image_id="")
    assert failed.value.line == (
        f"spark-a (image.registry): expected the daemon to pull {NAME}, found: "
        f"Error response from daemon: manifest for {NAME} not found"
    )


def test_a_pull_is_ended_within_seconds_when_it_is_interrupted(site: Site) -> None:
    (site["a"].base / "pull-seconds").write_text("60")
    start = time.monotonic()

    def check() -> None:
        if calls(site, "a", "pull"):
            raise SparkError("interrupted")

    with pytest.raises(SparkError, match="interrupted"):
        site.bring("a", settings=ImageSettings(registry=NAME), image_id="", check=check)
    assert time.monotonic() - start < 30
    end = time.monotonic() + 5
    while any(process.poll() is None for process in site["a"].streams) and time.monotonic() < end:
        time.sleep(0.05)
    assert all(process.poll() is not None for process in site["a"].streams)


def test_an_image_of_another_architecture_is_refused_before_a_byte_is_sent(site: Site) -> None:
    site.load("a")
    (site["b"].base / "architecture").write_text("arm64")
    with pytest.raises(SparkError) as failed:
        site.bring("ab")
    assert failed.value.line == (
        f"spark-b (image): expected an image for arm64, found one for amd64 ({site.image_id[:19]})"
    )
    assert site.rounds == []


def test_an_archive_for_another_architecture_is_refused_before_a_byte_is_sent(site: Site) -> None:
    write_archive(site.archive, site.layers, architecture="arm64")
    with pytest.raises(SparkError) as failed:
        site.bring("ab", settings=ImageSettings(archive=str(site.archive)), image_id=_id_of(site.archive))
    assert "expected an image for amd64, found one for arm64" in failed.value.render()
    assert site.rounds == []


def _id_of(archive: Path) -> str:
    return archive_image_id(str(archive))


def test_a_local_image_that_no_node_has_is_told(site: Site) -> None:
    with pytest.raises(SparkError) as failed:
        site.bring("ab")
    assert failed.value.line == (
        f"spark-a, spark-b (image.local_id): expected the image {site.image_id} on one node at least, "
        "found none of that id"
    )


@pytest.fixture
def context(site: Site) -> Path:
    folder = site.folder / "image"
    (folder / "patches").mkdir(parents=True)
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY patches /patches\n")
    (folder / "patches" / "fix.py").write_text("fixed = True\n")
    return folder


def test_a_build_runs_on_one_node_and_only_once(site: Site, context: Path) -> None:
    settings = ImageSettings(build=BuildSettings(context="image"))
    found = site.bring("ab", settings=settings, image_id="")
    assert found.image_id in site.images("b")
    site.bring("ab", settings=settings, image_id="", recorded=found.image_id)
    site.bring("ab", settings=settings, image_id="")
    assert len(calls(site, "a", "build")) == 1
    assert calls(site, "b", "build") == []
    assert not list((site["a"].base / "root" / "cache").glob("build-*"))


def test_a_build_that_fails_is_told_in_its_own_words(site: Site, context: Path) -> None:
    (context / "Dockerfile").write_text("FROM scratch\nRUN false\n")
    with pytest.raises(SparkError) as failed:
        site.bring("a", settings=ImageSettings(build=BuildSettings(context="image")), image_id="")
    assert failed.value.where == "spark-a (image.build)"
    assert "returned a non-zero code: 1" in failed.value.what


def test_a_context_is_known_by_its_content_and_not_by_its_place_or_dates(site: Site, context: Path) -> None:
    settings = BuildSettings(context="image")
    first = BuildContext(settings, site.folder)
    moved = site.folder / "elsewhere"
    shutil.copytree(context, moved / "image")
    second = BuildContext(settings, moved)
    assert first.tag == second.tag
    assert first.tar() == second.tar()
    (moved / "image/patches/fix.py").write_text("fixed = False\n")
    assert BuildContext(settings, moved).tag != first.tag
    changed = settings.model_copy(update={"arguments": {"VERSION": "2"}})
    assert BuildContext(changed, site.folder).tag != first.tag


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (BuildSettings(context="none"), "image.build.context: found no folder none in the project folder"),
        (BuildSettings(context="image", dockerfile="No"), "image.build.dockerfile: found no file No in image"),
    ],
)
def test_a_context_that_is_not_there_is_told_as_a_setting(
    settings: BuildSettings, words: str, site: Site, context: Path
) -> None:
    with pytest.raises(SettingsError) as failed:
        BuildContext(settings, site.folder)
    assert failed.value.violations == (words,)
