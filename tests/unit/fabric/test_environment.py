"""The environment of a rank that follows from the fabric."""

from __future__ import annotations

from typing import Any

import pytest

from spark_core.fabric.environment import rank_environment, rdma_policy
from tests.unit.fabric.networks import settings_with

NODES = ("spark-a", "spark-b", "spark-c", "spark-d")


def environment(change: dict[str, Any] | None = None, node: int = 0) -> dict[str, str]:
    settings = settings_with(change)
    return rank_environment(settings, settings.groups["main"], settings.nodes[node])


def ring(count: int) -> dict[str, Any]:
    """A ring, each cable a subnet of its own."""
    nodes = []
    for n, name in enumerate(NODES[:count]):
        fabric = [
            {"netdev": "enp1s0f0np0", "address": f"192.168.{n}.1/24", "hca": "rocep1s0f0"},
            {"netdev": "enp1s0f1np1", "address": f"192.168.{(n - 1) % count}.2/24", "hca": "rocep1s0f1"},
        ]
        address = f"10.1.230.{180 + n}"
        control = {"control_address": address, "control_netdev": "enP7s7"}
        nodes.append({"name": name, "management_address": address, "user": "aurora", "fabric": fabric, **control})
    return {
        "nodes": nodes,
        "fabric": {"topology": "ring"},
        "groups.main.nodes": list(NODES[:count]),
        "groups.main.serving": {"tensor_parallel_size": 1, "pipeline_parallel_size": count},
    }


def test_each_node_names_its_own_interfaces_and_devices() -> None:
    change = {
        "nodes[1].fabric": [
            {"netdev": "enp1s0f0np0", "address": "192.168.200.13/24", "hca": "rocep1s0f0"},
            {"netdev": "enP2p1s0f0np0", "address": "192.168.201.13/24", "hca": "roceP2p1s0f0"},
        ]
    }
    first, second = environment(change), environment(change, 1)
    own = {"VLLM_HOST_IP", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_IB_HCA"}
    assert {name for name in first if first[name] != second[name]} == own
    assert second["NCCL_SOCKET_IFNAME"] == second["GLOO_SOCKET_IFNAME"] == second["TP_SOCKET_IFNAME"] == "enp1s0f0np0"
    assert second["NCCL_IB_HCA"] == "=rocep1s0f0,roceP2p1s0f0"
    assert second["VLLM_HOST_IP"] == "192.168.200.13"


@pytest.mark.parametrize("change", [None, {"fabric": {"rdma": "preferred"}}, ring(3), ring(4)])
def test_no_index_of_a_gid_is_ever_set(change: dict[str, Any] | None) -> None:
    assert not any("GID" in name for name in environment(change))


@pytest.mark.parametrize(
    ("change", "policy", "variables"),
    [
        ({}, "required", {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB", "NCCL_IB_HCA": "=rocep1s0f1,roceP2p1s0f1"}),
        (
            {"fabric": {"rdma": "preferred"}},
            "preferred",
            {"NCCL_IB_DISABLE": "0", "NCCL_IB_HCA": "=rocep1s0f1,roceP2p1s0f1"},
        ),
        ({"fabric": {"rdma": "off"}}, "off", {"NCCL_IB_DISABLE": "1"}),
        ({"hardware": "cpu"}, "off", {}),
    ],
)
def test_what_rdma_is_to_be_decides_what_nccl_may_do(
    change: dict[str, Any], policy: str, variables: dict[str, str]
) -> None:
    assert rdma_policy(settings_with(change)) == policy
    found = environment(change)
    assert {name: found[name] for name in ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_IB_HCA") if name in found} == variables


def test_on_a_ring_ranks_meet_at_the_management_addresses() -> None:
    found = environment(ring(3), 1)
    assert found["VLLM_HOST_IP"] == "10.1.230.181"
    assert {found[f"{kind}_SOCKET_IFNAME"] for kind in ("NCCL", "GLOO", "TP")} == {"enP7s7"}
    assert found["NCCL_IB_HCA"] == "=rocep1s0f0,rocep1s0f1"
    assert (found["NCCL_NET_PLUGIN"], found["NCCL_IB_SUBNET_AWARE_ROUTING"], found["NCCL_IB_MERGE_NICS"]) == (
        "none",
        "1",
        "0",
    )
    assert "NCCL_ALGO" not in found


def test_a_ring_of_four_uses_the_ring_algorithm_and_the_owner_s_word_stands() -> None:
    assert environment(ring(4))["NCCL_ALGO"] == "Ring"
    change = ring(4)
    change["groups.main.serving"]["environment"] = {"NCCL_ALGO": "Tree"}
    assert environment(change)["NCCL_ALGO"] == "Tree"


def test_a_pair_has_none_of_the_variables_of_a_ring() -> None:
    assert not {"NCCL_NET_PLUGIN", "NCCL_IB_MERGE_NICS", "NCCL_ALGO"} & set(environment())
