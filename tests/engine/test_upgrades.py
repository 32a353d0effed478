"""This program over the state of every earlier release: nothing is lost, and nothing restarts that the changelog
does not say.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import PROJECT, EngineStack
from tests.upgrades.kept_state import REFERENCE

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
