"""The image: one and the same on every node, and absent only if the daemon says so."""

from __future__ import annotations

import errno
import io
import json
import tarfile
from pathlib import Path

import pytest

from spark_core.errors import CommandError, SettingsError, SparkError, UnreachableError
from spark_core.image import ImageFacts, archive_image_id, ensure_image, load_archive, observe_image, require_parity
from spark_core.settings import ImageSettings
from spark_core.transport.base import Command, Result
from tests.fake_host import FakeHost
from tests.scripted_transport import ScriptedTransport

ID = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64
IMAGE = {"image_id": ID, "architecture": "arm64", "layers": ["sha256:1", "sha256:2"]}
FACTS = ImageFacts(ID, "arm64", ("sha256:1", "sha256:2"))
NAME = "registry.example/vllm@sha256:" + "c" * 64


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path / "host")


def archive(path: Path, manifest: object = None) -> str:
    """A docker-save archive with the image ``ID``."""
    text = json.dumps([{"Config": f"{'a' * 64}.json"}] if manifest is None else manifest).encode()
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("manifest.json")
        info.size = len(text)
        tar.addfile(info, io.BytesIO(text))
    return str(path)


@pytest.mark.parametrize("config", ["a" * 64 + ".json", "blobs/sha256/" + "a" * 64])
def test_the_id_of_an_archive_is_the_digest_of_its_configuration(config: str, tmp_path: Path) -> None:
    assert archive_image_id(archive(tmp_path / "image.tar", [{"Config": config}])) == ID


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ([], "found 0 images in"),
        ([{"Config": "a"}, {"Config": "b"}], "found 2 images in"),
        ([{}], "which is not a docker-save archive ('Config')"),
    ],
    ids=["no image", "two images", "no configuration"],
)
def test_an_archive_of_another_shape_is_a_setting_that_cannot_be_used(
    manifest: object, words: str, tmp_path: Path
) -> None:
    path = archive(tmp_path / "image.tar", manifest)
    with pytest.raises(SettingsError) as failed:
        archive_image_id(path)
    assert words in failed.value.violations[0]


@pytest.mark.parametrize("content", [b"", b"no tar", b"\x1f\x8b\x08cut"])
def test_a_file_that_is_no_archive_is_told(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "image.tar").write_bytes(content)
    with pytest.raises(SettingsError) as failed:
        archive_image_id(str(tmp_path / "image.tar"))
    assert failed.value.violations[0].startswith(
        f"image.archive: found {tmp_path}/image.tar, which is not a docker-save archive"
    )


def test_an_archive_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as failed:
        archive_image_id(str(tmp_path / "none.tar"))
    assert failed.value.violations == (f"image.archive: found no file {tmp_path}/none.tar",)


def test_an_image_that_is_there_is_told_with_its_layers(host: FakeHost) -> None:
    host.change(images={NAME: IMAGE})
    assert observe_image(host.node, NAME) == FACTS
    assert observe_image(host.node, ID) == FACTS


def test_an_image_is_absent_only_if_the_daemon_says_so(host: FakeHost) -> None:
    assert observe_image(host.node, ID) is None


@pytest.mark.parametrize(
    "stderr",
    [
        "Cannot connect to the Docker daemon at unix:///var/run/docker.sock.",
        "permission denied",
        "bash: docker: command not found",
        "",
    ],
)
def test_a_daemon_that_could_not_be_asked_is_not_a_missing_image(stderr: str) -> None:
    with pytest.raises(CommandError) as failed:
        observe_image(ScriptedTransport("spark-a", lambda _: Result(1, "", stderr)), ID)
    assert failed.value.line == f"spark-a (docker): expected an answer about image {ID}, found: {stderr}"


def test_a_silent_node_is_not_a_missing_image() -> None:
    def silent(_: Command) -> Result:
        raise UnreachableError("no answer", node="spark-a", step="login")

    with pytest.raises(UnreachableError):
        observe_image(ScriptedTransport("spark-a", silent), ID)


def test_an_archive_is_loaded_once(host: FakeHost, tmp_path: Path) -> None:
    settings = ImageSettings(archive=archive(tmp_path / "image.tar"))
    host.change(archive={ID: IMAGE})
    for _ in range(2):
        assert ensure_image(host.node, settings, ID, lambda _: None) == FACTS
    assert host.read()["loads"] == [(tmp_path / "image.tar").stat().st_size]


def test_a_registry_name_is_pulled_by_the_node_itself(host: FakeHost) -> None:
    said: list[str] = []
    host.change(registry={NAME: IMAGE})
    assert ensure_image(host.node, ImageSettings(registry=NAME), None, said.append) == FACTS
    assert said == [f"spark-a: pulling {NAME}"]


def test_a_name_that_the_registry_does_not_know_is_told_with_its_setting(host: FakeHost) -> None:
    with pytest.raises(CommandError) as failed:
        ensure_image(host.node, ImageSettings(registry=NAME), None, lambda _: None)
    assert failed.value.line.startswith(f"spark-a (image.registry): expected the daemon to pull {NAME}: ")


def test_a_local_image_is_never_fetched(host: FakeHost) -> None:
    with pytest.raises(CommandError) as failed:
        ensure_image(host.node, ImageSettings(local_id=ID), ID, lambda _: None)
    assert failed.value.line == f"spark-a (image.local_id): expected the image {ID}, found none of that id"
    assert [call[0] for call in host.calls("docker")] == ["image"]


def test_a_full_disk_while_loading_is_told(host: FakeHost, tmp_path: Path) -> None:
    host.change(load_error="write /layer.tar: no space left on device")
    with pytest.raises(CommandError) as failed:
        ensure_image(host.node, ImageSettings(archive=archive(tmp_path / "i.tar")), ID, lambda _: None)
    assert "no space left on device" in failed.value.line
    assert "Docker Root Dir" in failed.value.do


def test_an_archive_that_gave_another_image_is_told(host: FakeHost, tmp_path: Path) -> None:
    host.change(archive={ID: {**IMAGE, "image_id": OTHER}})
    with pytest.raises(SparkError) as failed:
        ensure_image(host.node, ImageSettings(archive=archive(tmp_path / "i.tar")), ID, lambda _: None)
    assert f"expected image id {ID}, found {OTHER}" in failed.value.line


def test_a_load_that_brought_nothing_is_told(host: FakeHost, tmp_path: Path) -> None:
    with pytest.raises(CommandError) as failed:
        ensure_image(host.node, ImageSettings(archive=archive(tmp_path / "i.tar")), ID, lambda _: None)
    assert failed.value.line == f"spark-a: expected the image {ID} after bringing it, found none"
    assert "containerd image store" in failed.value.do
    assert "image.registry" in failed.value.do


@pytest.mark.parametrize("when", ["before", "while"])
def test_an_archive_that_cannot_be_read_is_told_in_one_line(
    when: str, host: FakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "i.tar"
    if when == "while":
        archive(path)

        class Stale(io.BytesIO):
            name = str(path)

            def read(self, size: int | None = -1) -> bytes:
                raise OSError(errno.ESTALE, "Stale file handle")

        monkeypatch.setattr(Path, "open", lambda *_: Stale())
    with pytest.raises(SparkError) as failed:
        load_archive(host.node, str(path), lambda _: None)
    words = "Stale file handle" if when == "while" else "No such file or directory"
    assert failed.value.line == f"image.archive: expected to read {path} to its end, found: {words}"


@pytest.mark.parametrize(
    "other",
    [
        ImageFacts(OTHER, "arm64", ("sha256:1",)),
        ImageFacts(OTHER, "amd64", FACTS.layers),
        ImageFacts(OTHER, "arm64", FACTS.layers[::-1]),
    ],
    ids=["layers", "architecture", "order of layers"],
)
def test_two_nodes_with_different_images_are_refused(other: ImageFacts) -> None:
    with pytest.raises(SparkError) as failed:
        require_parity({"spark-a": FACTS, "spark-b": other})
    assert failed.value.line == (
        f"spark-b (image): expected the image of spark-a ({ID[:19]}), found another one ({OTHER[:19]})"
    )


def test_one_image_under_two_ids_is_refused_since_the_nodes_keep_images_differently() -> None:
    with pytest.raises(SparkError) as failed:
        require_parity({"spark-a": FACTS, "spark-b": ImageFacts(OTHER, FACTS.architecture, FACTS.layers)})
    assert failed.value.line == (
        f"spark-b (image): expected the image id of spark-a ({ID}), found the same image as {OTHER}"
    )
    assert "same image store" in failed.value.do


def test_the_same_image_everywhere_is_that_image() -> None:
    assert require_parity({"spark-a": FACTS, "spark-b": FACTS}) == FACTS
