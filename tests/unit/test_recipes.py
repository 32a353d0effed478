"""Recipes: files that hold, settings on top of them, and whether each fits into the Sparks that it is for."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from spark_core.errors import SettingsError, SparkError
from spark_core.findings import Finding
from spark_core.fit import GIB, HIGH_UTILIZATION, load_findings, memory_findings, parallel_findings, plan_memory
from spark_core.group import GroupFiles, plan_group, serve_arguments
from spark_core.model_facts import ModelFacts, parse_config
from spark_core.settings import ServingSettings, Settings, read_settings
from spark_core.settings.recipe import OF_THE_SITE, Recipe, leaves, load_recipe, recipe_files
from spark_core.settings.recipe_merge import over, recipe_notes
from spark_core.settings.record import differing_keys, digest_of, record_of
from tests.config_cases import load_base

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "recipes"
SHIPPED = sorted(name for name, path in recipe_files().items() if path.parent.name == "recipes")
SPARK = int(121.6 * GIB)
"""MemTotal of a Spark."""


def model_of(name: str) -> ModelFacts:
    path = FIXTURES / f"{name.rpartition('-')[0]}.config.json"
    return parse_config(path.read_text(), path.name)


def stack_with(name: str, nodes: int, **group: Any) -> dict[str, Any]:
    """A stack file of so many Sparks whose group names a recipe."""
    raw = load_base()
    for index in range(2, nodes):
        other = copy.deepcopy(raw["nodes"][0])
        other |= {"name": f"spark-{index}", "management_address": f"10.1.230.{200 + index}"}
        for place, interface in enumerate(other["fabric"]):
            interface["address"] = f"192.168.{200 + place}.{20 + index}/24"
        raw["nodes"].append(other)
    raw["nodes"] = raw["nodes"][: max(1, nodes)]
    raw["groups"] = {"main": {"nodes": [node["name"] for node in raw["nodes"]], "recipe": name, **group}}
    return raw


def settings_with(name: str, **group: Any) -> Settings:
    return read_settings(stack_with(name, load_recipe(name).nodes, **group))


def refused(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(SettingsError) as error:
        read_settings(raw)
    return list(error.value.violations)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of recipes with one of the site's own, `small-2x`."""
    (tmp_path / "own").mkdir()
    value = {
        "summary": "a small model",
        "nodes": 2,
        "date": "2026-12",
        "image": "any",
        "weights": {"bytes": 1000, "source": "counted"},
        "sources": [{"title": "myself"}],
        "model": {"source": "hf://org/small@main", "served_name": "small"},
        "serving": {"tensor_parallel_size": 2, "environment": {"A": "1", "B": "2"}, "extra_args": ["--seed", "1"]},
    }
    value["why"] = {place: "tried" for place, _ in leaves({"model": value["model"], "serving": value["serving"]})}
    (tmp_path / "own" / "small-2x.yaml").write_text(yaml.safe_dump(value))
    monkeypatch.setattr("spark_core.settings.recipe.FOLDER", tmp_path)
    return tmp_path


def test_there_are_recipes_for_every_model_that_owners_run() -> None:
    families = ("qwen3.5-122b-a10b-fp8", "qwen3.5-35b-a3b", "gpt-oss-120b", "minimax-m2", "glm", "nemotron")
    assert [family for family in families if not any(name.startswith(family) for name in SHIPPED)] == []


@pytest.mark.parametrize("name", SHIPPED)
def test_a_recipe_holds_and_says_why_for_each_of_its_values(name: str) -> None:
    recipe = load_recipe(name)
    assert set(recipe.why) == set(recipe.values())
    assert all(len(text) > 9 for text in recipe.why.values())
    assert name.endswith(f"-{recipe.nodes}x")
    assert "kv_cache_memory_bytes" in recipe.serving or recipe.serving["gpu_memory_utilization"] <= HIGH_UTILIZATION
    assert recipe.weights.bytes and recipe.sources
    assert {proof.backend for proof in recipe.proven} <= {"ray", "mp", "none"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_reason_is_not_cut_short_by_a_comment(name: str) -> None:
    # In YAML a number sign behind a space ends a plain text.
    assert re.findall(r"^[^#\n]* #.*$", recipe_files()[name].read_text(), re.MULTILINE) == []


@pytest.mark.parametrize("name", SHIPPED)
def test_a_recipe_fits_the_sparks_that_it_is_for(name: str) -> None:
    settings, recipe, model = settings_with(name), load_recipe(name), model_of(name)
    group = settings.groups["main"]
    assert recipe.weights.bytes is not None
    totals = dict.fromkeys(group.nodes, SPARK)
    assert len(totals) == recipe.nodes
    found: list[Finding] = [
        *parallel_findings("main", group, model),
        *memory_findings(settings, "main", model, recipe.weights.bytes, totals),
        *load_findings(settings, "main", recipe.weights.bytes, recipe.weights.bytes // 10, totals),
    ]
    assert [finding.line for finding in found] == []
    plan = plan_memory(settings, group, model, recipe.weights.bytes, SPARK)
    assert plan.cache > 0
    assert model.architectures
    if model.layers is not None:
        assert plan.one_sequence is not None
        assert group.serving.max_model_len is not None and model.max_positions is not None
        assert group.serving.max_model_len <= model.max_positions


def test_what_an_owner_saw_of_minimax_follows_from_its_metadata() -> None:
    name = "minimax-m2.7-awq-2x"
    weights = load_recipe(name).weights.bytes or 0
    whole = settings_with(name, serving={"max_model_len": 196608})
    plan = plan_memory(whole, whole.groups["main"], model_of(name), weights, SPARK)
    assert plan.one_sequence is not None
    # "23.25 GiB KV cache is needed, which is larger than the available KV cache memory (22.5 GiB)"
    assert round(plan.one_sequence / GIB, 2) == 23.25
    assert round(plan.cache / GIB, 1) == 22.5
    findings = memory_findings(whole, "main", model_of(name), weights, {"spark-a": SPARK})
    assert [finding.code for finding in findings] == ["memory-fit"]
    more = settings_with(name, serving={"max_model_len": 196608, "gpu_memory_utilization": 0.85})
    assert memory_findings(more, "main", model_of(name), weights, {"spark-a": SPARK}) == []


def test_mamba_layers_keep_a_state_and_their_experts_nothing() -> None:
    model = model_of("nemotron-3-super-nvfp4-2x")
    assert (model.full_layers, model.linear_layers, model.layers) == (8, 40, 88)
    assert model.token_bytes(2, "fp8") == 2 * 8 * 1 * 128
    assert model.linear_state_bytes == 128 * 64 * 128 * 4 + 3 * (128 * 64 + 2 * 8 * 128) * 2


@pytest.mark.parametrize("name", SHIPPED)
def test_a_recipe_is_the_same_deployment_as_its_settings_written_out(name: str) -> None:
    recipe = load_recipe(name)
    short = settings_with(name)
    raw = stack_with(name, recipe.nodes)
    del raw["groups"]["main"]["recipe"]
    long = read_settings(
        {**raw, "groups": {"main": {**raw["groups"]["main"], "model": recipe.model, "serving": recipe.serving}}}
    )
    files = GroupFiles("runtime.pyz", (), dict.fromkeys(short.groups["main"].nodes, "/w"))
    plans = [plan_group(settings, "main", "spark", "sha256:1", files) for settings in (short, long)]
    assert plans[0] == plans[1]
    assert serve_arguments(short.groups["main"].serving)[0] == "--tensor-parallel-size"
    assert digest_of(record_of(short)) == digest_of(record_of(long))


def test_what_the_stack_says_wins() -> None:
    name = "qwen3.5-122b-a10b-fp8-2x"
    serving = {"max_model_len": 32768, "max_num_seqs": None, "port": 8080}
    model = {"served_name": "mine"}
    group = settings_with(name, serving=serving, model=model).groups["main"]
    recipe = load_recipe(name)
    assert (group.serving.max_model_len, group.serving.max_num_seqs, group.serving.port) == (32768, None, 8080)
    assert (group.model.served_name, group.model.source) == ("mine", recipe.model["source"])
    assert group.serving.reasoning_parser == "qwen3"
    [note] = recipe_notes(stack_with(name, 2, serving=serving, model=model))
    assert note.startswith(f"groups.main: {len(recipe.values()) - 3} settings are from the recipe {name} (reported by")
    assert note.endswith("; of the stack instead: model.served_name, serving.max_model_len, serving.max_num_seqs")


def test_maps_are_laid_over_item_by_item_and_lists_as_a_whole(own: Path) -> None:
    raw = stack_with("small-2x", 2, serving={"environment": {"B": "3", "C": "4"}, "extra_args": ["--seed", "2"]})
    serving = read_settings(raw).groups["main"].serving
    assert serving.environment == {"A": "1", "B": "3", "C": "4"}
    assert serving.extra_args == ("--seed", "2")
    assert "of the stack instead: serving.environment.B, serving.extra_args" in recipe_notes(raw)[0]
    assert over({"a": {"b": 1}}, {"a": None}) == {"a": None}
    assert over({"a": {"b": 1}}, "text") == "text"


def test_a_recipe_that_there_is_not_is_named_with_the_nearest() -> None:
    assert refused(stack_with("qwen3.5-122b-fp8-2x", 2)) == [
        "groups.main.recipe: expected the name of a recipe, found 'qwen3.5-122b-fp8-2x'; "
        "did you mean qwen3.5-122b-a10b-fp8-2x?"
    ]
    [line] = refused(stack_with("zzzz", 2))
    assert line.startswith("groups.main.recipe: expected the name of a recipe, found 'zzzz'; there are glm-")


@pytest.mark.parametrize("name", ["../own", "a/b", "", "/etc/passwd", "own/small-2x"])
def test_a_recipe_s_name_is_no_path(name: str) -> None:
    assert any(line.startswith("groups.main.recipe: ") for line in refused(stack_with(name, 2)))


def test_violations_name_the_recipe_that_a_value_came_from(own: Path) -> None:
    path = own / "own" / "small-2x.yaml"
    assert refused(stack_with("small-2x", 3)) == [
        "groups.main.serving: found tensor_parallel_size 2 times pipeline_parallel_size 1 = 2 ranks, expected 3, one "
        "for each node's GPU (the recipe small-2x is for 2 nodes)"
    ]
    with_port = stack_with("small-2x", 2, serving={"environment": {"HF_TOKEN": "hf_secretsecretsecret"}})
    [line] = refused(with_port)
    assert line.startswith("groups.main.serving.environment: HF_TOKEN would show in docker inspect")
    assert "secretsecret" not in line and "recipe" not in line
    path.write_text(path.read_text().replace("seed", "port"))
    [line] = refused(stack_with("small-2x", 2))
    assert line == (
        "groups.main.recipe: recipes/own/small-2x.yaml: expected a recipe, found serving.extra_args: "
        "--port is rendered by the program; use serving.port"
    )


def test_other_violations_are_told_beside_a_recipe_that_there_is_not() -> None:
    raw = stack_with("nothing-like-it", 2)
    raw["nodes"][0]["user"] = 5
    lines = refused(raw)
    assert len(lines) == 2
    assert lines[0].startswith("groups.main.recipe:") and lines[1].startswith("nodes[0].user:")


def test_groups_of_another_shape_are_left_to_the_validation() -> None:
    shapes: list[Any] = [
        [],
        "main",
        {"main": []},
        {"main": {"recipe": 5, "nodes": ["spark-a"]}},
        {"main": {"recipe": None}},
    ]
    for groups in shapes:
        raw = load_base() | {"groups": groups}
        assert refused(raw)
        assert recipe_notes(raw) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"why": {}}, "why: found none for model.served_name"),
        ({"nodes": 3}, "serving: found 2 ranks, expected 3, one for each node"),
        ({"serving": {"tensor_parallel_size": 2, "port": 80}}, "serving.port: belongs to the stack"),
        ({"serving": {"tensor_paralel_size": 2}}, "serving.tensor_paralel_size: Extra inputs are not permitted"),
        ({"model": {"source": "x", "served_name": "y"}}, "model.source: must be hf://"),
        ({"sources": []}, "sources: "),
        ({"secret": 1}, "secret: "),
        ({"date": "yesterday"}, "date: "),
    ],
)
def test_a_recipe_file_that_does_not_hold_is_refused(own: Path, change: dict[str, Any], says: str) -> None:
    path = own / "own" / "small-2x.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(SparkError) as error:
        load_recipe("small-2x")
    assert error.value.where == "recipes/own/small-2x.yaml"
    assert says in error.value.what


@pytest.mark.parametrize("text", ["a: [", "- 1", "", "\x00", "a: !!python/object:os.system 1"])
def test_a_recipe_file_that_is_none_is_refused_without_a_trace(own: Path, text: str) -> None:
    (own / "own" / "small-2x.yaml").write_text(text)
    with pytest.raises(SparkError) as error:
        load_recipe("small-2x")
    assert error.value.what.startswith("expected a recipe")


def test_a_recipe_says_nothing_of_a_site() -> None:
    known = set(ServingSettings.model_fields)
    assert known >= OF_THE_SITE
    ports = {name for name in known if name.endswith("_port")} | {"port", "host", "api_key", "mounts"}
    assert ports <= OF_THE_SITE


def test_the_record_holds_what_a_recipe_gave_and_not_its_name() -> None:
    settings = settings_with("gpt-oss-120b-1x")
    record = record_of(settings)
    assert "recipe" not in record["groups"]["main"]
    again = read_settings(record)
    assert again.groups["main"].serving == settings.groups["main"].serving
    assert differing_keys(record, record_of(again)) == []


def test_every_recipe_is_a_recipe_by_its_model() -> None:
    fields = set(Recipe.model_fields)
    assert fields >= {"sources", "date", "proven", "why", "weights"}
    for name in SHIPPED:
        assert set(yaml.safe_load(recipe_files()[name].read_text())) <= fields
