"""``recipes`` and ``import-recipe``: look at recipes, and make one of a file of another tool."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

import yaml

from automation.exit_codes import Exit
from automation.redaction import redacted
from automation.reports import ImportRecipeReport, PlaceReport, RecipeEntry, RecipesReport, error_text
from spark_core.errors import SparkError
from spark_core.foreign_recipes import Reading, read_foreign, recipe_of
from spark_core.foreign_recipes.account import Verdict
from spark_core.foreign_recipes.document import LARGEST
from spark_core.settings import recipe as book
from spark_core.settings.recipe import NAME, OWN, Recipe, load_recipe, recipe_files, shown_path

TOOLS = {"eugr": "eugr's spark-vllm-docker", "sparkrun": "sparkrun"}
_ORDER: tuple[Verdict, ...] = ("changed", "not understood", "left out", "taken", "information")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add them to the command line."""
    parser = commands.add_parser(
        "recipes",
        help="list recipes, or show one with its reasons",
        description="Recipes are settings of a model on a number of Sparks; a group takes them with `recipe: NAME`.",
    )
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="show this one")
    parser.add_argument("--json", action="store_true", help="print the result as JSON (docs/schemas/)")
    parser.set_defaults(run=run)
    other = commands.add_parser(
        "import-recipe",
        help="read a recipe file of sparkrun or of eugr's spark-vllm-docker",
        description="Reads a recipe file of another tool as it is, and tells of each key and each word of its command "
        "what became of it. Nothing of the file is run. With --as it becomes a recipe of your own.",
    )
    other.add_argument("file", metavar="FILE", help="the other tool's recipe")
    other.add_argument("--as", dest="name", metavar="NAME", help="write it to recipes/own/NAME.yaml")
    other.add_argument("--json", action="store_true", help="print the result as JSON (docs/schemas/)")
    other.set_defaults(run=import_recipe)


def run(options: argparse.Namespace) -> int:
    """List, or show."""
    recipes = {name: load_recipe(name) for name in ([options.recipe] if options.recipe else recipe_files())}
    if options.json:
        files = recipe_files()
        entries = [
            RecipeEntry(name=name, file=shown_path(files[name]), recipe=recipe) for name, recipe in recipes.items()
        ]
        report = RecipesReport(command="recipes", stack="", exit_code=Exit.DONE, recipes=entries)
        print(report.model_dump_json(indent=2))
        return Exit.DONE
    if options.recipe:
        print("\n".join(_shown(recipes[options.recipe], options.recipe)))
        return Exit.DONE
    rows = [("RECIPE", "SPARKS", "BACKEND", "REPORTED")]
    for name, recipe in recipes.items():
        rows.append((name, str(recipe.nodes), recipe.backend, recipe.proven[0].by if recipe.proven else "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]))
    return Exit.DONE


def import_recipe(options: argparse.Namespace) -> int:
    """Read, tell, and perhaps write."""
    path = Path(options.file)
    reading = read_foreign(_text(path), path.name)
    if not options.json:
        print("\n".join(account_told(reading, path.name)))
    recipe, written, error = None, None, None
    try:
        recipe = recipe_of(reading, path.name, datetime.date.today().isoformat())
        written = _written(recipe, path, options.name) if options.name is not None else None
    except SparkError as refusal:
        if not options.json:
            raise
        error = refusal
        print(redacted(error.render()), file=sys.stderr)
    if options.json:
        print(_report(reading, path, recipe, written, error).model_dump_json(indent=2))
    elif recipe is not None and written is None:
        print(f"it is a recipe for {recipe.nodes} node{'s' if recipe.nodes != 1 else ''}; --as NAME writes it")
    elif written is not None:
        print(f"written: {written}; a group takes it with `recipe: {options.name}`, or `use {options.name}`")
    return Exit.DONE if error is None else Exit.FAILED


def _written(recipe: Recipe, source: Path, name: str) -> str:
    """Write a recipe of one's own; its path as it is shown."""
    target = _target(name)
    target.parent.mkdir(exist_ok=True)
    head = (
        f"# Read from {source.name} by `python -m automation import-recipe`. It is yours now: change what you want.\n"
    )
    body = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=110)
    with target.open("x", encoding="utf-8") as file:
        file.write(head + body)
    return shown_path(target)


def _report(
    reading: Reading, path: Path, recipe: Recipe | None, written: str | None, error: SparkError | None
) -> ImportRecipeReport:
    return ImportRecipeReport(
        command="import-recipe",
        stack="",
        exit_code=Exit.DONE if error is None else Exit.FAILED,
        file=path.name,
        tool=TOOLS[reading.tool],
        places=[
            PlaceReport(place=entry.place, verdict=entry.verdict, text=entry.text, setting=entry.setting)
            for entry in reading.entries
        ],
        recipe=recipe,
        written=written,
        error=error_text(error) if error is not None else None,
    )


def account_told(reading: Reading, name: str) -> list[str]:
    """The account of a file, what a person has to look at first."""
    kinds = {verdict: [entry for entry in reading.entries if entry.verdict == verdict] for verdict in _ORDER}
    counts = ", ".join(f"{len(found)} {verdict}" for verdict, found in kinds.items() if found)
    lines = [f"{name}, a recipe of {TOOLS[reading.tool]}: {len(reading.entries)} places, {counts}"]
    for verdict, found in kinds.items():
        lines += [f"{verdict}:"] if found else []
        lines += [f"  {entry.place}: {entry.text}" for entry in found]
    return lines


def _shown(recipe: Recipe, name: str) -> list[str]:
    lines = [f"{name}: {recipe.summary}", f"  image: {recipe.image}", *(f"  note: {note}" for note in recipe.notes)]
    for place, value in recipe.values().items():
        text = value if isinstance(value, str) else json.dumps(value)
        lines += [f"  {place}: {text}", f"      {recipe.why[place]}"]
    for proof in recipe.proven:
        lines.append(f"  reported by {proof.by}, {proof.date}, {proof.hardware}: {proof.result}")
        lines += [f"      different there: {proof.differs}"] if proof.differs else []
    lines += [] if recipe.proven else ["  not run by anybody that we know of"]
    return [*lines, "  not run by this project on real Sparks", f"  file: {shown_path(recipe_files()[name])}"]


def _text(path: Path) -> str:
    """The text of a file.

    Raises:
        SparkError: it cannot be read.
    """
    try:
        if path.stat().st_size > LARGEST * 4:
            raise SparkError(f"expected a recipe, found a file of {path.stat().st_size} bytes", where=str(path))
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise SparkError(f"expected a recipe file, found: {reason}", where=str(path)) from None


def _target(name: str) -> Path:
    """Where a recipe of that name is written.

    Raises:
        SparkError: it cannot be a name, or is one already.
    """
    if not NAME.fullmatch(name):
        raise SparkError(f"expected a name of small letters, digits, dots and hyphens, found {name!r}", where="--as")
    if name in recipe_files():
        raise SparkError(
            f"expected a new name, found that of {shown_path(recipe_files()[name])}",
            where="--as",
            do="take another one",
        )
    return book.FOLDER / OWN / f"{name}.yaml"
