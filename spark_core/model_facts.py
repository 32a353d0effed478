"""What a model's own metadata says: its shape, and what a token costs in memory.

Read from ``config.json`` as it lies beside the weights. Multimodal models nest the language model under
``text_config`` (Qwen3.5). Nothing is guessed: a number that the file does not have is None, and what needs it is
"not known".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_core.errors import ObservationError

_NESTED = ("text_config", "llm_config", "language_config")
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_KV_BYTES = {"auto": None, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1}


@dataclass(frozen=True)
class ModelFacts:
    """The shape of a model.

    Attributes:
        architectures: Class names as vLLM's registry knows them.
        model_type: The name by which transformers knows the configuration.
        layers: Number of decoder layers.
        attention_heads: Query heads of a layer.
        kv_heads: Key/value heads of a layer.
        head_dim: Elements of a head.
        full_layers: Layers whose cache grows with the context.
        window_layers: Layers that keep a sliding window only, and the window in tokens.
        linear_layers: Layers that keep a state of fixed size (linear attention, Mamba).
        linear_state_bytes: Size of that state for one sequence and one layer, over all ranks.
        linear_heads: Key and value heads of linear layers; both are split over tensor parallel ranks.
        latent_elements: Elements that latent attention (MLA) keeps for a token and layer, or None.
        experts: Routed experts of a layer, or None for a dense model.
        quantization: Method, such as ``fp8``, or None.
        expert_block: ``(moe_intermediate_size, block)`` of block-quantized experts, or None.
        element_bytes: Bytes of an element of the cache if nothing else is set.
        max_positions: Longest context that the model was made for, in tokens.
    """

    architectures: tuple[str, ...]
    model_type: str | None
    layers: int | None
    attention_heads: int | None
    kv_heads: int | None
    head_dim: int | None
    full_layers: int | None
    window_layers: tuple[int, int] | None
    linear_layers: int
    linear_state_bytes: int
    linear_heads: tuple[int, int] | None
    latent_elements: int | None
    experts: int | None
    quantization: str | None
    expert_block: tuple[int, int] | None
    element_bytes: int
    max_positions: int | None

    def token_bytes(self, tensor_parallel_size: int, kv_cache_dtype: str | None = None) -> float | None:
        """Bytes that one token of context costs on one rank, over all layers that grow; None if not known."""
        size = _KV_BYTES.get(kv_cache_dtype or "auto") or self.element_bytes
        if self.full_layers is None:
            return None
        if self.latent_elements is not None:  # latent attention is kept whole on every rank
            return float(self.full_layers * self.latent_elements * size)
        if self.kv_heads is None or self.head_dim is None:
            return None
        heads = max(1, self.kv_heads // tensor_parallel_size)  # fewer heads than ranks: each rank has a copy
        return float(2 * self.full_layers * heads * self.head_dim * size)

    def sequence_bytes(self, tensor_parallel_size: int, kv_cache_dtype: str | None = None) -> float:
        """Bytes that one sequence costs on one rank whatever its length: linear states and sliding windows."""
        size = _KV_BYTES.get(kv_cache_dtype or "auto") or self.element_bytes
        total = self.linear_layers * self.linear_state_bytes / tensor_parallel_size
        if self.window_layers is not None and self.kv_heads is not None and self.head_dim is not None:
            count, window = self.window_layers
            total += 2 * count * window * max(1, self.kv_heads // tensor_parallel_size) * self.head_dim * size
        return total


def parse_config(text: str, source: str = "config.json") -> ModelFacts:
    """The facts of a model from the text of its ``config.json``.

    Raises:
        ObservationError: it is not a JSON object.
    """
    try:
        outer = json.loads(text)
    except ValueError:
        outer = None
    if not isinstance(outer, dict):
        raise ObservationError(f"expected a JSON object in {source}, found: {text[:60]!r}", where="model.source")
    inner: dict[str, Any] = next((outer[name] for name in _NESTED if isinstance(outer.get(name), dict)), {})
    config: dict[str, Any] = {**outer, **inner}
    layers = _whole(config, "num_hidden_layers", "n_layer", "num_layers")
    heads = _whole(config, "num_attention_heads", "n_head")
    hidden = _whole(config, "hidden_size", "n_embd")
    kinds = _layer_kinds(config, layers)
    window = _whole(config, "sliding_window") or 0
    quantization = outer.get("quantization_config") or config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    lora = _whole(config, "kv_lora_rank")
    return ModelFacts(
        architectures=tuple(str(name) for name in _items(outer.get("architectures"))),
        model_type=str(outer["model_type"]) if outer.get("model_type") else None,
        layers=layers,
        attention_heads=heads,
        kv_heads=_whole(config, "num_key_value_heads", "num_kv_heads") or heads,
        head_dim=_whole(config, "head_dim") or (hidden // heads if hidden and heads else None),
        full_layers=kinds.count("full") if kinds else layers,
        window_layers=(kinds.count("window"), window) if window and kinds.count("window") else None,
        linear_layers=kinds.count("linear"),
        linear_state_bytes=_linear_state_bytes(config),
        linear_heads=_linear_heads(config) if "linear" in kinds else None,
        latent_elements=lora + (_whole(config, "qk_rope_head_dim") or 0) if lora else None,
        experts=_whole(config, "num_experts", "num_local_experts", "n_routed_experts"),
        quantization=str(method) if method else None,
        expert_block=_expert_block(config, quantization),
        element_bytes=_BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2),
        max_positions=_whole(config, "max_position_embeddings", "n_positions"),
    )


def weights_bytes(index_text: str | None, shard_sizes: Mapping[str, int]) -> int | None:
    """Size of a model's weights: what the index says, else the sum of the shards; None if neither is there."""
    if index_text is not None:
        try:
            total = json.loads(index_text)["metadata"]["total_size"]
        except (ValueError, KeyError, TypeError):
            total = None
        if isinstance(total, int | float) and total > 0:
            return int(total)
    sizes = [size for name, size in shard_sizes.items() if name.endswith((".safetensors", ".bin", ".gguf"))]
    return sum(sizes) or None


def _layer_kinds(config: Mapping[str, Any], layers: int | None) -> list[str]:
    """For each layer ``full``, ``window``, ``linear`` or ``none``, as far as the configuration tells; empty if all are
    full."""
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern:  # Nemotron-H: * attention, M Mamba; E and - are experts and plain layers
        return [{"*": "full", "M": "linear"}.get(letter, "none") for letter in pattern]
    named = _items(config.get("layer_types"))
    if named:
        return [_kind_of(str(name)) for name in named]
    interval = _whole(config, "full_attention_interval")
    if interval and layers:
        return ["full" if (place + 1) % interval == 0 else "linear" for place in range(layers)]
    return []


def _kind_of(name: str) -> str:
    if "sliding" in name or "chunked" in name or "local" in name:
        return "window"
    return "linear" if "linear" in name or "mamba" in name or "conv" in name else "full"


def _linear_heads(config: Mapping[str, Any]) -> tuple[int, int] | None:
    keys, values = _whole(config, "linear_num_key_heads"), _whole(config, "linear_num_value_heads")
    return (keys, values) if keys and values else None


def _linear_state_bytes(config: Mapping[str, Any]) -> int:
    """State of a gated delta net for one sequence: a key-by-value matrix per value head, and the convolution's tail."""
    if _whole(config, "mamba_num_heads"):
        return _mamba_state_bytes(config)
    heads = _linear_heads(config)
    key_dim, value_dim = _whole(config, "linear_key_head_dim"), _whole(config, "linear_value_head_dim")
    if heads is None or not key_dim or not value_dim:
        return 0
    keys, values = heads
    matrix = values * key_dim * value_dim * _BYTES.get(str(config.get("mamba_ssm_dtype", "float32")), 4)
    tail = ((_whole(config, "linear_conv_kernel_dim") or 1) - 1) * (2 * keys * key_dim + values * value_dim) * 2
    return matrix + tail


def _mamba_state_bytes(config: Mapping[str, Any]) -> int:
    """State of a Mamba-2 layer for one sequence, in float32 as the makers of these models advise, and the tail."""
    heads, head_dim = _whole(config, "mamba_num_heads") or 0, _whole(config, "mamba_head_dim") or 0
    state, groups = _whole(config, "ssm_state_size") or 0, _whole(config, "n_groups") or 1
    tail = ((_whole(config, "conv_kernel") or 1) - 1) * (heads * head_dim + 2 * groups * state) * 2
    return heads * head_dim * state * 4 + tail


def _expert_block(config: Mapping[str, Any], quantization: Any) -> tuple[int, int] | None:
    block = _items(quantization.get("weight_block_size")) if isinstance(quantization, dict) else []
    size = _whole(config, "moe_intermediate_size")
    return (size, block[0]) if size and block and isinstance(block[0], int) and block[0] > 0 else None


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _whole(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these keys that holds a positive whole number."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return int(value)
    return None
