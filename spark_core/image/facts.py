"""The serving image: one and the same on every node, judged by image id and layer ids.

After ``docker load`` a node has no repo digest, and with the containerd store the id is another number than with the
classic one: what is compared is the configuration digest (the id, in the classic store) and the list of layer ids.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from spark_core.errors import CommandError, SparkError
from spark_core.transport.base import Result, Transport, command, script


@dataclass(frozen=True)
class ImageFacts:
    """An image on one node.

    Attributes:
        image_id: Local id, ``sha256:…``.
        architecture: Docker's word for it, such as ``arm64``.
        layers: Layer ids in order.
        digests: Names in registries by digest, where the daemon knows some.
        entrypoint: Its own entrypoint.
        command: Its own arguments.
        environment: Its own variables.
        user: The user that it runs as; empty for root.
    """

    image_id: str
    architecture: str
    layers: tuple[str, ...]
    digests: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    user: str = ""


IMAGE_FORMAT = (
    '{"image_id":{{json .Id}},"architecture":{{json .Architecture}},"layers":{{json .RootFS.Layers}},'
    '"digests":{{json .RepoDigests}},"entrypoint":{{json .Config.Entrypoint}},"command":{{json .Config.Cmd}},'
    '"environment":{{json .Config.Env}},"user":{{json .Config.User}}}'
)
"""What is asked of ``docker image inspect``."""

_DAEMON_FORMAT = "{{.Server.Version}} {{.Server.Arch}}"


def parse_image(text: str) -> ImageFacts:
    """An image from the answer to :data:`IMAGE_FORMAT`.

    Raises:
        ValueError: it is another answer.
    """
    try:
        value = json.loads(text)
        lists = {
            key: tuple(str(item) for item in value.get(key) or ())
            for key in ("layers", "digests", "entrypoint", "command", "environment")
        }
        return ImageFacts(
            str(value["image_id"]), str(value["architecture"]), user=str(value.get("user") or ""), **lists
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError("no facts of an image") from error


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
            IMAGE_FORMAT,
            reference,
            purpose=f"expected to learn whether image {reference} is there",
        )
    )
    return _image_of(transport, reference, result, result.stdout)


def observe_image_and_node(transport: Transport, reference: str) -> tuple[ImageFacts | None, str]:
    """An image on a node, and the architecture that an image must have there, in one round trip.

    Returns:
        What :func:`observe_image` gives, and the architecture of the daemon in Docker's words, such as ``arm64``.

    Raises:
        CommandError: the daemon could not be asked.
    """
    result = transport.run(
        script(
            'docker version --format "$1"; docker image inspect --format "$2" "$3"',
            _DAEMON_FORMAT,
            IMAGE_FORMAT,
            reference,
            purpose=f"expected to learn whether image {reference} is there",
        )
    )
    daemon, _, image = result.stdout.partition("\n")
    return _image_of(transport, reference, result, image), _architecture_of(daemon)


def _image_of(transport: Transport, reference: str, result: Result, answer: str) -> ImageFacts | None:
    if result.ok:
        return parse_image(answer)
    if "No such image" in result.stderr:
        return None
    raise CommandError(
        f"expected an answer about image {reference}, found: {result.stderr.strip()[-160:]}",
        where=f"{transport.node} (docker)",
    )


def _architecture_of(answer: str) -> str:
    words = answer.split()
    return words[1] if len(words) == 2 else ""


def require_parity(found: dict[str, ImageFacts]) -> ImageFacts:
    """The one image that all nodes have.

    Raises:
        SparkError: two nodes have different images under the same reference, or one image under different ids.
    """
    first_node, first = next(iter(found.items()))
    for node, facts in found.items():
        if facts.layers != first.layers or facts.architecture != first.architecture:
            raise SparkError(
                f"expected the image of {first_node} ({first.image_id[:19]}, {first.architecture}), "
                f"found another one ({facts.image_id[:19]}, {facts.architecture})",
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
