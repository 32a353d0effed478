"""Free space of the disks that a path of ours lies on; a disk that holds several of them is one disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from spark_core.facts.answer import Answer, Unread

PATH_MARK = "path "
"""Before the table of ``df`` for one path stands a line with this mark and the path that was asked for."""

_UNITS = {letter: 1024**power for power, letter in enumerate("KMGTPE", start=1)}
# The words of the heading depend on the language; the shape of a row does not.
_SIZE = r"(\d{1,19}(?:[.,]\d{1,3})?)([KMGTPE]?)(?:i?B)?"
_ROW = re.compile(rf"(\S.*?) +{_SIZE} +{_SIZE} +{_SIZE} +(?:\d{{1,3}}%|-) +(/.*)", re.ASCII)


@dataclass(frozen=True)
class Disk:
    """A file system.

    Args:
        device: Its device, such as ``/dev/nvme0n1p2``.
        mount: Where it is mounted.
        total_bytes: Its size.
        free_bytes: What may be used by somebody who is not root.
        paths: The paths that were asked for and lie on it.
    """

    device: str
    mount: str
    total_bytes: int
    free_bytes: int
    paths: tuple[str, ...] = ()


def parse_df(text: str) -> list[Disk]:
    """The rows of a table of ``df``, with sizes in bytes or in the units of ``-h``."""
    return [disk for line in text.splitlines() if (disk := _row(line.strip())) is not None]


def parse_disks(answer: Answer) -> tuple[Disk, ...] | Unread:
    """The disks below the paths that were asked for, each disk once."""
    found: dict[tuple[str, str], Disk] = {}
    for path, table in _tables(answer.text):
        rows = parse_df(table)
        if len(rows) != 1:
            return Answer(table, answer.status).unread(f"the free space of {path}", "df")
        # tmpfs and overlay are no names of a device.
        key = (rows[0].device, "" if rows[0].device.startswith("/") else rows[0].mount)
        before = found.setdefault(key, rows[0])
        found[key] = replace(before, paths=(*before.paths, path))
    nothing_asked = answer.status == 0 and not answer.lines
    return tuple(found.values()) if found or nothing_asked else answer.unread("the free space", "df")


def _tables(text: str) -> Iterator[tuple[str, str]]:
    for part in re.split(rf"^{PATH_MARK}(?=/)", text, flags=re.MULTILINE)[1:]:
        path, _, table = part.partition("\n")
        yield path.strip(), table


def _row(line: str) -> Disk | None:
    found = _ROW.fullmatch(line)
    if found is None:
        return None
    device, size, size_unit, _, _, free, free_unit, mount = found.groups()
    return Disk(device, mount.strip(), _bytes(size, size_unit), _bytes(free, free_unit))


def _bytes(number: str, unit: str) -> int:
    factor = _UNITS.get(unit, 1)
    return int(number) * factor if number.isdecimal() else int(float(number.replace(",", ".")) * factor)
