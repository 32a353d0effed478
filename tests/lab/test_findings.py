"""Every kind of finding that a lab can give a host is told by the real ``pulumi preview``, and nothing else is.

Only this shows that what is asked, how it is read and what is made of it fit together on a real systemd, sshd, Docker
and networkd. It needs root on Linux and about eight minutes.

To clean up after an aborted run: ``SPARK_VLLM_HOME=… python -m lab down --instance t-find``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.lab import healthy
from tests.lab.deployment import Deployment
from tests.lab.faults import ALL, Fault

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment("t-find", tmp_path_factory.mktemp("home"), hosts_only=True)
    try:
        healthy.start(made)
        yield made
    finally:
        made.stop()


def test_a_healthy_pair_has_no_finding_and_its_fabric_is_told(pair: Deployment) -> None:
    outcome = pair.preview()
    assert outcome.code == 0, outcome.text[-3000:]
    assert healthy.found(outcome) == []
    assert "hca rocep1s0f1" in outcome.text


@pytest.mark.parametrize("fault", ALL, ids=[fault.code for fault in ALL])
def test_one_fault_is_told_as_that_and_as_nothing_else(pair: Deployment, fault: Fault) -> None:
    with fault.made(pair):
        outcome = pair.preview()
    assert healthy.codes(outcome) == {fault.code, *fault.also}, outcome.text[-4000:]
    assert re.search(f"{fault.severity}: .*?{fault.told}", outcome.text, re.DOTALL), outcome.text[-4000:]
    assert (outcome.code != 0) == any(severity == "error" for severity, _ in healthy.found(outcome))
    assert "Traceback" not in outcome.text


def test_every_fault_was_mended(pair: Deployment) -> None:
    assert healthy.found(pair.preview()) == []
