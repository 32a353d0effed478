"""Settings of the serving image."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, field_validator, model_validator

from spark_core.settings.base import FrozenModel

SOURCES = ("registry", "build", "archive", "local_id")
"""The settings of which an image has exactly one."""
ImageId = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]


class BuildSettings(FrozenModel):
    """An image that is built on the head, from files of the project folder."""

    context: str = Field(description="folder in the project folder", pattern=r"^[^/~][^\x00]*$")
    dockerfile: str = Field(
        default="Dockerfile", description="the Dockerfile, below the context", pattern=r"^[^/~-][^\x00]*$"
    )
    target: str | None = Field(default=None, description="stage to build", pattern=r"^[A-Za-z0-9][\w.-]*$")
    arguments: dict[str, str] = Field(default_factory=dict, description="build arguments; no secrets")

    @field_validator("context", "dockerfile")
    @classmethod
    def _inside(cls, value: str) -> str:
        if ".." in value.split("/"):
            raise ValueError("must be inside the project folder")
        return value


class ImageSettings(FrozenModel):
    """The one image that every node runs. Exactly one of the four sources.

    One node gets it from there; the others get the layers that they lack from that node, over the fabric.
    """

    registry: str | None = Field(
        default=None,
        description="name in a registry, pinned by digest (name@sha256:…); a tag works, stays what it was at the first "
        "up, and is warned about; one node's own daemon pulls it with that node's credentials",
    )
    build: BuildSettings | None = Field(
        default=None, description="Dockerfile and context in the project folder; one node builds it"
    )
    archive: str | None = Field(
        default=None, description="docker-save archive on the controller; ~ is allowed; sent where layers are missing"
    )
    local_id: ImageId | None = Field(
        default=None, description="id (sha256:…) of an image that is already on a node, such as one built there"
    )
    python: str = Field(
        default="python3", description="python of the image; it starts the rank supervisor and the checks"
    )

    @model_validator(mode="after")
    def _one_source(self) -> ImageSettings:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ValueError(f"needs exactly one of {', '.join(SOURCES)}; found {found}")
        return self

    @property
    def is_floating(self) -> bool:
        """Whether the name in a registry may mean another image tomorrow."""
        return self.registry is not None and "@sha256:" not in self.registry
