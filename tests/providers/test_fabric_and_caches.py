"""``FabricLink``, ``ImageCopy`` and ``WeightsCopy`` over gRPC."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from providers.fabric_link import FabricLinkProvider
from providers.image_copy import ImageCopyProvider
from providers.node_journal import NodeJournalProvider
from providers.weights_copy import WeightsCopyProvider
from spark_core.fabric import render_netplan
from spark_core.settings import FabricInterface
from spark_core.weights import local_manifest
from tests.providers.conftest import Deployment
from tests.providers.engine import UNKNOWN, Managed, ProviderError

JournalProps = Callable[..., dict[str, Any]]
ADDRESSES = {"enp1s0f1np1": "192.168.200.12/24", "enP2p1s0f1np1": "192.168.201.12/24"}
ID = "sha256:" + "a" * 64
IMAGE = {"image_id": ID, "architecture": "arm64", "layers": ["sha256:1"]}
REGISTRY = "registry.example/vllm@sha256:" + "0123456789abcdef" * 4


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


@pytest.mark.parametrize("damage", ["mtu", "address", "file", "file gone", "interface gone"])
def test_drift_of_a_fabric_shows_and_is_repaired(damage: str, deployment: Deployment, fabric: Managed) -> None:
    host = deployment.host()
    if damage == "mtu":
        host.set_link("enp1s0f1np1", 1500, "192.168.200.12/24")
    elif damage == "address":
        host.set_link("enp1s0f1np1", 9000)
    elif damage == "file":
        host.netplan_path.write_text("network: {}\n")
    elif damage == "file gone":
        host.netplan_path.unlink()
    else:
        host.pull_cable("enp1s0f1np1")
    assert fabric.refresh()
    assert fabric.diff(fabric.check(fabric_props(deployment)))[0]
    if damage == "interface gone":
        with pytest.raises(ProviderError) as failed:
            fabric.up(fabric_props(deployment))
        assert "expected the interface enp1s0f1np1, found none of that name" in str(failed.value)
        host.set_link("enp1s0f1np1", 1500)
    assert fabric.up(fabric_props(deployment)) == "update"
    assert fabric.refresh()
    assert fabric.up(fabric_props(deployment)) == "same"
    assert host.addresses("enp1s0f1np1") == ["192.168.200.12/24"]
    assert host.link("enp1s0f1np1")["mtu"] == 9000


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


def image_props(**changes: Any) -> dict[str, Any]:
    return {"stack": "dev", "source": REGISTRY, "image_id": "", "nodes": ["spark-a", "spark-b"], **changes}


def test_the_life_of_an_image(deployment: Deployment) -> None:
    for host in deployment.ssh.hosts.values():
        host.change(registry={REGISTRY: IMAGE})
    image = deployment.manage(ImageCopyProvider)
    image.create(image_props())
    assert image.outputs["found_id"] == ID
    assert image.refresh()
    assert image.up(image_props()) == "same"
    deployment.host("spark-b").change(images={})
    assert image.refresh()
    assert image.outputs["nodes"] == ["spark-a"]
    assert image.up(image_props()) == "update"
    assert REGISTRY in deployment.host("spark-b").read()["images"]
    image.delete()
    assert REGISTRY in deployment.host("spark-a").read()["images"]


def test_two_nodes_that_got_different_images_are_refused(deployment: Deployment) -> None:
    deployment.host("spark-a").change(registry={REGISTRY: IMAGE})
    deployment.host("spark-b").change(registry={REGISTRY: {**IMAGE, "layers": ["sha256:2"]}})
    with pytest.raises(ProviderError) as failed:
        deployment.manage(ImageCopyProvider).create(image_props())
    assert "spark-vllm: spark-b (image): expected the image of spark-a" in str(failed.value)


def test_a_daemon_that_does_not_answer_is_no_missing_image(deployment: Deployment) -> None:
    for host in deployment.ssh.hosts.values():
        host.change(images={REGISTRY: IMAGE})
    image = deployment.manage(ImageCopyProvider)
    image.create(image_props())
    deployment.host("spark-b").change(docker_error="Cannot connect to the Docker daemon")
    with pytest.raises(ProviderError) as failed:
        image.refresh()
    assert "spark-b (docker): expected an answer about image" in str(failed.value)
    assert image.outputs["nodes"] == ["spark-a", "spark-b"]


def test_the_errors_of_both_nodes_are_told(deployment: Deployment) -> None:
    with pytest.raises(ProviderError) as failed:
        deployment.manage(ImageCopyProvider).create(image_props())
    assert "spark-a (image.registry)" in str(failed.value)
    assert "spark-b (image.registry)" in str(failed.value)


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


@pytest.mark.parametrize("provider", [FabricLinkProvider, ImageCopyProvider, WeightsCopyProvider])
def test_values_that_are_not_known_yet_pass_check_and_count_as_a_change(provider: Any, deployment: Deployment) -> None:
    known = {
        FabricLinkProvider: fabric_props(deployment),
        ImageCopyProvider: image_props(),
        WeightsCopyProvider: weights_props(deployment, "node:/x", {"spark-a": "/x"}, "as verified"),
    }[provider]
    resource = deployment.manage(provider)
    assert resource.check(dict.fromkeys(known, UNKNOWN)).keys() == known.keys()
    resource.id, resource.outputs = "x", known
    assert resource.diff(dict.fromkeys(known, UNKNOWN))[0] is True
    assert deployment.ssh.lines("spark-a") == []
