"""Whether a model fits: shapes read from its own metadata, heads over ranks, memory into nodes."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from spark_core.errors import ObservationError
from spark_core.fit import GIB, cache_bytes, load_findings, memory_findings, parallel_findings, plan_memory
from spark_core.model_facts import ModelFacts, parse_config, weights_bytes
from spark_core.model_look import ModelLook, look_locally, model_findings, model_fragment, parse_model
from spark_core.settings import Settings, read_settings
from spark_core.transport.base import compose, parse_sections
from tests.config_cases import load_base

FACTS = Path(__file__).resolve().parents[1] / "fixtures" / "models"
SPARK = int(121.6 * GIB)


def recorded(name: str) -> ModelFacts:
    return parse_config((FACTS / f"{name}.facts.json").read_text())


def settings_of(**serving: Any) -> Settings:
    raw = load_base()
    group = raw["groups"]["main"]
    group["serving"] = {**group["serving"], **serving}
    raw["hardware"] = "spark"
    return read_settings(raw)


def fit(model: ModelFacts, weights: int, **serving: Any) -> list[str]:
    settings = settings_of(**serving)
    return [f.code for f in memory_findings(settings, "main", model, weights, {"spark-a": SPARK})]


def divided(model: ModelFacts, **serving: Any) -> list[str]:
    settings = settings_of()
    group = settings.groups["main"]
    changed = group.model_copy(update={"serving": group.serving.model_copy(update=serving)})
    found = parallel_findings("main", changed, model)
    assert {finding.code for finding in found} <= {"parallel-size"}
    return [finding.what for finding in found]


def test_the_reference_model_is_read_as_published() -> None:
    model = recorded("qwen3.5-122b-a10b-fp8")
    assert (model.layers, model.full_layers, model.linear_layers) == (48, 12, 36)
    assert (model.attention_heads, model.kv_heads, model.head_dim, model.experts) == (32, 2, 256, 256)
    # Two key/value heads over two ranks: one head of 256 elements, keys and values, 12 layers, 2 bytes.
    assert model.token_bytes(2) == 12 * 2 * 256 * 2
    assert model.token_bytes(4) == model.token_bytes(2)  # a head cannot be halved: ranks hold copies
    assert model.token_bytes(2, "fp8") == 12 * 2 * 256
    # 64 matrices of 128 by 128 in float32 and three steps of the convolution, for 36 layers, halved over two ranks.
    state = 64 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 64 * 128) * 2
    assert model.sequence_bytes(2) == 36 * state / 2


def test_a_nested_language_model_is_found() -> None:
    inner = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64, "dtype": "float32"}
    outer = {"architectures": ["A"], "model_type": "outer", "text_config": {**inner, "model_type": "inner"}}
    model = parse_config(json.dumps(outer))
    assert (model.architectures, model.model_type) == (("A",), "outer")
    assert (model.layers, model.kv_heads, model.head_dim, model.element_bytes) == (4, 4, 16, 4)
    assert model.full_layers == 4


def test_sliding_windows_and_latent_attention_cost_what_they_keep() -> None:
    shape = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    kinds = ["sliding_attention", "full_attention"] * 2
    windowed = parse_config(json.dumps({**shape, "layer_types": kinds, "sliding_window": 128}))
    assert (windowed.full_layers, windowed.window_layers) == (2, (2, 128))
    assert windowed.token_bytes(2) == 2 * 2 * 4 * 64 * 2
    assert windowed.sequence_bytes(2) == 2 * 2 * 128 * 4 * 64 * 2
    latent = parse_config(json.dumps({**shape, "kv_lora_rank": 512, "qk_rope_head_dim": 64}))
    assert latent.token_bytes(2) == latent.token_bytes(1) == 4 * (512 + 64) * 2


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "not json", '"x"'])
def test_what_is_no_configuration_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ObservationError, match=r"expected a JSON object in config\.json"):
        parse_config(text)


def test_a_configuration_of_any_shape_is_read_without_a_trace() -> None:
    chance = random.Random(7)  # noqa: S311  # the same shapes each time
    keys = [*json.loads((FACTS / "qwen3.5-35b-a3b.facts.json").read_text()), "layer_types", "quantization_config"]
    values: list[Any] = [None, -1, 0, 3, 2.5, "x", [], [1, "full"], {}, {"quant_method": 3}, True]
    for _ in range(300):
        config = {key: chance.choice(values) for key in chance.sample(keys, 8)}
        model = parse_config(json.dumps(config))
        assert model.layers is None or model.layers > 0
        divided(model)
        fit(model, 10 * GIB)


def test_the_size_of_the_weights_comes_from_the_index_or_from_the_shards() -> None:
    assert weights_bytes('{"metadata": {"total_size": 5}}', {"a.safetensors": 7}) == 5
    for index in (None, "{}", "x", '{"metadata": {"total_size": "5"}}'):
        assert weights_bytes(index, {"a.safetensors": 7, "b.safetensors": 1, "config.json": 9}) == 8
    assert weights_bytes(None, {"config.json": 9}) is None


def test_the_reference_deployment_fits_at_080_and_is_warned_about_at_090() -> None:
    model, weights = recorded("qwen3.5-122b-a10b-fp8"), 127_000_000_000
    assert fit(model, weights, gpu_memory_utilization=0.80, max_model_len=131072) == []
    assert fit(model, weights, gpu_memory_utilization=0.90, max_model_len=32768) == ["memory-utilization"]
    assert fit(model, weights, max_model_len=32768) == ["memory-utilization"]  # vLLM's own default is 0.92
    plan = plan_memory(settings_of(gpu_memory_utilization=0.80), settings_of().groups["main"], model, weights, 1)
    assert round(plan.weights / GIB, 1) == 59.1  # as the owner of two Sparks reports it


def test_a_model_that_is_too_large_is_refused() -> None:
    model = recorded("qwen3.5-122b-a10b-fp8")
    assert fit(model, 244_000_000_000, gpu_memory_utilization=0.80) == ["memory-fit"]


def test_a_context_that_is_too_long_names_the_longest_that_fits() -> None:
    shape = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128}
    model = parse_config(json.dumps({**shape, "max_position_embeddings": 1_000_000}))
    settings = settings_of(gpu_memory_utilization=0.5, max_model_len=500_000)
    [found] = memory_findings(settings, "main", model, 50 * GIB, {"spark-a": SPARK})
    assert found.code == "memory-fit"
    longest = int(found.do.rpartition(" ")[2])
    assert fit(model, 50 * GIB, gpu_memory_utilization=0.5, max_model_len=longest) == []
    assert fit(model, 50 * GIB, gpu_memory_utilization=0.5, max_model_len=longest + 1) == ["memory-fit"]


def test_heads_that_cannot_be_divided_are_refused() -> None:
    model = recorded("qwen3.5-122b-a10b-fp8")
    assert divided(model, tensor_parallel_size=2) == []
    assert divided(model, tensor_parallel_size=4) == []
    assert any("32 attention heads, found 3" in what for what in divided(model, tensor_parallel_size=3))
    assert divided(recorded("minimax-m2"), tensor_parallel_size=3) == []  # its heads are not known


def test_blocks_of_quantized_experts_are_a_warning() -> None:
    shape = {"moe_intermediate_size": 384, "quantization_config": {"weight_block_size": [128, 128]}}
    model = parse_config(json.dumps(shape))
    assert divided(model, tensor_parallel_size=3) == []
    assert any("block 128, found 192" in what for what in divided(model, tensor_parallel_size=2))
    assert divided(model, tensor_parallel_size=2, enable_expert_parallel=True) == []


def test_sizes_of_the_cache_are_vllms_own() -> None:
    assert [cache_bytes(text) for text in ("64M", "64m", "25.6k", "7", 5, None, "lots")] == [
        64 << 20,
        64_000_000,
        25_600,
        7,
        5,
        None,
        None,
    ]


def looked_at(look: ModelLook) -> list[str]:
    return [f.code for f in model_findings(settings_of(gpu_memory_utilization=0.8), {"main": look}, {"spark-a": SPARK})]


def test_a_model_that_cannot_be_read_yet_is_not_known_and_no_failure() -> None:
    assert looked_at(ModelLook("", {})) == ["memory-unknown"]
    assert looked_at(ModelLook("<html>", {"a.safetensors": 1})) == ["memory-unknown"]
    config = (FACTS / "qwen3.5-122b-a10b-fp8.facts.json").read_text()
    assert looked_at(ModelLook(config, {})) == ["memory-unknown"]
    assert looked_at(ModelLook(config, {"a.safetensors": 127_000_000_000})) == []


def test_metadata_is_read_where_the_model_lies(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "m.safetensors").write_bytes(b"12345")
    local = settings_of().groups["main"].model.model_copy(update={"source": f"controller:{tmp_path}"})
    assert look_locally(local) == ModelLook('{"a": 1}', {"config.json": 8, "m.safetensors": 5})
    assert look_locally(local.model_copy(update={"source": "controller:/nowhere"})) == ModelLook("", {})
    settings = settings_of()
    on_nodes = settings.groups["main"].model.model_copy(update={"source": f"node:{tmp_path}"})
    group = settings.groups["main"].model_copy(update={"model": on_nodes})
    settings = settings.model_copy(update={"groups": {"main": group}})
    head, worker = settings.nodes
    assert model_fragment(settings, worker) is None
    fragment = model_fragment(settings, head)
    assert fragment is not None
    done = subprocess.run(compose(fragment).argv, capture_output=True, text=True, check=True, timeout=20)
    read = parse_model(parse_sections(done.stdout))
    assert (read.config, list(read.shards.values())) == ('{"a": 1}', [5])
    assert parse_model({}) == ModelLook("", {})


@pytest.mark.parametrize(
    ("load_format", "weights", "shard", "codes"),
    [
        (None, 230, 100, []),  # mapped files take nothing
        ("safetensors", 230, 100, []),
        ("pt", 200, 9, []),
        ("pt", 200, 20, ["memory-load"]),
        ("fastsafetensors", 200, 7, []),
        ("fastsafetensors", 200, 9, ["memory-load"]),
    ],
)
def test_what_a_load_format_holds_while_it_loads_is_part_of_the_fit(
    load_format: str | None, weights: int, shard: int, codes: list[str]
) -> None:
    settings = settings_of(load_format=load_format)
    found = load_findings(settings, "main", weights * GIB, shard * GIB, {"spark-a": SPARK})
    assert [finding.code for finding in found] == codes


def test_the_load_format_counts_in_the_preflight_of_a_model() -> None:
    settings = settings_of(load_format="fastsafetensors")
    config = (FACTS / "qwen3.5-122b-a10b-fp8.facts.json").read_text()
    look = ModelLook(config, {f"{number}.safetensors": 60 * GIB for number in range(2)})
    codes = [finding.code for finding in model_findings(settings, {"main": look}, {"spark-a": SPARK})]
    assert "memory-load" in codes
