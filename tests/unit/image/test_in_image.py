"""The program that runs in the image, with packages that stand for vLLM and Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parents[3] / "spark_runtime" / "image" / "in_image.py"
CLI = """
import argparse
def make_arg_parser(parser):
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--reasoning-parser")
    return parser
def validate_parsed_serve_args(args):
    if args.max_model_len == 13:
        raise TypeError("13 is not allowed")
"""
PARSERS = """
class {name}:
    @classmethod
    def {method}(cls, name):
        if name != "qwen3":
            raise KeyError(f"{{name}} is not one of: qwen3")
"""
FILES = {
    "vllm/__init__.py": "",
    "vllm/utils/__init__.py": "",
    "vllm/utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser\n",
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/launchers/__init__.py": "",
    "vllm/entrypoints/launchers/cli_args.py": CLI,
    "vllm/reasoning/__init__.py": PARSERS.format(name="ReasoningParserManager", method="get_reasoning_parser"),
    "vllm/tool_parsers/__init__.py": PARSERS.format(name="ToolParserManager", method="get_tool_parser"),
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/models/__init__.py": "",
    "vllm/model_executor/models/registry.py": "class ModelRegistry:\n    get_supported_archs = lambda: {'Known'}\n",
    "vllm-0.32.0.dist-info/METADATA": 'Name: vllm\nVersion: 0.32.0\nRequires-Dist: ray[cgraph]>=2.48.0; extra == "x"\n',
    "ray-2.40.0.dist-info/METADATA": "Name: ray\nVersion: 2.40.0\n",
    "nvidia_nccl_cu13-2.29.7.dist-info/METADATA": "Name: nvidia-nccl-cu13\nVersion: 2.29.7\n",
}


@pytest.fixture
def image(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def look(image: Path, **orders: Any) -> dict[str, Any]:
    asked = {"with_vllm": True, "arguments": [], "architectures": [], "parsers": {}, **orders}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=json.dumps(asked) + "\n",
        env={"PYTHONPATH": str(image / "site"), "HOME": str(image / "home"), "PATH": "/nowhere"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_versions_and_what_they_ask_of_each_other_are_told(image: Path) -> None:
    found = look(image)
    assert found["versions"]["vllm"] == "0.32.0"
    assert found["versions"]["ray"] == "2.40.0"
    assert found["versions"]["nccl"] == "2.29.7"
    assert found["ray_requirement"] == ">=2.48.0"
    assert found["ray_fits"] is False
    assert found["ray_command"] is False
    assert found["unread"] == {}


def test_flags_architectures_and_parsers_are_asked_of_that_very_vllm(image: Path) -> None:
    found = look(
        image,
        arguments=["--max-model-len", "12", "--no-such-flag"],
        architectures=["Known", "New"],
        parsers={"reasoning": "qwen3", "tool_call": "qwen9"},
    )
    assert found["refused_flags"] == "unrecognized arguments: --no-such-flag"
    assert found["unknown_architectures"] == ["New"]
    assert found["unknown_parsers"] == {"tool_call": "qwen9 is not one of: qwen3"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-model-len", "12"], ""),
        (["--max-model-len", "many"], "argument --max-model-len: invalid int value: 'many'"),
        (["--max-model-len", "13"], "13 is not allowed"),
    ],
)
def test_a_bad_value_is_told_in_the_parser_s_own_words(image: Path, arguments: list[str], words: str) -> None:
    assert look(image, arguments=arguments)["refused_flags"] == words


def test_a_configuration_of_nccl_in_the_image_is_found(image: Path) -> None:
    (image / "home").mkdir()
    (image / "home" / ".nccl.conf").write_text("NCCL_IB_DISABLE=1\n")
    assert look(image)["nccl_files"] == [str(image / "home" / ".nccl.conf")]


def test_a_vllm_that_keeps_its_parser_elsewhere_is_told_and_takes_nothing_else_away(image: Path) -> None:
    (image / "site/vllm/entrypoints/launchers/cli_args.py").unlink()
    found = look(image, architectures=["New"])
    assert "refused_flags" not in found
    assert found["unread"]["refused_flags"].startswith("ImportError: vllm.entrypoints.launchers.cli_args: ")
    assert found["unknown_architectures"] == ["New"]


def test_an_import_that_ends_the_program_is_told(image: Path) -> None:
    (image / "site/vllm/model_executor/models/registry.py").write_text("raise SystemExit('no device')\n")
    assert look(image)["unread"]["unknown_architectures"] == "SystemExit: no device"


def test_an_image_without_vllm_is_asked_nothing_of_it(image: Path) -> None:
    (image / "site/vllm-0.32.0.dist-info/METADATA").unlink()
    found = look(image)
    assert found["versions"]["vllm"] is None
    assert "refused_flags" not in found
