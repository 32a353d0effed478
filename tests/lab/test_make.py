"""The two commands of the README, in a fresh copy of the checkout, by somebody whose home folder is empty.

Only this shows that `make up` and `make down` work as they are written. It needs what test_end_to_end.py needs, and the
addresses of the default lab: a lab that runs already on this machine is in the way.

To clean up after an aborted run: ``HOME=… python -m lab down``.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.deployment import copy_checkout

pytestmark = pytest.mark.lab

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


def test_make_up_on_a_fresh_checkout_ends_with_a_completion(person: Person) -> None:
    done = person.make("up")
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"^endpoint\s+http://10\.99\.0\.12:30000/v1$", done.stdout, re.MULTILINE)
    assert re.search(r"^completion\s+\S", done.stdout, re.MULTILINE), done.stdout[-2000:]
    assert "passphrase" in done.stdout  # said once, with how to back it up


def test_a_second_make_up_does_only_what_is_missing(person: Person) -> None:
    start = time.monotonic()
    done = person.make("up")
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"^\s*\d+ unchanged", done.stdout, re.MULTILINE)
    assert not re.search(r"^\s*\S* ?\d+ (created|replaced|updated)", done.stdout, re.MULTILINE)
    assert "back it up" not in done.stdout
    assert time.monotonic() - start < 120  # no engine build, no image, no model load


def test_the_checkout_is_as_it_was(person: Person) -> None:
    for file in person.checkout.glob("Pulumi*.yaml"):
        assert "encryptionsalt" not in file.read_text()


def test_make_down_ends_the_lab_and_works_twice(person: Person) -> None:
    done = person.make("down")
    assert done.returncode == 0, done.stdout[-5000:]
    assert not (person.home / ".local/share/spark-vllm/lab/dev/hosts").exists()
    assert " 10.99.0." not in subprocess.run(["ip", "-4", "address"], capture_output=True, text=True, check=True).stdout
    again = person.make("down")
    assert again.returncode == 0, again.stdout[-3000:]
