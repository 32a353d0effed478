"""The engine: ``pulumi`` as ``. ./env`` puts it on the PATH, run in the project folder."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from automation.stack_file import PROJECT
from spark_core.errors import CommandError, SparkError

TIMEOUT_S = 600


def pulumi(*words: str) -> str:
    """Run a command of the engine that must succeed; its standard output.

    Raises:
        SparkError: there is no engine on the PATH.
        CommandError: it failed, with the end of what it said.
    """
    try:
        done = subprocess.run(
            ["pulumi", *words, "--non-interactive"],
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise SparkError("expected pulumi on the PATH, found none", do="run `. ./env` first") from None
    except subprocess.TimeoutExpired:
        raise CommandError(f"`pulumi {words[0]}` gave no answer in {TIMEOUT_S} s", do="run it by hand") from None
    if done.returncode != 0:
        said = [line for line in (done.stderr + _diagnostics(done.stdout)).splitlines() if line.strip()]
        raise CommandError(
            f"expected `pulumi {' '.join(words[:2])}` to succeed, found exit status {done.returncode}", evidence=said
        )
    return done.stdout


def pulumi_json(*words: str) -> dict[str, Any]:
    """The same, for a command whose output is a JSON object."""
    text = pulumi(*words)
    try:
        value = json.loads(text[text.index("{") :])
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise CommandError(f"expected JSON from `pulumi {words[0]}`, found: {text[:80]!r}")
    return value


def pulumi_list(*words: str) -> list[dict[str, Any]]:
    """The same, for a command whose output is a JSON list of objects."""
    text = pulumi(*words)
    try:
        value = json.loads(text[text.index("[") :])
    except ValueError:
        value = None
    if not isinstance(value, list):
        raise CommandError(f"expected a JSON list from `pulumi {words[0]}`, found: {text[:80]!r}")
    return value


def _diagnostics(text: str) -> str:
    """What the engine says inside its JSON."""
    try:
        value = json.loads(text[text.index("{") :])
        return "\n".join(str(item.get("message", "")) for item in value.get("diagnostics", []))
    except (ValueError, AttributeError):
        return text
