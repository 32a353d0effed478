"""Somebody who comes to this project for the first time: an empty home, a fresh checkout, and nothing set."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.deployment import copy_checkout

TIMEOUT_S = 1500


@dataclass
class Person:
    """Somebody with an empty home folder and a fresh checkout; only the machine's caches are warm."""

    home: Path
    checkout: Path

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PULUMI_", "SPARK_VLLM_", "XDG_", "SSH_"))}
        cache = os.environ.get("SPARK_VLLM_CACHE") or str(
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spark-vllm"
        )
        return kept | {"HOME": str(self.home), "SPARK_VLLM_CACHE": cache}

    def make(self, target: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", target],
            cwd=self.checkout,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Person]:
    routes = subprocess.run(["ip", "-4", "address"], capture_output=True, text=True, check=True).stdout
    if " 10.99.0." in routes:
        in_the_way = "a lab runs on this machine at the default addresses; stop it with `make down`"
        if os.environ.get("CI"):
            pytest.fail(in_the_way)
        pytest.skip(in_the_way)
    home = tmp_path_factory.mktemp("person")
    made = Person(home, copy_checkout(home / "spark-vllm"))
    try:
        yield made
    finally:
        subprocess.run(
            ["python3", "-m", "lab", "down"], cwd=made.checkout, env=made.environment, check=False, timeout=300
        )
