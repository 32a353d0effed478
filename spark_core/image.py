"""The serving image: one and the same on every node, judged by image id and layer ids.

After ``docker load`` a node has no repo digest, and with the containerd store the id is another number than with the
classic one: what is compared is the configuration digest (the id, in the classic store) and the list of layer ids.
"""

from __future__ import annotations

import json
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from spark_core.errors import CommandError, SettingsError, SparkError
from spark_core.settings.image import ImageSettings
from spark_core.transport.base import Transport, command, run_checked, tail_lines

LOAD_TIMEOUT_S = 3600
PULL_TIMEOUT_S = 4 * 3600
_CHUNK = 1 << 20
_PROGRESS_EVERY_S = 10.0

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ImageFacts:
    """An image on one node.

    Attributes:
        image_id: Local id, ``sha256:…``.
        architecture: Docker's word for it, such as ``arm64``.
        layers: Layer ids in order.
    """

    image_id: str
    architecture: str
    layers: tuple[str, ...]


def archive_image_id(archive: str) -> str:
    """The image id that loading a docker-save archive gives: the digest of its configuration.

    Raises:
        SettingsError: the file is missing, not such an archive, or holds more than one image.
    """
    path = Path(archive).expanduser()
    try:
        with tarfile.open(path) as tar:
            member = tar.extractfile("manifest.json")
            manifest = json.load(member) if member else []
        if len(manifest) != 1:
            raise SettingsError([f"image.archive: found {len(manifest)} images in {archive}, expected exactly one"])
        name = Path(str(manifest[0]["Config"])).name.removesuffix(".json")
    except FileNotFoundError:
        raise SettingsError([f"image.archive: found no file {archive}"]) from None
    except (tarfile.TarError, KeyError, ValueError, OSError, EOFError, zlib.error) as error:
        raise SettingsError([f"image.archive: found {archive}, which is not a docker-save archive ({error})"]) from None
    return f"sha256:{name}"


def observe_image(transport: Transport, reference: str) -> ImageFacts | None:
    """The image of that id, tag or digest on a node; None if the daemon says that there is none.

    Raises:
        CommandError: the daemon could not be asked; that is not "absent".
    """
    result = transport.run(
        command(
            "docker",
            "image",
            "inspect",
            "--format",
            '{"image_id":{{json .Id}},"architecture":{{json .Architecture}},"layers":{{json .RootFS.Layers}}}',
            reference,
            purpose=f"expected to learn whether image {reference} is there",
        )
    )
    if result.ok:
        value = json.loads(result.stdout)
        return ImageFacts(value["image_id"], value["architecture"], tuple(value["layers"] or ()))
    if "No such image" in result.stderr:
        return None
    raise CommandError(
        f"expected an answer about image {reference}, found: {result.stderr.strip()[-160:]}",
        where=f"{transport.node} (docker)",
    )


def load_archive(transport: Transport, archive: str, progress: Progress) -> None:
    """Load a docker-save archive of the controller into a node's daemon. Layers that are there are not stored again.

    Raises:
        SparkError: the archive cannot be read, or docker does not take it.
    """
    path = Path(archive).expanduser()
    try:
        file = path.open("rb")
        total = path.stat().st_size
    except OSError as error:
        raise _unreadable(archive, error) from error
    with file:
        result = transport.stream(
            command("docker", "load", "-q", timeout_s=LOAD_TIMEOUT_S, purpose=f"expected docker to load {archive}"),
            _chunks(file, total, lambda text: progress(f"{transport.node}: image {text}")),
        )
    if not result.ok:
        raise CommandError(
            f"expected docker to load {archive}, found: {result.stderr.strip()[-160:]}",
            where=f"{transport.node} (image.archive)",
            do="check the free space where Docker keeps its images (docker info, Docker Root Dir)",
            evidence=tail_lines(result.stderr, 4),
        )


def pull_image(transport: Transport, reference: str) -> None:
    """Let a node's own daemon pull an image, with the credentials that it has."""
    run_checked(
        transport,
        command("docker", "pull", "-q", reference, timeout_s=PULL_TIMEOUT_S),
        purpose=f"expected the daemon to pull {reference}",
        setting="image.registry",
    )


def ensure_image(transport: Transport, settings: ImageSettings, image_id: str | None, progress: Progress) -> ImageFacts:
    """Bring the image onto one node if it is not there.

    Args:
        image_id: The id that must result, or None if only a registry reference is known.

    Raises:
        CommandError: the image could not be brought, or is another one than declared.
    """
    wanted = image_id or settings.registry or ""
    facts = observe_image(transport, wanted)
    if facts is None:
        if settings.archive is not None:
            load_archive(transport, settings.archive, progress)
        elif settings.registry is not None:
            progress(f"{transport.node}: pulling {settings.registry}")
            pull_image(transport, settings.registry)
        else:
            raise CommandError(
                f"expected the image {settings.local_id}, found none of that id",
                where=f"{transport.node} (image.local_id)",
                do="build or load it on this node, or name an archive or a registry",
            )
        facts = observe_image(transport, wanted)
        if facts is None:
            raise CommandError(
                f"expected the image {wanted} after bringing it, found none",
                where=transport.node,
                do="the node's Docker probably uses the containerd image store, where the id of the archive's image is "
                "another number: use image.registry, or the classic image store on this node"
                if settings.archive is not None
                else "",
            )
    if image_id is not None and facts.image_id != image_id:
        raise CommandError(f"expected image id {image_id}, found {facts.image_id}", where=f"{transport.node} (image)")
    return facts


def require_parity(found: dict[str, ImageFacts]) -> ImageFacts:
    """The one image that all nodes have.

    Raises:
        SparkError: two nodes have different images under the same reference, or one image under different ids.
    """
    first_node, first = next(iter(found.items()))
    for node, facts in found.items():
        if facts.layers != first.layers or facts.architecture != first.architecture:
            raise SparkError(
                f"expected the image of {first_node} ({first.image_id[:19]}), "
                f"found another one ({facts.image_id[:19]})",
                where=f"{node} (image)",
                do="pin the image by digest, or remove the differing one on that node and run up again",
            )
        if facts.image_id != first.image_id:
            raise SparkError(
                f"expected the image id of {first_node} ({first.image_id}), found the same image as {facts.image_id}",
                where=f"{node} (image)",
                do=f"{first_node} and {node} keep images in different stores: let the nodes' Docker use the same image "
                "store (docker info, Storage Driver: the containerd store or the classic one)",
            )
    return first


def _unreadable(archive: str, error: OSError) -> SparkError:
    return SparkError(
        f"expected to read {archive} to its end, found: {error.strerror or error}",
        where="image.archive",
        do="let the archive lie as it is until up has ended",
    )


def _chunks(file: IO[bytes], total: int, progress: Progress) -> Iterator[bytes]:
    sent, said = 0, time.monotonic()
    while True:
        try:
            chunk = file.read(_CHUNK)
        except OSError as error:
            raise _unreadable(str(file.name), error) from error
        if not chunk:
            return
        yield chunk
        sent += len(chunk)
        if time.monotonic() - said >= _PROGRESS_EVERY_S:
            said = time.monotonic()
            progress(f"{sent / 1e9:.1f} of {total / 1e9:.1f} GB sent")
