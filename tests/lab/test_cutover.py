"""From another launcher's cluster to a stack that serves, and back by the very commands that are printed.

Only this shows that everything is brought while the other cluster runs, that it stops by name and nothing of it is
lost, and that the way back works. It needs what test_end_to_end.py needs and about ten minutes; the tests build on each
other and run in order.

To clean up after an aborted run: ``SPARK_VLLM_HOME=… python -m lab down --instance t-cut``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from automation.exit_codes import Exit
from tests.lab import healthy
from tests.lab.deployment import Deployment
from tests.lab.in_order import in_order as in_order
from tests.lab.operating import HOSTS, assert_serves, run
from tests.lab.test_end_to_end import dying_at_its_first_completion
from tests.lab.watching import launcher

pytestmark = [pytest.mark.lab, pytest.mark.campaign]

STATE = "docker inspect -f '{{.Id}} {{.Image}} {{.State.Running}}' vllm_node"


def replacing(config: dict[str, Any]) -> None:
    config["replaces"] = ["vllm_node"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment("t-cut", tmp_path_factory.mktemp("home"))
    try:
        made.start()
        for host in HOSTS:
            made.on(host, launcher(serve=True))
        yield made
    finally:
        made.stop()


def running(served: Deployment) -> dict[str, bool]:
    return {host: served.on(host, STATE).split()[2] == "true" for host in HOSTS}


def test_beside_it_preview_warns_and_up_refuses_before_anything_changes(served: Deployment) -> None:
    refused = served.preview()
    assert refused.code != 0 and "launcher-running" in healthy.codes(refused), refused.text[-3000:]
    served.configure({}, edit=replacing)
    outcome = served.preview()
    assert outcome.code == 0, outcome.text[-3000:]
    assert "launcher-to-replace" in healthy.codes(outcome)
    report, said = run(served, "up")
    assert report["exit_code"] == Exit.FAILED, said[-3000:]
    assert "found running: vllm_node" in report["error"]["what"]
    assert all(running(served).values())
    assert served.on("spark-a", "docker ps -aq --filter label=spark-vllm.stack") == ""


def test_settings_that_the_image_refuses_end_it_before_the_stop(served: Deployment) -> None:
    served.configure({"extra_args": ["--no-such-flag"]}, edit=replacing)
    report, said = run(served, "cutover", "--yes")
    assert report["exit_code"] == Exit.FAILED, said[-3000:]
    assert all(running(served).values())


def test_without_a_yes_everything_is_brought_and_nothing_is_stopped(served: Deployment) -> None:
    served.configure({}, edit=replacing)
    report, said = run(served, "cutover")
    assert report["exit_code"] == Exit.REFUSED, said[-3000:]
    assert "spark-a: vllm_node" in said and "docker start vllm_node" in said
    assert all(running(served).values())
    for host in HOSTS:
        assert served.on(host, "ls ~/.spark-vllm/weights").split()


def test_where_the_gate_fails_the_printed_commands_bring_the_old_cluster_back(served: Deployment) -> None:
    before = {host: served.on(host, STATE).split()[:2] for host in HOSTS}
    served.configure(dying_at_its_first_completion(), edit=replacing)
    report, said = run(served, "cutover", "--yes")
    assert report["exit_code"] == Exit.FAILED, said[-3000:]
    assert report["stopped"] == {host: ["vllm_node"] for host in HOSTS}
    assert not any(running(served).values())
    assert "the old cluster comes back with:" in said
    go_back(served, report["way_back"])
    assert {host: served.on(host, STATE).split()[:2] for host in HOSTS} == before


def go_back(served: Deployment, lines: list[str]) -> None:
    """Do what was printed, line by line."""
    assert lines[0] == "python -m automation stop --stack dev"
    for line in lines:
        done = served.inside("sh", "-c", line, timeout_s=600)
        assert done.code == 0, (line, done.text[-2000:])
    assert all(running(served).values())


def test_on_a_yes_the_stack_serves_and_nothing_of_the_old_one_is_lost(served: Deployment) -> None:
    before = {host: served.on(host, STATE).split()[:2] for host in HOSTS}
    images = {host: served.on(host, "docker image ls -q --no-trunc | sort -u").split() for host in HOSTS}
    served.configure({}, edit=replacing)
    report, said = run(served, "cutover", "--yes")
    assert report["exit_code"] == Exit.DONE, (report, said[-4000:])
    assert_serves(served)
    for host in HOSTS:
        found = served.on(host, STATE).split()
        assert (found[:2], found[2]) == (before[host], "false")
        assert set(images[host]) <= set(served.on(host, "docker image ls -q --no-trunc | sort -u").split())
    again, said = run(served, "cutover", "--yes")
    assert (again["exit_code"], again["stopped"], again["run"]["changes"]) == (Exit.DONE, {}, []), said[-3000:]
    assert_serves(served)


def test_a_stack_that_serves_goes_back_too(served: Deployment) -> None:
    report, said = run(served, "cutover", "--yes")
    assert report["exit_code"] == Exit.DONE, said[-3000:]
    go_back(served, report["way_back"])
    status, _ = run(served, "status")
    assert status["wanted"] == "stopped"
