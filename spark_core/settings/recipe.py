"""A recipe file: the settings of one model on a number of nodes, why each has its value, and who has run it.

Files lie in ``recipes/`` of the project, those that people made themselves or imported in ``recipes/own/``. A recipe
speaks of the model and of how vLLM serves it, never of a site: ports, keys, mounts and nodes belong to the stack.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BeforeValidator, Field, StringConstraints, ValidationError, model_validator

from spark_core.errors import SparkError
from spark_core.settings.base import FrozenModel
from spark_core.settings.group import ModelSettings, ServingSettings

FOLDER = Path(__file__).resolve().parents[2] / "recipes"
OWN = "own"
"""Folder in it for recipes of the site."""
NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,80}")

Day = Annotated[str, BeforeValidator(str), StringConstraints(pattern=r"^20\d\d-\d\d(-\d\d)?$")]
"""A date, or a month where no more is told."""

OF_THE_SITE = frozenset(
    {
        "host",
        "port",
        "public_host",
        "ray_port",
        "ray_token",
        "master_port",
        "status_port",
        "api_key",
        "nccl_debug",
        "mounts",
        "patches",
        "heal",
        "join_timeout_s",
        "canary_timeout_s",
    }
)
"""Serving settings that a recipe may not hold: they do not follow from the model."""


class RecipeSource(FrozenModel):
    """Where values of a recipe come from."""

    title: str = Field(description="repository and file, or page")
    address: str = Field(default="", description="https address; empty for a file of the owner")
    date: Day | None = Field(default=None, description="of the source, as far as it tells")


class RecipeProof(FrozenModel):
    """Somebody has run the model on such hardware, and said so in public. Nobody of this project has."""

    by: str
    date: Day
    hardware: str
    backend: str = Field(description="what distributed the ranks: ray, mp, or none on a single node")
    result: str
    differs: str = Field(default="", description="what was different from the recipe's settings")


class RecipeWeights(FrozenModel):
    """Size of the model's weights, for the memory plan."""

    bytes: int | None = Field(default=None, gt=0, description="all weights; an upper bound where no exact size is told")
    source: str = Field(description="who says so, or how the bound follows")


class Recipe(FrozenModel):
    """A recipe file."""

    summary: str
    nodes: int = Field(ge=1, le=64, description="number of Sparks, one rank each")
    date: Day = Field(description="when the values were put together")
    image: str = Field(description="what the image must bring; the stack chooses it")
    notes: tuple[str, ...] = Field(default=(), description="what to know before relying on it")
    weights: RecipeWeights
    sources: tuple[RecipeSource, ...] = Field(min_length=1)
    proven: tuple[RecipeProof, ...] = Field(default=(), description="empty: no public report was found")
    model: dict[str, Any]
    serving: dict[str, Any]
    why: dict[str, str] = Field(description="for each value of model and serving its reason")

    @model_validator(mode="after")
    def _holds(self) -> Recipe:
        problems = []
        for part, kind in (("model", ModelSettings), ("serving", ServingSettings)):
            try:
                kind.model_validate(getattr(self, part))
            except ValidationError as error:
                problems += [
                    f"{'.'.join([part, *map(str, detail['loc'])])}: {detail['msg'].removeprefix('Value error, ')}"
                    for detail in error.errors()
                ]
        problems += [f"serving.{key}: belongs to the stack" for key in self.serving if key in OF_THE_SITE]
        values, reasons = set(self.values()), set(self.why)
        problems += [f"why: found none for {place}" for place in sorted(values - reasons)]
        problems += [f"why.{place}: found no such value" for place in sorted(reasons - values)]
        ranks = self.serving.get("tensor_parallel_size", 1) * self.serving.get("pipeline_parallel_size", 1)
        if ranks != self.nodes:
            problems.append(f"serving: found {ranks} ranks, expected {self.nodes}, one for each node")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def values(self) -> dict[str, Any]:
        """Each value by its place, such as ``serving.max_model_len``; of maps their items."""
        return dict(leaves({"model": self.model, "serving": self.serving}))

    @property
    def backend(self) -> str:
        """What distributes the ranks."""
        return str(self.serving.get("backend", ServingSettings.model_fields["backend"].default))


def leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(place, value) of everything in nested maps that is no map."""
    for key, item in value.items():
        place = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            yield from leaves(item, f"{place}.")
        else:
            yield place, item


def recipe_files() -> dict[str, Path]:
    """The file of each recipe by its name, sorted; one of the site stands for a shipped one of the same name."""
    found = {path.stem: path for place in (FOLDER, FOLDER / OWN) for path in place.glob("*.yaml")}
    return {name: found[name] for name in sorted(found) if NAME.fullmatch(name)}


def load_recipe(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        SparkError: there is none, and which name is near; or the file is not as it must be.
    """
    files = recipe_files()
    if name not in files:
        near = difflib.get_close_matches(str(name), files, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(files) or 'none'}"
        raise SparkError(f"expected the name of a recipe, found {name!r}; {hint}", where="recipes/")
    path = files[name]
    try:
        value = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or "no text"
        raise SparkError(f"expected a recipe in YAML, found: {reason}", where=shown_path(path)) from None
    try:
        return Recipe.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        text = first["msg"].removeprefix("Value error, ")
        raise SparkError(
            f"expected a recipe, found {place + ': ' if place else ''}{text}", where=shown_path(path)
        ) from None


def shown_path(path: Path) -> str:
    """A recipe's file as people name it."""
    return f"recipes/{path.relative_to(FOLDER)}"
