"""A preview for code that is not trusted: no state, no secrets, no nodes.

The stack's file is copied without its secrets and with ``preflight: off``, and planned against an empty state in a
folder that goes away. It shows the whole plan, not a difference, and proves that settings and program fit.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from automation.history import STACK_TOOL
from automation.stack_file import CONFIG_FILE_VARIABLE, PROJECT, StackFile
from spark_core.errors import CommandError
from spark_core.settings import SECRET_KEYS

_PLACEHOLDER = "not-a-secret"
_INIT_TIMEOUT_S = 180


@contextlib.contextmanager
def offline(file: StackFile) -> Iterator[None]:
    """Run what is inside against an empty state and a file without secrets; the environment is as before afterwards."""
    with tempfile.TemporaryDirectory(prefix="spark-vllm-offline-") as folder:
        name = file.stack.rsplit("/", 1)[-1]
        copy = Path(folder) / f"Pulumi.{name}.yaml"
        copy.write_text(without_secrets(file))
        (Path(folder) / "backend").mkdir()
        ours = {
            "PULUMI_BACKEND_URL": f"file://{folder}/backend",
            "PULUMI_CONFIG_PASSPHRASE": _PLACEHOLDER,
            CONFIG_FILE_VARIABLE: str(copy),
        }
        before = dict(os.environ)
        os.environ.pop("PULUMI_CONFIG_PASSPHRASE_FILE", None)
        os.environ.update(ours)
        try:
            made = subprocess.run(
                [sys.executable, str(STACK_TOOL), name],
                cwd=PROJECT,
                capture_output=True,
                text=True,
                timeout=_INIT_TIMEOUT_S,
                check=False,
            )
            if made.returncode != 0:
                raise CommandError("expected an empty state", evidence=(made.stderr or made.stdout).splitlines())
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def without_secrets(file: StackFile) -> str:
    """A stack's file whose secrets are placeholders, and which looks at no node."""
    content = yaml.safe_load(file.text)
    prefix = f"{file.project}:"
    config: dict[str, Any] = dict(content.get("config") or {})
    for key in SECRET_KEYS:
        if f"{prefix}{key}" in config:
            config[f"{prefix}{key}"] = _PLACEHOLDER
    plain = {key: value for key, value in config.items() if not _holds_secret(value)}
    return yaml.safe_dump({"config": plain | {f"{prefix}preflight": "off"}}, sort_keys=False)


def _holds_secret(value: Any) -> bool:
    if isinstance(value, dict):
        return set(value) == {"secure"} or any(map(_holds_secret, value.values()))
    return isinstance(value, list) and any(map(_holds_secret, value))
