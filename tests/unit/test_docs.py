"""The documents say what is there: settings, links, commands, variables, components, error classes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs import generate_reference
from spark_core import errors
from spark_core.fabric.environment import rank_environment
from spark_core.settings import SECRET_KEYS, read_settings
from tests.config_cases import load_base

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs"
PAGES = sorted([*PROJECT.glob("*.md"), *DOCS.rglob("*.md")])
README = PROJECT / "README.md"
DECISIONS = sorted((DOCS / "adr").glob("*.md"))
STACK_FILES = sorted(PROJECT.glob("Pulumi.*.yaml"))

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:root|work|tmp/lead)\b")


def name_of(path: Path) -> str:
    return str(path.relative_to(PROJECT))


def links_of(page: Path) -> Iterator[str]:
    """Relative links of a page; addresses of the web and the parts in code blocks are left out."""
    return links_of_text(page.read_text("utf-8"))


def links_of_text(page: str) -> Iterator[str]:
    """The same of a text."""
    text = _CODE_BLOCK.sub("", page)
    return (link for link in _LINK.findall(text) if not re.match(r"[a-z]+:", link))


def anchors_of(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.+)$", _CODE_BLOCK.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def keys_of(value: Any, path: str, known: set[str]) -> Iterator[str]:
    """The path of every setting in a stack file, down to values that are the owner's own maps."""
    if isinstance(value, list):
        for item in value:
            yield from keys_of(item, f"{path}[]", known) if isinstance(item, dict) else ()
        return
    if not isinstance(value, dict):
        return
    named = any(key.startswith(f"{path}.<name>.") for key in known)
    below = any(key.startswith(f"{path}.") for key in known)
    for key, item in value.items():
        if named:
            yield from keys_of(item, f"{path}.<name>", known)
        elif below:
            yield f"{path}.{key}"
            yield from keys_of(item, f"{path}.{key}", known)


def targets_of_makefile() -> set[str]:
    text = (PROJECT / "Makefile").read_text("utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", text, re.MULTILINE))


@pytest.mark.parametrize("page", generate_reference.pages(), ids=name_of)
def test_a_generated_page_is_what_the_program_gives(page: Path) -> None:
    assert page.read_text("utf-8") == generate_reference.pages()[page], "run: python docs/generate_reference.py"


def test_a_stale_page_ends_the_check_with_1_and_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate_reference.main(["--check"]) == 0
    stale = tmp_path / "settings.md"
    stale.write_text("# Settings of last year\n")
    monkeypatch.setattr(generate_reference, "PAGE", stale)
    assert generate_reference.main(["--check"]) == 1
    assert stale.read_text() == "# Settings of last year\n"
    assert "docs/settings.md is stale; run: python docs/generate_reference.py" in capsys.readouterr().err


def test_ci_runs_what_finds_a_stale_page() -> None:
    workflow = yaml.safe_load((PROJECT / ".github" / "workflows" / "check.yml").read_text("utf-8"))
    assert [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step] == [
        "make check"
    ]
    makefile = (PROJECT / "Makefile").read_text("utf-8")
    check = makefile.partition("\ncheck:")[2].partition("\n\n")[0]
    assert "test-unit" in check and re.search(r"^test-unit:.*\n(?:.*\n)*?.*tests/unit\b", makefile, re.MULTILINE)


def test_every_setting_and_secret_has_a_meaning_on_the_settings_page() -> None:
    empty = [row.path for section in generate_reference.sections() for row in section.rows if not row.text]
    assert empty == []
    assert set(generate_reference.SECRETS) == set(SECRET_KEYS)


@pytest.mark.parametrize("path", STACK_FILES, ids=lambda path: path.name)
def test_every_key_of_a_stack_file_is_on_the_settings_page(path: Path) -> None:
    known = generate_reference.setting_paths()
    config = {k.removeprefix("spark-vllm:"): v for k, v in yaml.safe_load(path.read_text())["config"].items()}
    found = [key for name, value in config.items() for key in (name, *keys_of(value, name, known))]
    assert len(found) > 20
    assert [key for key in found if key not in known | set(SECRET_KEYS)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in links_of(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    assert broken == []


def test_every_page_can_be_reached_from_the_index() -> None:
    reached, left = {README}, [README]
    while left:
        page = left.pop()
        targets = [(page.parent / link.partition("#")[0]).resolve() for link in links_of(page)]
        fresh = [target for target in targets if target.suffix == ".md" and target not in reached]
        reached.update(fresh)
        left += fresh
    assert [name_of(page) for page in PAGES if page not in reached] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_make_target_that_a_page_names_exists(page: Path) -> None:
    code = re.findall(r"`([^`\n]+)`", page.read_text("utf-8")) + page.read_text("utf-8").splitlines()
    named = {word for text in code for word in re.findall(r"^make ([a-z][a-z-]*)", text)}
    assert named - targets_of_makefile() == set()


def test_the_readme_names_the_two_commands() -> None:
    assert {"make up", "make test"} <= set(re.findall(r"^make \w+", README.read_text("utf-8"), re.MULTILINE))


def test_the_readme_s_first_screen_says_what_was_run_and_what_was_not() -> None:
    screen = README.read_text("utf-8").partition("## Two commands")[0]
    assert len(screen.splitlines()) < 50
    assert re.search(r"^\| Run, in the lab \|", screen, re.MULTILINE)
    assert re.search(r"^\| \*\*Not run: real Sparks\*\* \|", screen, re.MULTILINE)
    assert "docs/explanation/health.md#what-counts" in links_of_text(screen)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_holds_a_path_of_the_machine_it_was_written_on(page: Path) -> None:
    assert _MACHINE_PATH.findall(page.read_text("utf-8")) == []


def test_every_lab_command_that_a_page_names_exists() -> None:
    named = {word for page in PAGES for word in re.findall(r"python -m lab ([a-z][a-z-]*)", page.read_text("utf-8"))}
    shown = subprocess.run(
        [sys.executable, "-m", "lab", "--help"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    commands = set(re.findall(r"^ {4}([a-z][a-z-]*)", shown.stdout, re.MULTILINE))
    assert named
    assert named - commands == set()


def test_the_environment_page_has_every_variable_that_the_program_sets() -> None:
    raw = load_base()
    raw["groups"]["main"]["serving"]["nccl_debug"] = "INFO"
    settings = read_settings(raw)
    main = settings.groups["main"]
    page = (DOCS / "explanation" / "environment.md").read_text("utf-8")
    rows = {line.split("|")[1] for line in page.splitlines() if line.startswith("| `")}
    documented = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    wanted = set(rank_environment(settings, main, settings.node("spark-a")))
    assert wanted - documented == set()


def test_the_errors_page_has_every_class() -> None:
    page = (DOCS / "errors.md").read_text("utf-8")
    names = ["SparkError", *(kind.__name__ for kind in errors.SparkError.__subclasses__())]
    assert len(names) > 5
    assert [name for name in names if f"| `{name}` |" not in page] == []


def test_the_picture_has_every_component_and_every_provider() -> None:
    picture = README.read_text("utf-8").partition("```mermaid")[2].partition("```")[0]
    program = (PROJECT / "__main__.py").read_text("utf-8")
    components = set(re.findall(r"^from components\.\w+ import ([A-Z]\w+), \1Args", program, re.MULTILINE))
    providers = {
        name
        for path in (PROJECT / "providers").glob("*.py")
        for name in re.findall(r"^class (\w+)\(Resource,", path.read_text("utf-8"), re.MULTILINE)
    }
    assert len(components) == 5
    assert providers
    assert {name for name in components | providers if name not in picture} == set()


def test_the_readme_has_every_output_of_the_program() -> None:
    exported = re.findall(r'pulumi\.export\("(\w+)"', (PROJECT / "__main__.py").read_text("utf-8"))
    rows = re.findall(r"^\| `(\w+)` \|", README.read_text("utf-8"), re.MULTILINE)
    assert exported
    assert set(exported) <= set(rows)


@pytest.mark.parametrize("page", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_has_its_five_parts(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", page.read_text("utf-8"), re.MULTILINE)
    assert headings == ["Context", "Options", "Decision", "Consequences", "Reconsider when"]
    assert re.fullmatch(r"\d{4}-[a-z0-9-]+", page.stem)
    assert page.read_text("utf-8").startswith(f"# {page.stem[:4]}: ")
