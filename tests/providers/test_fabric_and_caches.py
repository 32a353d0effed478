"""``FabricLink`` and ``WeightsCopy`` over gRPC."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import empty_pb2

from providers.node_journal import NodeJournalProvider
from providers.weights_copy import WeightsCopyProvider
from spark_core.fabric.netplan import render_netplan
from spark_core.settings import FabricInterface
from spark_core.weights import local_manifest
from tests.providers.conftest import Deployment
from tests.providers.engine import UNKNOWN, Managed, ProviderError
from tests.providers.quick_fabric_link import QuickFabricLinkProvider as FabricLinkProvider

pytestmark = pytest.mark.slow

JournalProps = Callable[..., dict[str, Any]]
FABRIC = {"spark-a": "127.0.0.21", "spark-b": "127.0.0.22"}
"""Addresses on which the fake nodes really reach each other."""
ADDRESSES = {"enp1s0f1np1": "192.168.200.12/24", "enP2p1s0f1np1": "192.168.201.12/24"}


def fabric_props(deployment: Deployment, *, mtu: int = 9000, managed: bool = True, **addresses: str) -> dict[str, Any]:
    wanted = addresses or ADDRESSES
    interfaces = [FabricInterface(netdev=netdev, address=address) for netdev, address in wanted.items()]
    return {
        "node": "spark-a",
        "connection": deployment.connection(),
        "stack": "dev",
        "root": deployment.root(),
        "managed": managed,
        "interfaces": [{"netdev": n, "address": a, "mtu_bytes": mtu} for n, a in wanted.items()],
        "netplan_file": deployment.host().netplan_file,
        "netplan": render_netplan(interfaces, mtu) if managed else "",
        "take_over": [],
    }


@pytest.fixture
def fabric(deployment: Deployment, journal_props: JournalProps) -> Managed:
    """A managed fabric that is as declared."""
    deployment.manage(NodeJournalProvider).create(journal_props())
    found = deployment.manage(FabricLinkProvider)
    found.create(fabric_props(deployment))
    return found


def test_the_life_of_a_managed_fabric(deployment: Deployment, fabric: Managed) -> None:
    host = deployment.host()
    assert fabric.id == "spark-a/fabric"
    assert host.addresses("enp1s0f1np1") == ["192.168.200.12/24"]
    assert host.link("enP2p1s0f1np1")["mtu"] == 9000
    assert fabric.refresh()
    assert fabric.up(fabric_props(deployment)) == "same"
    assert fabric.up(fabric_props(deployment, mtu=4200)) == "update"
    assert host.link("enp1s0f1np1")["mtu"] == 4200
    assert fabric.up(fabric_props(deployment, mtu=4200) | {"netplan_file": "/etc/netplan/61.yaml"}) == "replace"
    fabric.delete()
    assert host.links() == {
        "enp1s0f1np1": {"mtu": 1500, "addresses": []},
        "enP2p1s0f1np1": {"mtu": 1500, "addresses": []},
    }
    assert not host.netplan_path.exists()
    fabric.delete()


def test_drift_of_a_fabric_shows_and_is_repaired(deployment: Deployment, fabric: Managed) -> None:
    host = deployment.host()
    damages: dict[str, Callable[[], object]] = {
        "mtu": lambda: host.set_link("enp1s0f1np1", 1500, "192.168.200.12/24"),
        "address": lambda: host.set_link("enp1s0f1np1", 9000),
        "file": lambda: host.netplan_path.write_text("network: {}\n"),
        "file gone": host.netplan_path.unlink,
    }
    for damage, happen in damages.items():
        happen()
        assert fabric.refresh()
        assert fabric.up(fabric_props(deployment)) == "update", damage
        assert fabric.refresh()
        assert fabric.up(fabric_props(deployment)) == "same", damage
        assert host.addresses("enp1s0f1np1") == ["192.168.200.12/24"]
        assert host.link("enp1s0f1np1")["mtu"] == 9000


def test_an_interface_that_is_gone_shows_and_is_repaired_once_it_is_back(
    deployment: Deployment, fabric: Managed
) -> None:
    host = deployment.host()
    host.pull_cable("enp1s0f1np1")
    assert fabric.refresh()
    with pytest.raises(ProviderError) as failed:
        fabric.up(fabric_props(deployment))
    assert "expected the interface enp1s0f1np1, found none of that name" in str(failed.value)
    host.set_link("enp1s0f1np1", 1500)
    assert fabric.up(fabric_props(deployment)) == "update"
    assert host.addresses("enp1s0f1np1") == ["192.168.200.12/24"]


def test_an_interface_that_is_no_longer_declared_goes_back(deployment: Deployment, fabric: Managed) -> None:
    host = deployment.host()
    assert fabric.up(fabric_props(deployment, enp1s0f1np1="192.168.200.12/24")) == "update"
    assert host.link("enP2p1s0f1np1") == {"mtu": 1500, "addresses": []}
    assert host.link("enp1s0f1np1") == {"mtu": 9000, "addresses": ["192.168.200.12/24"]}
    fabric.delete()
    assert host.link("enp1s0f1np1") == {"mtu": 1500, "addresses": []}


def test_a_fabric_that_is_no_longer_managed_is_put_back_and_then_only_checked(
    deployment: Deployment, fabric: Managed
) -> None:
    with pytest.raises(ProviderError) as failed:
        fabric.up(fabric_props(deployment, managed=False))
    assert "expected 192.168.200.12/24 on enp1s0f1np1, found no address" in str(failed.value)
    assert not deployment.host().netplan_path.exists()


def test_an_unmanaged_fabric_is_checked_and_never_changed(deployment: Deployment, journal_props: JournalProps) -> None:
    host = deployment.host()
    fabric = deployment.manage(FabricLinkProvider)
    with pytest.raises(ProviderError) as failed:
        fabric.create(fabric_props(deployment, managed=False))
    assert str(failed.value).splitlines()[:2] == [
        "spark-vllm: spark-a (nodes[].fabric[0]): expected 192.168.200.12/24 on enp1s0f1np1, found no address",
        "  do: configure it, or set fabric.manage to true",
    ]
    for netdev, address in ADDRESSES.items():
        host.set_link(netdev, 9000, address)
    before = host.links()
    fabric.create(fabric_props(deployment, managed=False))
    assert fabric.refresh()
    assert fabric.up(fabric_props(deployment, managed=False)) == "same"
    fabric.delete()
    assert host.links() == before
    assert not any("sudo" in line for line in deployment.ssh.lines("spark-a"))


def test_a_silent_node_is_no_fabric_without_addresses(deployment: Deployment, fabric: Managed) -> None:
    deployment.ssh.kill("spark-a")
    outputs = dict(fabric.outputs)
    with pytest.raises(ProviderError) as failed:
        fabric.refresh()
    assert str(failed.value).startswith("spark-vllm: spark-a, ")
    assert "Traceback" not in str(failed.value)
    assert fabric.outputs == outputs


THEIRS = "/etc/netplan/40-cx7.yaml"
THEIR_TEXT = "network:\n  ethernets:\n    enp1s0f1np1:\n      mtu: 4200\n"


def test_a_file_of_others_gives_way_only_if_it_is_named_and_comes_back(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    theirs = Path(f"{deployment.host().base}{THEIRS}")
    theirs.write_text(THEIR_TEXT)
    deployment.manage(NodeJournalProvider).create(journal_props())
    fabric = deployment.manage(FabricLinkProvider)
    with pytest.raises(ProviderError) as failed:
        fabric.create(fabric_props(deployment))
    assert f"expected no other file that configures enp1s0f1np1, found {THEIRS}" in str(failed.value)
    assert f"  do: add {THEIRS} to fabric.take_over" in str(failed.value)
    assert theirs.read_text() == THEIR_TEXT
    fabric.create(fabric_props(deployment) | {"take_over": [THEIRS]})
    assert not theirs.exists()
    assert fabric.refresh()
    assert fabric.up(fabric_props(deployment) | {"take_over": [THEIRS]}) == "same"
    fabric.delete()
    assert theirs.read_text() == THEIR_TEXT
    assert not deployment.host().netplan_path.exists()


def test_a_file_that_is_no_longer_named_comes_back_and_is_in_the_way_again(
    deployment: Deployment, journal_props: JournalProps
) -> None:
    theirs = Path(f"{deployment.host().base}{THEIRS}")
    theirs.write_text(THEIR_TEXT)
    deployment.manage(NodeJournalProvider).create(journal_props())
    fabric = deployment.manage(FabricLinkProvider)
    fabric.create(fabric_props(deployment) | {"take_over": [THEIRS]})
    with pytest.raises(ProviderError) as failed:
        fabric.up(fabric_props(deployment))
    assert "expected no other file that configures enp1s0f1np1" in str(failed.value)
    assert theirs.read_text() == THEIR_TEXT


def test_a_state_of_before_files_could_be_taken_over_is_understood(deployment: Deployment, fabric: Managed) -> None:
    for kept in (fabric.inputs, fabric.outputs):
        kept.pop("take_over")
    assert fabric.refresh()
    assert fabric.up(fabric_props(deployment)) == "update"
    assert fabric.up(fabric_props(deployment)) == "same"
    fabric.delete()
    assert not deployment.host().netplan_path.exists()


def test_a_node_that_is_given_up_is_not_contacted(deployment: Deployment, fabric: Managed) -> None:
    deployment.ssh.kill("spark-a")
    change = {
        "abandoned_nodes": ["spark-a"],
        "groups.main.nodes": ["spark-b"],
        "groups.main.serving.tensor_parallel_size": 1,
    }
    fabric.servicer = deployment.next_run(change)
    outputs = dict(fabric.outputs)
    assert fabric.refresh()
    assert fabric.outputs == outputs
    assert fabric.up(fabric_props(deployment, mtu=4200)) == "update"
    fabric.delete()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights" * 50)
    return folder


def weights_props(deployment: Deployment, source: str, folders: dict[str, str], revision: str) -> dict[str, Any]:
    return {
        "stack": "dev",
        "group": "main",
        "source": source,
        "folders": folders,
        "roots": {node: deployment.root(node) for node in folders},
        "addresses": {node: FABRIC[node] for node in folders},
        "revisions": dict.fromkeys(folders, revision),
    }


def test_the_life_of_copied_weights(deployment: Deployment, model: Path) -> None:
    revision = local_manifest(str(model)).revision
    folders = {node: f"{deployment.root(node)}/weights/{revision}" for node in ("spark-a", "spark-b")}
    props = weights_props(deployment, f"controller:{model}", folders, revision)
    weights = deployment.manage(WeightsCopyProvider)
    weights.create(props)
    assert weights.outputs["revision"] == revision
    assert weights.refresh()
    assert weights.up(props) == "same"
    rotten = Path(folders["spark-b"]) / "model.safetensors"
    rotten.write_bytes(b"rotten")
    assert weights.refresh()
    assert weights.outputs["revisions"]["spark-a"] == revision
    assert weights.outputs["revisions"]["spark-b"] != revision
    assert weights.up(props) == "update"
    assert rotten.read_bytes() == b"weights" * 50
    assert weights.refresh()
    assert weights.up(props) == "same"
    weights.delete()
    assert rotten.exists()
    assert [line for line in deployment.servicer.said().splitlines() if line.startswith("weights: ")] == [
        "weights: 0.00 GB from the controller to spark-a, and from there over the fabric to spark-b",
        "weights: 0.00 GB from spark-a over the fabric to spark-b",
    ]


def test_ctrl_c_during_a_copy_ends_it_within_five_seconds(deployment: Deployment, model: Path) -> None:
    revision = local_manifest(str(model)).revision
    folders = {node: f"{deployment.root(node)}/weights/{revision}" for node in ("spark-a", "spark-b")}
    python = deployment.host("spark-b").programs / "python3"
    python.write_text(f'#!/bin/sh\ncase "$*" in *node_mover*) exec sleep 60;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    weights = deployment.manage(WeightsCopyProvider)
    props = weights_props(deployment, f"controller:{model}", folders, revision)
    copying = deployment.servicer.start("Create", weights.create_request(props))
    end = time.monotonic() + 60
    while "node_mover" not in "".join(deployment.ssh.lines("spark-b")) and time.monotonic() < end:
        time.sleep(0.05)
    asked = time.monotonic()
    deployment.servicer.call("Cancel", empty_pb2.Empty())
    with pytest.raises(grpc.RpcError) as failed:
        copying.result()
    assert time.monotonic() - asked < 5
    assert "interrupted; what has arrived is kept" in failed.value.details()
    assert not Path(folders["spark-b"]).exists()
    python.unlink()
    weights.servicer = deployment.next_run()
    weights.create(props)
    assert (Path(folders["spark-b"]) / "model.safetensors").read_bytes() == b"weights" * 50


def test_a_directory_that_changed_since_the_plan_is_refused(deployment: Deployment, model: Path) -> None:
    folders = {"spark-a": f"{deployment.root()}/weights/x"}
    props = weights_props(deployment, f"controller:{model}", folders, "0" * 40)
    with pytest.raises(ProviderError) as failed:
        deployment.manage(WeightsCopyProvider).create(props)
    assert "model.source: expected revision 000000000000" in str(failed.value)
    assert not Path(folders["spark-a"]).exists()


def test_weights_used_in_place_are_told_only_when_they_change(deployment: Deployment, model: Path) -> None:
    props = weights_props(deployment, f"node:{model}", dict.fromkeys(("spark-a", "spark-b"), str(model)), "as verified")
    weights = deployment.manage(WeightsCopyProvider)
    weights.create(props)
    assert weights.refresh()
    assert weights.up(props) == "same"
    (model / "config.json").write_text("[]")
    assert weights.refresh()
    assert "as verified" not in weights.outputs["revisions"].values()
    before = weights.outputs["revision"]
    assert weights.up(props) == "update"
    assert weights.outputs["revision"] != before
    assert weights.refresh()
    assert weights.up(props) == "same"
    weights.delete()
    assert model.is_dir()


def test_caches_are_left_but_not_forgotten_while_a_node_does_not_answer(deployment: Deployment, model: Path) -> None:
    props = weights_props(deployment, f"node:{model}", {"spark-a": str(model)}, "as verified")
    weights = deployment.manage(WeightsCopyProvider)
    weights.create(props)
    deployment.ssh.kill("spark-b")
    with pytest.raises(ProviderError) as failed:
        weights.delete()
    assert "spark-b, connect (TCP)" in str(failed.value)


@pytest.mark.parametrize("provider", [FabricLinkProvider, WeightsCopyProvider])
def test_values_that_are_not_known_yet_pass_check_and_count_as_a_change(provider: Any, deployment: Deployment) -> None:
    known = {
        FabricLinkProvider: fabric_props(deployment),
        WeightsCopyProvider: weights_props(deployment, "node:/x", {"spark-a": "/x"}, "as verified"),
    }[provider]
    resource = deployment.manage(provider)
    assert resource.check(dict.fromkeys(known, UNKNOWN)).keys() == known.keys()
    resource.id, resource.outputs = "x", known
    assert resource.diff(dict.fromkeys(known, UNKNOWN))[0] is True
    assert deployment.ssh.lines("spark-a") == []
