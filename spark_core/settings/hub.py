"""Settings of the model hub: where it answers, who asks it, and what nodes may already have of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from spark_core.settings.base import FrozenModel


class HubSettings(FrozenModel):
    """The hub that ``hf://`` models come from. It is asked by a node, never by the controller."""

    endpoint: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/@]+(/[^\s?#@]*)?$")] = Field(
        default="https://huggingface.co", description="address of the hub or of a mirror of it (HF_ENDPOINT)"
    )
    token_file: str | None = Field(
        default=None,
        description="file on the controller that holds the hub's token (mode 600); the secret hf_token does the same; "
        "not needed for public models",
    )
    cache: Annotated[str, StringConstraints(pattern=r"^[~/][^\x00:\s]*$")] | None = Field(
        default="~/.cache/huggingface/hub",
        description="hub cache that a node may already have, whoever owns it (~ is the deploy user's home). A "
        "revision that is whole there is verified and used in place, read-only; null uses none",
    )
