"""Settings of a stack on top of the recipes that its groups name, before anything is validated.

What the stack says wins: a value for a value, a list for a list; of maps such as ``serving.environment`` each item by
itself. ``null`` in the stack takes a recipe's value away. Violations then say which values came from a recipe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spark_core.errors import SparkError
from spark_core.settings.recipe import Recipe, leaves, load_recipe


@dataclass
class Merged:
    """Settings with their recipes filled in.

    Attributes:
        values: The settings.
        used: For each group that names one, its recipe's name and the recipe.
        taken: Place of each value that came from a recipe, such as ``groups.main.serving.max_model_len``.
        problems: Violations: recipes that there are not, or that cannot be used.
    """

    values: dict[str, Any]
    used: dict[str, tuple[str, Recipe]] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def explain(self, line: str) -> str:
        """A violation with the recipe that its value came from."""
        key = re.sub(r"\[\d+\].*$", "", line.partition(": ")[0])
        name = self.taken.get(key)
        if name is None:
            for group, (recipe, made) in self.used.items():
                if key == f"groups.{group}.serving":
                    return f"{line} (the recipe {recipe} is for {made.nodes} node{'s' if made.nodes != 1 else ''})"
        return f"{line} (from the recipe {name})" if name else line

    def concerns_a_problem(self, line: str) -> bool:
        """Whether a violation is only there because a group's recipe could not be used."""
        return any(line.startswith((f"groups.{group}.model", f"groups.{group}.serving")) for group in self.problems)


def with_recipes(raw: Mapping[str, Any]) -> Merged:
    """Settings on top of the recipes that they name. What is not of the right shape is left to the validation."""
    merged = Merged(dict(raw))
    groups = raw.get("groups")
    if not isinstance(groups, Mapping):
        return merged
    merged.values["groups"] = filled = dict(groups)
    for name, group in groups.items():
        if not isinstance(group, Mapping) or not isinstance(group.get("recipe"), str):
            continue
        try:
            recipe = load_recipe(group["recipe"])
        except SparkError as error:
            at_name = error.where == "recipes/"
            merged.problems[str(name)] = f"groups.{name}.recipe: {error.what if at_name else error.line}"
            continue
        merged.used[str(name)] = (group["recipe"], recipe)
        filled[name] = {
            **group,
            **{part: over(getattr(recipe, part), group.get(part, {})) for part in ("model", "serving")},
        }
        for place, _value in leaves({"model": recipe.model, "serving": recipe.serving}):
            if not _says(group, place):
                merged.taken[f"groups.{name}.{place}"] = group["recipe"]
    return merged


def over(below: Any, above: Any) -> Any:
    """A value on top of another one."""
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        return {**below, **{key: over(below[key], item) if key in below else item for key, item in above.items()}}
    return above


def own_values(group: Mapping[str, Any], recipe: Recipe) -> list[str]:
    """Places at which a group of a stack says something itself that its recipe says too."""
    return [place for place in recipe.values() if _says(group, place)]


def recipe_notes(raw: Mapping[str, Any]) -> list[str]:
    """For each group that names a recipe, which one is used and what of it the stack says otherwise."""
    merged = with_recipes(raw)
    notes = []
    for group, (name, recipe) in merged.used.items():
        own = own_values(raw["groups"][group], recipe)
        count = len(recipe.values()) - len(own)
        otherwise = f"; of the stack instead: {', '.join(own)}" if own else ""
        proven = f"reported by {recipe.proven[0].by}" if recipe.proven else "no public report of it was found"
        notes.append(f"groups.{group}: {count} settings are from the recipe {name} ({proven}){otherwise}")
    return notes


def _says(group: Mapping[str, Any], place: str) -> bool:
    """Whether a group says something at a place or above it."""
    value: Any = group
    for part in place.split(".", 2):
        if not isinstance(value, Mapping):
            return True
        if part not in value:
            return False
        value = value[part]
    return True
