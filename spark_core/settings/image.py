"""Settings of the serving image."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from spark_core.settings.base import FrozenModel

ImageId = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


class ImageSettings(FrozenModel):
    """The one image that every node runs. Exactly one of the three sources."""

    registry: str | None = Field(
        default=None,
        description="name in a registry, pinned by digest (name@sha256:…); a tag works and is warned about; "
        "each node's own daemon pulls it",
    )
    archive: str | None = Field(
        default=None, description="docker-save archive on the controller; ~ is allowed; loaded where it is missing"
    )
    local_id: ImageId | None = Field(
        default=None, description="id (sha256:…) of an image that is already on every node, such as one built there"
    )
    python: str = Field(default="python3", description="python of the image that starts the rank supervisor")

    @model_validator(mode="after")
    def _one_source(self) -> ImageSettings:
        given = [name for name in ("registry", "archive", "local_id") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ValueError(f"needs exactly one of registry, archive, local_id; found {found}")
        return self
