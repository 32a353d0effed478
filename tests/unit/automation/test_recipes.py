"""``use``, ``stage``, ``recipes`` and ``import-recipe``: what they write, and that they write nothing else."""

from __future__ import annotations

import argparse
import difflib
import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from automation import stage, up
from automation.__main__ import main
from automation.exit_codes import CommandEnd, Exit
from automation.recipe_edit import told, with_recipe
from automation.reports import StageReport
from automation.schemas import schema_of
from automation.stack_file import CONFIG_FILE_VARIABLE, PROJECT, StackFile
from spark_core.errors import SparkError
from spark_core.settings.recipe import load_recipe, recipe_files

RECIPE = "qwen3.5-122b-a10b-fp8-2x"
OTHER = "minimax-m2.7-awq-2x"
FOREIGN = PROJECT / "tests" / "fixtures" / "foreign-recipes"
BASE = (PROJECT / "Pulumi.spark.yaml").read_text()


def stack(text: str) -> StackFile:
    return StackFile("spark", Path("Pulumi.spark.yaml"), "spark-vllm", text)


def written(group: str, newline: str = "\n") -> str:
    """The reference stack with another text of its group."""
    head = BASE[: BASE.index("  spark-vllm:groups:")]
    return (head + "  spark-vllm:groups:\n" + group).replace("\n", newline)


def differing(before: str, after: str) -> list[str]:
    return [
        line
        for line in difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
        if not line.startswith(("---", "+++", "@@"))
    ]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stack's file of its own, which the commands then take."""
    path = tmp_path / "Pulumi.spark.yaml"
    path.write_text(BASE)
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(path))
    return path


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipes in a folder that a test may write into."""
    folder = tmp_path / "recipes"
    shutil.copytree(PROJECT / "recipes", folder, ignore=shutil.ignore_patterns("own"))
    monkeypatch.setattr("spark_core.settings.recipe.FOLDER", folder)
    return folder


def test_a_recipe_takes_the_place_of_the_model_and_every_other_line_stays() -> None:
    changed = with_recipe(stack(BASE), RECIPE)
    assert differing(BASE, changed.file.text) == [
        "-      model:",
        "-        source: node:/home/aurora/models/Qwen3.5-122B-A10B-FP8",
        "-        served_name: Qwen3.5-122B-A10B-FP8",
        f"+      recipe: {RECIPE}",
    ]
    group = changed.file.settings().groups["main"]
    assert group.model.source == load_recipe(RECIPE).model["source"]
    assert (group.serving.max_model_len, group.serving.max_num_seqs) == (32768, 8)
    assert changed.taken_out == ("model.source", "model.served_name")
    assert "serving.max_model_len" in changed.kept
    assert any("--drop-overrides" in line for line in told(changed, RECIPE))


def test_overrides_go_on_request_and_what_the_recipe_does_not_say_stays() -> None:
    changed = with_recipe(stack(BASE), RECIPE, drop_overrides=True)
    assert changed.kept == ()
    group = changed.file.settings().groups["main"]
    assert (group.serving.max_model_len, group.serving.gpu_memory_utilization) == (131072, 0.8)
    assert (group.serving.port, group.serving.trust_remote_code) == (30000, True)
    kept = [line for line in BASE.splitlines() if "#" in line]
    assert [line for line in kept if line not in changed.file.text.splitlines()] == []


def test_another_recipe_takes_the_place_of_the_one_before() -> None:
    first = with_recipe(stack(BASE), RECIPE, drop_overrides=True)
    second = with_recipe(first.file, OTHER)
    assert differing(first.file.text, second.file.text) == [f"-      recipe: {RECIPE}", f"+      recipe: {OTHER}"]
    assert second.file.settings().groups["main"].model.served_name == "MiniMax-M2.7"
    again = with_recipe(second.file, OTHER)
    assert again.file.text == second.file.text


NODES = "nodes: [spark-a, spark-b]"
MODEL = "model: {source: 'hf://a/b@main', served_name: x}"


NAMED = f"recipe: {RECIPE}"


def block(*lines: str, name: str = "main") -> str:
    """A group, its lines below it."""
    return "".join(f"    {line}\n" for line in (f"{name}:", *(f"  {line}" if line else "" for line in lines)))


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("group", "after"),
    [
        (block(NODES, MODEL), block(NODES, NAMED)),
        (block(f"{MODEL} # mine", "# of both", NODES), block(NAMED, "# of both", NODES)),
        (block(NODES), block(NAMED, NODES)),
        (block(NODES, "recipe: 'x' # why", MODEL, name="'main'"), block(NODES, f"{NAMED} # why", name="'main'")),
        (f"    main: {{{NODES}, {MODEL}}}\n", f"    main: {{{NAMED}, {NODES}}}\n"),
        (
            f"    main: {{{MODEL}, serving: {{max_model_len: 1, port: 5}}, recipe: x, {NODES}}}\n",
            f"    main: {{{NAMED}, serving: {{port: 5}}, {NODES}}}\n",
        ),
        (f"    main: {{{NODES}, serving: {{max_model_len: 1}}}}\n", f"    main: {{{NAMED}, {NODES}}}\n"),
        (
            block(NODES, MODEL, "serving: {max_model_len: 1, port: 1234, max_num_seqs: 3}"),
            block(NODES, NAMED, "serving: {port: 1234}"),
        ),
        (
            block(NODES, MODEL, "serving:", "  max_model_len: 1", "  # two", "  max_num_seqs: 3"),
            block(NODES, NAMED),
        ),
        (
            block(
                NODES,
                MODEL,
                "serving:",
                "  max_model_len: 1",
                "",
                "  # a port",
                "  port: 5 # 5",
                "  max_num_seqs: 3",
            ),
            block(NODES, NAMED, "serving:", "", "  # a port", "  port: 5 # 5"),
        ),
        (
            block(NODES, "model:", "  source: >-", "    hf://a/b@main", "", "  served_name: x", "", "notify: {}"),
            block(NODES, NAMED, "", "notify: {}"),
        ),
    ],
)
def test_any_way_of_writing_a_group_is_changed_in_place(group: str, after: str, newline: str) -> None:
    changed = with_recipe(stack(written(group, newline)), RECIPE, drop_overrides=True)
    assert changed.file.text == written(after, newline)
    last = with_recipe(stack(written(group, newline).rstrip()), RECIPE, drop_overrides=True)
    assert yaml.safe_load(last.file.text) == yaml.safe_load(written(after))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (written('    {"main": {"nodes": ["a"]}}\n').replace("groups:\n    ", "groups: '").rstrip() + "'\n", "change"),
        (written("    a: {nodes: [x]}\n    b: {nodes: [y]}\n"), "expected one group in the file"),
        (written("    main: []\n"), "expected one group in the file"),
        ("config: {}\n", "expected one group in the file"),
        (written("    main: &m {nodes: [a], model: {source: x}}\n"), ""),
    ],
)
def test_files_of_another_shape_are_left_alone(text: str, says: str) -> None:
    try:
        changed = with_recipe(stack(text), RECIPE)
    except SparkError as error:
        assert says and says in error.render()
    else:
        assert not says
        assert yaml.safe_load(changed.file.text)["config"]["spark-vllm:groups"]["main"]["recipe"] == RECIPE


def test_use_writes_the_recipe_and_runs_up(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[argparse.Namespace] = []

    def run(options: argparse.Namespace) -> int:
        ran.append(options)
        return 0

    monkeypatch.setattr(up, "up", run)
    assert main(["use", RECIPE, "--stack", "spark", "--yes", "--rollback-on-failure"]) == 0
    [options] = ran
    assert (options.yes, options.rollback_on_failure, options.no_restart, options.retry_failed) == (
        True,
        True,
        False,
        False,
    )
    assert yaml.safe_load(file.read_text())["config"]["spark-vllm:groups"]["main"]["recipe"] == RECIPE


@pytest.mark.parametrize("code", [Exit.REFUSED, Exit.LOCKED, Exit.FAILED])
def test_use_leaves_the_file_as_it_was_if_up_did_not_begin(
    code: Exit, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_options: argparse.Namespace) -> int:
        raise CommandEnd(code, "nothing was changed")

    monkeypatch.setattr(up, "up", refuse)
    assert main(["use", RECIPE, "--stack", "spark"]) == code
    assert file.read_text() == BASE
    assert f"{file} is as it was" in capsys.readouterr().err


@pytest.mark.parametrize("end", [Exit.FAILED, Exit.INTERRUPTED, Exit.ROLLED_BACK])
def test_use_keeps_what_it_wrote_once_up_has_begun(end: Exit, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "up", lambda _options: int(end))
    assert main(["use", RECIPE, "--stack", "spark"]) == end
    assert f"recipe: {RECIPE}" in file.read_text()


@pytest.mark.parametrize("name", ["qwen", "gpt-oss-120b-1x"])
def test_use_writes_nothing_that_could_not_be_used(name: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "up", lambda _options: pytest.fail("up ran"))
    arguments = ["use", name, "--stack", "spark", "--drop-overrides"]
    assert main(arguments) == Exit.FAILED  # no such recipe; or one for another number of nodes
    assert file.read_text() == BASE


def test_stage_takes_a_recipe_as_it_takes_a_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    staged: list[StackFile] = []

    def bring(other: StackFile) -> Any:
        staged.append(other)
        return StageReport(
            command="stage",
            stack="spark",
            exit_code=Exit.DONE,
            settings="x",
            image_id="sha256:1",
            revision="a",
            source="hf://c/d@a",
            nodes=["spark-a"],
        )

    monkeypatch.setattr(stage, "bring_all", bring)
    assert main(["stage", "--stack", "spark", RECIPE, "--drop-overrides"]) == 0
    assert staged[0].settings().groups["main"].serving.max_model_len == 131072
    assert file.read_text() == BASE
    said = capsys.readouterr()
    assert f"to switch: use {RECIPE} --drop-overrides" in said.out
    assert "pin it before the switch" in said.out
    assert f"the recipe {RECIPE}" in said.err
    report = printed("stage", "--stack", "spark", RECIPE, code=Exit.DONE, capsys=capsys)
    assert report["nodes"] == ["spark-a"]
    staged.clear()
    other = file.with_name("other.yaml")
    other.write_text(BASE.replace("32768", "1024"))
    assert main(["stage", "--stack", "spark", str(other)]) == 0
    assert staged[0].settings().groups["main"].serving.max_model_len == 1024
    assert f"to switch: put {other} in place of {file}, then up" in capsys.readouterr().out
    assert main(["stage", "--stack", "spark", "no-such-recipe"]) == Exit.FAILED


def test_recipes_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in recipe_files())
    assert main(["recipes", RECIPE]) == 0
    shown = capsys.readouterr().out
    recipe = load_recipe(RECIPE)
    assert all(text in shown for text in recipe.why.values())
    assert "not run by this project on real Sparks" in shown
    assert main(["recipes", "qwen3.5-122b"]) == Exit.FAILED
    assert "did you mean" in capsys.readouterr().err


def printed(command: str, *words: str, code: Exit, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a command prints with --json, which fits its schema."""
    assert main([command, *words, "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    jsonschema.validate(report, schema_of(command))
    assert report["exit_code"] == code
    return report


def test_recipes_are_documents_too(capsys: pytest.CaptureFixture[str]) -> None:
    all_of_them = printed("recipes", code=Exit.DONE, capsys=capsys)["recipes"]
    assert [entry["name"] for entry in all_of_them] == list(recipe_files())
    [one] = printed("recipes", RECIPE, code=Exit.DONE, capsys=capsys)["recipes"]
    assert (one["file"], one["recipe"]["why"]) == (f"recipes/{RECIPE}.yaml", dict(load_recipe(RECIPE).why))
    none = printed("recipes", "qwen3.5-122b", code=Exit.FAILED, capsys=capsys)
    assert "did you mean" in none["error"]["what"]


def test_an_import_is_a_document_too_also_of_what_cannot_be_served(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(FOREIGN / "eugr-cluster.yaml")
    read = printed("import-recipe", source, code=Exit.DONE, capsys=capsys)
    assert (read["written"], read["error"], read["recipe"]["nodes"]) == (None, None, 2)
    assert {"taken", "left out"} <= {place["verdict"] for place in read["places"]}
    assert not (own / "own").exists()
    kept = printed("import-recipe", source, "--as", "mine", code=Exit.DONE, capsys=capsys)
    assert kept["written"] == "recipes/own/mine.yaml" and (own / "own" / "mine.yaml").is_file()
    again = printed("import-recipe", source, "--as", "mine", code=Exit.FAILED, capsys=capsys)
    assert again["written"] is None and "found that of recipes/own/mine.yaml" in again["error"]["what"]
    other = printed("import-recipe", str(FOREIGN / "sparkrun-sglang.yaml"), code=Exit.FAILED, capsys=capsys)
    assert other["recipe"] is None and "another server than vLLM" in other["error"]["what"]
    assert any(place["place"] == "runtime" for place in other["places"])
    none = printed("import-recipe", "/no/such/file", code=Exit.FAILED, capsys=capsys)
    assert none["error"]["where"] == "/no/such/file"


@pytest.mark.parametrize("name", ["eugr-cluster.yaml", "sparkrun-template.yaml", "shell.yaml", "api-server.yaml"])
def test_an_imported_file_becomes_a_recipe_that_can_be_used(
    name: str, own: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import-recipe", str(FOREIGN / name), "--as", "mine-2x"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{name}, a recipe of ")
    assert "written: recipes/own/mine-2x.yaml" in said
    assert "Zz9secret" not in said + (own / "own" / "mine-2x.yaml").read_text()
    recipe = load_recipe("mine-2x")
    assert recipe.sources[0].title == name
    if recipe.nodes == 2:
        group = with_recipe(stack(BASE), "mine-2x", drop_overrides=True).file.settings().groups["main"]
        assert group.model.source == recipe.model["source"]


def test_nothing_is_written_without_a_name_or_over_a_recipe(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(FOREIGN / "eugr-cluster.yaml")
    assert main(["import-recipe", source]) == 0
    assert "--as NAME writes it" in capsys.readouterr().out
    assert not (own / "own").exists()
    for name, says in (
        (RECIPE, "found that of recipes/qwen3.5"),
        ("../x", "expected a name of small letters"),
        ("Up", "expected a name"),
    ):
        assert main(["import-recipe", source, "--as", name]) == Exit.FAILED
        assert says in capsys.readouterr().err
    assert not (own / "own").exists()
    assert main(["import-recipe", source, "--as", "mine"]) == 0
    assert main(["import-recipe", source, "--as", "mine"]) == Exit.FAILED
    assert "found that of recipes/own/mine.yaml" in capsys.readouterr().err


def test_a_file_that_cannot_be_served_is_told_with_its_account(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-recipe", str(FOREIGN / "sparkrun-sglang.yaml"), "--as", "mine"]) == Exit.FAILED
    said = capsys.readouterr()
    assert "runtime: another server than vLLM" in said.out
    assert "expected a recipe for vLLM, found: it is for another server than vLLM" in said.err
    assert not (own / "own").exists()


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00", b"x" * 2_000_000, b"- 1\n"])
def test_a_file_that_is_no_recipe_is_told_in_one_line(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_bytes(content)
    assert main(["import-recipe", str(path)]) == Exit.FAILED
    assert capsys.readouterr().err.count("\n") == 1
