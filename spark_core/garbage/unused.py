"""What could be freed on a node: older revisions, what interrupted copies left, images that no settings use."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spark_core.errors import ObservationError
from spark_core.garbage.claims import ask
from spark_core.transport.base import Transport


@dataclass(frozen=True)
class Item:
    """Something on a node that takes space.

    Attributes:
        node: Name of the node.
        name: Folder of the weights, or id of the image.
        kind: ``revision``, ``copy`` (of an interrupted transfer) or ``image``.
        size: Bytes.
        used_by: Who uses it; empty if it could be freed.
    """

    node: str
    name: str
    kind: Literal["revision", "copy", "image"]
    size: int
    used_by: str


def look_at_unused(
    transport: Transport, root: str, revisions: Collection[str] = (), images: Collection[str] = ()
) -> list[Item]:
    """Weights and images of ours on a node, and who uses each.

    Args:
        revisions: Revisions that the caller knows to be used, such as those of the last good settings in a state.
        images: The same for images.
    """
    text = ask(transport, root, {"do": "look"}, "expected to learn who uses which weights")
    try:
        return plan_unused(transport.node, json.loads(text), root, revisions, images)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ObservationError("expected a list of weights, found something else", where=transport.node) from error


def plan_unused(
    node: str, seen: dict[str, Any], root: str, revisions: Collection[str] = (), images: Collection[str] = ()
) -> list[Item]:
    """Who uses what, from what the node told; pure. What cannot be told for sure counts as used."""
    claims: dict[str, dict[str, Any]] = seen["claims"]
    items = []
    for entry in seen["entries"]:
        revision, path = entry["revision"], f"{root}/weights/{entry['name']}"
        copy = entry["name"] != revision
        used = (
            _claimed_by(claims, ("revision", "good", "staged"), revision)
            if not entry["name"].endswith(".going")
            else ""
        )
        if not used and revision in revisions:
            used = "the last good settings of this stack"
        if not used and any(
            f"{mount}/".startswith(f"{path}/") for one in seen["containers"] for mount in one["mounts"]
        ):
            used = "a container"
        if not used and entry["held"] is not None:
            used = f"process {entry['held']}, which fills it"
        items.append(Item(node, entry["name"], "copy" if copy else "revision", int(entry["bytes"]), used))
    running = {one["image"] for one in seen["containers"]}
    for image in seen["images"]:
        used = _claimed_by(claims, ("image", "good_image", "staged_image"), image["id"])
        if not used and image["id"] in images:
            used = "the last good settings of this stack"
        if not used and image["id"] in running:
            used = "a container"
        items.append(Item(node, image["id"], "image", int(image["bytes"]), used))
    return items


def _claimed_by(claims: dict[str, dict[str, Any]], keys: Sequence[str], value: str) -> str:
    told = ("the settings of", "the last good settings of", "what was staged for")
    for name, claim in sorted(claims.items()):
        if claim.get("unreadable"):
            return f"perhaps {name}, whose claim cannot be read"
        for key, words in zip(keys, told, strict=True):
            if claim.get(key) == value:
                return f"{words} {name}"
    return ""


def free(transport: Transport, root: str, items: Sequence[Item]) -> tuple[list[str], list[str]]:
    """Remove what is named on a node, unless somebody has begun to use it.

    Returns:
        Names of what is gone, and of what was kept.
    """
    orders = {
        "do": "free",
        "names": [item.name for item in items if item.kind != "image"],
        "images": [item.name for item in items if item.kind == "image"],
    }
    answer = json.loads(ask(transport, root, orders, "expected to free weights"))
    return [str(name) for name in answer["done"]], [str(name) for name in answer["kept"]]
