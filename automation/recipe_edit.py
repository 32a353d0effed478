"""A recipe named in a stack's file, every other line kept as it is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import yaml

from automation.stack_file import StackFile
from spark_core.errors import SparkError
from spark_core.settings.recipe import Recipe, load_recipe
from spark_core.settings.recipe_merge import own_values

Edit = tuple[int, int, str]
"""(start, end, new text)"""


@dataclass(frozen=True)
class WithRecipe:
    """A stack's file that names a recipe.

    Attributes:
        file: The file with its new content; nothing is written yet.
        group: The group.
        recipe: What it says.
        taken_out: Places of the group that the file said before and does not any more.
        kept: Places that the file goes on saying itself, and which win over the recipe.
    """

    file: StackFile
    group: str
    recipe: Recipe
    taken_out: tuple[str, ...]
    kept: tuple[str, ...]


def with_recipe(file: StackFile, name: str, *, drop_overrides: bool = False) -> WithRecipe:
    """The file with a recipe in its group.

    The group's own model goes, since it would win over the recipe's and nothing would be switched.

    Args:
        drop_overrides: Whether serving settings that the recipe says too go as well.

    Raises:
        SparkError: there is no such recipe, or the file is written in a way that cannot be changed in place.
    """
    recipe = load_recipe(name)
    groups = file.raw().get("groups")
    if not isinstance(groups, dict) or len(groups) != 1 or not isinstance(next(iter(groups.values())), dict):
        raise SparkError("expected one group in the file, found another shape", where=f"{file.path} (groups)")
    [(group_name, group)] = groups.items()
    own = own_values(group, recipe)
    serving = [place for place in own if place.startswith("serving.")]
    dropped = sorted({place.split(".")[1] for place in serving if place.count(".") == 1}) if drop_overrides else []
    text = _edited(file, str(group_name), name, dropped)
    taken_out = (*(f"model.{key}" for key in group.get("model") or {}), *(f"serving.{key}" for key in dropped))
    kept = tuple(place for place in serving if place.split(".")[1] not in dropped)
    return WithRecipe(replace(file, text=text), str(group_name), recipe, taken_out, kept)


def _edited(file: StackFile, group: str, name: str, dropped: Sequence[str]) -> str:
    text = file.text
    key = f"{file.project}:groups"
    node = _value(_value(_value(yaml.compose(text, Loader=yaml.SafeLoader), "config"), key), group)
    if isinstance(node, yaml.MappingNode) and node.value:
        for start, end, new in sorted(_edits(text, node, name, dropped), reverse=True):
            text = text[:start] + new + text[end:]
    wanted = copy.deepcopy(yaml.safe_load(file.text))
    expected = wanted["config"][key]
    if isinstance(expected, dict):
        value = expected[group]
        value["recipe"] = name
        value.pop("model", None)
        if dropped and isinstance(value.get("serving"), dict):
            value["serving"] = {item: one for item, one in value["serving"].items() if item not in dropped}
            if not value["serving"]:
                del value["serving"]
    try:
        right = isinstance(expected, dict) and yaml.safe_load(text) == wanted
    except yaml.YAMLError:
        right = False
    if not right:
        lines = [f"groups.{group}.recipe: {name}", f"take out groups.{group}.model"]
        lines += [f"take out groups.{group}.serving.{item}" for item in dropped]
        raise SparkError(
            "expected a group written out key by key, found it written in a way that cannot be changed in place",
            where=str(file.path),
            do="change it by hand: " + "; ".join(lines),
        )
    return text


def _edits(text: str, node: yaml.MappingNode, name: str, dropped: Sequence[str]) -> list[Edit]:
    """What changes in the mapping of a group; the recipe takes the place of the one before, or of the model."""
    if node.flow_style:
        return [(_start(node), _end(text, node), _flow(text, node, name, dropped))]
    edits: list[Edit] = []
    items = {key.value: (key, value) for key, value in node.value}
    newline = "\r\n" if "\r\n" in text else "\n"
    if "recipe" in items:
        value = items["recipe"][1]
        edits.append((_start(value), _end(text, value), name))
    else:
        place = items["model"] if "model" in items else node.value[0]
        start, end = _lines(text, *place)
        indent = " " * place[0].start_mark.column
        edits.append((start, end if "model" in items else start, f"{indent}recipe: {name}{newline}"))
    if "model" in items and "recipe" in items:
        edits.append((*_lines(text, *items["model"]), ""))
    serving = items["serving"][1] if "serving" in items else None
    if isinstance(serving, yaml.MappingNode) and dropped:
        if {key.value for key, _ in serving.value} <= set(dropped):
            edits.append((*_lines(text, *items["serving"]), ""))
        elif serving.flow_style:
            edits.append((_start(serving), _end(text, serving), _flow_without(text, serving, dropped)))
        else:
            edits += [(*_lines(text, key, value), "") for key, value in serving.value if key.value in dropped]
    return edits


def _flow(text: str, node: yaml.MappingNode, name: str, dropped: Sequence[str]) -> str:
    """A group between braces, with a recipe."""
    parts = [f"recipe: {name}"]
    for key, value in node.value:
        if key.value == "serving" and dropped and isinstance(value, yaml.MappingNode):
            if not {item.value for item, _ in value.value} <= set(dropped):
                parts.append(f"{text[_start(key) : _end(text, key)]}: {_flow_without(text, value, dropped)}")
        elif key.value not in ("recipe", "model"):
            parts.append(text[_start(key) : _end(text, value)])
    return f"{{{', '.join(parts)}}}"


def _flow_without(text: str, node: yaml.MappingNode, names: Sequence[str]) -> str:
    """A mapping between braces, without some of its keys."""
    kept = [text[_start(key) : _end(text, value)] for key, value in node.value if key.value not in names]
    return f"{{{', '.join(kept)}}}"


def _lines(text: str, key: yaml.Node, value: yaml.Node) -> tuple[int, int]:
    """From the beginning of a key's line to the end of its value's last one."""
    newline = text.find("\n", _end(text, value))
    return text.rfind("\n", 0, _start(key)) + 1, len(text) if newline < 0 else newline + 1


def _start(node: yaml.Node) -> int:
    return int(node.start_mark.index)


def _end(text: str, node: yaml.Node) -> int:
    """The end of what a value says, without comments and empty lines behind it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(last, tuple) else last)
    return len(text[: node.end_mark.index].rstrip())


def _value(node: yaml.Node | None, key: str) -> yaml.Node | None:
    for name, value in node.value if isinstance(node, yaml.MappingNode) else []:
        if isinstance(name, yaml.ScalarNode) and name.value == key:
            found: yaml.Node = value
            return found
    return None


def told(changed: WithRecipe, name: str) -> list[str]:
    """What the change means, one line each."""
    lines = [f"groups.{changed.group}: the recipe {name}, {changed.recipe.summary}"]
    if changed.taken_out:
        lines.append(f"taken out of {changed.file.path}: {', '.join(changed.taken_out)}")
    if changed.kept:
        lines.append(f"of the stack instead: {', '.join(changed.kept)} (--drop-overrides takes them out)")
    if not changed.recipe.proven:
        lines.append("no public report of the model on such hardware was found")
    return lines
