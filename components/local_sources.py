"""What the stack takes from the controller: the image archive and the weights, before anything is registered."""

from __future__ import annotations

from dataclasses import dataclass, field

from components.runtime_bundle import PROJECT
from spark_core.errors import SettingsError, SparkError
from spark_core.image import BuildContext, archive_image_id
from spark_core.settings import Settings
from spark_core.transfer.manifest import Manifest
from spark_core.weights import local_manifest

NOT_YET_KNOWN = "not-yet-known"
"""Stands for what cannot be known in a plan that is only rendered."""


@dataclass(frozen=True)
class LocalSources:
    """Facts of the sources on the controller.

    Attributes:
        image_id: Id that the image will have, or empty if only a registry or a build will tell it.
        image_source: Where the image comes from; for a build with the hash of what it is made of.
        revisions: For each group, the revision of weights that are copied from here; absent for others.
        manifests: For each of them that could be read, its files.
    """

    image_id: str
    image_source: str
    revisions: dict[str, str]
    manifests: dict[str, Manifest] = field(default_factory=dict)


def sources_not_read(settings: Settings) -> LocalSources:
    """What stands for the sources where nothing will be made of them."""
    named = {name: NOT_YET_KNOWN for name, group in settings.groups.items() if group.model.kind == "controller"}
    return LocalSources(settings.image.local_id or "", _named(settings), named)


def look_at_sources(settings: Settings) -> LocalSources:
    """Read the sources on the controller; all faults are told together.

    Raises:
        SettingsError: a source is missing or broken. With ``preflight: off`` a missing one is not yet known instead.
    """
    violations: list[str] = []
    image_id, image_source = settings.image.local_id or "", _named(settings)
    if settings.image.archive is not None:
        try:
            image_id = archive_image_id(settings.image.archive)
        except SettingsError as error:
            violations += error.violations
    if settings.image.build is not None:
        try:
            image_source = f"{image_source} {BuildContext(settings.image.build, PROJECT).tag}"
        except SettingsError as error:
            violations += error.violations
    revisions, manifests = {}, {}
    for name, group in settings.groups.items():
        if group.model.kind == "controller":
            try:
                manifests[name] = local_manifest(group.model.directory)
                revisions[name] = manifests[name].revision
            except SparkError as error:
                violations += getattr(error, "violations", (error.line,))
                revisions[name] = NOT_YET_KNOWN
    if violations and settings.preflight != "off":
        raise SettingsError(violations)
    return LocalSources(image_id, image_source, revisions, manifests)


def _named(settings: Settings) -> str:
    image = settings.image
    return image.registry or image.archive or image.local_id or f"build:{image.build.context if image.build else ''}"
