"""The same files on every node of a group: from their origin once, to one node, and from there over the fabric.

A node that has them already is the source. Each node passes on what it gets while it gets it, so that the source sends
its bytes about once. A node that the fabric does not reach gets them from the origin.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from spark_core.errors import CommandError, SparkError, join_errors
from spark_core.transfer.chain import STALL_S, Lane, carry
from spark_core.transfer.faults import explain
from spark_core.transfer.look import Look, Place, contents_of, look_at
from spark_core.transfer.manifest import Manifest
from spark_core.transfer.origin import ControllerFolder, Origin
from spark_core.transfer.session import Outcome

T = TypeVar("T")
_WAIT_S = 2.0
_ROUNDS = 5
_SPARE_SPACE = 1.02


def distribute(
    origin: Origin | str,
    places: Sequence[Place],
    wanted: Manifest,
    report: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Bring files to every place: only what is missing or different there.

    A new folder becomes visible by one rename after all its files are whole and verified. In a folder that is already
    visible (a file was altered) each bad file is replaced by one rename, so that a container that has the folder
    mounted sees it too. Another run that fills the same folder is waited for.

    Args:
        origin: Where ``wanted`` comes from if no node has it; a text is a directory of the controller.
        report: Called with a line for the person.
        check: Called often; what it raises ends it within seconds on all nodes. What has arrived stays.

    Raises:
        SparkError: something went wrong; the next run goes on from what has arrived.
    """
    origin = ControllerFolder(origin) if isinstance(origin, str) else origin
    apart: dict[str, str] = {}
    for _ in range(_ROUNDS + len(places)):
        looks = free_of_others(places, wanted, report, check)
        lacking = [place for place in places if not looks[place.node].is_whole(wanted)]
        if not lacking:
            return
        _refuse_foreign(lacking, looks, wanted)
        require_space(lacking, looks, wanted)
        lanes = _plan(origin, places, lacking, looks, wanted, apart)
        for lane in lanes:
            report(_told(origin, lane, looks, wanted, apart))
        outcomes = carry(lanes, wanted.files, report, check)
        errors = [error for lane in lanes for error in _errors_of(origin, lane, outcomes, wanted)]
        if errors:
            raise join_errors(errors)
        if all(outcomes.get(place.node, Outcome()).whole for place in lacking):
            return
        for lane in lanes:
            apart |= _not_reached(lane, outcomes)
    raise SparkError(
        f"expected the weights to be whole after {_ROUNDS} rounds, found that they are not",
        where=", ".join(place.node for place in lacking),
        do="see whether something else changes their folders, then run up again",
    )


def free_of_others(
    places: Sequence[Place], wanted: Manifest, report: Callable[[str], None], check: Callable[[], None]
) -> dict[str, Look]:
    """Look at all places, once no other run fills one of those that lack something."""
    moved, since, said = -1, time.monotonic(), False
    while True:
        looks = dict(zip([p.node for p in places], at_once([_looking(place) for place in places], check), strict=True))
        held = {node: look for node, look in looks.items() if look.held and not look.is_whole(wanted)}
        if not held:
            return looks
        node, look = next(iter(held.items()))
        if not said:
            report(f"weights: wait for process {look.held} of {node}, with which another run brings them there")
            said = True
        if look.moved != moved:
            moved, since = look.moved, time.monotonic()
        if time.monotonic() - since > STALL_S:
            raise SparkError(
                f"expected process {look.held} to go on filling {node}'s folder, found no byte in {STALL_S:.0f} s",
                where=node,
                do=f"end it (kill {look.held}) if no other run needs it, then run up again",
            )
        until = time.monotonic() + _WAIT_S
        while time.monotonic() < until:
            check()
            time.sleep(0.1)


def _looking(place: Place) -> Callable[[], Look]:
    return lambda: look_at(place)


def _refuse_foreign(lacking: Sequence[Place], looks: Mapping[str, Look], wanted: Manifest) -> None:
    """A folder that is not ours is never filled."""
    errors = [
        SparkError(
            f"expected {name} in {place.folder} as it was verified, found it missing or different",
            where=f"{place.node} (hub.cache)",
            do="run up again: the hub cache is then left alone, and the model comes to node_root",
        )
        for place in lacking
        if place.only is not None
        for name in looks[place.node].lacking(wanted)[:1]
    ]
    if errors:
        raise join_errors(errors)


def require_space(lacking: Sequence[Place], looks: Mapping[str, Look], wanted: Manifest) -> None:
    """Refuse before the first byte where what is lacking does not fit on the disk; every such node is told.

    Raises:
        SparkError: naming each node, and how much it needs.
    """
    errors = [
        CommandError(
            f"expected {looks[place.node].needs(wanted) / 1e9:.1f} GB of free space for the weights, "
            f"found {looks[place.node].free / 1e9:.1f} GB",
            where=f"{place.node} (node_root)",
            do=f"free some space on the disk of {place.folder}",
        )
        for place in lacking
        if looks[place.node].free < looks[place.node].needs(wanted) * _SPARE_SPACE
    ]
    if errors:
        raise join_errors(errors)


def _plan(
    origin: Origin,
    places: Sequence[Place],
    lacking: Sequence[Place],
    looks: Mapping[str, Look],
    wanted: Manifest,
    apart: Mapping[str, str],
) -> list[Lane]:
    joined = [place for place in places if place.address and place.node not in apart]
    takers = [place for place in joined if place in lacking]
    sources = [place for place in joined if place not in lacking]
    lanes = []
    if sources and takers:
        lanes.append(Lane([sources[0], *takers]))
    elif takers:
        first = min(takers, key=lambda place: looks[place.node].needs(wanted))
        others = [place for place in takers if place is not first]
        lanes.append(origin.lane([first, *others], looks, wanted))
    alone = [place for place in lacking if place not in takers]
    return lanes + [origin.lane([place], looks, wanted) for place in alone]


def _told(origin: Origin, lane: Lane, looks: Mapping[str, Look], wanted: Manifest, apart: Mapping[str, str]) -> str:
    first, *others = [place.node for place in lane.places]
    size = max(looks[place.node].needs(wanted) for place in lane.places) / 1e9
    onward = f"over the fabric to {', '.join(others)}"
    if lane.feed is None and lane.hub is None:
        return f"weights: {size:.2f} GB from {first} {onward}"
    if others:
        return f"weights: {size:.2f} GB from {origin.name} to {first}, and from there {onward}"
    alone = len(looks) == 1 or (lane.places[0].address and first not in apart)
    why = f"cannot be reached over it ({apart[first]})" if first in apart else "has no address on it"
    return f"weights: {size:.2f} GB from {origin.name} to {first}" + (
        "" if alone else f", not over the fabric, since {first} {why}"
    )


def _not_reached(lane: Lane, outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """The nodes of a lane that the one before them could not connect to, and why."""
    found = {}
    for before, after in zip(lane.places, lane.places[1:], strict=False):
        dialled, listened = outcomes[before.node].has("dial"), outcomes[after.node].has("listen")
        if listened or (dialled and not outcomes[after.node].whole):
            found[after.node] = (listened or dialled)[0].found
    return found


def _errors_of(origin: Origin, lane: Lane, outcomes: Mapping[str, Outcome], wanted: Manifest) -> list[SparkError]:
    """What went wrong along a lane. Where content was wrong, the file of the node that gave it is read anew."""
    first = lane.places[0].node
    errors = origin.errors(first, outcomes[first])
    errors += explain([place.node for place in lane.places], outcomes, wanted, origin.name)
    for before, after in zip(lane.places, lane.places[1:], strict=False):
        names = [fault.file for fault in outcomes[after.node].has("wrong")]
        if names and outcomes[before.node].whole:
            found = contents_of(before.transport, before.folder, before.cache, names, before.only) or Manifest({})
            errors += [
                SparkError(
                    f"expected {name} as it was verified, found other content on its disk",
                    where=before.node,
                    do="run up again; it is brought again",
                )
                for name in names
                if found.files.get(name) != wanted.files[name]
            ]
    return errors


def at_once(works: Sequence[Callable[[], T]], check: Callable[[], None]) -> list[T]:
    """Do several things at the same time, and none of them to its end if ``check`` raises; all errors are told."""
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(index: int, work: Callable[[], T]) -> None:
        try:
            results[index] = work()
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        check()
        threads[0].join(0.05) if threads[0].is_alive() else time.sleep(0.02)
    ours = [error for _, error in sorted(errors.items()) if isinstance(error, SparkError)]
    if ours:
        raise join_errors(ours)
    for error in errors.values():
        raise error
    return [results[index] for index in range(len(works))]
