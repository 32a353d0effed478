"""Where files come from that no node has yet: a directory of the controller, or a hub that a node downloads from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from spark_core.errors import SparkError
from spark_core.transfer.chain import Lane
from spark_core.transfer.look import Look, Place
from spark_core.transfer.manifest import Manifest
from spark_core.transfer.session import Outcome, part

_PART_BYTES = 4 << 20


class Origin(Protocol):
    """Where files come from that no node has yet."""

    @property
    def name(self) -> str:
        """What a person calls it."""
        ...

    def lane(self, places: Sequence[Place], looks: Mapping[str, Look], wanted: Manifest) -> Lane:
        """The lane by which the first of these places gets the files, and others along with it if they can."""
        ...

    def errors(self, node: str, outcome: Outcome) -> list[SparkError]:
        """What went wrong at the origin itself while a node got files from it."""
        ...


@dataclass(frozen=True)
class ControllerFolder:
    """A directory of the controller; its bytes go over ssh."""

    directory: str
    name: str = "the controller"

    def lane(self, places: Sequence[Place], looks: Mapping[str, Look], wanted: Manifest) -> Lane:
        return Lane(places, feed=_feed(self.directory, looks[places[0].node], wanted))

    def errors(self, _node: str, _outcome: Outcome) -> list[SparkError]:
        """What cannot be read here is raised while it is read."""
        return []


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
