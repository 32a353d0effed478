"""A docker-save archive: which image it holds, and where its layers lie."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest

from spark_core.errors import SettingsError, SparkError
from spark_core.image.archive import archive_image_id, open_archive
from tests.unit.image.conftest import layer_tar, write_archive


def written(path: Path, members: dict[str, bytes]) -> str:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return str(path)


def test_the_id_of_an_archive_is_the_digest_of_its_configuration(tmp_path: Path) -> None:
    layers = [layer_tar("one", 1000), layer_tar("two", 5000)]
    wanted = write_archive(tmp_path / "image.tar", layers)
    assert archive_image_id(str(tmp_path / "image.tar")) == wanted


def test_the_layers_lie_where_it_says(tmp_path: Path) -> None:
    layers = [layer_tar("one", 1000), layer_tar("two", 5000)]
    write_archive(tmp_path / "image.tar", layers)
    found = open_archive(str(tmp_path / "image.tar"))
    content = (tmp_path / "image.tar").read_bytes()
    names = list(found.contents.above(0).files)
    assert [content[found.offsets[name] : found.offsets[name] + found.contents.sizes[name]] for name in names] == layers
    assert found.contents.above(1).total_bytes == len(layers[1])


def test_a_layer_that_occurs_twice_is_a_link_in_the_archive_and_sent_once(tmp_path: Path) -> None:
    layer = layer_tar("one", 1000)
    write_archive(tmp_path / "image.tar", [layer, layer])
    path = tmp_path / "linked.tar"
    with tarfile.open(tmp_path / "image.tar") as old, tarfile.open(path, "w") as tar:
        for member in old:
            if member.name == "1/layer.tar":
                link = tarfile.TarInfo(member.name)
                link.type, link.linkname = tarfile.SYMTYPE, "../0/layer.tar"
                tar.addfile(link)
            else:
                tar.addfile(member, old.extractfile(member))
    found = open_archive(str(path))
    assert len(found.contents.layers) == 2
    assert found.contents.above(0).total_bytes == len(layer)


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ([], "found 0 images in"),
        ([{"Config": "a"}, {"Config": "b"}], "found 2 images in"),
        ([{}], "which is not a docker-save archive ('Config')"),
        ([{"Config": "none", "Layers": []}], "which is not a docker-save archive ('none')"),
    ],
    ids=["no image", "two images", "no configuration named", "configuration missing"],
)
def test_an_archive_of_another_shape_is_a_setting_that_cannot_be_used(
    manifest: object, words: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "image.tar", {"manifest.json": json.dumps(manifest).encode()})
    with pytest.raises(SettingsError) as failed:
        archive_image_id(path)
    assert words in failed.value.violations[0]


def test_compressed_layers_are_told_before_a_node_is_contacted(tmp_path: Path) -> None:
    write_archive(tmp_path / "image.tar", [gzip.compress(layer_tar("one", 1000))])
    with pytest.raises(SettingsError) as failed:
        open_archive(str(tmp_path / "image.tar"))
    assert "found compressed layers" in failed.value.violations[0]


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


def test_an_archive_that_is_cut_while_it_is_sent_is_told_in_one_line(tmp_path: Path) -> None:
    write_archive(tmp_path / "image.tar", [layer_tar("one", 100_000)])
    found = open_archive(str(tmp_path / "image.tar"))
    (tmp_path / "image.tar").write_bytes((tmp_path / "image.tar").read_bytes()[:50_000])
    with pytest.raises(SparkError, match="found less"):
        list(found.feed(list(found.contents.sizes), {}))
    (tmp_path / "image.tar").unlink()
    with pytest.raises(SparkError) as failed:
        list(found.feed(list(found.contents.sizes), {}))
    assert failed.value.line == (
        f"image.archive: expected to read {tmp_path}/image.tar to its end, found: No such file or directory"
    )
