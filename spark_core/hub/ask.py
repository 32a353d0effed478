"""Asks the hub, from a node, which commit a revision is and what its files are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from spark_core.errors import ObservationError
from spark_core.hub.errors import HubFault, hub_error
from spark_core.hub.listing import Listing, parse_listing
from spark_core.settings import HubSettings, ModelSettings
from spark_core.transport.base import Transport, command, run_checked

ASK_TIMEOUT_S = 90


@dataclass(frozen=True)
class HubAnswer:
    """What the hub says of a model.

    Attributes:
        listing: Its commit and its files.
        config: Text of its ``config.json``; empty if it has none.
    """

    listing: Listing
    config: str


def ask_hub(transport: Transport, model: ModelSettings, hub: HubSettings, token: str | None) -> HubAnswer:
    """Ask the hub from a node: the one that would download. Nothing is written there.

    Raises:
        HubError: the hub does not give it; which of the ways is told apart.
        ObservationError: the answer is not understood.
    """
    orders = {
        "endpoint": hub.endpoint,
        "repository": model.repository,
        "revision": model.hub_revision,
        "token": token or "",
    }
    purpose = f"expected to ask the hub for {model.repository}"
    text = run_checked(
        transport,
        command(
            *("python3", "-IS", "-X", "utf8", "-c", Path(__file__).with_name("node_ask.py").read_text()),
            stdin=json.dumps(orders).encode() + b"\n",
            timeout_s=ASK_TIMEOUT_S,
        ),
        purpose=purpose,
        setting="model.source",
    )
    try:
        answer = json.loads(text)
        fault = answer.get("fault")
        found = None if fault is None else HubFault(str(fault["kind"]), str(fault["found"]), "", int(fault["wait_s"]))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ObservationError(f"{purpose}, found an answer that is not understood", where=transport.node) from error
    if found is not None:
        raise hub_error(found, model, hub, transport.node, with_token=bool(token))
    return HubAnswer(parse_listing(answer, transport.node), str(answer.get("config", "")))
