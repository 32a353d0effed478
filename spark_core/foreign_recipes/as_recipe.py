"""A recipe of ours from what was read of another tool's file."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import ValidationError

from spark_core.errors import SparkError
from spark_core.foreign_recipes.result import Reading
from spark_core.settings.recipe import Recipe, RecipeSource, RecipeWeights, leaves


def recipe_of(reading: Reading, source: str, day: str) -> Recipe:
    """A recipe of ours from a file of another tool; every value says from where in the file it is.

    Args:
        source: Name of the file.
        day: Today.

    Raises:
        SparkError: it cannot be served here.
    """
    if reading.obstacles:
        first, *rest = reading.obstacles
        raise SparkError(f"expected a recipe for vLLM, found: {first}", where=source, evidence=rest)
    why = {}
    for place, _value in leaves({"model": reading.model, "serving": reading.serving}):
        entry = reading.account.of_setting(place)
        said = f"{entry.place} of {source}" if entry else f"follows from {source}"
        why[place] = f"{said}; {entry.text}" if entry and entry.verdict == "changed" else said
    try:
        return _recipe(reading, source, day, why)
    except ValidationError as error:
        text = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise SparkError(f"expected settings that go together, found: {text}", where=source) from None


def _recipe(reading: Reading, source: str, day: str, why: Mapping[str, str]) -> Recipe:
    return Recipe(
        summary=reading.summary or f"read from {source}",
        nodes=reading.nodes,
        date=day,
        image=f"what {reading.container} has" if reading.container else "not told",
        notes=(f"Read from a recipe of {reading.tool}; nobody has run it with this program.",),
        weights=RecipeWeights(bytes=None, source="not known"),
        sources=(RecipeSource(title=source, date=None),),
        proven=(),
        model=reading.model,
        serving=reading.serving,
        why=dict(why),
    )
