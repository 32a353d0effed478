"""A pinned revision without the hub: what a node's own hub cache knows of it, for sites without a way out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from spark_core.errors import SparkError
from spark_core.hub.ask import HubAnswer
from spark_core.hub.listing import parse_listing
from spark_core.settings import ModelSettings, Settings
from spark_core.transport.base import Transport, command, run_checked

LOOK_TIMEOUT_S = 30


def ask_caches(settings: Settings, model: ModelSettings, nodes: Sequence[Transport]) -> tuple[HubAnswer, str] | None:
    """What the first node that has the revision whole in its hub cache says of it, and that node's name.

    None if no node has it so, or if the settings name no commit: what a branch means only the hub can tell.
    """
    if settings.hub.cache is None or not model.is_pinned:
        return None
    orders = {"cache": settings.hub.cache, "repository": model.repository, "commit": model.hub_revision}
    text = Path(__file__).with_name("node_cache.py").read_text()
    for transport in nodes:
        asked = command(
            *("python3", "-IS", "-X", "utf8", "-c", text),
            stdin=json.dumps(orders).encode() + b"\n",
            timeout_s=LOOK_TIMEOUT_S,
        )
        try:
            answer = json.loads(run_checked(transport, asked, purpose="expected to read the hub cache"))
            if answer is not None:
                return HubAnswer(parse_listing(answer, transport.node), str(answer["config"])), transport.node
        except (SparkError, ValueError, KeyError, TypeError):
            continue  # the hub's silence is told in any case
    return None
