"""Keeps the settings with the state once they have served."""

from __future__ import annotations

import pulumi

from providers.good_settings import GoodSettings
from spark_core.settings import Settings
from spark_core.settings.record import record_of, record_text


def keep_good_settings(
    name: str,
    settings: Settings,
    image_id: pulumi.Input[str],
    revision: pulumi.Input[str],
    state: pulumi.Input[str],
    opts: pulumi.ResourceOptions,
) -> GoodSettings:
    """The settings as the stack's file has them, kept after what they depend on: the group, and with it its gate.

    Args:
        state: What the gate has found; settings of a group that is stopped on request have not served.
    """
    return GoodSettings(
        name,
        settings=record_text(record_of(settings)),
        image_id=image_id,
        revision=revision,
        state=state,
        opts=opts,
    )
