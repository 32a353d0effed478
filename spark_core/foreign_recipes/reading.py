"""A recipe file of sparkrun or of eugr's spark-vllm-docker, read as it is into settings and an account of it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from spark_core.errors import SparkError
from spark_core.foreign_recipes import containers
from spark_core.foreign_recipes.account import Account, Entry
from spark_core.foreign_recipes.document import Document, place_of, read_document
from spark_core.foreign_recipes.flags import Serving
from spark_core.foreign_recipes.secrets import looks_secret
from spark_core.foreign_recipes.words import Statement, Word, filled, statements
from spark_core.settings.group import ModelSettings, ServingSettings
from spark_core.settings.recipe import Recipe, RecipeSource, RecipeWeights, leaves

_VLLM = ("", "vllm", "vllm-ray", "vllm-distributed", "eugr-vllm")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_HUB_CACHE = re.compile(r"^/\S*/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?$")
"""A model in a hub cache, as a path in a container."""
_SPARKRUN_FLAGS = {
    "tensor_parallel": "--tensor-parallel-size",
    "pipeline_parallel": "--pipeline-parallel-size",
    "data_parallel": "--data-parallel-size",
}
"""Defaults of sparkrun whose flag has another name; of all others it is the name itself."""
_INFORMATION = {
    "recipe_version": "version of the format",
    "sparkrun_version": "version of the format",
    "name": "the tool's name of the recipe",
    "description": "what it is for",
    "runtime_version": "a note of its maker",
}
_NOT_RUN = {
    "mods": "changes files in the containers at each start; bring what you need with serving.patches, or in an image",
    "pre_exec": "shell of the recipe, which is not run; bring what it makes with serving.patches, or in an image",
    "post_exec": "shell of the recipe, which is not run; the gate of up asks for a completion instead",
    "post_commands": "shell of the recipe on your own machine, which is not run",
    "stop_after_post": "belongs to commands that are not run",
    "build_args": "the image is the stack's; build it once and name it, see the settings of image",
    "builder": "the image is the stack's, see the settings of image",
    "builder_config": "the image is the stack's, see the settings of image",
    "distribution_config": "up brings image and weights to every node by itself; further models are not brought",
    "runtime_cache": "compile caches are kept in a volume of each group anyway",
    "benchmark": "belongs to the tool's own benchmark",
    "runtime_config": "belongs to the tool's own runtimes",
}
_NODES = ("cluster_only", "solo_only", "min_nodes", "max_nodes", "mode")
KNOWN = frozenset(
    {
        *_INFORMATION,
        *_NOT_RUN,
        *_NODES,
        *("model", "model_revision", "runtime", "container", "containers", "defaults", "env", "command", "metadata"),
        *("executor", "executor_config"),
    }
)
"""Keys that either tool knows."""


@dataclass
class Reading:
    """What a file says, in the words of this program.

    Attributes:
        tool: Whose file it is.
        summary: What it is for.
        container: The tool's name of the image, if it can be shown.
        model: Settings of the model.
        serving: Serving settings.
        obstacles: Why it cannot be served here; empty if it can.
        entries: The account.
    """

    tool: str
    account: Account
    summary: str = ""
    container: str = ""
    model: dict[str, str] = field(default_factory=dict)
    serving: dict[str, Any] = field(default_factory=dict)
    obstacles: list[str] = field(default_factory=list)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return self.account.entries

    @property
    def nodes(self) -> int:
        """Number of nodes, one rank each."""
        return int(self.serving.get("tensor_parallel_size", 1)) * int(self.serving.get("pipeline_parallel_size", 1))


def read_foreign(text: str, where: str) -> Reading:
    """Read a file.

    Args:
        where: Its name, for messages.

    Raises:
        SparkError: it is no mapping in YAML.
    """
    document = read_document(text, where)
    value = document.value
    tool = "eugr" if str(value.get("recipe_version")) == "1" else "sparkrun"
    reading = Reading(tool, Account(document.leaves))
    for place in document.repeated:
        reading.account.add(f"{place} (said twice)", "changed", "the last one holds, the one before is not used")
    serving = Serving(reading.account)
    for place, leaf in document.leaves.items():
        if leaf in (None, {}, []) and place not in ("model", "command", "container"):
            reading.account.say(place, "information", "empty")
    _runtime(reading, value)
    _command(reading, serving, document)
    containers.take_variables(reading.account, document, serving.settings)
    serving.settings |= containers.executor_settings(reading.account, document)
    _model(reading, serving, value)
    _information(reading, document)
    reading.serving = _valid(reading.account, serving.settings)
    _nodes(reading, value)
    for key in value:
        if isinstance(key, str) and key not in KNOWN:
            near = difflib.get_close_matches(key, sorted(KNOWN), n=1, cutoff=0.8)
            hint = f"; did its maker mean {near[0]}?" if near else ""
            reading.account.say_below(key, "not understood", f"neither tool has this key{hint}")
    for place in reading.account.unsaid():
        reading.account.say(place, "not understood", "not of the shape that the tools write here")
    return reading


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


def _runtime(reading: Reading, value: Mapping[Any, Any]) -> None:
    runtime = value.get("runtime")
    if "runtime" not in value:
        return
    if runtime is None or (isinstance(runtime, str) and runtime in _VLLM):
        reading.account.say("runtime", "taken", "vLLM", "serving.backend")
    elif isinstance(runtime, str):
        reading.account.say("runtime", "not understood", "another server than vLLM")
        reading.obstacles.append("it is for another server than vLLM")


def _command(reading: Reading, serving: Serving, document: Document) -> None:
    value, account = document.value, reading.account
    raw = value.get("defaults")
    defaults = {key: item for key, item in raw.items() if isinstance(key, str)} if isinstance(raw, Mapping) else {}
    template = value.get("command")
    if template is not None and not isinstance(template, str):
        account.say_below("command", "not understood", "expected one text")
        reading.obstacles.append("its command is no text")
    elif isinstance(template, str) and template.strip():
        _template(reading, serving, template, defaults | {"model": value.get("model")})
        _unused_defaults(reading, serving, defaults)
    elif reading.tool == "eugr":
        account.say_below("command", "not understood", "expected a command")
        reading.obstacles.append("it has no command")
        account.say_below("defaults", "left out", "only a command would use it")
    elif not reading.obstacles:
        account.say_below("command", "information", "none; sparkrun makes one from the defaults")
        for key, item in defaults.items():
            _default_as_flag(serving, key, item, defaults | {"model": value.get("model")})
    serving.settings.setdefault("backend", "ray" if value.get("runtime") == "vllm-ray" else "mp")


def _template(reading: Reading, serving: Serving, template: str, values: Mapping[str, Any]) -> None:
    account = reading.account
    try:
        text, used = filled(template, values)
        found = statements(text)
    except ValueError:
        account.say("command", "not understood", "no shell could read it: a quote is not closed, or it is too long")
        reading.obstacles.append("its command cannot be read")
        return
    for key in sorted(used - {"model"}):
        account.say(place_of("defaults", key), "taken", f"stands for {{{key}}} in the command")
    servers = [statement for statement in found if statement.is_serve and not statement.joined]
    if servers:
        account.say("command", "taken", "word by word, see below")
    else:
        account.say("command", "not understood", "nothing in it starts vllm serve")
        reading.obstacles.append("its command does not start vllm serve")
    for statement in found:
        _statement(serving, statement, statement is (servers[0] if servers else None))


def _statement(serving: Serving, statement: Statement, serves: bool) -> None:
    line = f"command, line {statement.line}"
    for name, word in statement.assignments.items():
        place = f"{line}: {'a variable' if looks_secret(name) else name}"
        containers.take_variable(serving.account, place, name, word, serving.settings)
    if serves:
        serving.read(statement.arguments, lambda name: f"command: {name}")
    elif statement.words:
        what = "joined to the one before by the shell" if statement.joined else "another command"
        count = len(statement.words)
        serving.account.add(line, "left out", f"{what}, of {count} words; no shell of a recipe is run")


def _unused_defaults(reading: Reading, serving: Serving, defaults: Mapping[str, Any]) -> None:
    account = reading.account
    for key, item in defaults.items():
        place = place_of("defaults", key)
        flag = _SPARKRUN_FLAGS.get(key, "--" + key.replace("_", "-"))
        if reading.tool == "sparkrun" and key in ("tensor_parallel", "pipeline_parallel", "served_model_name"):
            known = serving.served_name if key == "served_model_name" else serving.settings.get(f"{key}_size")
            if place in account.unsaid() and not known and isinstance(item, str | int):
                serving.read([Word(flag), Word(str(item))], lambda _name, place=place: place)  # type: ignore[misc]
        account.say_below(place, "left out", "the command does not use it, so neither does the tool")


def _default_as_flag(serving: Serving, key: str, item: Any, values: Mapping[str, Any]) -> None:
    place = place_of("defaults", key)
    flag = _SPARKRUN_FLAGS.get(key, "--" + key.replace("_", "-"))
    say: Callable[[str], str] = lambda _name: place  # noqa: E731
    if isinstance(item, bool):
        if item:
            serving.read([Word(flag)], say)
        else:
            serving.account.say(place, "information", "off, and so is not passed on")
    elif isinstance(item, str | int | float):
        try:
            text = filled(str(item), values)[0]
        except ValueError:
            serving.account.say(place, "not understood", "too long")
            return
        serving.read([Word(f"{flag}={text}", "$" in text or "`" in text)], say)
    else:
        serving.account.say_below(place, "not understood", "expected one value")


def _model(reading: Reading, serving: Serving, value: Mapping[Any, Any]) -> None:
    account, named = reading.account, value.get("model")
    own = named if isinstance(named, str) else ""
    revision = value.get("model_revision")
    chosen = serving.revision or (str(revision) if isinstance(revision, str | int) else "")
    model, cached = serving.model or own, _HUB_CACHE.search(serving.model)
    if cached:
        model, chosen = f"{cached.group(1)}/{cached.group(2)}", cached.group(3)
    elif model.startswith("/") and model != own:
        model = own  # a path in the tool's container
    if looks_secret(model) or not (model.startswith("/") or _HUB.fullmatch(model)):
        account.say("model", "not understood", "expected ORG/NAME of the hub, or a path that every node has")
        account.say_below("model_revision", "left out", "belongs to the model")
        reading.obstacles.append("it names no model of the hub and no path of the nodes")
        return
    source = f"node:{model}" if model.startswith("/") else f"hf://{model}@{chosen or 'main'}"
    try:
        ModelSettings(source=source, served_name="name")
    except ValidationError:
        account.say_below("model_revision", "left out", "no revision that a model can have; main is taken")
        source = f"hf://{model}@main"
    if "model" in value:
        text = f"model.source: {source}"
        account.say("model", "taken" if own == model else "changed", text, "model.source")
    if serving.model and serving.model != model:
        account.revise("model.source", "changed", f"model.source: {source}, for a path in the tool's container")
    if "model_revision" in value:
        account.say("model_revision", "taken", f"model.source: {source}", "model.source")
    name = serving.served_name if re.fullmatch(r"[^\s-]\S*", serving.served_name) else model.rstrip("/").split("/")[-1]
    if name != serving.served_name:
        account.revise("model.served_name", "left out", "no name that a model can have")
    reading.model = {"source": source, "served_name": name}


def _information(reading: Reading, document: Document) -> None:
    value, account = document.value, reading.account
    metadata = value.get("metadata")
    texts = [value.get("description"), metadata.get("description") if isinstance(metadata, Mapping) else None]
    texts += [value.get("name")]
    summary = next((text for text in texts if isinstance(text, str) and text.strip()), "")
    reading.summary = "" if looks_secret(summary) else " ".join(summary.split())[:200]
    for key, text in _INFORMATION.items():
        account.say_below(key, "information", text)
    for key, text in _NOT_RUN.items():
        account.say_below(key, "left out", text)
    account.say_below("metadata", "information", "the tool's own notes of the model; nothing is decided by them")
    containers.image(account, document)
    container = value.get("container")
    if isinstance(container, str) and containers.is_image_name(container):
        reading.container = container
    if reading.obstacles:
        account.say_below("defaults", "left out", "there is no command of vLLM that would use it")
    runtime_is_ours = not reading.obstacles
    account.say_below("env", "left out" if not runtime_is_ours else "not understood", "expected a name and one value")


def _valid(account: Account, settings: dict[str, Any]) -> dict[str, Any]:
    """Serving settings without those that cannot stand beside the others."""
    settings = dict(settings)
    for _ in range(len(settings) + 1):
        try:
            ServingSettings.model_validate(settings)
        except ValidationError as error:
            detail = error.errors()[0]
            text = str(detail["msg"]).removeprefix("Value error, ")
            name = str(detail["loc"][0]) if detail["loc"] else "enable_auto_tool_choice"
            if name not in settings:
                break
            del settings[name]
            account.revise(f"serving.{name}", "left out", text)
        else:
            break
    return settings


def _nodes(reading: Reading, value: Mapping[Any, Any]) -> None:
    account = reading.account
    single = value.get("solo_only") is True or value.get("mode") == "solo" or value.get("max_nodes") == 1
    if single and reading.nodes > 1:  # both tools then start one rank, whatever the command says
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if reading.serving.pop(name, None):
                account.revise(f"serving.{name}", "changed", f"serving.{name}: 1, since it is for one node only")
    ranks = reading.nodes
    least, most = value.get("min_nodes"), value.get("max_nodes")
    fits = {
        "cluster_only": value.get("cluster_only") is not True or ranks > 1,
        "solo_only": value.get("solo_only") is not True or ranks == 1,
        "min_nodes": not isinstance(least, int) or ranks >= least,
        "max_nodes": not isinstance(most, int) or ranks <= most,
        "mode": {"solo": ranks == 1, "cluster": ranks > 1}.get(str(value.get("mode")), True),
    }
    for key in _NODES:
        if reading.obstacles:
            account.say_below(key, "left out", "there is no command of vLLM that it would be about")
        elif key in value and not isinstance(value[key], dict | list):
            text = f"the recipe is for {ranks} node{'s' if ranks != 1 else ''}, by its parallel sizes"
            account.say(
                key, "taken" if fits[key] else "changed", text if fits[key] else f"{text}, whatever stands here"
            )
