"""A recipe file of sparkrun or of eugr's spark-vllm-docker, read as it is into settings and an account of it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from spark_core.foreign_recipes import containers
from spark_core.foreign_recipes.account import Account
from spark_core.foreign_recipes.commands import read_command
from spark_core.foreign_recipes.document import Document, read_document
from spark_core.foreign_recipes.flags import Serving
from spark_core.foreign_recipes.result import Reading
from spark_core.foreign_recipes.secrets import looks_secret
from spark_core.settings.group import ModelSettings, ServingSettings

_VLLM = ("", "vllm", "vllm-ray", "vllm-distributed", "eugr-vllm")
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")
_HUB_CACHE = re.compile(r"^/\S*/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?$")
"""A model in a hub cache, as a path in a container."""
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
    read_command(reading, serving, document)
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


def _runtime(reading: Reading, value: Mapping[Any, Any]) -> None:
    runtime = value.get("runtime")
    if "runtime" not in value:
        return
    if runtime is None or (isinstance(runtime, str) and runtime in _VLLM):
        reading.account.say("runtime", "taken", "vLLM", "serving.backend")
    elif isinstance(runtime, str):
        reading.account.say("runtime", "not understood", "another server than vLLM")
        reading.obstacles.append("it is for another server than vLLM")


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
