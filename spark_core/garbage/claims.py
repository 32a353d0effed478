"""Which weights and images the stacks of a node use: written down on the node itself, since any stack may ask."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spark_core.transport.base import Transport, command, run_checked

TIMEOUT_S = 900


def claim(
    transport: Transport,
    root: str,
    stack: str,
    group: str,
    claim: Mapping[str, str],
    images: Sequence[str] = (),
) -> None:
    """Write down what a group of a stack uses on a node from now on; what served until now stays protected as good.

    Args:
        claim: ``revision`` and ``image`` of the settings that are being made, or ``staged`` and ``staged_image``.
        images: Images that the stack brought.
    """
    orders = {"do": "claim", "stack": stack, "group": group, "claim": dict(claim), "images": list(images)}
    ask(transport, root, orders, "expected to write down which weights are used")


def ask(transport: Transport, root: str, orders: Mapping[str, Any], purpose: str) -> str:
    """What the node's program answers.

    Raises:
        CommandError: it failed, such as where docker does not answer.
    """
    return run_checked(
        transport,
        command(
            *("python3", "-IS", "-X", "utf8", "-c", Path(__file__).with_name("node_garbage.py").read_text()),
            stdin=json.dumps({"root": root, **orders}).encode() + b"\n",
            timeout_s=TIMEOUT_S,
        ),
        purpose=purpose,
        setting="node_root",
    )
