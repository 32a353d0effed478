"""What all settings models share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints


class FrozenModel(BaseModel):
    """A settings model: immutable, and any key that it does not know is an error."""

    # Built at the first use with what holds it: at import, one by one, they cost each process of a run 0.1 s.
    model_config = ConfigDict(
        frozen=True, extra="forbid", str_strip_whitespace=True, validate_default=True, defer_build=True
    )


Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{1,30}$")]
"""A node or group name: it becomes part of resource, container and folder names."""

AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/[^\x00:]*$")]
"""A path on a node or in a container. No colon, which Docker would split at."""

Port = Annotated[int, Field(ge=1, le=65535)]
"""A TCP port."""
