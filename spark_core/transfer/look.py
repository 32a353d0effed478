"""What is in a folder of a node, and what is on its way into it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_core.errors import ObservationError
from spark_core.transfer.manifest import Manifest
from spark_core.transport.base import Transport, command, run_checked

HASH_TIMEOUT_S = 3600
_NODE_MODULES = {
    "node_folder": (),
    "node_place": ("node_folder",),
    "node_mover": ("node_folder", "node_links", "node_store"),
    "node_hub": ("node_folder", "node_links", "node_store", "node_mover"),
}
"""Programs that run on a node, and the modules that each needs before it."""
_BOOT = """
import sys, types
for name, text in zip(sys.argv[1::2], sys.argv[2::2]):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
sys.exit(module.main())
"""


@dataclass(frozen=True)
class Place:
    """A folder of a node that is to hold files.

    Args:
        transport: How the node is reached.
        folder: The folder; its neighbours ``<folder>.partial``, ``.incoming`` and ``.lock`` are used while it fills.
        root: Our folder on the node, where hashes are cached.
        address: The node's address on the fabric, or None if it has none.
        only: Names of the files that count in a folder that is not ours and is never filled; None for one of ours.
    """

    transport: Transport
    folder: str
    root: str
    address: str | None = None
    only: tuple[str, ...] | None = None

    @property
    def node(self) -> str:
        return self.transport.node

    @property
    def cache(self) -> str:
        return f"{self.root}/cache/hashes.json"


@dataclass(frozen=True)
class Look:
    """What is there of a folder that is to be filled.

    Attributes:
        files: What it holds, or None if there is no such folder.
        staged: Files that arrived whole for it while it is not there yet.
        parts: Bytes that arrived of others.
        moved: Bytes on their way, whole files included.
        free: Bytes of free space on its disk.
        held: The process that fills it at this moment, or None.
    """

    files: Manifest | None
    staged: Manifest
    parts: Mapping[str, int]
    moved: int
    free: int
    held: int | None

    def lacking(self, wanted: Manifest) -> list[str]:
        """Names of the files that are not there whole, the largest first."""
        return wanted.lacking(self.files if self.files is not None else self.staged)

    def is_whole(self, wanted: Manifest) -> bool:
        """Whether the folder holds what is wanted and nothing else."""
        return self.files is not None and not wanted.differences(self.files)

    def needs(self, wanted: Manifest) -> int:
        """Bytes that are still to arrive."""
        return sum(max(0, wanted.files[name][0] - self.parts.get(name, 0)) for name in self.lacking(wanted))


def node_program(last: str) -> tuple[str, ...]:
    """The words that run a program of ours on a node, with the modules that it needs."""
    words = ["python3", "-IS", "-X", "utf8", "-c", _BOOT]
    for name in (*_NODE_MODULES[last], last):
        words += [f"spark_core.transfer.{name}", Path(__file__).with_name(f"{name}.py").read_text()]
    return tuple(words)


def contents_of(
    transport: Transport, folder: str, cache: str, anew: Sequence[str] = (), only: Sequence[str] | None = None
) -> Manifest | None:
    """What a folder of a node holds; None if there is no such folder. Unchanged files are not read again.

    Args:
        anew: Names of files that are read again even so.
        only: Names of the files that are looked at; all if it is None.
    """
    orders = {"target": folder, "cache": cache, "anew": list(anew), "to_fill": False}
    answer = _ask(transport, orders | {"only": None if only is None else list(only)})
    return None if answer["files"] is None else _manifest(transport, answer["files"])


def look_at(place: Place) -> Look:
    """What is there of a folder that is to be filled."""
    orders = {"target": place.folder, "cache": place.cache, "anew": [], "to_fill": True}
    answer = _ask(place.transport, orders | {"only": None if place.only is None else list(place.only)})
    files = answer["files"]
    try:
        return Look(
            None if files is None else _manifest(place.transport, files),
            _manifest(place.transport, answer["staged"]),
            {str(name): int(size) for name, size in answer["parts"].items()},
            int(answer["moved"]),
            int(answer["free"]),
            None if answer["held"] is None else int(answer["held"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _not_understood(place.transport) from error


def _ask(transport: Transport, orders: Mapping[str, object]) -> dict[str, Any]:
    text = run_checked(
        transport,
        command(*node_program("node_folder"), stdin=json.dumps(orders).encode() + b"\n", timeout_s=HASH_TIMEOUT_S),
        purpose=f"expected to read the weights in {orders['target']}",
        setting="model.source",
    )
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise _not_understood(transport) from error
    if not isinstance(answer, dict) or "files" not in answer:
        raise _not_understood(transport)
    return answer


def _manifest(transport: Transport, files: Any) -> Manifest:
    try:
        return Manifest({name: (int(size), str(digest)) for name, (size, digest) in files.items()})
    except (ValueError, TypeError, AttributeError) as error:
        raise _not_understood(transport) from error


def _not_understood(transport: Transport) -> ObservationError:
    return ObservationError("expected a list of files, found something else", where=transport.node)
