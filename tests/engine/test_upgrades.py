"""This program over the state of every earlier release: nothing is lost, and nothing restarts that the changelog
does not say.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from automation.schemas import schema_of
from tests.engine.conftest import PROJECT, EngineStack
from tests.upgrades.kept_state import REFERENCE, plan, providers_of, state_of

STATES = sorted((PROJECT / "tests" / "upgrades").glob("*/state.json"))
CONTAINER = "docker:index/container:Container"
BUNDLE = "command:remote:CopyToRemote"
_SAYS = re.compile(r"restarts\s+serving")


def newer_sections(version: str) -> str:
    """What the changelog says of everything after a release."""
    text = (PROJECT / "CHANGELOG.md").read_text()
    return text.partition(f"## {version}")[0]


def imported(home: Path, state: Path) -> EngineStack:
    """A stack of its own, with the state of a release."""
    (home / "backend").mkdir()
    stack = EngineStack(home, "reference", {"PULUMI_BACKEND_URL": f"file://{home}/backend"})
    bootstrapped = stack.run("python3 toolchain/bootstrap.py")
    assert bootstrapped.returncode == 0, bootstrapped.stdout
    stack.configure(lambda config: None, REFERENCE)
    made = stack.run('python3 toolchain/stack.py "$@"', stack.name)
    assert made.returncode == 0, made.stdout
    done = stack.pulumi("stack", "import", "-s", stack.name, "--file", str(state))
    assert done.returncode == 0, done.stdout
    return stack


def steps_of(stack: EngineStack) -> dict[str, tuple[str, str]]:
    """Name of each resource that a plan touches, to its type and what is done."""
    done = stack.pulumi("preview", "-s", stack.name, "--json", "--refresh=false")
    assert done.returncode == 0, done.stdout[-3000:]
    found: dict[str, tuple[str, str]] = {}
    for step in json.loads(done.stdout[done.stdout.index("{") :])["steps"]:
        new: dict[str, Any] = step.get("newState") or step.get("oldState") or {}
        if step["op"] != "same" and not new["type"].startswith("pulumi:providers:"):
            found[step["urn"].rpartition("::")[2]] = (new["type"], step["op"])
    return found


def test_there_is_a_state_of_every_release() -> None:
    releases = re.findall(r"^## (\d+\.\d+\.\d+)", (PROJECT / "CHANGELOG.md").read_text(), re.MULTILINE)
    version = re.search(r'^version = "([\d.]+)"', (PROJECT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert {*releases, version.group(1)} <= {state.parent.name for state in STATES}


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.parent.name)
def test_an_upgrade_makes_and_takes_away_nothing_and_restarts_only_what_the_changelog_says(
    state: Path, tmp_path: Path
) -> None:
    steps = steps_of(imported(tmp_path, state))
    kept = ("update", "create")
    lost = {name: step for name, step in steps.items() if step[1] not in kept and step[0] not in (CONTAINER, BUNDLE)}
    assert lost == {}, "a resource of an earlier release would be made anew: it needs an alias or a shim"
    restarted = [name for name, (kind, _) in steps.items() if kind == CONTAINER]
    said = _SAYS.search(newer_sections(state.parent.name))
    assert not restarted or said, f"{restarted} would restart, and the changelog does not say so"


def test_over_a_state_of_its_own_it_changes_nothing_and_renders_what_runs(tmp_path: Path) -> None:
    """What is kept of a release is what its up records; and render reads a stack that is deployed."""
    (tmp_path / "made").mkdir()
    own = EngineStack(tmp_path / "made", "reference")
    assert own.run("python3 toolchain/bootstrap.py").returncode == 0
    own.configure(lambda config: None, REFERENCE)
    assert own.run('python3 toolchain/stack.py "$@"', own.name).returncode == 0
    exported = own.pulumi("stack", "export", "-s", own.name).stdout
    state = state_of(plan(own), json.loads(exported[exported.index("{") :]), providers_of(own))
    state["deployment"].pop("secrets_providers", None)
    file = tmp_path / "present" / "state.json"
    file.parent.mkdir()
    file.write_text(json.dumps(state))
    stack = imported(tmp_path, file)
    steps = steps_of(stack)
    assert {name: step for name, step in steps.items() if step[0] != BUNDLE} == {}
    done = stack.run('exec python -m automation render --stack "$@" --json 2>/dev/null', stack.name)
    report = json.loads(done.stdout)
    jsonschema.validate(report, schema_of("render"))
    scripts = {entry["node"]: entry["script"] for entry in report["nodes"]}
    assert set(scripts) == {"spark-a", "spark-b"}
    container = next(r for r in state["deployment"]["resources"] if r["type"] == CONTAINER)
    deployment = next(x["value"] for x in container["inputs"]["labels"] if x["label"] == "spark-vllm.deployment")
    assert all(f"--deployment {deployment}" in " ".join(text.split()).replace(" \\", "") for text in scripts.values())
    assert all("/runtime.pyz <<'END_OF_FILE'" in text and "--gpus=all" in text for text in scripts.values())
    assert "api_key" in scripts["spark-a"] and "sk-not-a-secret" not in done.stdout
