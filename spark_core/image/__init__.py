"""The serving image: where it comes from, how it reaches every node, and what is in it."""

from spark_core.image.archive import archive_image_id
from spark_core.image.bring import Bringing, bring_image
from spark_core.image.facts import ImageFacts, observe_image, require_parity
from spark_core.image.sources import BuildContext
from spark_core.image.spread import ImageNode

__all__ = [
    "Bringing",
    "BuildContext",
    "ImageFacts",
    "ImageNode",
    "archive_image_id",
    "bring_image",
    "observe_image",
    "require_parity",
]
