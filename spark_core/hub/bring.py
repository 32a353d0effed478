"""A model of the hub on every node of a group: downloaded once by one node, from there over the fabric to the others.

A node that has the revision already, in our folder or in a hub cache of its own, is verified against what the hub says
and is then the source.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from spark_core.errors import ObservationError, SparkError, join_errors
from spark_core.hub.download import HubOrigin
from spark_core.hub.listing import Listing
from spark_core.transfer.chain import carry
from spark_core.transfer.distribution import at_once, distribute, free_of_others, require_space
from spark_core.transfer.faults import explain
from spark_core.transfer.look import Look, Place
from spark_core.transfer.manifest import Manifest
from spark_core.transport.base import Transport, command, run_checked

_GIT_IDS = """
import hashlib, json, sys
orders, found = json.loads(sys.stdin.readline()), {}
for name in orders["names"]:
    try:
        with open(orders["folder"] + "/" + name, "rb") as file:
            content = file.read()
    except OSError:
        continue
    found[name] = hashlib.sha1(b"blob %d\\0" % len(content) + content).hexdigest()
print(json.dumps(found))
"""
_ROUNDS = 3


def bring_hub_model(
    origin: HubOrigin,
    listing: Listing,
    places: Sequence[Place],
    report: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> Manifest:
    """Bring a revision to every place: only what is missing or different there.

    Args:
        listing: What the hub says of the revision.
        places: The head's first; places of hub caches have ``only`` set and are verified and never filled.
        report: Called with a line for the person.
        check: Called often; what it raises ends it within seconds on all nodes. What has arrived stays.

    Returns:
        What every place holds now.

    Raises:
        SparkError: something went wrong; the next run goes on from what has arrived.
    """
    wanted = Manifest(listing.files)
    for _ in range(_ROUNDS):
        looks = free_of_others(places, wanted, report, check)
        wrong = dict(
            zip(
                [place.node for place in places],
                at_once([_judging(p, looks, listing) for p in places], check),
                strict=True,
            )
        )
        _refuse_altered_caches(places, wrong)
        whole = [place for place in places if not wrong[place.node]]
        if whole:
            files = looks[whole[0].node].files
            manifest = listing.of(files if files is not None else Manifest({}))
            distribute(origin, places, manifest, report, check)
            return manifest
        _download(origin, places, looks, listing, report, check)
    raise SparkError(
        f"expected {listing.commit[:12]} to be whole after {_ROUNDS} downloads, found that it is not",
        where=places[0].node,
        do="see whether something else changes its folder, then run up again",
    )


def _judging(place: Place, looks: Mapping[str, Look], listing: Listing) -> Callable[[], list[str]]:
    """What is wrong with the files of a place."""
    files = looks[place.node].files

    def judge() -> list[str]:
        if files is None:
            return ["there is no such folder"]
        return listing.differences(files, git_ids(place.transport, place.folder, listing.small))

    return judge


def git_ids(transport: Transport, folder: str, names: Sequence[str]) -> dict[str, str]:
    """Git's object ids of small files of a folder; of those that can be read."""
    text = run_checked(
        transport,
        command(
            *("python3", "-IS", "-X", "utf8", "-c", _GIT_IDS),
            stdin=json.dumps({"folder": folder, "names": list(names)}).encode() + b"\n",
            timeout_s=120,
        ),
        purpose=f"expected to read the small files in {folder}",
        setting="model.source",
    )
    try:
        return {str(name): str(digest) for name, digest in json.loads(text).items()}
    except (ValueError, AttributeError) as error:
        raise ObservationError("expected object ids of files, found something else", where=transport.node) from error


def _refuse_altered_caches(places: Sequence[Place], wrong: Mapping[str, list[str]]) -> None:
    """A hub cache that is to be used in place must be right; it is never mended by us."""
    errors = [
        SparkError(
            f"expected {wrong[place.node][0].partition(': ')[0]} in the hub cache as the hub has it, "
            f"found: {wrong[place.node][0].partition(': ')[2]}",
            where=f"{place.node} (hub.cache)",
            do="run up again: the cache is then left alone and the model comes to node_root; or download it anew there",
            evidence=[f"{place.folder}/{line}" for line in wrong[place.node]],
        )
        for place in places
        if place.only is not None and wrong[place.node]
    ]
    if errors:
        raise join_errors(errors)


def _download(
    origin: HubOrigin,
    places: Sequence[Place],
    looks: Mapping[str, Look],
    listing: Listing,
    report: Callable[[str], None],
    check: Callable[[], None],
) -> None:
    """Let the place that has most of it download the rest."""
    wanted = Manifest(listing.files)

    def left(place: Place) -> int:
        return looks[place.node].needs(wanted) - (listing.total_bytes if place.node in origin.snapshots else 0)

    place = min((place for place in places if place.only is None), key=left)
    require_space([place], looks, wanted)
    report(f"weights: {looks[place.node].needs(wanted) / 1e9:.2f} GB from {origin.name} to {place.node}")
    outcome = carry([origin.lane([place], looks, wanted)], listing.files, report, check)
    errors = origin.errors(place.node, outcome[place.node])
    errors += explain([place.node], outcome, wanted, origin.name)
    if errors:
        raise join_errors(errors)
