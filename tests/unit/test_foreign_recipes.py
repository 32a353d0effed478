"""Recipe files of sparkrun and of eugr's tool: what becomes of each key, and that no secret is shown or kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from spark_core.errors import SparkError
from spark_core.fit import HIGH_UTILIZATION
from spark_core.foreign_recipes import Reading, read_foreign, recipe_of
from spark_core.foreign_recipes.account import VERDICTS
from spark_core.foreign_recipes.document import read_document
from spark_core.foreign_recipes.reading import KNOWN
from spark_core.foreign_recipes.secrets import is_secret_name, looks_secret
from spark_core.foreign_recipes.words import Word, filled, statements
from spark_core.settings import ModelSettings, ServingSettings
from spark_core.settings.recipe import OF_THE_SITE, Recipe

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "foreign-recipes"
FILES = sorted(path.name for path in FOLDER.iterdir())
MARKER = "Zz9secret"
"""Part of every secret in the files."""


def read(name: str) -> Reading:
    return read_foreign((FOLDER / name).read_text(), name)


def read_value(value: dict[Any, Any]) -> Reading:
    return read_foreign(yaml.safe_dump(value), "test.yaml")


def command(text: str, **more: Any) -> Reading:
    return read_value({"model": "org/model", "container": "a/b:1", "command": text, **more})


def told(reading: Reading, place: str) -> tuple[str, str]:
    [entry] = [entry for entry in reading.entries if entry.place == place]
    return entry.verdict, entry.text


def places_of(value: Any, prefix: str = "") -> list[str]:
    """The place of every value, by another walk than the one of the program; plain keys only."""
    if isinstance(value, dict) and value:
        return [place for key, item in value.items() for place in places_of(item, f"{prefix}.{key}" if prefix else key)]
    if isinstance(value, list) and value:
        return [place for index, item in enumerate(value) for place in places_of(item, f"{prefix}[{index}]")]
    return [prefix]


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_a_file_is_accounted_for_once(name: str) -> None:
    reading = read(name)
    wanted = places_of(yaml.safe_load((FOLDER / name).read_text()))
    found = [entry.place for entry in reading.entries]
    assert sorted(set(wanted) - set(found)) == []
    assert len(found) == len(set(found))
    assert all(entry.text for entry in reading.entries)


@pytest.mark.parametrize("name", FILES)
def test_every_word_of_a_command_is_accounted_for(name: str) -> None:
    text = yaml.safe_load((FOLDER / name).read_text()).get("command") or ""
    reading = read(name)
    flags = {word.split("=")[0] for word in text.split() if word.startswith("-") and not word.startswith("-]")}
    serves = [] if reading.obstacles else [flag for flag in flags if flag not in ("-m", "-p")]
    accounted = " ".join(entry.place for entry in reading.entries)
    assert [flag for flag in serves if f"command: {flag}" not in accounted] == []


@pytest.mark.parametrize("name", FILES)
def test_no_secret_of_a_file_is_shown_or_kept(name: str) -> None:
    text = (FOLDER / name).read_text()
    reading = read(name)
    everything = [repr(reading.entries), json.dumps([reading.model, reading.serving]), reading.summary]
    everything += [reading.container, *reading.obstacles]
    if not reading.obstacles:
        everything.append(recipe_of(reading, name, "2026-12-01").model_dump_json())
    assert MARKER not in " ".join(everything)
    assert (MARKER in text) == (name in ("eugr-cluster.yaml", "sparkrun-hooks.yaml"))


@pytest.mark.parametrize("name", FILES)
def test_a_file_for_vllm_becomes_a_recipe_that_says_where_each_value_is_from(name: str) -> None:
    reading = read(name)
    if reading.obstacles:
        assert name in ("sparkrun-gguf.yaml", "sparkrun-sglang.yaml")
        with pytest.raises(SparkError, match=f"^{name}: expected a recipe for vLLM, found: it is for another server"):
            recipe_of(reading, name, "2026-12-01")
        return
    recipe = recipe_of(reading, name, "2026-12-01")
    assert recipe.proven == () and recipe.sources[0].title == name
    assert all(name in text for text in recipe.why.values())
    assert not OF_THE_SITE & set(recipe.serving)
    assert Recipe.model_validate(yaml.safe_load(yaml.safe_dump(recipe.model_dump(mode="json")))) == recipe
    assert ServingSettings.model_validate(recipe.serving).world_size == recipe.nodes


def test_eugr_s_form() -> None:
    reading = read("eugr-cluster.yaml")
    assert reading.tool == "eugr"
    assert reading.model == {"source": "hf://test-org/Test-MoE-FP8@main", "served_name": "Test-MoE-FP8"}
    assert reading.serving == {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": HIGH_UTILIZATION,
        "max_model_len": 128000,
        "max_num_seqs": 10,
        "enable_prefix_caching": False,
        "kv_cache_dtype": "fp8",
        "trust_remote_code": True,
        "tool_call_parser": "qwen3_coder",
        "reasoning_parser": "qwen3",
        "enable_auto_tool_choice": True,
        "backend": "ray",
        "load_format": "instanttensor",
        "environment": {"VLLM_TEST_FLAG": "1", "VLLM_TEST_SWITCH": "True"},
        "extra_args": [
            *("--cudagraph-capture-sizes", "5", "10", "15", "-cc.mode", "0"),
            *("--speculative-config", '{"method":"mtp","num_speculative_tokens":3}'),
        ],
    }
    assert told(reading, "command: --gpu-memory-utilization")[0] == "changed"
    assert told(reading, "defaults.not_used")[0] == "left out"
    assert told(reading, "mods[0]")[0] == "left out"
    assert told(reading, "env.NCCL_IB_HCA") == ("left out", "a value of each node, which follows from nodes[].fabric")


def test_eugr_s_form_for_one_node_is_for_one_whatever_its_command_says() -> None:
    reading = read("eugr-solo.yml")
    assert (reading.nodes, reading.serving["backend"]) == (1, "mp")
    assert told(reading, "command: -tp") == (
        "changed",
        "serving.tensor_parallel_size: 1, since it is for one node only",
    )
    assert told(reading, "container (said twice)")[0] == "changed"
    assert reading.container == "vllm-node-other"
    assert told(reading, "command: --quantization") == ("not understood", "the file has no value for quant")
    assert reading.serving["gpu_memory_utilization"] == HIGH_UTILIZATION


def test_sparkrun_s_form_with_a_template() -> None:
    reading = read("sparkrun-template.yaml")
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert reading.tool == "sparkrun"
    assert reading.model == {"source": f"hf://test-org/Test-MoE-NVFP4@{commit}", "served_name": "test-moe"}
    assert reading.serving["extra_args"][1] == '{"method": "mtp", "num_speculative_tokens": 2}'
    assert json.loads(reading.serving["extra_args"][3])["custom_ops"] == ["all"]
    assert (reading.serving["shm_size_mib"], reading.serving["backend"], reading.nodes) == (20480, "mp", 2)
    assert "max_model_len" not in reading.serving
    assert reading.summary == "A test model, in two lines"


def test_sparkrun_s_form_without_a_command() -> None:
    reading = read("sparkrun-defaults.yaml")
    assert reading.serving["backend"] == "ray"
    assert reading.serving["enable_prefix_caching"] is True
    assert reading.serving["extra_args"] == ["--enable-chunked-prefill", "--max-num-seqz", "4"]
    assert told(reading, "defaults.served_model_name[0]") == ("not understood", "expected one value")


def test_what_would_run_something_is_never_taken() -> None:
    reading = read("sparkrun-hooks.yaml")
    places = ("pre_exec[0]", "pre_exec[1].copy", "post_exec[0]", "post_commands[0]", "mods[1]", "builder")
    assert {told(reading, place)[0] for place in places} == {"left out"}
    assert reading.model["source"] == "node:/data/models/test"
    assert reading.container == ""  # it holds a password
    assert told(reading, "enviroment.A")[0] == "not understood"
    assert reading.serving["environment"] == {"VLLM_OK": "yes"}


def test_a_script_is_read_up_to_what_a_shell_would_do() -> None:
    reading = read("shell.yaml")
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert reading.model == {"source": f"hf://test-org/Test-Script@{commit}", "served_name": "one"}
    assert reading.serving["environment"] == {"VLLM_SCRIPT_FLAG": "1", "OMP_NUM_THREADS": "4"}
    assert reading.serving["extra_args"] == ["--dtype", "auto"]
    assert told(reading, "command: --seed")[0] == "left out"
    joined = [entry.text for entry in reading.entries if "joined to the one before" in entry.text]
    assert joined == ["joined to the one before by the shell, of 2 words; no shell of a recipe is run"]


@pytest.mark.parametrize(
    ("words", "place", "verdict", "serving"),
    [
        ("--max-model-len 32K", "--max-model-len", "taken", {"max_model_len": 32768}),
        ("--max-model-len 1.5m", "--max-model-len", "taken", {"max_model_len": 1500000}),
        ("--max-model-len -1", "--max-model-len", "left out", {}),
        ("--gpu-memory-utilization 0.5", "--gpu-memory-utilization", "taken", {"gpu_memory_utilization": 0.5}),
        ("--gpu-memory-utilization 90", "--gpu-memory-utilization", "changed", {"gpu_memory_utilization": 0.85}),
        ("--kv-cache-memory-bytes 2G", "--kv-cache-memory-bytes", "taken", {"kv_cache_memory_bytes": "2G"}),
        ("--load-format nosuch", "--load-format", "left out", {}),
        ("--chat-template /app/t.jinja", "--chat-template", "taken", {"chat_template": "/app/t.jinja"}),
        ("--distributed-executor-backend uni", "--distributed-executor-backend", "not understood", {}),
        ("--data-parallel-size 1", "--data-parallel-size", "information", {}),
        ("-dp 2", "-dp", "not understood", {}),
        ("--master-addr 10.0.0.1", "--master-addr", "left out", {}),
        ("--middleware a.b", "--middleware", "left out", {}),
        ("--tokenizer org/other", "--tokenizer", "left out", {}),
        ("--environment A=1", "--environment", "not understood", {}),
        ("--seed $SEED", "--seed", "left out", {}),
        ("--seed `date`", "--seed", "left out", {}),
        ("--seed {nothing}", "--seed", "not understood", {}),
        ("--trust-remote-code --seed 1", "--seed", "taken", {"trust_remote_code": True, "extra_args": ["--seed", "1"]}),
        ("--enforce-eager yes", "model (2)", "not understood", {"enforce_eager": True}),
        ("--reasoning-parser", "--reasoning-parser", "not understood", {}),
        ("--hf-overrides '{\"a\": 1}'", "--hf-overrides", "taken", {"extra_args": ["--hf-overrides", '{"a": 1}']}),
        ("--ssl-keyfile-password x", "--ssl-keyfile-password", "left out", {}),
        ("--seed hf_Abcdefgh12345678", "--seed", "left out", {}),
        (
            "--speculative_config.method mtp",
            "--speculative_config.method",
            "taken",
            {"extra_args": ["--speculative_config.method", "mtp"]},
        ),
        ('--speculative-config \'{"model": "a/b"}\'', "--speculative-config", "left out", {}),
        ("--speculative-config mtp", "--speculative-config", "left out", {}),
        ("-O3", "-O3", "taken", {"extra_args": ["-O3"]}),
        ("--Zz9Secret", "(a flag)", "not understood", {}),
        ("--max-num-seqs 4 --max-num-seqs 8", "--max-num-seqs (2)", "taken", {"max_num_seqs": 8}),
        ("--max-num-seqs 4 --max-num-seqs 8", "--max-num-seqs", "left out", {"max_num_seqs": 8}),
    ],
)
def test_what_a_flag_means(words: str, place: str, verdict: str, serving: dict[str, Any]) -> None:
    reading = command(f"vllm serve org/model {words}")
    assert told(reading, f"command: {place}")[0] == verdict
    assert {key: value for key, value in reading.serving.items() if key != "backend"} == serving


@pytest.mark.parametrize(
    ("value", "obstacle"),
    [
        ({"model": "org/m", "runtime": "trtllm", "container": "c"}, "it is for another server than vLLM"),
        ({"model": "org/m", "recipe_version": "1", "container": "c"}, "it has no command"),
        ({"model": "org/m", "command": "echo"}, "its command does not start vllm serve"),
        ({"model": "org/m", "command": "cat x | vllm serve org/m"}, "its command does not start vllm serve"),
        ({"model": "org/m", "command": "vllm serve 'x"}, "its command cannot be read"),
        ({"model": "org/m", "command": ["vllm", "serve"]}, "its command is no text"),
        ({"model": "m", "command": "vllm serve m"}, "it names no model of the hub and no path of the nodes"),
        ({"command": "vllm serve /model"}, "it names no model of the hub and no path of the nodes"),
        (
            {"model": "org/m", "defaults": {"a": "{a}{a}" * 9999}, "command": "vllm serve x {a}"},
            "its command cannot be read",
        ),
    ],
)
def test_what_cannot_be_served_here_is_told_and_still_accounted_for(value: dict[str, Any], obstacle: str) -> None:
    reading = read_value(value)
    assert obstacle in reading.obstacles
    assert set(places_of(value)) <= {entry.place for entry in reading.entries}
    with pytest.raises(SparkError):
        recipe_of(reading, "x.yaml", "2026-12-01")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- a\n- b\n",
        "just text",
        "a: [",
        "a: !!python/object/apply:os.system ['true']",
        "a: 2026-99-99",
        "? [a, b]\n: c",
        "a: &x [*x]",
        "\x00",
        "---\na: 1\n---\nb: 2\n",
        "a: " + "[" * 3000 + "]" * 3000,
        "a: " + "[" * 40 + "]" * 40,
        "a: &a [1,1,1,1,1,1,1,1,1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
        "d: [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]",
        "x" * 300000,
    ],
)
def test_what_is_no_recipe_is_refused_in_one_line_without_its_text(text: str) -> None:
    with pytest.raises(SparkError) as error:
        read_foreign(text + "\n# Zz9secret", "odd.yaml")
    assert error.value.render().count("\n") == 0
    assert "odd.yaml: expected" in error.value.line
    assert "Zz9" not in error.value.line and "os.system" not in error.value.line


_KEYS = st.sampled_from(sorted(KNOWN)) | st.text("abcdefg_", min_size=1, max_size=8)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-5, 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["{port}", "$X", "1", "vllm serve org/m --seed {port}", "0.8", "'", '"', "\\", "org/m", "a/b:1"])
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(_KEYS, _VALUES, min_size=1, max_size=10))
@example({"defaults": {"model": "x"}, "model": None, "command": "vllm serve {model}"})
@example({"env": {"A": None, "B": {}, "C": [1]}, "executor_config": 5, "metadata": []})
def test_every_key_of_any_file_is_accounted_for(value: dict[str, Any]) -> None:
    reading = read_value(value)
    found = [entry.place for entry in reading.entries]
    assert set(places_of(value)) <= set(found)
    assert len(found) == len(set(found))
    assert {entry.verdict for entry in reading.entries} <= set(VERDICTS)
    ServingSettings.model_validate(reading.serving)
    if not reading.obstacles:
        ModelSettings.model_validate(reading.model)
        assert recipe_of(reading, "x.yaml", "2026-12-01").nodes == reading.nodes
    for entry in reading.entries:  # what is said to have become a setting is one
        if entry.setting.startswith("serving.") and entry.setting != "serving.backend":
            key, _, item = entry.setting.removeprefix("serving.").partition(".")
            assert key in reading.serving
            assert not item or item in reading.serving[key]


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.one_of(st.text(max_size=6), st.booleans(), st.integers(), st.none()), _SCALARS, min_size=1))
def test_keys_of_any_kind_have_places_of_their_own(value: dict[Any, Any]) -> None:
    text = yaml.safe_dump(value, allow_unicode=True)
    try:
        document = read_document(text, "x")
    except SparkError:
        return  # a text that YAML itself does not give back
    assert len(document.leaves) == len(document.value)
    assert set(document.leaves) <= {entry.place for entry in read_foreign(text, "x").entries}


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(
        ["env.HF_TOKEN", "env.MY_API_KEY", "pre_exec[]", "post_commands[]", "notes", "defaults.hf_token", "container"]
    ),
    st.text("abcdefXYZ0123456789", min_size=10, max_size=20),
)
def test_a_secret_at_any_place_is_neither_shown_nor_kept(place: str, tail: str) -> None:
    secret = f"hf_X9{tail}"
    key, _, below = place.partition(".")
    value: dict[str, Any] = {"model": "org/m", "defaults": {"tensor_parallel": 1}}
    inner: Any = [secret] if key.endswith("[]") else ({below: secret} if below else f"https://u:{secret}@example.org/x")
    name = key.removesuffix("[]")
    value[name] = {**value.get(name, {}), **inner} if isinstance(inner, dict) else inner
    reading = read_value(value)
    kept = recipe_of(reading, "x.yaml", "2026-12-01").model_dump_json()
    assert tail not in repr(reading.entries) + kept


@given(st.text("ab {}'\"\\$`#\n;|&<>()=-", max_size=40))
def test_any_command_is_read_or_refused(text: str) -> None:
    try:
        found = statements(filled(text, {"a": "1"})[0])
    except ValueError:
        return
    assert all(statement.words or statement.assignments for statement in found)
    assert all(1 <= statement.line <= text.count("\n") + 1 for statement in found)


def test_words_are_those_of_a_shell() -> None:
    text = """A=1 export B='x y'; vllm serve "a b"c \\
  --x='{"k": "v"}' --y=\\$z "$Q" # rest
next one"""
    first, second, third = statements(text)
    assert first.assignments == {"A": Word("1"), "B": Word("x y")}
    assert [word.text for word in second.arguments] == ["a bc", '--x={"k": "v"}', "--y=$z", "$Q"]
    assert [word.expands for word in second.arguments] == [False, False, False, True]
    assert ([word.text for word in third.words], third.line) == (["next", "one"], 3)


def test_braces_are_read_as_each_tool_means_them() -> None:
    assert filled("{a} {{b}} {c}", {"a": 1, "b": 2}) == ("1 {b} {c}", {"a"})
    assert filled('{"a": {a}, "b": {}}', {"a": 1}) == ('{"a": 1, "b": {}}', {"a"})
    assert filled("{a}", {"a": "{b}", "b": "x"}) == ("x", {"a", "b"})
    assert filled("{a}", {"a": "{a}"}) == ("{a}", {"a"})


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "api-key", "MY_SECRET", "db.password", "hf-token", "AUTH", "aws_access_key"]
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["max-num-batched-tokens", "tokenizer-mode", "num_speculative_tokens", "VLLM_KEY_VALUE", "author", "max-tokens"],
)
def test_other_names_are_not_taken_for_secrets(name: str) -> None:
    assert not is_secret_name(name)


def test_forms_of_secrets_are_known() -> None:
    for text in ("hf_Ab1cdefghij", "Bearer abcdefgh", "https://u:pw@x", "AKIAABCDEFGHIJKLMNOP", "password=hunter22"):
        assert looks_secret(text)
    for text in ("hf_overrides", "sk-learn-models", "expandable_segments:True", "https://example.org/x", "org/model"):
        assert not looks_secret(text)
