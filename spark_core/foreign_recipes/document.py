"""A file of another tool as a tree of keys: every place that holds a value, and every key that is said twice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from spark_core.errors import SparkError
from spark_core.foreign_recipes.secrets import looks_secret

LARGEST = 256 * 1024
"""Characters of a file that is read; recipes have a few thousand."""
MOST_VALUES = 5000
DEEPEST = 20
_PLAIN = re.compile(r"[\w-]{1,60}")


@dataclass(frozen=True)
class Document:
    """What a file says.

    Attributes:
        value: Its content.
        leaves: Each place that holds no further keys, such as ``defaults.port`` or ``mods[0]``, with its value.
        repeated: Places that are said twice; the last one holds.
    """

    value: dict[Any, Any]
    leaves: dict[str, Any]
    repeated: tuple[str, ...]


def read_document(text: str, where: str) -> Document:
    """The tree of a file.

    Raises:
        SparkError: it is no mapping in YAML, or too large. The text of the file is not part of the message.
    """
    if len(text) > LARGEST:
        raise SparkError(f"expected at most {LARGEST} characters, found {len(text)}", where=where)
    try:
        value = yaml.safe_load(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        raise SparkError(f"expected YAML, found something else{line}", where=where) from None
    except (RecursionError, ValueError, OverflowError, TypeError):  # nested too deep, or no date or number after all
        raise SparkError("expected YAML, found a value that cannot be read", where=where) from None
    if not isinstance(value, dict):
        raise SparkError(f"expected keys and values, found {type(value).__name__}", where=where)
    leaves = {}
    for place, leaf in _leaves(value, "", 0, where):
        leaves[place] = leaf
        if len(leaves) > MOST_VALUES:
            raise SparkError(f"expected at most {MOST_VALUES} values, found more", where=where)
    return Document(value, leaves, tuple(_repeated(node, "", set())))


def place_of(prefix: str, key: Any) -> str:
    """The place of a key below another place."""
    if isinstance(key, str) and _PLAIN.fullmatch(key) and not looks_secret(key):
        return f"{prefix}.{key}" if prefix else key
    shown = "hidden" if looks_secret(key) else repr(key)[:40]
    return f"{prefix}[{shown}]"


def _leaves(value: Any, prefix: str, depth: int, where: str) -> Iterator[tuple[str, Any]]:
    if depth > DEEPEST:
        raise SparkError(f"expected at most {DEEPEST} levels of keys, found more", where=where)
    if isinstance(value, dict) and value:
        taken: set[str] = set()
        for key, item in value.items():
            place = place_of(prefix, key)
            while place in taken:
                place += "'"
            taken.add(place)
            yield from _leaves(item, place, depth + 1, where)
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{prefix}[{index}]", depth + 1, where)
    else:
        yield prefix, value


def _repeated(node: Any, prefix: str, seen: set[int]) -> Iterator[str]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        names: set[str] = set()
        for key, item in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            place = place_of(prefix, name)
            if name and name in names and name != "<<":
                yield place
            names.add(name)
            yield from _repeated(item, place, seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated(item, f"{prefix}[{index}]", seen)
