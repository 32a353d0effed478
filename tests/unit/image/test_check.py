"""What the answers from inside the image mean, and how they are got and remembered."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from spark_core.group import GroupFiles, plan_group
from spark_core.image.check import (
    CheckReport,
    CheckSpec,
    architectures_of,
    check_findings,
    check_spec,
    check_words,
    question_of,
    run_check,
)
from spark_core.settings import Settings, read_settings
from spark_core.transport.base import Command, Result
from tests.config_cases import apply_change, load_base
from tests.scripted_transport import ScriptedTransport
from tests.unit.image.conftest import Site

IMAGE = "sha256:" + "a" * 64
SPEC = CheckSpec(IMAGE, ("--max-model-len", "512"), ("Qwen3ForCausalLM",), {"reasoning": "qwen3"})
ANSWER: dict[str, Any] = {
    "python": "3.12.3",
    "machine": "aarch64",
    "versions": {"vllm": "0.32.0", "ray": "2.60.0", "transformers": "5.19.0", "torch": "2.13.0", "nccl": "2.29.7"},
    "ray_command": True,
    "nccl_files": [],
    "unread": {},
    "ray_requirement": ">=2.48.0",
    "ray_fits": True,
    "nccl_library": "2.29.7",
    "unknown_architectures": [],
    "refused_flags": "",
    "unknown_parsers": {},
}


def settings_of(**changes: Any) -> Settings:
    return read_settings(apply_change(load_base(), {"hardware": "cpu", **changes}))


def answer(**changes: Any) -> dict[str, Any]:
    return {**ANSWER, **changes, "versions": {**ANSWER["versions"], **changes.pop("versions", {})}}


def reports(**changes: Any) -> list[CheckReport]:
    return [CheckReport(node, answer(**changes)) for node in ("spark-a", "spark-b")]


def test_an_image_that_fits_is_no_finding() -> None:
    assert check_findings("main", SPEC, reports()) == []


@pytest.mark.parametrize(
    ("code", "changes", "words"),
    [
        ("vllm-missing", {"versions": {"vllm": None}}, "expected vLLM in image sha256:aaaaaaaaaaaa, found none"),
        ("ray-missing", {"versions": {"ray": None}, "ray_fits": None}, "found no Ray"),
        ("ray-missing", {"ray_command": False}, "found Ray 2.60.0 without the command `ray`"),
        ("ray-unsupported", {"ray_fits": False}, "expected Ray >=2.48.0 for vLLM 0.32.0, found 2.60.0"),
        (
            "architecture-unknown",
            {"unknown_architectures": ["NewForCausalLM"]},
            "expected an architecture that vLLM 0.32.0 knows, found NewForCausalLM",
        ),
        (
            "flag-refused",
            {"refused_flags": "unrecognized arguments: --no-such"},
            "expected arguments that vLLM 0.32.0 takes, found: unrecognized arguments: --no-such",
        ),
        (
            "parser-unknown",
            {"unknown_parsers": {"reasoning": "not found"}, "refused_flags": "invalid reasoning parser"},
            "expected a parser that vLLM 0.32.0 knows, found qwen3 (not found)",
        ),
        ("nccl-config-baked", {"nccl_files": ["/etc/nccl.conf"]}, "found /etc/nccl.conf, which NCCL reads"),
        ("image-unreadable", {"unread": {"refused_flags": "ImportError: moved"}}, "found: ImportError: moved"),
    ],
)
def test_what_does_not_fit_is_told_once_with_its_nodes(code: str, changes: dict[str, Any], words: str) -> None:
    [found] = check_findings("main", SPEC, reports(**changes))
    assert found.code == code
    assert words in found.what
    assert found.where.startswith("spark-a, spark-b (")


def test_without_ray_as_backend_no_ray_is_needed() -> None:
    spec = replace(SPEC, backend="mp")
    assert check_findings("main", spec, reports(versions={"ray": None}, ray_command=False)) == []


def test_a_model_with_code_of_its_own_may_bring_its_architecture() -> None:
    spec = replace(SPEC, trust_remote_code=True)
    [found] = check_findings("main", spec, reports(unknown_architectures=["NewForCausalLM"]))
    assert (found.code, found.severity) == ("architecture-unknown", "warn")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions": {"ray": "2.59.0"}}, "expected the same ray on all nodes, found spark-a 2.60.0, spark-b 2.59.0"),
        ({"python": "3.12.4"}, "expected the same python on all nodes, found spark-a 3.12.3, spark-b 3.12.4"),
        ({"nccl_library": "2.28.9"}, "expected the same nccl on all nodes, found spark-a 2.29.7, spark-b 2.28.9"),
    ],
)
def test_versions_that_differ_between_nodes_are_told_with_both(changes: dict[str, Any], words: str) -> None:
    [found] = check_findings(
        "main", SPEC, [CheckReport("spark-a", answer()), CheckReport("spark-b", answer(**changes))]
    )
    assert (found.code, found.what) == ("image-versions-differ", words)


def test_a_container_that_failed_is_told_with_its_last_words() -> None:
    [found] = check_findings("main", SPEC, [CheckReport("spark-a", error="exit status 127: no python3")])
    assert (found.code, found.where) == ("image-check-failed", "spark-a (image)")
    assert "found: exit status 127: no python3" in found.what


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (Result(137, "\n", ""), "killed, as over its bound of 4096 MiB"),
        (Result(124, "", ""), "no end within 300 s"),
        (Result(127, "", 'exec: "python3": executable file not found\n'), "exit status 127: exec:"),
        (Result(0, "no json\n", ""), "exit status 0"),
        (Result(0, "{}\n", ""), "exit status 0"),
    ],
)
def test_an_end_without_an_answer_says_how_it_ended(result: Result, words: str) -> None:
    settings = settings_of()
    [container, *_] = containers(settings)
    report = run_check(ScriptedTransport("spark-a", lambda _: result), "/root", SPEC, container, ["image"], "yes")
    assert report is not None
    assert report.error.startswith(words)


def containers(settings: Settings) -> list[Any]:
    files = GroupFiles("hash/runtime.pyz", (), dict.fromkeys(settings.groups["main"].nodes, "/weights"))
    return list(plan_group(settings, "main", "dev", IMAGE, files).containers)


def test_the_container_is_bounded_and_sees_neither_weights_nor_key_nor_state() -> None:
    settings = settings_of(**{"groups.main.serving.mounts": [{"source": "/opt/libs", "target": "/libs"}]})
    words = check_words(settings, "main", containers(settings)[0], IMAGE)
    assert words[words.index("--memory") + 1] == "4096m"
    assert [word for word in words if word.startswith("type=bind")] == [
        "type=bind,source=/opt/libs,target=/libs,readonly"
    ]
    assert words[words.index("--entrypoint") + 1] == "python3"
    assert words[words.index("--entrypoint") + 2] == IMAGE


def test_the_question_changes_with_whatever_decides_the_answer_and_with_nothing_else() -> None:
    settings = settings_of()
    first = question_of(settings, "main", ["A"], containers(settings))
    assert question_of(settings, "main", ["A"], containers(settings)) == first
    assert question_of(settings, "main", ["B"], containers(settings)) != first
    for change in ({"groups.main.serving.max_model_len": 77}, {"groups.main.serving.environment": {"A": "1"}}):
        other = settings_of(**change)
        assert question_of(other, "main", ["A"], containers(other)) != first


def test_the_spec_follows_from_settings_and_model() -> None:
    settings = settings_of(**{"groups.main.serving.reasoning_parser": "qwen3"})
    spec = check_spec(settings, "main", IMAGE, architectures_of('{"architectures": ["A"], "model_type": "a"}'))
    assert spec.architectures == ("A",)
    assert spec.parsers["reasoning"] == "qwen3"
    assert "--reasoning-parser" in spec.arguments
    assert architectures_of("") == architectures_of("no json") == ()


def test_an_answer_is_remembered_and_a_look_that_leaves_nothing_remembers_none(site: Site) -> None:
    settings = settings_of(**{"image": {"local_id": site.image_id}})
    [container, *_] = containers(settings)
    words = check_words(settings, "main", container, site.image_id)
    spec = replace(SPEC, image_id=site.image_id)
    node, root = site["a"], str(site["a"].base / "root")
    assert run_check(node, root, spec, container, words, "cached") is None
    asked = run_check(node, root, spec, container, words, "no")
    assert asked is not None
    assert asked.answer["python"]
    assert run_check(node, root, spec, container, words, "cached") is None
    assert run_check(node, root, spec, container, words, "yes") == asked
    runs = (node.base / "docker-calls").read_text().count("\nrun ") + 1
    assert run_check(node, root, spec, container, words, "cached") == asked
    assert run_check(node, root, spec, container, words, "yes") == asked
    assert (node.base / "docker-calls").read_text().count("\nrun ") + 1 == runs


def test_the_question_of_vllm_reaches_the_program_on_standard_input() -> None:
    seen: list[Command] = []

    def ask(cmd: Command) -> str:
        seen.append(cmd)
        return json.dumps(ANSWER)

    settings = settings_of()
    report = run_check(ScriptedTransport("spark-a", ask), "/root", SPEC, containers(settings)[0], ["image"], "yes")
    assert report == CheckReport("spark-a", ANSWER)
    assert json.loads(seen[0].stdin)["arguments"] == ["--max-model-len", "512"]
