"""Which image, which model and which serving settings fit what is on the nodes; pure, each with its reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from spark_core.first_day.survey import STANDARD_CACHE, FoundContainer, FoundModel, Server, Survey
from spark_core.settings import ModelSettings, ServingSettings

REFERENCE_IMAGE = "hellohal2064/vllm-qwen3.5-gb10:latest"
REFERENCE_MODEL = "hf://Qwen/Qwen3.5-122B-A10B-FP8"
"""Of the reference deployment (Pulumi.spark.yaml), where the nodes have nothing to go by."""

SAFE_CONTEXT = 32768
SAFE_UTILIZATION = 0.8
"""Owners ran out of memory at 0.90 and above (vllm-project/recipes PR 632)."""

_MOST_TOLD = 6
_NUMBERS = {"port", "max_model_len", "max_num_seqs", "max_num_batched_tokens"}
_SWITCHES = {
    "enable_auto_tool_choice",
    "enable_prefix_caching",
    "enable_expert_parallel",
    "trust_remote_code",
}
_TEXTS = {"kv_cache_dtype", "load_format", "reasoning_parser", "tool_call_parser"}


@dataclass(frozen=True)
class Choice:
    """Settings and why they are so.

    Attributes:
        values: The settings.
        reasons: For a path below them, lines for the person; the empty path is the whole.
    """

    values: dict[str, Any]
    reasons: dict[str, list[str]] = field(default_factory=dict)


def replaced_containers(surveys: Mapping[str, Survey]) -> dict[str, list[FoundContainer]]:
    """For each node, the containers of other launchers that run, or that serve with vLLM."""
    found = {
        node: [one for one in survey.containers if one.running and (one.launcher or one.servers)]
        for node, survey in surveys.items()
    }
    return {node: containers for node, containers in found.items() if containers}


def running_server(surveys: Mapping[str, Survey]) -> Server | None:
    """The server of the cluster that runs: that of its head."""
    servers = [
        server
        for containers in replaced_containers(surveys).values()
        for container in containers
        for server in container.servers
    ]
    return next((server for server in servers if "--headless" not in server.flags), None)


def choose_image(surveys: Mapping[str, Survey]) -> Choice:
    """The image that serves now, else one that is on most nodes and has vLLM in its name, else the reference's."""
    nodes_of: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    for node, survey in surveys.items():
        for image_id, known in survey.images.items():
            nodes_of.setdefault(image_id, []).append(node)
            names.setdefault(image_id, known[0] if known else image_id[7:19])
    serving = [
        container.image_id
        for containers in replaced_containers(surveys).values()
        for container in sorted(containers, key=lambda one: not one.servers)
        if container.image_id in nodes_of
    ]
    vllm = sorted((one for one in nodes_of if "vllm" in names[one].lower()), key=lambda one: -len(nodes_of[one]))
    wanted = [*serving, *vllm]
    if not wanted:
        why = "no node has an image with vllm in its name; this is the reference deployment's: put yours here"
        return Choice({"registry": REFERENCE_IMAGE}, {"registry": [why]})
    chosen = wanted[0]
    told = f"{names[chosen]}, on {', '.join(nodes_of[chosen])}" + ("; it serves now" if chosen in serving else "")
    others = [f"{names[one]} ({one})" for one in dict.fromkeys(wanted[1:]) if one != chosen][:_MOST_TOLD]
    return Choice({"local_id": chosen}, {"local_id": [told, *([f"also there: {', '.join(others)}"] if others else [])]})


def choose_model(surveys: Mapping[str, Survey]) -> tuple[Choice, FoundModel | None, str]:
    """The model that is served now, else the largest that most nodes have whole, else the reference's.

    Returns:
        The settings, the model as it was found on a node, and the hub cache if it is not the usual one.
    """
    nodes_of: dict[str, list[str]] = {}
    found: dict[str, FoundModel] = {}
    for node, survey in surveys.items():
        for model in survey.models:
            source = _source_of(model)
            if not model.fault and node not in nodes_of.setdefault(source, []):
                nodes_of[source].append(node)
                found.setdefault(source, model)
    usable = [source for source, nodes in nodes_of.items() if source.startswith("hf://") or len(nodes) == len(surveys)]
    usable.sort(key=lambda source: (-len(nodes_of[source]), -found[source].bytes))
    server = running_server(surveys)
    wanted = server.model if server is not None else ""
    served = [one for one in usable if wanted and wanted in (found[one].repository, found[one].path)]
    if not served and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", wanted):
        why = "served now, but whole in no hub cache that was found: it is downloaded; pin it with @COMMIT"
        return Choice(_model(f"hf://{wanted}", server), {"source": [why]}), None, ""
    if not usable:
        why = "no node has a whole model; this is the reference deployment's: put yours here, with @COMMIT"
        return Choice(_model(REFERENCE_MODEL, None), {"source": [why]}), None, ""
    chosen = (served or usable)[0]
    model = found[chosen]
    place = f"{'served now; ' if served else ''}{model.bytes / 1e9:.1f} GB, whole on {', '.join(nodes_of[chosen])}"
    if wanted and not served:
        place += f"; what is served now was not found: {wanted}"
    others = [source for source in usable if source != chosen][:_MOST_TOLD]
    reasons = {"source": [place, *([f"also there: {', '.join(others)}"] if others else [])]}
    cache = model.cache if model.cache not in ("", STANDARD_CACHE) else ""
    return Choice(_model(chosen, server if served else None), reasons), model, cache


def _source_of(model: FoundModel) -> str:
    return f"hf://{model.repository}@{model.commit}" if model.repository else f"node:{model.path}"


def _model(source: str, server: Server | None) -> dict[str, Any]:
    plain = source.removeprefix("hf://").partition("@")[0].rpartition("/")[2]
    # Without a name of its own vLLM serves a model under the very text that it was given.
    name = plain if server is None else server.flags.get("--served-model-name") or server.model
    return ModelSettings(source=source, served_name=name).model_dump(exclude_defaults=True)


def wished_model(source: str, surveys: Mapping[str, Survey]) -> tuple[Choice, FoundModel | None]:
    """The model that the person asked for, and what a node has of it."""
    found = [model for survey in surveys.values() for model in survey.models if _source_of(model) == source]
    name = source.removeprefix("hf://").partition("@")[0].rstrip("/").rpartition("/")[2] or source
    return Choice({"source": source, "served_name": name}), next(iter(found), None)


def choose_serving(nodes: int, server: Server | None, hardware: str, model: FoundModel | None) -> Choice:
    """How the cluster that runs is served, else a safe start.

    Args:
        nodes: How many nodes there are.
        server: The server of that cluster.
        model: The model as it was found on a node.
    """
    if server is None:
        values: dict[str, Any] = {"tensor_parallel_size": nodes}
        if model is not None:
            values["max_model_len"] = min(SAFE_CONTEXT, model.positions or SAFE_CONTEXT)
        if hardware == "spark":
            values["gpu_memory_utilization"] = SAFE_UTILIZATION
        reasons = {
            "max_model_len": [f"a safe start; the model was made for {model.positions if model else None} tokens"],
            "gpu_memory_utilization": ["a safe start: owners ran out of memory at 0.90 and above"],
            "tensor_parallel_size": ["one rank for each node"],
        }
        return Choice(values, {key: lines for key, lines in reasons.items() if key in values})
    values, refused = _taken(server.flags)
    sizes = [int(server.flags.get(f"--{kind}-parallel-size") or 1) for kind in ("tensor", "pipeline")]
    if sizes[0] * sizes[1] != nodes:
        sizes = [nodes, 1]
    values["tensor_parallel_size"] = sizes[0]
    values |= {"pipeline_parallel_size": sizes[1]} if sizes[1] > 1 else {}
    if "--nnodes" in server.flags and server.flags.get("--distributed-executor-backend") != "ray":
        values["backend"] = "mp"
    left = [*refused, *server.others]
    lines = ["as the cluster that runs is served"]
    lines += [f"not taken over: {', '.join(left)}; see serving.extra_args in docs/settings.md"] if left else []
    return Choice(values, {"": lines})


def _taken(flags: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Settings from flags of vLLM, and flags whose value no setting takes."""
    values: dict[str, Any] = {}
    refused = []
    for flag, text in flags.items():
        key = flag.removeprefix("--").replace("-", "_")
        value: Any
        if key in _SWITCHES:
            value = True
        elif key in _NUMBERS and text.isdigit():
            value = int(text)
        elif key == "gpu_memory_utilization" and re.fullmatch(r"[01]?\.\d+|1", text):
            value = float(text)
        elif key in _TEXTS:
            value = text
        else:
            if key in _NUMBERS or key == "gpu_memory_utilization":
                refused.append(flag)
            continue
        try:
            ServingSettings.model_validate({**({"tool_call_parser": "x"} if key in _SWITCHES else {}), key: value})
        except ValidationError:
            refused.append(flag)
            continue
        values[key] = value
    if values.get("enable_auto_tool_choice") and "tool_call_parser" not in values:
        values.pop("enable_auto_tool_choice")
        refused.append("--enable-auto-tool-choice")
    return values, refused
