"""Who may import whom. Each test names the file and the line that breaks the rule."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
PRODUCT = ("spark_core", "spark_runtime", "providers", "components", "automation", "bench")
OURS = {*PRODUCT, "lab", "toolchain", "tests"}
STANDARD = sys.stdlib_module_names

ALLOWED: dict[str, set[str]] = {
    "spark_core": {
        "spark_core",
        "pydantic",
        "pydantic_core",
        "yaml",
    },  # yaml comes with pulumi; recipes are written in it
    "spark_runtime": {"spark_runtime"},
    "providers": {"providers", "spark_core", "pulumi"},
    "components": {"components", "providers", "spark_core", "pulumi", "pulumi_command", "pulumi_docker"},
    "automation": {"automation", "providers", "spark_core", "pulumi", "pydantic", "yaml"},
}
INSIDE_THE_IMAGE = {"ray", "vllm", "torch", "uvicorn", "starlette", "fastapi"}
"""What the rank supervisor may import when it is there, since the serving image has it."""
HUB_CLIENT = "spark_core/hub/image_fetch.py"
"""Runs in the serving image too, sent there as text; it is never imported here."""


def sources(package: str) -> list[Path]:
    return [path for path in sorted((PROJECT / package).rglob("*.py")) if "__pycache__" not in path.parts]


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of each import of a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.relative_to(PROJECT).parts[: -node.level]) if node.level else ""
            yield node.lineno, ".".join(filter(None, [package, node.module or ""]))


def offences(package: str, allowed: set[str]) -> list[str]:
    return [
        f"{path.relative_to(PROJECT)}:{line} imports {module}"
        for path in sources(package)
        for line, module in imports(path)
        if (top := module.split(".")[0]) not in allowed and top not in STANDARD
    ]


@pytest.mark.parametrize("package", ["spark_core", "providers", "components", "automation"])
def test_a_layer_imports_only_what_lies_below_it(package: str) -> None:
    assert sources(package)
    found = offences(package, ALLOWED[package])
    assert [line for line in found if not re.match(rf"{HUB_CLIENT}:\d+ imports huggingface_hub", line)] == []


def test_the_rank_supervisor_needs_nothing_but_the_standard_library_and_what_its_image_serves_with() -> None:
    assert sources("spark_runtime")
    assert offences("spark_runtime", ALLOWED["spark_runtime"] | INSIDE_THE_IMAGE) == []


def test_the_rank_supervisor_imports_nothing_of_its_image_when_it_starts() -> None:
    found = []
    for path in sources("spark_runtime"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path.name}:{node.lineno} {name}" for name in names if name.split(".")[0] in INSIDE_THE_IMAGE]
    assert found == []


@pytest.mark.parametrize("package", ["lab", "toolchain", "bench"])
def test_what_drives_the_product_from_outside_imports_none_of_it(package: str) -> None:
    found = [
        f"{path.relative_to(PROJECT)}:{line} imports {module}"
        for path in sources(package)
        for line, module in imports(path)
        if (top := module.split(".")[0]) in OURS and top != package
    ]
    assert found == []


def test_the_program_is_wiring_of_components_only() -> None:
    allowed = {"components", "spark_core.errors", "spark_core.project", "pulumi", "sys", "pathlib"}
    found = [
        f"__main__.py:{line} imports {module}"
        for line, module in imports(PROJECT / "__main__.py")
        if module not in allowed and module.split(".")[0] not in {"components", "pulumi"}
    ]
    assert found == []


def test_the_domain_reads_no_environment_but_the_agent_s_socket() -> None:
    found = [
        f"{path.relative_to(PROJECT)}:{node.lineno}"
        for path in sources("spark_core")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"})
    ]
    assert [line.rpartition(":")[0] for line in found] == ["spark_core/transport/connection.py"]


def test_no_module_is_a_drawer_for_everything() -> None:
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    found = [
        str(path.relative_to(PROJECT))
        for package in sorted(OURS)
        for path in sources(package)
        if (path.stem in drawers or path.parent.name in drawers) and "fixtures" not in path.parts
    ]
    assert found == []


def _undocumented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Public functions and classes without a docstring; properties and methods speak for themselves."""
    if not ast.get_docstring(tree):
        yield 1, "the module"
    for node in tree.body:
        if (
            isinstance(node, ast.FunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ):
            yield node.lineno, node.name


@pytest.mark.parametrize("package", ["spark_core", "providers", "components", "automation"])
def test_every_public_function_and_class_says_what_it_is(package: str) -> None:
    found = [
        f"{path.relative_to(PROJECT)}:{line} {name}"
        for path in sources(package)
        for line, name in _undocumented(ast.parse(path.read_text()))
    ]
    assert found == []


def test_every_test_asserts_something() -> None:
    found = []
    for path in sources("tests/unit") + sources("tests/providers") + sources("tests/program"):
        if "runtime" in path.parts or not path.name.startswith("test_"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                inside = list(ast.walk(node))
                raises = any(isinstance(part, ast.Attribute) and part.attr == "raises" for part in inside)
                if not raises and not any(isinstance(part, ast.Assert) for part in inside):
                    found.append(f"{path.relative_to(PROJECT)}:{node.lineno} {node.name}")
    assert found == []


def test_no_file_holds_a_path_of_the_machine_it_was_written_on() -> None:
    """Tracked sources name ``~`` or a placeholder; a user's own folder would not exist anywhere else."""
    home = str(Path.home())
    needles = [str(PROJECT) + "/"] + ([home + "/"] if home not in {"/", "/root"} else [])
    found = [
        f"{path.relative_to(PROJECT)} holds {needle}"
        for package in sorted(OURS)
        for path in sources(package)
        for needle in needles
        if needle in path.read_text()
    ]
    assert found == []
