"""``FabricProof`` over gRPC: proven once with the very commands of a node, kept by read, made anew on a change."""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import Any

import pytest
from google.protobuf import empty_pb2

from providers.fabric_proof import FabricProofProvider
from spark_core.settings import read_settings
from tests.providers.conftest import Deployment
from tests.providers.engine import UNKNOWN, ProviderError
from tests.unit.proof.conftest import DOCKER, FAKES, put_bundle

pytestmark = pytest.mark.slow

NODES = ("spark-a", "spark-b")
IMAGE = "sha256:" + "a" * 64
OURS = "/spark-vllm-dev-main-rank0|dev||null|[]|runc"
BYTES = "traffic-off-fabric"
"""The stand-in for torch sends no bytes."""


@pytest.fixture
def proven(deployment: Deployment) -> Deployment:
    """Two nodes on loopback addresses whose docker runs a stand-in for torch, in a process of this machine."""
    interfaces = {f"nodes[{n}].fabric[{i}].address": f"127.0.{i + 1}.{n + 1}/24" for n in (0, 1) for i in (0, 1)}
    deployment.next_run(
        {
            **interfaces,
            "node_root": f"{deployment.ssh.base}/root",
            "fabric": {"proof": "always", "mtu_bytes": 9000, "minimum_gbps": 0.001},
            "severities": {BYTES: "ignore"},
        }
    )
    meeting = deployment.ssh.base / "meeting"
    meeting.mkdir()
    put_bundle(deployment.ssh.base / "root/stacks/dev/files/hash/runtime.pyz")
    for n, host in enumerate(deployment.ssh.hosts.values()):
        for i, netdev in enumerate(("enp1s0f1np1", "enP2p1s0f1np1")):
            host.set_link(netdev, 9000, f"127.0.{i + 1}.{n + 1}/24")
        shutil.copy(DOCKER, host.programs / "containers.py")
        docker = host.programs / "docker"
        docker.write_text(
            f'#!/bin/sh\nFAKE_LIBRARY="{FAKES}" FAKE_MEETING="{meeting}" '
            f'exec {sys.executable} "{host.programs}/containers.py" "$@"\n'
        )
        docker.chmod(0o755)
    return deployment


def props(deployment: Deployment, **changes: Any) -> dict[str, Any]:
    settings = read_settings(deployment.config)
    return {
        "stack": "dev",
        "group": "main",
        "image_id": IMAGE,
        "interfaces": {
            node.name: {"fabric": [interface.model_dump() for interface in node.fabric]} for node in settings.nodes
        },
        "environment": "0123",
        "demands": {"proof": settings.fabric.proof, "minimum_gbps": settings.fabric.minimum_gbps, "rdma": "off"},
        "runtime": "hash/runtime.pyz",
        "patches": [],
        **changes,
    }


def runs(deployment: Deployment) -> list[int]:
    """How many containers each node has started."""
    counts = []
    for node in NODES:
        path = deployment.host(node).base / "runs"
        counts.append(len(path.read_text().splitlines()) if path.exists() else 0)
    return counts


def new_meeting(deployment: Deployment) -> None:
    shutil.rmtree(deployment.ssh.base / "meeting")
    (deployment.ssh.base / "meeting").mkdir()


def test_the_life_of_a_proof(proven: Deployment) -> None:
    proof = proven.manage(FabricProofProvider)
    proof.create(props(proven))
    assert proof.id == "dev/main/fabric-proof"
    (pair,) = proof.outputs["bandwidth"]
    assert (pair["pair"], pair["method"], pair["links"]) == ("spark-a - spark-b", "tcp", 2.0)
    assert all(rate > 0 for rate in pair["gbps"]) and pair["round_trip_us"] > 0
    assert proof.outputs["transports"] == dict.fromkeys(NODES, "gloo over enp1s0f1np1")
    assert proof.outputs["not_proven"] == []
    assert runs(proven) == [1, 1]
    before, asked = dict(proof.outputs), len(proven.ssh.lines("spark-a"))
    assert proof.refresh()
    assert proof.outputs == before and set(proof.inputs) <= set(props(proven))
    assert proof.up(props(proven)) == "same"
    assert len(proven.ssh.lines("spark-a")) == asked  # a no-op asks nothing of a node
    proof.delete()
    proof.delete()
    assert len(proven.ssh.lines("spark-a")) == asked


def test_what_is_proven_is_proven_anew_when_it_changes_and_only_then(proven: Deployment) -> None:
    proof = proven.manage(FabricProofProvider)
    proof.create(props(proven))
    changes: list[dict[str, Any]] = [
        {"image_id": "sha256:" + "b" * 64},
        {"environment": "4567"},
        {"demands": {"proof": "always", "rdma": "required"}},
    ]
    unseen: list[dict[str, Any]] = [{"runtime": "hash2/runtime.pyz"}, {"patches": ["hash/fix.py"]}]
    for count, change in enumerate(changes, start=2):
        new_meeting(proven)
        assert proof.up(props(proven, **change)) == "update"
        assert runs(proven) == [count, count]
        for same in unseen:
            assert proof.up(props(proven, **change, **same)) == "same"


def test_a_change_while_the_group_serves_says_that_the_node_is_busy(proven: Deployment) -> None:
    proof = proven.manage(FabricProofProvider)
    proof.create(props(proven))
    (proven.host("spark-b").base / "running").write_text(OURS)
    proven.next_run({"fabric.proof": "idle"})
    proof.servicer = proven.servicer
    assert proof.up(props(proven, environment="4567")) == "update"
    assert runs(proven) == [1, 1]
    (line,) = proof.outputs["not_proven"]
    assert "not checked: node busy" in line and "spark-b: container spark-vllm-dev-main-rank0 of the stack dev" in line
    assert proof.outputs["bandwidth"] == [] and proof.outputs["transports"] == {}


def test_a_rate_below_the_floor_fails_up_in_one_line_and_is_tried_again(proven: Deployment) -> None:
    proven.next_run({"fabric.minimum_gbps": 100_000})
    proof = proven.manage(FabricProofProvider)
    with pytest.raises(ProviderError) as failed:
        proof.create(props(proven))
    first = str(failed.value).strip().splitlines()[0]
    assert first.startswith("spark-vllm: spark-a - spark-b (fabric): expected at least 100000 Gb/s")
    assert first.endswith("[bandwidth-low]")
    assert proof.id is None and runs(proven) == [0, 0]
    proven.next_run({"fabric.minimum_gbps": 0.001})
    proof.servicer = proven.servicer
    proof.create(props(proven))
    assert proof.id is not None


def test_a_collective_that_fails_is_told_with_the_words_of_each_rank(proven: Deployment) -> None:
    (proven.host("spark-b").base / "mode").write_text("no-import")
    with pytest.raises(ProviderError) as failed:
        proven.manage(FabricProofProvider).create(props(proven))
    lines = str(failed.value).strip().splitlines()
    assert "found: rank 1 on spark-b failed in 'importing torch': ImportError: libcudart.so.13" in lines[0]
    assert lines[1] == "  do: correct the cause and run up again; no weights were loaded"
    assert any(line.startswith("  seen: rank 0 on spark-a: ") for line in lines)
    assert "Traceback" not in str(failed.value)
    assert list(proven.ssh.base.glob("*/containers/*")) == []


def test_packets_that_do_not_fit_fail_up_before_anything_is_loaded(proven: Deployment) -> None:
    proven.host("spark-b").set_link("enp1s0f1np1", 1500, "127.0.1.2/24")
    with pytest.raises(ProviderError) as failed:
        proven.manage(FabricProofProvider).create(props(proven))
    assert "mtu-differs" in str(failed.value) and "9000" in str(failed.value) and "1500" in str(failed.value)
    assert runs(proven) == [0, 0]


def test_ctrl_c_ends_the_containers_and_nothing_is_recorded(proven: Deployment) -> None:
    for node in NODES:
        (proven.host(node).base / "mode").write_text("hang")
    proof = proven.manage(FabricProofProvider)
    call = proof.servicer.start("Create", proof.create_request(proof.check(props(proven))))
    deadline = time.monotonic() + 60
    while len(list(proven.ssh.base.glob("*/containers/*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    proof.servicer.call("Cancel", empty_pb2.Empty())
    assert "interrupted; nothing of the proof is left running" in call.exception(timeout=60).details()
    assert list(proven.ssh.base.glob("*/containers/*")) == []


def test_values_that_are_not_known_yet_pass_check_and_count_as_a_change(proven: Deployment) -> None:
    proof = proven.manage(FabricProofProvider)
    preview = props(proven, image_id=UNKNOWN)
    assert proof.check(preview)["image_id"] == UNKNOWN
    proof.id, proof.outputs = "x", json.loads(json.dumps(props(proven)))
    assert proof.diff(preview) == (True, [])
    assert proof.diff(props(proven, group="other")) == (True, ["group"])


def test_a_node_that_does_not_answer_is_named(proven: Deployment) -> None:
    proven.ssh.kill("spark-b")
    with pytest.raises(ProviderError) as failed:
        proven.manage(FabricProofProvider).create(props(proven))
    assert str(failed.value).startswith("spark-vllm: spark-b, ")
