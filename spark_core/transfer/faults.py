"""From what each node of a lane tells, what a person must know: the first cause, with its file and its node."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from spark_core.errors import SparkError
from spark_core.transfer.manifest import Manifest
from spark_core.transfer.session import Fault, Outcome

AGAIN = "run up again; what has arrived is not sent again"
CONTROLLER = "the controller"


def explain(
    lane: Sequence[str], outcomes: Mapping[str, Outcome], wanted: Manifest, origin: str = CONTROLLER
) -> list[SparkError]:
    """The errors of a lane in which something went wrong; what follows from the fault of a node before is left out.

    Args:
        lane: Its nodes, in their order.
        outcomes: How it ended for each of them.
        origin: Where the first of them gets the files, if it has not got them.
    """
    errors = []
    for before, node in itertools.pairwise(["", *lane]):
        outcome, source = outcomes[node], outcomes.get(before, Outcome())
        errors += [_altered(node, fault) for fault in outcome.has("altered")]
        for fault in outcome.has("wrong"):
            if fault.file not in {other.file for other in source.has("wrong")}:
                errors.append(_wrong(node, before or origin, fault))
        errors += [_disk(node, fault, wanted) for fault in outcome.has("disk")[:1]]
        if not source.orphaned and not source.has("altered", "disk", "cut", "busy"):
            errors += [_cut(node, before, source.died, fault, wanted) for fault in outcome.has("cut")[:1] if before]
        after = next((other for place, other in itertools.pairwise(lane) if place == node), "")
        if outcome.died and not outcomes.get(after, Outcome()).has("cut"):
            errors.append(_died(node, outcome, source))
    return errors


def _altered(node: str, fault: Fault) -> SparkError:
    return SparkError(
        f"expected {fault.file} as it was verified, found it changed ({fault.found})",
        where=node,
        do="run up again: it is read anew there, and brought again if it is not right",
    )


def _wrong(node: str, before: str, fault: Fault) -> SparkError:
    return SparkError(
        f"expected {fault.file} with the SHA-256 of its manifest, found other content in what came from {before}",
        where=node,
        do="run up again; only this file is sent again",
    )


def _disk(node: str, fault: Fault, wanted: Manifest) -> SparkError:
    return SparkError(
        f"expected to write {fault.file}, found: {fault.found} after {_amount(fault, wanted)}",
        where=f"{node} (node_root)",
        do=f"free some space on that disk or mend it, then {AGAIN}",
    )


def _cut(node: str, before: str, died: str, fault: Fault, wanted: Manifest) -> SparkError:
    return SparkError(
        f"expected {fault.file} whole from {before}, found the connection cut after {_amount(fault, wanted)}"
        + (f": {before} {died}" if died else f" ({fault.found})"),
        where=node,
        do=f"look at {before} and at the cable, then {AGAIN}",
    )


def _died(node: str, outcome: Outcome, source: Outcome) -> SparkError:
    file = next((fault.file for fault in source.has("cut onward") if fault.file), outcome.latest or "the weights")
    return SparkError(
        f"expected the transfer of {file} to go on, found that its program {outcome.died}", where=node, do=AGAIN
    )


def _amount(fault: Fault, wanted: Manifest) -> str:
    size = wanted.files.get(fault.file, (0, ""))[0]
    return f"{fault.got / 1e9:.2f} of {size / 1e9:.2f} GB"
