"""One and the same image on every node: where it comes from, what must not be, and how it is proven."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spark_core.errors import CommandError, SparkError, join_errors
from spark_core.image.archive import Archive, open_archive
from spark_core.image.facts import ImageFacts, node_architecture, observe_image, require_parity
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
    elif bringing.settings.archive is not None and not any(found.values()):
        archive = open_archive(bringing.settings.archive)
        if archive.contents.image_id != wanted:
            raise SparkError(
                f"expected the image {wanted[:19]} in {bringing.settings.archive}, "
                f"found {archive.contents.image_id[:19]}",
                where="image.archive",
                do="the archive changed while this ran; run up again",
            )
    having = [node for node in bringing.nodes if found.get(node.node) is not None]
    architecture = archive.contents.architecture if archive else ""
    for facts in found.values():
        architecture = facts.architecture if facts is not None else architecture
    if having or archive:
        _require_architecture(bringing, wanted, architecture)
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


def _wanted(bringing: Bringing) -> tuple[str, dict[str, ImageFacts | None]]:
    """The id that must result, if it is known, and which nodes have it."""
    for known in (bringing.image_id, bringing.recorded):
        if known:
            found = _observe(bringing, known)
            if known == bringing.image_id or any(found.values()):
                return known, found
    named = {node: facts for node, facts in _observe(bringing, bringing.reference).items() if facts is not None}
    if not named:
        return "", {}
    facts = require_parity(named)
    return facts.image_id, _observe(bringing, facts.image_id)


def _fetch(bringing: Bringing) -> tuple[str, dict[str, ImageFacts | None]]:
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


def _observe(bringing: Bringing, reference: str) -> dict[str, ImageFacts | None]:
    looks = at_once([_looking(node, reference) for node in bringing.nodes], bringing.check)
    return {node.node: facts for node, facts in zip(bringing.nodes, looks, strict=True)}


def _looking(node: ImageNode, reference: str) -> Callable[[], ImageFacts | None]:
    return lambda: observe_image(node.transport, reference)


def _require_architecture(bringing: Bringing, image_id: str, architecture: str) -> None:
    """Refuse an image of another architecture before a byte of it is sent."""
    found = at_once([_asking_architecture(node) for node in bringing.nodes], bringing.check)
    errors: list[SparkError] = [
        CommandError(
            f"expected an image for {own}, found one for {architecture} ({image_id[:19]})",
            where=f"{node.node} (image)",
            do="build or pull the image for the nodes' architecture; docker may fall back to another one silently",
        )
        for node, own in zip(bringing.nodes, found, strict=True)
        if own and own != architecture
    ]
    if errors:
        raise join_errors(errors)


def _asking_architecture(node: ImageNode) -> Callable[[], str]:
    return lambda: node_architecture(node.transport)


def _nowhere(bringing: Bringing, image_id: str) -> SparkError:
    names = ", ".join(node.node for node in bringing.nodes)
    return CommandError(
        f"expected the image {image_id} on one node at least, found none of that id",
        where=f"{names} (image.local_id)",
        do="build or load it on one node, or name an archive, a registry or a build",
    )


def _proven(bringing: Bringing, image_id: str) -> ImageFacts:
    found = _observe(bringing, image_id)
    missing = [node for node, facts in found.items() if facts is None]
    if missing:
        raise CommandError(
            f"expected the image {image_id[:19]} after bringing it, found none of that id",
            where=", ".join(missing),
            do="see whether something removes images there; with the containerd image store the id is another number",
        )
    return require_parity(_present(found))


def _present(found: Mapping[str, ImageFacts | None]) -> dict[str, ImageFacts]:
    return {node: facts for node, facts in found.items() if facts is not None}
