"""``HubRevision`` and ``WeightsCopy`` of a model of the hub, over gRPC."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.hub import Hub
from providers.hub_revision import HubRevisionProvider
from providers.weights_copy import WeightsCopyProvider
from spark_core.hub.listing import from_compact
from tests.providers.conftest import Deployment
from tests.providers.engine import ProviderError
from tests.providers.test_fabric_and_caches import FABRIC

pytestmark = pytest.mark.slow

CLIENT = Path(__file__).resolve().parents[1] / "fixtures" / "hub-client"
TOKEN = "hf_a_marker"
SHARD = "model.safetensors"
SHARD_BYTES = 2 << 20
SOURCE = "hf://org/model@main"


@pytest.fixture
def hub(deployment: Deployment, tmp_path: Path) -> Iterator[Hub]:
    """A hub with a model, and nodes that can start its client."""
    folder = tmp_path / "hub" / "org" / "model" / "main"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / SHARD).write_bytes(os.urandom(SHARD_BYTES))
    for host in deployment.ssh.hosts.values():
        docker, other = host.programs / "docker", host.base / "other" / "docker"
        other.parent.mkdir()
        docker.rename(other)
        run = f"exec {sys.executable} '{CLIENT}/container.py' '{CLIENT}' \"$@\""
        docker.write_text(f'#!/bin/sh\n[ "$1" = run ] || exec \'{other}\' "$@"\n{run}\n')
        docker.chmod(0o755)
    with Hub(tmp_path / "hub", token=TOKEN) as found:
        change = {"groups.main.model.source": SOURCE, "hub": {"endpoint": found.endpoint}}
        deployment.next_run(change, hf_token=TOKEN)
        yield found


def listed(hub: Hub) -> tuple[str, dict[str, str]]:
    """The commit, and the files as they are kept in state."""
    commit = str(hub.commit("org/model"))
    files = hub.files("org/model", commit)
    return commit, {name: f"{one.size}:{one.sha256 if one.large else one.git_id}" for name, one in files.items()}


def props(deployment: Deployment, hub: Hub, **changes: Any) -> dict[str, Any]:
    commit, files = listed(hub)
    folders = {node: f"{deployment.root(node)}/weights/{commit}" for node in FABRIC}
    return {
        "stack": "dev",
        "group": "main",
        "source": SOURCE,
        "folders": folders,
        "roots": {node: deployment.root(node) for node in FABRIC},
        "addresses": FABRIC,
        "revisions": dict.fromkeys(folders, "as verified"),
        "commit": commit,
        "listing": files,
        "in_place": [],
        "image": "sha256:1",
        **changes,
    }


def test_the_life_of_a_record(deployment: Deployment, hub: Hub) -> None:
    commit, files = listed(hub)
    wanted = {"group": "main", "source": SOURCE, "commit": commit, "files": files}
    record = deployment.manage(HubRevisionProvider)
    record.create(wanted)
    hub.requests.clear()
    assert record.refresh()
    assert record.up(wanted) == "same"
    assert from_compact(record.outputs["commit"], record.outputs["files"]).files[SHARD][0] == SHARD_BYTES
    assert record.up({**wanted, "commit": "e" * 40}) == "update"
    record.delete()
    assert hub.requests == []


def test_the_life_of_weights_of_the_hub(deployment: Deployment, hub: Hub) -> None:
    wanted = props(deployment, hub)
    weights = deployment.manage(WeightsCopyProvider)
    weights.create(wanted)
    assert weights.outputs["revision"] == wanted["commit"]
    hub.requests.clear()
    assert weights.refresh()
    assert weights.up(wanted) == "same"
    rotten = Path(wanted["folders"]["spark-b"]) / SHARD
    good = rotten.read_bytes()
    rotten.write_bytes(good[:1000])
    assert weights.refresh()
    assert weights.outputs["revisions"]["spark-a"] == "as verified"
    assert weights.outputs["revisions"]["spark-b"] != "as verified"
    assert weights.up(wanted) == "update"
    assert rotten.read_bytes() == good
    assert weights.refresh()
    assert weights.up(wanted) == "same"
    assert hub.requests == []
    weights.delete()
    assert rotten.exists()
    assert [line for line in deployment.servicer.said().splitlines() if line.startswith("weights: ")] == [
        "weights: 0.00 GB from the hub to spark-a",
        "weights: 0.00 GB from spark-a over the fabric to spark-b",
        "weights: 0.00 GB from spark-a over the fabric to spark-b",
    ]


def test_two_stacks_that_share_nodes_and_a_model_copy_it_once(deployment: Deployment, hub: Hub) -> None:
    wanted = props(deployment, hub)
    deployment.manage(WeightsCopyProvider).create(wanted)
    hub.requests.clear()
    deployment.next_run(hf_token=TOKEN)
    other = deployment.manage(WeightsCopyProvider)
    other.create({**wanted, "stack": "other"})
    assert other.outputs["content"]
    assert hub.requests == []
    assert [line for line in deployment.servicer.said().splitlines() if line.startswith("weights: ")] == []


def test_the_token_is_neither_in_state_nor_in_any_command(deployment: Deployment, hub: Hub) -> None:
    weights = deployment.manage(WeightsCopyProvider)
    weights.create(props(deployment, hub))
    assert TOKEN not in json.dumps(weights.outputs)
    for node in FABRIC:
        assert not any(TOKEN in line for line in deployment.ssh.lines(node))
    assert any(line.endswith("+token") for line in hub.requests)
    assert TOKEN not in deployment.servicer.said()


def test_a_token_in_a_file_is_used_and_one_that_cannot_be_read_is_told(
    deployment: Deployment, hub: Hub, tmp_path: Path
) -> None:
    deployment.config.pop("hf_token")
    file = tmp_path / "token"
    deployment.next_run({"hub.token_file": str(file)})
    weights = deployment.manage(WeightsCopyProvider)
    with pytest.raises(ProviderError, match=r"hub\.token_file: expected the hub's token in .*, found: No such file"):
        weights.create(props(deployment, hub))
    file.write_text(f"{TOKEN}\n")
    weights.create(props(deployment, hub))
    assert weights.outputs["content"]


def test_where_nobody_was_asked_before_the_hub_is_asked_for_the_files(deployment: Deployment, hub: Hub) -> None:
    wanted = props(deployment, hub, listing={})
    weights = deployment.manage(WeightsCopyProvider)
    weights.create(wanted)
    assert (Path(wanted["folders"]["spark-b"]) / SHARD).stat().st_size == SHARD_BYTES
    assert weights.up(wanted) == "same"


def test_a_login_that_is_refused_is_told_in_one_line(deployment: Deployment, hub: Hub) -> None:
    hub.token = "another"
    with pytest.raises(ProviderError) as failed:
        deployment.manage(WeightsCopyProvider).create(props(deployment, hub))
    [line, do, *rest] = str(failed.value).splitlines()
    assert line.startswith("spark-vllm: spark-a (model.source): expected ")
    assert "HTTP status 401" in line
    assert do.startswith("  do: the hub does not take the token")
    assert rest == []
    assert TOKEN not in str(failed.value)
