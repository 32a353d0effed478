"""A stack in a folder of its own, run by the real engine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

PROJECT = Path(__file__).resolve().parent.parent.parent
TIMEOUT_S = 180


@dataclass
class EngineStack:
    """A stack of this project with state of its own."""

    home: Path
    name: str
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PULUMI_", "SPARK_VLLM_"))}
        cache = {k: v for k, v in os.environ.items() if k == "SPARK_VLLM_CACHE"}
        return (
            kept
            | cache
            | self.extra
            | {
                "SPARK_VLLM_HOME": str(self.home),
                "PULUMI_OPTION_CONFIG_FILE": str(self.home / f"Pulumi.{self.name}.yaml"),
            }
        )

    def configure(self, change: Callable[[dict[str, Any]], None], template: str) -> None:
        """Write the stack file: a committed one, changed."""
        stack = yaml.safe_load((PROJECT / template).read_text())
        change(stack["config"])
        (self.home / f"Pulumi.{self.name}.yaml").write_text(yaml.safe_dump(stack, sort_keys=False))

    def run(
        self, script: str, *words: str, cwd: Path = PROJECT, extra: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run shell text inside ``. ./env`` of the checkout, then from a folder."""
        return subprocess.run(
            ["sh", "-c", f'cd "$0" && . ./env && cd "$1" && shift && {script}', str(PROJECT), str(cwd), *words],
            cwd=PROJECT,
            env=self.environment | dict(extra or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    def pulumi(
        self, *words: str, cwd: Path = PROJECT, extra: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.run('exec pulumi "$@"', *words, cwd=cwd, extra=extra)


@pytest.fixture(scope="session")
def engine_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """State and passphrase for this tier."""
    home = tmp_path_factory.mktemp("engine-home")
    made = EngineStack(home, "none").run("python3 toolchain/bootstrap.py")
    assert made.returncode == 0, made.stdout
    return home


@pytest.fixture
def spark(engine_home: Path) -> EngineStack:
    """Stack ``spark``, as a person has it who owns no Spark."""
    return _stack(engine_home, "spark", "Pulumi.spark.yaml")


@pytest.fixture
def dev(engine_home: Path) -> EngineStack:
    """Stack ``dev``, without a lab."""
    return _stack(engine_home, "dev", "Pulumi.dev.yaml")


def _stack(home: Path, name: str, template: str) -> EngineStack:
    stack = EngineStack(home, name)
    stack.configure(lambda config: None, template)
    made = stack.run('python3 toolchain/stack.py "$@"', name)
    assert made.returncode == 0, made.stdout
    return stack
