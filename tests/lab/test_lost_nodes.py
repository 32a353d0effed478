"""Nodes that die, move or are reinstalled, and a stack that loses its state, around one deployment that serves.

Only this shows that a deployment goes on without a node when told so and never by itself, that a change of address or a
lost state restarts nothing, and that a reinstalled node is refused first and repaired then. It needs what
test_end_to_end.py needs and about eight minutes. The tests build on each other and run in order.

The lab has three hosts: the group serves on the first two, and the third is a node of the stack that no group uses, so
that giving it up needs no other group.

To clean up after an aborted run: ``SPARK_VLLM_HOME=… python -m lab down --instance t-lost``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.deployment import FABRIC, Deployment, chat
from tests.lab.healthy import TWIN
from tests.lab.in_order import in_order as in_order
from tests.lab.runs import Outcome

pytestmark = [pytest.mark.lab, pytest.mark.campaign]

GROUP = ("spark-a", "spark-b")
IDLE = "spark-c"


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment("t-lost", tmp_path_factory.mktemp("home"), lab_options=("--hosts", "3"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


def third_node(serving: Deployment) -> dict[str, Any]:
    """Settings of the node that no group uses."""
    return {
        "name": IDLE,
        "management_address": serving.addresses[IDLE],
        "user": "spark",
        "fabric": [
            {"netdev": FABRIC, "address": "192.168.200.14/24"},
            {"netdev": TWIN, "address": "192.168.201.14/24"},
        ],
    }


def configure(serving: Deployment, **settings: Any) -> None:
    """The stack of three nodes, with some settings of the whole stack given another value."""

    def edit(config: dict[str, Any]) -> None:
        config["nodes"].append(third_node(serving))
        config |= settings

    serving.configure({}, edit=edit)


def containers(serving: Deployment) -> dict[str, list[str]]:
    """Name, id and start of every container of the group's nodes."""
    return {host: serving.containers(host) for host in GROUP}


def first_error(outcome: Outcome) -> str:
    """The first line that tells an error."""
    return next((line for line in outcome.lines if "error:" in line), "")


def assert_serves(serving: Deployment) -> None:
    outputs = serving.outputs()
    assert chat(outputs, outputs["api_key"]).status == 200


def assert_unchanged(outcome: Outcome) -> None:
    """An up that left every resource as it was."""
    assert outcome.code == 0, outcome.text[-3000:]
    for word in ("created", "replaced", "deleted"):
        assert outcome.count(word) == 0, outcome.text[-3000:]


def test_a_node_that_no_group_uses_is_part_of_the_stack(serving: Deployment) -> None:
    configure(serving)
    outcome = serving.up()
    assert outcome.code == 0, outcome.text[-4000:]
    assert_serves(serving)
    assert "tcp_keepalive_time" in json.dumps(serving.exported())
    assert serving.on(IDLE, "cat /proc/sys/net/ipv4/tcp_keepalive_time").strip() == "120"


def test_a_stack_whose_state_was_deleted_adopts_what_runs_without_a_restart(serving: Deployment) -> None:
    before, key = containers(serving), serving.outputs()["api_key"]
    shutil.rmtree(serving.home / "backend" / ".pulumi")
    serving.make_stack()
    assert not serving.exported()["deployment"].get("resources")
    refused = serving.up()
    assert refused.code != 0 and "adopt" in refused.text, refused.text[-3000:]
    assert containers(serving) == before
    adopted = serving.inside("python", "-m", "automation", "adopt", "--stack", "dev")
    assert adopted.code == 0, adopted.text[-3000:]
    outcome = serving.up()
    assert outcome.code == 0, outcome.text[-3000:]
    assert containers(serving) == before
    assert serving.outputs()["api_key"] == key
    assert_serves(serving)
    assert_unchanged(serving.up())


def test_a_node_at_another_address_is_taken_as_the_same_node(serving: Deployment) -> None:
    before, old = containers(serving), serving.addresses["spark-b"]
    serving.lab("readdress", "spark-b")
    stale = serving.preview(timeout_s=120)
    assert stale.code != 0 and "spark-b, " in first_error(stale) and old in first_error(stale), stale.text[-2000:]
    configure(serving)
    assert serving.addresses["spark-b"] != old
    outcome = serving.up()
    assert outcome.code == 0, outcome.text[-3000:]
    for word in ("created", "replaced", "deleted"):
        assert outcome.count(word) == 0, outcome.text[-3000:]
    assert containers(serving) == before
    assert_serves(serving)
    assert_unchanged(serving.up())


def test_two_stacks_on_the_same_hosts_share_what_they_agree_on_and_refuse_what_they_do_not(
    serving: Deployment,
) -> None:
    before = containers(serving)
    other = Deployment(serving.instance, serving.home, lab_options=serving.lab_options, stack="other")
    other.make_stack()

    def of_other(value: str) -> None:
        def edit(config: dict[str, Any]) -> None:
            config["nodes"].append(third_node(other))
            config["host"] = {"sysctls": {"net.ipv4.tcp_keepalive_time": value}}
            config["groups"]["main"]["serving"] |= {"port": 31000, "ray_port": 31001, "status_port": 31002}

        other.configure({}, edit=edit)

    of_other("77")
    refused = other.preview()
    assert refused.code != 0, refused.text[-3000:]
    assert "[setting-contradicted]" in refused.text
    assert re.search(
        r"tcp_keepalive_time = 77 for the stack other, found that the stack dev declares 120", refused.text
    )
    of_other("120")
    shared = other.up(targets=("**SparkNode**",))
    assert shared.code == 0, shared.text[-3000:]
    gone = other.destroy()
    assert gone.code == 0, gone.text[-3000:]
    for host in (*GROUP, IDLE):
        assert serving.on(host, "cat /proc/sys/net/ipv4/tcp_keepalive_time").strip() == "120"
    assert containers(serving) == before
    assert_unchanged(serving.up())


def test_a_reinstalled_node_is_refused_by_its_key_and_then_repaired(serving: Deployment) -> None:
    serving.lab("reimage", "spark-b", "--keep-known-hosts")
    for run in (serving.preview, serving.up):
        refused = run(timeout_s=120)
        assert refused.code != 0
        assert "spark-b, host key" in first_error(refused) and first_error(refused).count("SHA256:") == 2
    assert serving.console("spark-b", "ls -A /home/spark | grep spark-vllm || true") == ""
    serving.lab("up")  # pins the new key, as its owner does after a look at the console
    outcome = serving.up()
    assert outcome.code == 0, outcome.text[-4000:]
    assert_serves(serving)
    assert serving.on("spark-b", "cat /proc/sys/net/ipv4/tcp_keepalive_time").strip() == "120"
    assert serving.on("spark-b", f"cat /sys/class/net/{FABRIC}/mtu").strip() == "9000"


def test_up_goes_on_without_a_dead_node_only_when_told_and_says_what_is_left_behind(serving: Deployment) -> None:
    before = containers(serving)
    serving.lab("power-cut", IDLE)
    for run in (serving.preview, serving.up, serving.destroy):
        refused = run(timeout_s=120)
        assert refused.code != 0
        assert f"{IDLE}, connect (TCP)" in first_error(refused), refused.text[-3000:]
    serving.configure({}, edit=lambda config: config.update(abandoned_nodes=[IDLE]))
    outcome = serving.up()
    assert outcome.code == 0, outcome.text[-3000:]
    assert outcome.count("deleted") > 0
    assert f"{IDLE} is given up" in outcome.text and "what stays on it" in outcome.text, outcome.text[-3000:]
    assert containers(serving) == before
    assert_serves(serving)
    serving.configure({})
    assert_unchanged(serving.up())


def test_destroy_goes_on_without_a_dead_node_only_when_told_and_puts_the_others_back(serving: Deployment) -> None:
    serving.lab("power-cut", "spark-b")
    refused = serving.destroy(timeout_s=120)
    assert refused.code != 0 and "spark-b, connect (TCP)" in first_error(refused)
    assert len(serving.containers("spark-a")) == 1
    serving.configure({}, edit=lambda config: config.update(abandoned_nodes=["spark-b"]))
    outcome = serving.destroy(timeout_s=300)
    assert outcome.code == 0, outcome.text[-3000:]
    assert "spark-b is given up" in outcome.text and "what stays on it" in outcome.text, outcome.text[-3000:]
    assert serving.containers("spark-a") == []
    assert serving.on("spark-a", f"cat /sys/class/net/{FABRIC}/mtu").strip() == "1500"
    assert serving.on("spark-a", "cat /proc/sys/net/ipv4/tcp_keepalive_time").strip() != "120"
    assert not serving.exported()["deployment"].get("resources")
