"""The text of a new stack file: every setting with what it means, and why it is so."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from spark_core.settings import describe

WIDTH = 118


def stack_text(
    project: str, values: Mapping[str, Any], reasons: Mapping[str, Sequence[str]], header: Sequence[str]
) -> str:
    """A stack file with these settings.

    Args:
        reasons: For the path of a setting, such as ``image.local_id``, lines that say why it is so.
        header: Lines about the file as a whole.
    """
    lines = [*(line for text in header for line in _comment(text, 0)), "config:"]
    told: set[str] = set()
    for key, value in values.items():
        lines += _setting(f"{project}:{key}", (key,), value, 2, reasons, told)
    return "\n".join(lines) + "\n"


def _setting(
    name: str,
    location: tuple[str | int, ...],
    value: Any,
    depth: int,
    reasons: Mapping[str, Sequence[str]],
    told: set[str],
) -> Iterator[str]:
    """A setting's lines: what it means, why it is so, and its value."""
    path = ".".join(str(part) for part in location if isinstance(part, str))
    if path not in told:  # of several nodes only the first is explained
        told.add(path)
        for text in (describe(location), *(f"here: {reason}" for reason in reasons.get(path, ()))):
            yield from _comment(text, depth)
    blank = " " * depth
    if isinstance(value, Mapping) and value:
        yield f"{blank}{name}:"
        for key, below in value.items():
            yield from _setting(str(key), (*location, str(key)), below, depth + 2, reasons, told)
    elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
        yield f"{blank}{name}:"
        for index, item in enumerate(value):
            yield from _item(item, (*location, index), depth + 2, reasons, told)
    else:
        yield f"{blank}{name}: {_plain(value)}"


def _item(
    item: Mapping[str, Any],
    location: tuple[str | int, ...],
    depth: int,
    reasons: Mapping[str, Sequence[str]],
    told: set[str],
) -> Iterator[str]:
    """An item of a list; its mark stands before its first key, and what explains that stands above the mark."""
    blank, marked = " " * depth, False
    for key, below in item.items():
        for line in _setting(str(key), (*location, str(key)), below, depth + 2, reasons, told):
            if marked:
                yield line
            elif line.lstrip().startswith("#"):
                yield line[2:]
            else:
                yield f"{blank}- {line[depth + 2 :]}"
                marked = True


def _plain(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n...\n").strip()


def _comment(text: str, depth: int) -> list[str]:
    blank = " " * depth + "# "
    return (
        textwrap.wrap(text, WIDTH, initial_indent=blank, subsequent_indent=blank, break_on_hyphens=False)
        if text
        else []
    )
