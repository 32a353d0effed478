"""The same files on every node of a group: from the controller once, to one node, and from there over the fabric.

A node that has them already is the source. Each node passes on what it gets while it gets it, so that the source sends
its bytes about once. A node that the fabric does not reach gets them from the controller.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from spark_core.errors import CommandError, SparkError, join_errors
from spark_core.transfer.chain import STALL_S, Lane, carry
from spark_core.transfer.faults import explain
from spark_core.transfer.look import Look, Place, contents_of, look_at
from spark_core.transfer.manifest import Manifest
from spark_core.transfer.session import Outcome, part

T = TypeVar("T")
_PART_BYTES = 4 << 20
_WAIT_S = 2.0
_ROUNDS = 5
_SPARE_SPACE = 1.02


def distribute(
    directory: str,
    places: Sequence[Place],
    wanted: Manifest,
    report: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Bring a directory of the controller to every place: only what is missing or different there.

    A new folder becomes visible by one rename after all its files are whole and verified. In a folder that is already
    visible (a file was altered) each bad file is replaced by one rename, so that a container that has the folder
    mounted sees it too. Another run that fills the same folder is waited for.

    Args:
        directory: Folder on the controller that holds ``wanted``.
        report: Called with a line for the person.
        check: Called often; what it raises ends it within seconds on all nodes. What has arrived stays.

    Raises:
        SparkError: something went wrong; the next run goes on from what has arrived.
    """
    apart: dict[str, str] = {}
    for _ in range(_ROUNDS + len(places)):
        looks = _free_of_others(places, wanted, report, check)
        lacking = [place for place in places if not looks[place.node].is_whole(wanted)]
        if not lacking:
            return
        _require_space(lacking, looks, wanted)
        lanes = _plan(directory, places, lacking, looks, wanted, apart)
        for lane in lanes:
            report(_told(lane, looks, wanted, apart))
        outcomes = carry(lanes, wanted.files, report, check)
        errors = [error for lane in lanes for error in _errors_of(lane, outcomes, wanted)]
        if errors:
            raise join_errors(errors)
        if all(outcomes[place.node].whole for place in lacking):
            return
        for lane in lanes:
            apart |= _not_reached(lane, outcomes)
    raise SparkError(
        f"expected the weights to be whole after {_ROUNDS} rounds, found that they are not",
        where=", ".join(place.node for place in lacking),
        do="see whether something else changes their folders, then run up again",
    )


def _free_of_others(
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


def _require_space(lacking: Sequence[Place], looks: Mapping[str, Look], wanted: Manifest) -> None:
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
    directory: str,
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
        lanes.append(Lane([first, *others], _feed(directory, looks[first.node], wanted)))
    alone = [place for place in lacking if place not in takers]
    return lanes + [Lane([place], _feed(directory, looks[place.node], wanted)) for place in alone]


def _told(lane: Lane, looks: Mapping[str, Look], wanted: Manifest, apart: Mapping[str, str]) -> str:
    first, *others = [place.node for place in lane.places]
    size = max(looks[place.node].needs(wanted) for place in lane.places) / 1e9
    onward = f"over the fabric to {', '.join(others)}"
    if lane.feed is None:
        return f"weights: {size:.2f} GB from {first} {onward}"
    if others:
        return f"weights: {size:.2f} GB from the controller to {first}, and from there {onward}"
    alone = len(looks) == 1 or (lane.places[0].address and first not in apart)
    why = f"cannot be reached over it ({apart[first]})" if first in apart else "has no address on it"
    return f"weights: {size:.2f} GB from the controller to {first}" + (
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


def _errors_of(lane: Lane, outcomes: Mapping[str, Outcome], wanted: Manifest) -> list[SparkError]:
    """What went wrong along a lane. Where content was wrong, the file of the node that gave it is read anew."""
    errors = explain([place.node for place in lane.places], outcomes, wanted)
    for before, after in zip(lane.places, lane.places[1:], strict=False):
        names = [fault.file for fault in outcomes[after.node].has("wrong")]
        if names and outcomes[before.node].whole:
            found = contents_of(before.transport, before.folder, before.cache, anew=names) or Manifest({})
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


def _feed(directory: str, look: Look, wanted: Manifest) -> Iterator[bytes]:
    """What a node lacks, from where each file of it goes on."""
    for name in look.lacking(wanted):
        path, size = Path(directory).expanduser() / name, wanted.files[name][0]
        offset = min(look.parts.get(name, 0), size)
        try:
            with path.open("rb") as file:
                file.seek(offset)
                yield part(name, offset, b"")
                while offset < size:
                    content = file.read(min(_PART_BYTES, size - offset))
                    if not content:
                        raise SparkError(f"expected {size} bytes in {path.name}, found less while copying")
                    yield part(name, offset, content)
                    offset += len(content)
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise SparkError(
                f"expected to read {path} to its end, found: {error.strerror or error}",
                where="model.source",
                do="let the directory lie as it is until up has ended",
            ) from error


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
