"""Whether a model fits: its heads and experts over the ranks, and its memory into a node; pure.

What vLLM's ``gpu_memory_utilization`` multiplies on a Spark is the whole unified memory (vllm-project/vllm#35313).
Whether that much is available at the moment is a fact of the node and told with the others. Sizes are told in GiB,
2^30 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from spark_core.findings import Finding
from spark_core.model_facts import ModelFacts
from spark_core.settings import GroupSettings, Settings

GIB = 1 << 30
DEFAULT_UTILIZATION = 0.92
"""vLLM's own default (vLLM recipes PR 632)."""
HIGH_UTILIZATION = 0.85
"""Above this, owners of Sparks ran out of memory on the buffers of RDMA and of the runtime (vllm-dgx-spark)."""
RESERVE_BYTES = 6 * GIB
"""What a rank takes beside weights and cache: CUDA context, graphs, activations, NCCL. Sources give 4 to 8 GiB."""
SHARDS_HELD = {
    "pt": 1,
    "npcache": 1,
    "fastsafetensors": 2,
    "instanttensor": 2,
    "runai_streamer": 2,
    "runai_streamer_sharded": 2,
}
"""Whole shards that a load format holds beside the weights while it loads: ``torch.load`` reads one into memory; those
that read ahead have one in use and the next one in a buffer (vllm/model_executor/model_loader/weight_utils.py). The
others map files, whose pages the kernel takes back. Not measured here."""
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
}
"""vLLM's: a small letter is decimal, a capital one binary."""


@dataclass(frozen=True)
class MemoryPlan:
    """Where the memory of one rank goes, in bytes.

    Attributes:
        budget: What vLLM may take in all.
        weights: This rank's part of the weights.
        reserve: Taken by the runtime.
        cache: What is left for the cache.
        one_sequence: What one sequence of the declared context needs of it; None if not known.
        largest_context: Longest context that one sequence could have; None if not known.
    """

    budget: float
    weights: float
    reserve: float
    cache: float
    one_sequence: float | None
    largest_context: int | None


def parallel_findings(name: str, group: GroupSettings, model: ModelFacts) -> list[Finding]:
    """What cannot be divided over the ranks, by the rules that vLLM itself applies when it loads."""
    serving = group.serving
    tensor, pipeline = serving.tensor_parallel_size, serving.pipeline_parallel_size
    where = f"groups.{name}.serving.tensor_parallel_size"
    found: list[Finding] = []

    def fail(what: str, setting: str = where) -> None:
        found.append(Finding("parallel-size", setting, what, "choose sizes whose product is the number of nodes"))

    if model.attention_heads and model.attention_heads % tensor:
        fail(f"expected a divisor of the model's {model.attention_heads} attention heads, found {tensor}")
    if model.kv_heads and model.latent_elements is None and model.kv_heads % tensor and tensor % model.kv_heads:
        fail(f"expected a divisor or a multiple of the model's {model.kv_heads} key/value heads, found {tensor}")
    for heads in model.linear_heads or ():
        if heads % tensor:
            fail(f"expected a divisor of the model's {heads} linear attention heads, found {tensor}")
            break
    if not serving.enable_expert_parallel and model.expert_block:
        size, block = model.expert_block
        if size % tensor == 0 and (size // tensor) % block:
            what = (
                f"expected each rank's part of an expert ({size} / {tensor}) to be a multiple of "
                f"the quantization block {block}, found {size // tensor}"
            )
            do = "enable_expert_parallel keeps experts whole; a vLLM that refines blocks takes it as it is"
            found.append(Finding("parallel-size", where, what, do, told_as="warn"))
    if model.layers and pipeline > model.layers:
        fail(
            f"expected at most the model's {model.layers} layers, found {pipeline}",
            f"groups.{name}.serving.pipeline_parallel_size",
        )
    return found


def plan_memory(settings: Settings, group: GroupSettings, model: ModelFacts, weights: int, total: int) -> MemoryPlan:
    """Where the memory of one rank goes.

    Args:
        weights: Size of all weights in bytes.
        total: MemTotal of a node in bytes.
    """
    serving = group.serving
    tensor, pipeline = serving.tensor_parallel_size, serving.pipeline_parallel_size
    share = weights / (tensor * pipeline)
    reserve = RESERVE_BYTES if settings.hardware == "spark" else 0
    fixed = cache_bytes(serving.kv_cache_memory_bytes)
    if fixed is not None:
        budget, cache = share + reserve + fixed, float(fixed)
    else:
        budget = (serving.gpu_memory_utilization or DEFAULT_UTILIZATION) * total
        cache = budget - share - reserve
    token = model.token_bytes(tensor, serving.kv_cache_dtype)
    if token is None:
        return MemoryPlan(budget, share, reserve, cache, None, None)
    each = token / pipeline
    base = model.sequence_bytes(tensor, serving.kv_cache_dtype) / pipeline
    context = serving.max_model_len or model.max_positions
    largest = int(max(0.0, cache - base) // each) if each else None
    if largest is not None and model.max_positions:
        largest = min(largest, model.max_positions)
    return MemoryPlan(budget, share, reserve, cache, base + each * context if context else None, largest)


def load_findings(
    settings: Settings, name: str, weights: int, largest_shard: int, totals: Mapping[str, int]
) -> list[Finding]:
    """Whether what the load format holds while it loads fits beside a rank's weights.

    Args:
        weights: Size of all weights in bytes.
        largest_shard: Size of the largest file of them.
        totals: MemTotal in bytes of each node that was seen.
    """
    serving = settings.groups[name].serving
    held = SHARDS_HELD.get(serving.load_format or "auto", 0) * largest_shard
    share = weights / serving.world_size
    reserve = RESERVE_BYTES if settings.hardware == "spark" else 0
    return [
        Finding(
            "memory-load",
            f"{node} (groups.{name}.serving.load_format)",
            f"expected room for {_gib(held)} GiB of shards that {serving.load_format} holds while it loads, found "
            f"{_gib(total - share - reserve)} GiB beside weights {_gib(share)} and runtime {_gib(reserve)}",
            "leave load_format out: files are then mapped and take nothing beside the weights",
        )
        for node, total in totals.items()
        if held and share + reserve + held > total
    ]


def memory_findings(
    settings: Settings, name: str, model: ModelFacts, weights: int | None, totals: Mapping[str, int]
) -> list[Finding]:
    """Whether the group's memory fits into each of its nodes.

    Args:
        weights: Size of all weights in bytes, or None if not known.
        totals: MemTotal in bytes of each node that was seen.
    """
    group = settings.groups[name]
    serving = group.serving
    where = f"groups.{name}.serving"
    if weights is None:
        return [Finding("memory-unknown", where, "expected the size of the model's weights, found none to read")]
    found = []
    if settings.hardware == "spark" and serving.kv_cache_memory_bytes is None:
        share = serving.gpu_memory_utilization or DEFAULT_UTILIZATION
        if share > HIGH_UTILIZATION:
            told = "" if serving.gpu_memory_utilization else " (vLLM's own default)"
            found.append(
                Finding(
                    "memory-utilization",
                    f"{where}.gpu_memory_utilization",
                    f"expected at most {HIGH_UTILIZATION} of a Spark's memory, found {share}{told}",
                    "0.80 is a safe start; others ran out of memory at 0.90",
                )
            )
    for node, total in totals.items():
        plan = plan_memory(settings, group, model, weights, total)
        found += _node_memory(node, where, plan, serving.max_model_len or model.max_positions)
    return found


def _node_memory(node: str, where: str, plan: MemoryPlan, context: int | None) -> list[Finding]:
    place = f"{node} ({where})"
    parts = (
        f"weights {_gib(plan.weights)}, runtime {_gib(plan.reserve)}, "
        f"cache {_gib(plan.cache)} of {_gib(plan.budget)} GiB"
    )
    if plan.cache <= 0:
        need = f"expected room for a cache beside the weights, found none: {parts}"
        return [Finding("memory-fit", place, need, "use more nodes, a smaller model, or a higher utilization")]
    if plan.one_sequence is not None and plan.one_sequence > plan.cache:
        what = (
            f"expected {_gib(plan.one_sequence)} GiB of cache for one sequence of {context} tokens, "
            f"found {_gib(plan.cache)} ({parts})"
        )
        return [Finding("memory-fit", place, what, f"set max_model_len to at most {plan.largest_context}")]
    return []


def cache_bytes(text: str | int | None) -> int | None:
    """``kv_cache_memory_bytes`` in bytes, in vLLM's words; None if it is not set or not a size."""
    if text is None or isinstance(text, int):
        return text
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text.strip())
    return int(float(found.group(1)) * _UNITS[found.group(2)]) if found else None


def _gib(count: float) -> str:
    return f"{count / GIB:.1f}"
