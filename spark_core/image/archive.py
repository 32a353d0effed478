"""A docker-save archive on the controller: which image it holds, and where in it each layer lies."""

from __future__ import annotations

import json
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from spark_core.errors import SettingsError, SparkError
from spark_core.image.layers import ImageContents
from spark_core.image.node_docker import file_name
from spark_core.transfer.session import part

_PART_BYTES = 4 << 20
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class Archive:
    """An archive that was read.

    Attributes:
        path: Where it lies.
        contents: The image.
        offsets: File name of each layer to where its tar begins in the archive.
    """

    path: Path
    contents: ImageContents
    offsets: dict[str, int]

    def feed(self, names: Sequence[str], arrived: dict[str, int]) -> Iterator[bytes]:
        """Layers as a node takes them from the controller, each from where it goes on.

        Args:
            names: File names of the layers, in their order.
            arrived: Bytes of them that a node has already.
        """
        try:
            with self.path.open("rb") as file:
                for name in names:
                    size = self.contents.sizes[name]
                    offset = min(arrived.get(name, 0), size)
                    file.seek(self.offsets[name] + offset)
                    yield part(name, offset, b"")
                    while offset < size:
                        content = file.read(min(_PART_BYTES, size - offset))
                        if not content:
                            raise SparkError(f"expected {size} bytes of layer {name[:12]} in {self.path}, found less")
                        yield part(name, offset, content)
                        offset += len(content)
        except OSError as error:
            raise SparkError(
                f"expected to read {self.path} to its end, found: {error.strerror or error}",
                where="image.archive",
                do="let the archive lie as it is until up has ended",
            ) from error


def archive_image_id(archive: str) -> str:
    """The image id that loading a docker-save archive gives: the digest of its configuration.

    Raises:
        SettingsError: the file is missing, not such an archive, or holds more than one image.
    """
    return open_archive(archive).contents.image_id


def open_archive(archive: str) -> Archive:
    """Read where everything lies in a docker-save archive; the content of layers is not read.

    Raises:
        SettingsError: the file is missing, not such an archive, holds more than one image, or compressed layers.
    """
    path = Path(archive).expanduser()
    try:
        with tarfile.open(path, "r:") as tar:
            return _read(path, tar)
    except FileNotFoundError:
        raise SettingsError([f"image.archive: found no file {archive}"]) from None
    except (tarfile.TarError, KeyError, ValueError, OSError, EOFError, zlib.error) as error:
        raise SettingsError([f"image.archive: found {archive}, which is not a docker-save archive ({error})"]) from None


def _read(path: Path, tar: tarfile.TarFile) -> Archive:
    members = {member.name: member for member in tar}

    def text(name: str) -> bytes:
        opened = tar.extractfile(members[name])
        if opened is None:
            raise ValueError(f"{name} is no file")
        return opened.read()

    manifest = json.loads(text("manifest.json"))
    if len(manifest) != 1:
        raise SettingsError([f"image.archive: found {len(manifest)} images in {path}, expected exactly one"])
    config = text(str(manifest[0]["Config"]))
    layers = tuple(str(layer) for layer in json.loads(config)["rootfs"]["diff_ids"])
    files = [str(name) for name in manifest[0]["Layers"]]
    if len(files) != len(layers):
        raise ValueError(f"{len(files)} files for {len(layers)} layers")
    sizes, offsets = {}, {}
    with path.open("rb") as raw:
        for layer, name in zip(layers, files, strict=True):
            member = _resolved(members, name)
            raw.seek(member.offset_data)
            if raw.read(4).startswith((_GZIP, _ZSTD)):
                raise SettingsError(
                    [
                        f"image.archive: found compressed layers in {path}, as the containerd image store writes them; "
                        "load it on one node and use image.local_id"
                    ]
                )
            sizes[file_name(layer)], offsets[file_name(layer)] = member.size, member.offset_data
    contents = ImageContents(f"sha256:{sha256(config).hexdigest()}", config.decode(), layers, sizes)
    return Archive(path, contents, offsets)


def _resolved(members: dict[str, tarfile.TarInfo], name: str) -> tarfile.TarInfo:
    """A member; docker save writes a layer that occurs twice as a link to the first."""
    member = members[name]
    for _ in range(8):
        if not (member.issym() or member.islnk()):
            return member
        target = member.linkname
        if member.issym():
            parts: list[str] = []
            for piece in (*name.split("/")[:-1], *target.split("/")):
                if piece == "..":
                    parts.pop()
                elif piece not in ("", "."):
                    parts.append(piece)
            target = "/".join(parts)
        name, member = target, members[target]
    raise ValueError(f"{name} is a link in a circle")
