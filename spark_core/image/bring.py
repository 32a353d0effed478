"""One and the same image on every node: where it comes from, what must not be, and how it is proven."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from spark_core.errors import CommandError, SparkError, join_errors
from spark_core.image.archive import Archive, open_archive
from spark_core.image.facts import ImageFacts, observe_image, observe_image_and_node, require_parity
from spark_core.image.layers import GivingNode, store_state
from spark_core.image.sources import BuildContext, build_image, pull_image
from spark_core.image.spread import ImageNode, spread
from spark_core.settings.image import ImageSettings
from spark_core.transfer.distribution import at_once


@dataclass(frozen=True)
class Bringing:
    """What is to be brought where.

    Args:
        settings: Where the image comes from.
        nodes: The nodes, the head first.
        project: The project folder, which holds the context of a build.
        image_id: The id that must result, or empty if only a pull or a build will tell.
        recorded: The id that an earlier run found for the same source; what a floating tag is stays so. Or empty.
        report: Called with a line for the person.
        check: Called often; what it raises ends it within seconds.
    """

    settings: ImageSettings
    nodes: Sequence[ImageNode]
    project: Path
    image_id: str
    recorded: str
    report: Callable[[str], None]
    check: Callable[[], None]

    @property
    def reference(self) -> str:
        """The name under which a node that pulled or built the image has it."""
        if self.settings.build is not None:
            return BuildContext(self.settings.build, self.project).tag
        return self.settings.registry or self.settings.local_id or ""


class _Seen(NamedTuple):
    """An image on a node, or None, and the architecture that an image must have there."""

    facts: ImageFacts | None
    architecture: str


def bring_image(bringing: Bringing) -> ImageFacts:
    """Bring the image to every node that lacks it, and prove that all have the same.

    Raises:
        SparkError: two nodes have different images under the same name, the image is for another architecture, or it
            could not be brought. What has arrived stays for the next run.
    """
    wanted, found = _wanted(bringing)
    archive: Archive | None = None
    if not wanted and bringing.settings.archive is None:
        wanted, found = _fetch(bringing)
    elif bringing.settings.archive is not None and not _having(found):
        archive = open_archive(bringing.settings.archive)
        if archive.contents.image_id != wanted:
            raise SparkError(
                f"expected the image {wanted[:19]} in {bringing.settings.archive}, "
                f"found {archive.contents.image_id[:19]}",
                where="image.archive",
                do="the archive changed while this ran; run up again",
            )
    images = _having(found)
    having = [node for node in bringing.nodes if node.node in images]
    architecture = archive.contents.architecture if archive else ""
    for facts in images.values():
        architecture = facts.architecture
    if having or archive:
        _require_architecture(found, wanted, architecture)
    lacking = [node for node in bringing.nodes if node not in having]
    if lacking:
        if archive is not None:
            contents, source = archive.contents, archive
            spread(contents, source, lacking, bringing.report, bringing.check)
        elif having:
            state = store_state(having[0].transport, ())
            giver = GivingNode(having[0].transport, wanted, state)
            spread(giver.contents(), having[0], lacking, bringing.report, bringing.check)
        else:
            raise _nowhere(bringing, wanted)
    return _proven(bringing, wanted)


def _wanted(bringing: Bringing) -> tuple[str, dict[str, _Seen]]:
    """The id that must result, if it is known, and which nodes have it."""
    for known in (bringing.image_id, bringing.recorded):
        if known:
            found = _observe(bringing, known)
            if known == bringing.image_id or _having(found):
                return known, found
    named = _having(_observe(bringing, bringing.reference))
    if not named:
        return "", {}
    facts = require_parity(named)
    return facts.image_id, _observe(bringing, facts.image_id)


def _fetch(bringing: Bringing) -> tuple[str, dict[str, _Seen]]:
    """Let the first node get the image from where it comes."""
    first, settings = bringing.nodes[0], bringing.settings
    if settings.build is not None:
        context = BuildContext(settings.build, bringing.project)
        build_image(first.transport, first.root, context, bringing.report, bringing.check)
    elif settings.registry is not None:
        pull_image(first.transport, settings.registry, bringing.report, bringing.check)
    facts = observe_image(first.transport, bringing.reference)
    if facts is None:
        raise CommandError(
            f"expected the image {bringing.reference} after bringing it, found none", where=f"{first.node} (image)"
        )
    if bringing.recorded and facts.image_id != bringing.recorded:
        bringing.report(
            f"image: {bringing.reference} was {bringing.recorded[:19]}, which no node has any more, and is now "
            f"{facts.image_id[:19]}"
        )
    return facts.image_id, _observe(bringing, facts.image_id)


def _observe(bringing: Bringing, reference: str) -> dict[str, _Seen]:
    looks = at_once([_looking(node, reference) for node in bringing.nodes], bringing.check)
    return {node.node: _Seen(*look) for node, look in zip(bringing.nodes, looks, strict=True)}


def _looking(node: ImageNode, reference: str) -> Callable[[], tuple[ImageFacts | None, str]]:
    return lambda: observe_image_and_node(node.transport, reference)


def _having(found: Mapping[str, _Seen]) -> dict[str, ImageFacts]:
    """The nodes that have the image."""
    return {node: seen.facts for node, seen in found.items() if seen.facts is not None}


def _require_architecture(found: Mapping[str, _Seen], image_id: str, architecture: str) -> None:
    """Refuse an image of another architecture before a byte of it is sent."""
    errors: list[SparkError] = [
        CommandError(
            f"expected an image for {seen.architecture}, found one for {architecture} ({image_id[:19]})",
            where=f"{node} (image)",
            do="build or pull the image for the nodes' architecture; docker may fall back to another one silently",
        )
        for node, seen in found.items()
        if seen.architecture and seen.architecture != architecture
    ]
    if errors:
        raise join_errors(errors)


def _nowhere(bringing: Bringing, image_id: str) -> SparkError:
    names = ", ".join(node.node for node in bringing.nodes)
    return CommandError(
        f"expected the image {image_id} on one node at least, found none of that id",
        where=f"{names} (image.local_id)",
        do="build or load it on one node, or name an archive, a registry or a build",
    )


def _proven(bringing: Bringing, image_id: str) -> ImageFacts:
    found = _observe(bringing, image_id)
    missing = [node for node, seen in found.items() if seen.facts is None]
    if missing:
        raise CommandError(
            f"expected the image {image_id[:19]} after bringing it, found none of that id",
            where=", ".join(missing),
            do="see whether something removes images there; with the containerd image store the id is another number",
        )
    return require_parity(_having(found))
