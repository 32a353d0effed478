"""RDMA devices at the start of a rank, and the address by which vLLM asks Ray for it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from spark_runtime import hcas, ray_node
from tests.unit.runtime.runtime_group import ADDRESSES, Group, scenario

pytestmark = pytest.mark.slow

BOTH = "=rocep1s0f1,roceP2p1s0f1"
RECORDED = Path(__file__).parents[2] / "fixtures" / "spark" / "sys-infiniband"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """The four functions of a Spark that is cabled at port 1, as the kernel tells them."""
    for name, state in (
        ("rocep1s0f0", "1: DOWN"),
        ("rocep1s0f1", "4: ACTIVE"),
        ("roceP2p1s0f0", "1: DOWN"),
        ("roceP2p1s0f1", "4: ACTIVE"),
    ):
        set_state(tmp_path, name, state)
    return tmp_path


def set_state(sysfs: Path, name: str, state: str) -> None:
    folder = sysfs / name / "ports" / "1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state").write_text(state + "\n")


def test_devices_whose_port_is_active_stay(sysfs: Path) -> None:
    env, found = hcas.choose_hcas({"NCCL_IB_HCA": BOTH, "X": "1"}, "required", sysfs)
    assert env == {"NCCL_IB_HCA": BOTH, "X": "1"}
    assert (found.used, found.dropped, found.text) == (("rocep1s0f1", "roceP2p1s0f1"), {}, "")


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("1: DOWN", "roceP2p1s0f1 (DOWN)"),
        ("2: INIT", "roceP2p1s0f1 (INIT)"),
        ("", "roceP2p1s0f1 (unknown)"),
        (None, "roceP2p1s0f1 (no such device)"),
    ],
)
@pytest.mark.parametrize("rdma", ["required", "preferred"])
def test_a_device_without_an_active_port_is_left_out_and_told(
    sysfs: Path, state: str | None, told: str, rdma: str
) -> None:
    if state is None:
        (sysfs / "roceP2p1s0f1").rename(sysfs / "elsewhere")
    else:
        set_state(sysfs, "roceP2p1s0f1", state)
    env, found = hcas.choose_hcas({"NCCL_IB_HCA": BOTH, "NCCL_NET": "IB"}, rdma, sysfs)
    assert env == {"NCCL_IB_HCA": "=rocep1s0f1", "NCCL_NET": "IB"}
    assert told in found.text and "in use: rocep1s0f1" in found.text
    assert found.as_json()["used"] == ["rocep1s0f1"]


def test_the_recorded_states_are_understood(tmp_path: Path) -> None:
    set_state(tmp_path, "rocep1s0f0", (RECORDED / "rocep1s0f0-port1-state.txt").read_text())
    assert hcas.port_state("rocep1s0f0", tmp_path) == "ACTIVE"


def test_without_any_active_port_a_rank_that_requires_rdma_does_not_start(tmp_path: Path) -> None:
    set_state(tmp_path, "rocep1s0f1", "1: DOWN")
    with pytest.raises(hcas.NoActivePort) as failed:
        hcas.choose_hcas({"NCCL_IB_HCA": BOTH}, "required", tmp_path)
    assert "rocep1s0f1: DOWN, roceP2p1s0f1: no such device" in str(failed.value)
    assert "power-cycle" in str(failed.value)


@pytest.mark.parametrize("rdma", ["preferred", "off"])
def test_without_any_active_port_others_fall_back_to_sockets_and_say_so(tmp_path: Path, rdma: str) -> None:
    given = {"NCCL_IB_HCA": BOTH, "NCCL_NET": "IB", "NCCL_IB_DISABLE": "0", "X": "1"}
    env, found = hcas.choose_hcas(given, rdma, tmp_path)
    assert env == {"NCCL_IB_DISABLE": "1", "X": "1"}
    assert "in use: none" in found.text


@pytest.mark.parametrize("value", ["mlx5", "^mlx5_0", "", "rocep1s0f1,roceP2p1s0f1"])
def test_a_list_that_is_not_ours_is_left_alone(tmp_path: Path, value: str) -> None:
    given = {"NCCL_IB_HCA": value}
    assert hcas.choose_hcas(given, "required", tmp_path) == (given, hcas.Hcas())


def test_a_second_port_is_looked_at_where_it_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "mlx5_0" / "ports" / "2"
    folder.mkdir(parents=True)
    (folder / "state").write_text("4: ACTIVE\n")
    env, _ = hcas.choose_hcas({"NCCL_IB_HCA": "=mlx5_0:2,mlx5_0"}, "required", tmp_path)
    assert env["NCCL_IB_HCA"] == "=mlx5_0:2"


@pytest.mark.parametrize("given", [{}, {"NCCL_IB_HCA": BOTH}])
def test_the_gid_index_is_never_set_and_an_empty_one_is_taken_away(sysfs: Path, given: dict[str, str]) -> None:
    env, _ = hcas.choose_hcas(given, "required", sysfs)
    assert "NCCL_IB_GID_INDEX" not in env
    env, _ = hcas.choose_hcas(given | {"NCCL_IB_GID_INDEX": ""}, "required", sysfs)
    assert "NCCL_IB_GID_INDEX" not in env
    env, _ = hcas.choose_hcas(given | {"NCCL_IB_GID_INDEX": "5"}, "required", sysfs)
    assert env["NCCL_IB_GID_INDEX"] == "5"


def test_vllm_and_ray_mean_the_same_node_or_both_addresses_are_named() -> None:
    assert ray_node.address_mismatch({"VLLM_HOST_IP": "192.168.200.12"}, "192.168.200.12") == ""
    text = ray_node.address_mismatch({"VLLM_HOST_IP": "10.1.230.180"}, "192.168.200.12")
    assert "node 10.1.230.180 (from VLLM_HOST_IP)" in text and "registers this node as 192.168.200.12" in text


@pytest.mark.parametrize("env", [{}, {"VLLM_HOST_IP": ""}])
def test_without_the_pin_the_default_route_s_address_is_what_vllm_asks_for(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Routed(socket.socket):
        def connect(self, address: object) -> None:
            super().connect(("127.0.0.9", 80))

    monkeypatch.setattr(socket, "socket", Routed)
    address, source = ray_node.address_asked_by_vllm(env)
    assert address == "127.0.0.1" and "default route" in source
    assert "VLLM_HOST_IP is not set" in ray_node.address_mismatch(env, "192.168.200.12")


def test_without_a_route_vllm_asks_for_no_address_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unrouted(socket.socket):
        def connect(self, address: object) -> None:
            raise OSError("Network is unreachable")

    monkeypatch.setattr(socket, "socket", Unrouted)
    assert ray_node.address_asked_by_vllm({})[0] == "0.0.0.0"


@scenario
def test_a_head_whose_vllm_would_ask_for_another_address_fails_before_ray_starts(group: Group) -> None:
    head = group.start(0, VLLM_HOST_IP="10.1.230.180")
    group.start(1)
    status = head.wait_for("failed")
    line = status["first_error"]["line"]
    assert "10.1.230.180 (from VLLM_HOST_IP)" in line and "registers this node as 127.0.0.1" in line
    assert group.events() == []


@scenario
def test_a_worker_whose_vllm_would_ask_for_another_address_is_the_head_s_first_error(group: Group) -> None:
    head = group.start(0)
    group.start(1, VLLM_HOST_IP="10.1.230.181")
    status = head.wait_for("failed")
    assert "10.1.230.181 (from VLLM_HOST_IP)" in status["first_error"]["line"]
    assert ADDRESSES[1] in status["first_error"]["line"]
    assert "vllm start" not in group.events()


@scenario
def test_a_rank_that_requires_rdma_and_has_no_active_port_says_so_as_first_error(group: Group) -> None:
    head = group.start(0, "--rdma required", NCCL_IB_HCA="=no-such-device")
    group.start(1)
    status = head.wait_for("failed")
    assert (
        "no RDMA device of this node has an active port (no-such-device: no such device)"
        in (status["first_error"]["line"])
    )
    assert group.events() == []


@scenario
def test_a_rank_that_prefers_rdma_serves_over_sockets_and_shows_what_it_left_out(group: Group) -> None:
    head = group.start(0, "--rdma preferred", NCCL_IB_HCA="=no-such-device", NCCL_NET="IB")
    group.start(1)
    status = head.wait_for("serving")
    assert status["hcas"] == {"used": [], "dropped": {"no-such-device": "no such device"}}
    assert "RDMA devices without an active port are left out: no-such-device" in head.text()
    env = json.loads((group.folder / "vllm.env").read_text())
    assert env["NCCL_IB_DISABLE"] == "1" and "NCCL_NET" not in env and "NCCL_IB_HCA" not in env


@scenario
def test_a_lone_rank_needs_no_address_of_a_fabric(group: Group) -> None:
    head = group.start(0, nodes=1, VLLM_HOST_IP="127.0.0.1")
    head.wait_for("serving")
    assert group.events()[-1] == "vllm completion"
