"""The reference page of the recipes, made from their files; ``python docs/generate_reference.py`` writes it."""

from __future__ import annotations

import json
from typing import Any

from spark_core.settings.recipe import FOLDER, Recipe, RecipeProof, RecipeSource, load_recipe, recipe_files

INTRODUCTION = """# Recipes

<!-- Made by docs/generate_reference.py from the files in recipes/. Change those, then run it again. -->

Settings of a model on a number of Sparks. A group takes them with `recipe: NAME`; what the stack says itself wins
([Use a recipe](how-to/recipes.md)).

**Nobody of this project has run any of them on real Sparks.** What is checked for each: the settings are valid, vLLM's
own parser takes the command line, the heads divide over the ranks, and the memory plan fits, by the model's own
metadata as far as it was found. "Reported" is what others said in public of the model on such hardware, and what was
different there. Speeds are theirs.

| recipe | Sparks | backend | reported |
| --- | --- | --- | --- |
"""


def render() -> str:
    """The whole page; only recipes that ship with the program are on it."""
    recipes = {name: load_recipe(name) for name, path in recipe_files().items() if path.parent == FOLDER}
    rows = [
        f"| [{name}](#{_anchor(name)}) | {recipe.nodes} | {recipe.backend} | {_short(recipe)} |"
        for name, recipe in recipes.items()
    ]
    parts = [INTRODUCTION + "\n".join(rows) + "\n"]
    parts += [_section(name, recipe) for name, recipe in recipes.items()]
    return "\n".join(parts)


def _anchor(name: str) -> str:
    return name.replace(".", "")


def _short(recipe: Recipe) -> str:
    if not recipe.proven:
        return "no report was found"
    return "; ".join(f"{proof.hardware.split(',')[0]}, {proof.date}" for proof in recipe.proven)


def _section(name: str, recipe: Recipe) -> str:
    size = f"{recipe.weights.bytes / 10**9:g} GB" if recipe.weights.bytes else "not found"
    lines = [
        f"## {name}",
        "",
        f"{recipe.summary}. Put together on {recipe.date}.",
        "",
        f"- Image: {recipe.image}.",
        f"- Weights: {size} ({recipe.weights.source}).",
        *(f"- {_sentence(note)}" for note in recipe.notes),
        "",
        "| setting | value | why |",
        "| --- | --- | --- |",
        *(f"| `{place}` | `{_value(value)}` | {recipe.why[place]} |" for place, value in recipe.values().items()),
        "",
        "Reported:",
        "",
        *([_proof(proof) for proof in recipe.proven] or ["- not run by anybody that we know of"]),
        "",
        "Sources:",
        "",
        *(_source(source) for source in recipe.sources),
    ]
    return "\n".join(lines) + "\n"


def _proof(proof: RecipeProof) -> str:
    differs = f" Different there: {proof.differs}." if proof.differs else ""
    return f"- {proof.by}, {proof.date}: {proof.hardware}; backend {proof.backend}; {proof.result}.{differs}"


def _source(source: RecipeSource) -> str:
    title = f"[{source.title}]({source.address})" if source.address else source.title
    return f"- {title}{f', {source.date}' if source.date else ''}"


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
