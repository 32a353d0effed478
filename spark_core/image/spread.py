"""The layers of an image to every node that lacks some: over the fabric, all nodes at once, only what is missing.

The nodes form a chain, as for weights (docs/adr/0011-move-weights-with-a-program-of-our-own.md): each passes on what it
gets while it gets it. A layer that has arrived goes into the node's daemon while the next ones arrive.
"""

from __future__ import annotations

import ipaddress
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spark_core.errors import CommandError, SparkError, join_errors
from spark_core.image.archive import Archive
from spark_core.image.layers import (
    GivingNode,
    ImageContents,
    StoreState,
    TakingNode,
    load_configuration,
    place_of,
    store_state,
)
from spark_core.transfer.chain import STALL_S, Lane, carry
from spark_core.transfer.distribution import at_once
from spark_core.transfer.faults import AGAIN, explain
from spark_core.transfer.look import Look, Place, look_at
from spark_core.transport.base import Transport

FABRIC, MANAGEMENT, ALONE = "fabric", "management network", "controller"
"""How bytes come to a node: from other nodes over one or the other, or each node by itself from the controller."""
_ROUNDS = 5
_WAIT_S = 2.0
_SPARE_SPACE = 1.05


@dataclass(frozen=True)
class ImageNode:
    """A node that is to have the image.

    Args:
        transport: How the node is reached.
        root: Our folder there, in which layers arrive.
        fabric_address: Its address on the fabric, or None.
        management_address: How it is reached otherwise; nodes use it among themselves where the fabric carries nothing.
    """

    transport: Transport
    root: str
    fabric_address: str | None = None
    management_address: str | None = None

    @property
    def node(self) -> str:
        return self.transport.node

    def address(self, way: str) -> str | None:
        """Where other nodes reach it; a name of the controller's ssh configuration says nothing to them."""
        if way == FABRIC:
            return self.fabric_address
        try:
            return str(ipaddress.IPv4Address(self.management_address or ""))
        except ValueError:
            return None


@dataclass(frozen=True)
class _Lacking:
    """A node with what it lacks."""

    node: ImageNode
    state: StoreState
    look: Look

    def place(self, contents: ImageContents, address: str | None) -> Place:
        carrier = TakingNode(self.node.transport, contents, self.state.have, self.node.root)
        return place_of(carrier, self.node.root, contents.image_id, address)


@dataclass(frozen=True)
class _Giving:
    """A node that has the image, with what its daemon says of itself."""

    node: ImageNode
    state: StoreState

    def place(self, contents: ImageContents, address: str | None) -> Place:
        carrier = GivingNode(self.node.transport, contents.image_id, self.state)
        return place_of(carrier, self.node.root, contents.image_id, address)


class _Ways:
    """How nodes reach each other, as found so far."""

    def __init__(self) -> None:
        self.failed: dict[tuple[str, str], str] = {}

    def choose(self, nodes: Sequence[ImageNode], source: ImageNode | Archive) -> tuple[str, list[ImageNode]]:
        """The best way that any of the nodes still has, and the nodes that have it.

        Raises:
            SparkError: nobody can give the image to them.
        """
        for way in (FABRIC, MANAGEMENT):
            joined = [node for node in nodes if node.address(way) and (node.node, way) not in self.failed]
            if joined and (isinstance(source, Archive) or source.address(way)):
                return way, joined
        if isinstance(source, Archive):
            return ALONE, [nodes[0]]
        raise join_errors([self._cut_off(node, source) for node in nodes])

    def _cut_off(self, node: ImageNode, source: ImageNode) -> SparkError:
        why = [f"{reason} over the {way}" for (name, way), reason in self.failed.items() if name == node.node]
        return CommandError(
            f"expected {source.node}, which has the image, to reach {node.node}, found "
            + ("; ".join(why) or "no address that it knows"),
            where=f"{node.node} (fabric)",
            do="mend the fabric, or name an image.archive, which the controller can bring to each node",
        )

    def told(self, way: str, nodes: Sequence[_Lacking]) -> str:
        if way == FABRIC:
            return "over the fabric"
        why = next((self.failed[key] for one in nodes if (key := (one.node.node, FABRIC)) in self.failed), "no address")
        return f"over the management network, since the fabric does not reach {nodes[-1].node.node} ({why}),"


def spread(
    contents: ImageContents,
    source: ImageNode | Archive,
    targets: Sequence[ImageNode],
    report: Callable[[str], None],
    check: Callable[[], None],
) -> None:
    """Bring an image to nodes: only the layers that each one lacks.

    Args:
        source: A node whose daemon has it, or the archive on the controller.
        report: Called with a line for the person.
        check: Called often; what it raises ends it within seconds on all nodes. What has arrived stays.

    Raises:
        SparkError: something went wrong; the next run goes on from what has arrived.
    """
    ways, waiting, having = _Ways(), list(targets), None if isinstance(source, Archive) else source
    for _ in range(_ROUNDS + 3 * len(targets)):
        asked = [*waiting, *([having] if having else [])]
        found = dict(zip([n.node for n in asked], at_once([_state(n, contents) for n in asked], check), strict=True))
        states = {node.node: found[node.node] for node in waiting}
        _require_classic(states)
        lowest = min(state.have for state in states.values())
        row = [node for node in waiting if states[node.node].have == lowest]
        if lowest == len(contents.layers):
            at_once([_configure(node, contents) for node in row], check)
            done = row
        else:
            giver: ImageNode | Archive = having or source
            try:
                way, chosen = ways.choose(row, giver)
            except SparkError:
                if not isinstance(source, Archive):
                    raise
                giver, way, chosen = source, ALONE, row[:1]
            lacking = _looked_at(chosen, states, contents, report, check)
            if not lacking:  # another run has brought something meanwhile
                continue
            _require_space(lacking, contents)
            giving = giver if isinstance(giver, Archive) else _Giving(giver, found[giver.node])
            done = _carry(contents, giving, lacking, (way, ways), report, check)
        having = having or next(iter(done), None)
        waiting = [node for node in waiting if node not in done]
        if not waiting:
            return
    raise SparkError(
        "expected the image to be whole after several rounds, found that it is not",
        where=", ".join(node.node for node in waiting),
        do="see whether something else removes images there, then run up again",
    )


def _state(node: ImageNode, contents: ImageContents) -> Callable[[], StoreState]:
    return lambda: store_state(node.transport, contents.layers)


def _configure(node: ImageNode, contents: ImageContents) -> Callable[[], None]:
    return lambda: load_configuration(node.transport, contents)


def _require_classic(states: Mapping[str, StoreState]) -> None:
    errors: list[SparkError] = [
        CommandError(
            "expected the classic image store on overlay2, which takes an image layer by layer, found "
            + ("the containerd store" if state.containerd else f"the storage driver {state.driver}"),
            where=f"{node} (docker)",
            do="bring the image to this node by hand (`docker save` on a node that has it, `docker load` here), or set "
            '"features": {"containerd-snapshotter": false} in its daemon.json',
        )
        for node, state in states.items()
        if state.containerd or state.driver != "overlay2"
    ]
    if errors:
        raise join_errors(errors)


def _looked_at(
    row: Sequence[ImageNode],
    states: Mapping[str, StoreState],
    contents: ImageContents,
    report: Callable[[str], None],
    check: Callable[[], None],
) -> list[_Lacking]:
    """The nodes with what is on its way to them; none after another run that brought the image there has ended."""
    moved, since, said = -1, time.monotonic(), False
    while True:
        places = [place_of(node.transport, node.root, contents.image_id, None) for node in row]
        looks = at_once([_looking(place) for place in places], check)
        held = [(node, look) for node, look in zip(row, looks, strict=True) if look.held]
        if not held and said:
            return []
        if not held:
            return [_Lacking(node, states[node.node], look) for node, look in zip(row, looks, strict=True)]
        node, look = held[0]
        if not said:
            report(f"image: wait for process {look.held} of {node.node}, with which another run brings it there")
            said = True
        if look.moved != moved:
            moved, since = look.moved, time.monotonic()
        if time.monotonic() - since > STALL_S:
            raise SparkError(
                f"expected process {look.held} to go on bringing the image, found no byte in {STALL_S:.0f} s",
                where=node.node,
                do=f"end it (kill {look.held}) if no other run needs it, then run up again",
            )
        until = time.monotonic() + _WAIT_S
        while time.monotonic() < until:
            check()
            time.sleep(0.1)


def _looking(place: Place) -> Callable[[], Look]:
    return lambda: _look(place)


def _look(place: Place) -> Look:
    """A look at a folder that another run may be about to remove, since the image is in Docker."""
    try:
        return look_at(place)
    except CommandError as error:
        if "No such file" not in error.what:
            raise
        time.sleep(_WAIT_S)
        return look_at(place)


def _require_space(lacking: Sequence[_Lacking], contents: ImageContents) -> None:
    """The layers as they arrive, and again in the daemon, which unpacks one load at a time beside it."""
    errors: list[SparkError] = []
    for one in lacking:
        wanted = contents.above(one.state.have)
        files = one.look.needs(wanted)
        needs = (wanted.total_bytes + max(size for size, _ in wanted.files.values())) * _SPARE_SPACE
        shared = needs if one.look.free == one.state.free else 0
        for where, folder, free, need in (
            ("node_root", one.node.root, one.look.free, files * _SPARE_SPACE + shared),
            ("docker", one.state.root, one.state.free, needs),
        ):
            if free < need:
                errors.append(
                    CommandError(
                        f"expected {need / 1e9:.1f} GB of free space for the layers of the image, "
                        f"found {free / 1e9:.1f} GB",
                        where=f"{one.node.node} ({where})",
                        do=f"free some space on the disk of {folder}",
                    )
                )
                break
    if errors:
        raise join_errors(errors)


def _carry(
    contents: ImageContents,
    source: _Giving | Archive,
    lacking: Sequence[_Lacking],
    ways: tuple[str, _Ways],
    report: Callable[[str], None],
    check: Callable[[], None],
) -> list[ImageNode]:
    """One transfer; the nodes that have the image now.

    Raises:
        SparkError: it failed; not being reached is no failure as long as there is another way.
    """
    way, found = ways
    wanted = contents.above(lacking[0].state.have)
    row = sorted(lacking, key=lambda one: one.look.needs(wanted))
    places = [one.place(contents, one.node.address(way)) for one in row]
    if isinstance(source, Archive):
        look = row[0].look
        lane = Lane(places, source.feed([n for n in wanted.files if n not in look.staged.files], dict(look.parts)))
        names = ["the controller", *(place.node for place in places)]
    else:
        lane = Lane([source.place(contents, source.node.address(way)), *places])
        names = [place.node for place in lane.places]
    told = f"{len(contents.layers) - row[0].state.have} of {len(contents.layers)} layers"
    onward = f"{found.told(way, row)} to {', '.join(names[1:])}"
    if isinstance(source, Archive):
        onward = f"to {names[1]}" + (f", and from there {found.told(way, row)} to {names[2]}" if names[2:] else "")
        onward += "".join(f", {name}" for name in names[3:])
    report(f"image: {told}, {wanted.total_bytes / 1e9:.2f} GB, from {names[0]} {onward}")
    start = time.monotonic()
    outcomes = carry([lane], wanted.files, lambda line: report(line.replace("weights:", "image:", 1)), check)
    along = [place.node for place in lane.places]
    errors = [_as_image(error) for error in explain(along, outcomes, wanted)]
    errors += [_not_loaded(node, fault.found) for node in along for fault in outcomes[node].has("load")]
    if errors:
        raise join_errors(errors)
    for before, after in itertools.pairwise(along):
        failed = outcomes[after].has("listen") or (outcomes[before].has("dial") if not outcomes[after].whole else [])
        if failed:
            found.failed[after, way] = failed[0].found
    done = [one.node for one in row if outcomes[one.node.node].whole]
    for node in done:
        got = outcomes[node.node].received
        report(f"image: {got / 1e9:.2f} GB came to {node.node} and are in Docker, {time.monotonic() - start:.0f} s")
    return done


def _not_loaded(node: str, found: str) -> SparkError:
    return CommandError(
        f"expected Docker to take the layers of the image, found: {found}",
        where=f"{node} (docker)",
        do=f"see `journalctl -u docker` and the space on its disk, then {AGAIN}",
    )


def _as_image(error: SparkError) -> SparkError:
    """An error of a transfer in the words of an image: its files are layers."""
    return SparkError(
        error.what.replace("the SHA-256 of its manifest", "its own id").replace("the weights", "the image"),
        where=error.where,
        do=error.do,
        evidence=error.evidence,
    )
