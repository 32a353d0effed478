"""The program rendered for a stack, and the rendering that is expected.

``python -m tests.program.rendering`` writes the expected renderings anew; look at the difference before
committing it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

PROJECT = Path(__file__).resolve().parents[2]
EXPECTED = PROJECT / "tests" / "fixtures" / "program"
STACKS = ("dev", "spark")
HOST_KEYS = {
    "spark-a": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAaBcDeFgHiJkLmNoPqRsTuVwXyZ0123456789abcdefghi",
    "spark-b": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIZyXwVuTsRqPoNmLkJiHgFeDcBa9876543210ihgfedcba",
}
_VARYING = (
    (re.compile(r"[0-9a-f]{64}/runtime\.pyz"), "<hash>/runtime.pyz"),
    (re.compile(r"runtime\.pyz-[0-9a-f]{8}"), "runtime.pyz-<hash>"),
    (re.compile(r"/ctl/[0-9a-f]{16}"), "/ctl/<hash>"),
)
"""What changes with the supervisor's sources, which are no part of a rendering."""


@dataclass(frozen=True)
class Rendering:
    """What the program registered.

    Attributes:
        registered: Each registration in order.
        outputs: Each exported output: whether it is known and secret, and its value.
        log: What was said to the person.
        error: The text of a refusal, or nothing.
    """

    registered: list[dict[str, Any]]
    outputs: dict[str, dict[str, Any]]
    log: list[str]
    error: str

    @cached_property
    def by_name(self) -> dict[str, dict[str, Any]]:
        return {f"{item['type'].rpartition(':')[2]} {item['name']}": item for item in self.registered}

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        """Registrations of a type such as ``Container``, by name."""
        found = [item for item in self.registered if item["type"].rpartition(":")[2] == kind]
        return sorted(found, key=lambda item: str(item["name"]))

    def text(self) -> str:
        """The registrations as text: the tree of all, and the containers whole."""
        containers = self.of_type("Container")
        deployments = {word for item in containers for word in _after(item["inputs"].get("command"), "--deployment")}
        tree = sorted(f"{item['type']} {item['name']} < {item['parent']}" for item in self.registered)
        text = json.dumps({"resources": tree, "containers": containers}, indent=1, sort_keys=True) + "\n"
        for pattern, replacement in _VARYING:
            text = pattern.sub(replacement, text)
        for deployment in deployments:
            text = text.replace(deployment, "<deployment>")
        return text


def settings_of(stack: str) -> dict[str, Any]:
    """The settings of a committed stack file, for a machine from which no node can be reached."""
    raw = yaml.safe_load((PROJECT / f"Pulumi.{stack}.yaml").read_text())["config"]
    config = {key.removeprefix("spark-vllm:"): value for key, value in raw.items()}
    for node in config["nodes"]:
        node["host_key"] = HOST_KEYS[node["name"]]
    return {**config, "preflight": "off", "ssh": {"config_file": "tests/fixtures/program/ssh_config"}}


def render(
    config: Mapping[str, Any],
    *,
    stack: str = "dev",
    preview: bool = False,
    secrets: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    state: Mapping[str, Any] | None = None,
) -> Rendering:
    """Run the program under a mocked engine, in a process of its own.

    Args:
        state: What the stack's state has: URN of each resource to it.
    """
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in config.items()}
    asked = {"stack": stack, "preview": preview, "config": texts, "secrets": dict(secrets or {})}
    asked["state"] = dict(state or {})
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [sys.executable, "-m", "tests.program.record"],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            cwd=PROJECT,
            check=False,
            timeout=300,
            env={"PATH": os.environ["PATH"], "HOME": home, **(environment or {})},
        )
    if done.returncode != 0:
        raise AssertionError(f"the program ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return Rendering(**json.loads(done.stdout.splitlines()[-1]))


def _after(words: Any, flag: str) -> list[str]:
    return [str(words[words.index(flag) + 1])] if isinstance(words, list) and flag in words else []


def main() -> None:
    """Write the expected renderings."""
    for stack in STACKS:
        (EXPECTED / f"{stack}.json").write_text(render(settings_of(stack), stack=stack).text())


if __name__ == "__main__":
    main()
