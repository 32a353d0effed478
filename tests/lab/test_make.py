"""The two commands of the README, in a fresh copy of the checkout, by somebody whose home folder is empty.

Only this shows that `make up` and `make down` work as they are written. It needs what test_end_to_end.py needs, and the
addresses of the default lab: a lab that runs already on this machine is in the way.

To clean up after an aborted run: ``HOME=… python -m lab down``.
"""

from __future__ import annotations

import re
import subprocess
import time

import pytest

from tests.lab.person import Person
from tests.lab.person import person as person

pytestmark = pytest.mark.lab


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
