"""The tutorial and the README, followed literally: every command of their text, in one terminal, one after another.

Whoever follows them has an empty home and a fresh checkout; only the machine's caches are warm. The README's commands
are run where the tutorial has a deployment to show. It needs what test_make.py needs, the addresses of the default lab
and `curl`, and about ten minutes. The tests run in order.

To clean up after an aborted run: ``HOME=… python -m lab down``.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.command_blocks import NOT_RUN, README, TUTORIAL, bare, commands_of
from tests.lab.in_order import in_order as in_order
from tests.lab.person import TIMEOUT_S, Person
from tests.lab.person import person as person
from tests.lab.terminal import Terminal, open_terminal

pytestmark = [pytest.mark.lab, pytest.mark.campaign]


def steps() -> list[str]:
    """The commands in the order in which they are run."""
    tutorial = commands_of(TUTORIAL)
    asked = next(number for number, command in enumerate(tutorial) if "curl" in command)
    shown = [command for command in commands_of(README) if bare(command) not in NOT_RUN]
    return [*tutorial[: asked + 1], *shown, *tutorial[asked + 1 :]]


STEPS = steps()


@pytest.fixture(scope="module")
def terminal(person: Person) -> Iterator[Terminal]:
    with open_terminal(person.checkout, person.environment) as opened:
        yield opened


@pytest.mark.parametrize(
    "number", range(len(STEPS)), ids=[f"{n:02}-{' '.join(STEPS[n].split()[:5])}" for n in range(len(STEPS))]
)
def test_a_command_ends_well_as_it_stands_there(terminal: Terminal, number: int) -> None:
    status, terminal.said[number] = terminal.run(STEPS[number], TIMEOUT_S)
    assert status == 0, terminal.said[number][-5000:]


def test_both_pages_got_a_completion_from_the_model(terminal: Terminal) -> None:
    asked = [number for number, command in enumerate(STEPS) if "curl" in command]
    assert len(asked) == 2
    for number in asked:
        said = terminal.said[number]
        answer = json.loads(said[said.index("{") :])
        message = answer["choices"][0]["message"]
        assert any(message.get(key) for key in ("content", "reasoning", "reasoning_content")), said
        assert answer["model"] == "tiny-qwen3.5-moe"


def test_up_from_the_readme_found_nothing_to_do_after_the_tutorial(terminal: Terminal) -> None:
    [again] = [number for number, command in enumerate(STEPS) if bare(command) == "make up"]
    assert re.search(r"^\s*\d+ unchanged", terminal.said[again], re.MULTILINE)
    assert not re.search(r"^\s*\S* ?\d+ (created|replaced|updated)", terminal.said[again], re.MULTILINE)


def test_nothing_of_it_is_left(person: Person, terminal: Terminal) -> None:
    assert bare(STEPS[-1]) == "make down"
    assert not (person.home / ".local/share/spark-vllm/lab/dev/hosts").exists()
    addresses = subprocess.run(["ip", "-4", "address"], capture_output=True, text=True, check=True).stdout
    assert " 10.99.0." not in addresses
