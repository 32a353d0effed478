"""``ApiKey`` and ``EndpointGate`` over gRPC: the key stays where it belongs, and serving is proven."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from providers.api_key import ApiKeyProvider
from providers.endpoint_gate import EndpointGateProvider
from spark_core.api_key import key_digest
from tests.chat_endpoint import ChatEndpoint, chat_endpoint
from tests.providers.conftest import Deployment
from tests.providers.engine import UNKNOWN, Managed, ProviderError

MARKER = "sk-marker-a1b2c3d4"


def key_path(deployment: Deployment) -> Path:
    return Path(deployment.root()) / "stacks/dev/secrets/main/api_key"


def key_props(deployment: Deployment, source: str = "generated") -> dict[str, Any]:
    return {
        "node": "spark-a",
        "connection": deployment.connection(),
        "stack": "dev",
        "group": "main",
        "source": source,
        "path": str(key_path(deployment)),
        "file": "in place",
    }


def test_the_life_of_a_generated_key(deployment: Deployment) -> None:
    key = deployment.manage(ApiKeyProvider)
    key.create(key_props(deployment))
    made = key.outputs["api_key"]
    assert key_path(deployment).read_text() == f"{made}\n"
    assert key_path(deployment).stat().st_mode & 0o777 == 0o600
    assert key.refresh()
    assert key.up(key_props(deployment)) == "same"
    key.delete()
    assert not key_path(deployment).exists()
    key.delete()


@pytest.mark.parametrize("damage", ["removed", "altered", "mode"])
def test_a_key_file_that_is_not_as_it_was_gets_the_same_key_again(damage: str, deployment: Deployment) -> None:
    key = deployment.manage(ApiKeyProvider)
    key.create(key_props(deployment))
    made = key.outputs["api_key"]
    path = key_path(deployment)
    if damage == "removed":
        path.unlink()
    elif damage == "altered":
        path.write_text("sk-other\n")
    else:
        path.chmod(0o644)
    assert key.refresh()
    assert key.inputs["file"] == ("absent" if damage == "removed" else "altered")
    assert key.up(key_props(deployment)) == "update"
    assert path.read_text() == f"{made}\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert key.refresh()
    assert key.up(key_props(deployment)) == "same"


def test_the_key_is_in_the_one_secret_output_and_nowhere_else(deployment: Deployment) -> None:
    deployment.config = deployment.config | {"api_key": MARKER}
    deployment.next_run({"groups.main.serving.api_key": "own"})
    key = deployment.manage(ApiKeyProvider)
    key.create(key_props(deployment, "own"))
    assert {name for name, value in key.outputs.items() if MARKER in str(value)} == {"api_key"}
    assert MARKER not in str(key.inputs)
    assert key_digest(MARKER) not in str(key.inputs)
    key.refresh()
    assert MARKER not in str(key.inputs)
    assert not any(MARKER in line for line in deployment.ssh.lines("spark-a"))
    deployment.ssh.kill("spark-a")
    with pytest.raises(ProviderError) as failed:
        key.refresh()
    assert MARKER not in str(failed.value)


def test_another_own_key_is_written_in_place(deployment: Deployment) -> None:
    deployment.config = deployment.config | {"api_key": "sk-first"}
    deployment.next_run({"groups.main.serving.api_key": "own"})
    key = deployment.manage(ApiKeyProvider)
    key.create(key_props(deployment, "own"))
    deployment.next_run(api_key="sk-second")
    key.servicer = deployment.servicer
    assert key.up(key_props(deployment, "own")) == "update"
    assert key_path(deployment).read_text() == "sk-second\n"
    assert key.outputs["api_key"] == "sk-second"


def test_a_stack_that_gives_up_its_own_key_gets_a_new_one(deployment: Deployment) -> None:
    deployment.config = deployment.config | {"api_key": MARKER}
    deployment.next_run({"groups.main.serving.api_key": "own"})
    key = deployment.manage(ApiKeyProvider)
    key.create(key_props(deployment, "own"))
    assert key.up(key_props(deployment, "generated")) == "update"
    assert key.outputs["api_key"] != MARKER
    assert key_path(deployment).read_text() == f"{key.outputs['api_key']}\n"


def test_a_key_of_a_killed_run_is_taken_over(deployment: Deployment) -> None:
    path = key_path(deployment)
    path.parent.mkdir(parents=True)
    path.write_text("sk-of-a-killed-run\n")
    key = deployment.manage(ApiKeyProvider)
    key.create(key_props(deployment))
    assert key.outputs["api_key"] == "sk-of-a-killed-run"


def test_an_empty_key_file_of_a_killed_run_is_no_key(deployment: Deployment) -> None:
    path = key_path(deployment)
    path.parent.mkdir(parents=True)
    path.touch()
    key = deployment.manage(ApiKeyProvider)
    key.create(key_props(deployment))
    assert len(key.outputs["api_key"]) > 40


def test_another_head_is_another_key_file(deployment: Deployment) -> None:
    key = deployment.manage(ApiKeyProvider)
    key.create(key_props(deployment))
    assert key.up(key_props(deployment) | {"node": "spark-b"}) == "replace"


@pytest.fixture
def endpoint() -> Iterator[ChatEndpoint]:
    with chat_endpoint() as served:
        yield served


def gate_props(deployment: Deployment, endpoint: ChatEndpoint, **changes: Any) -> dict[str, Any]:
    ranks = [
        {
            "node": node,
            "connection": deployment.connection(node),
            "container": f"rank{place}",
            "state_folder": f"{deployment.host(node).base}/state",
        }
        for place, node in enumerate(("spark-a", "spark-b"))
    ]
    return {
        "stack": "dev",
        "group": "main",
        "ranks": ranks,
        "deployment": "d1",
        "endpoint": endpoint.url,
        "model": "qwen",
        "key_path": str(key_path(deployment)),
        "containers": ["id-of-rank0", "id-of-rank1"],
        "state": "serving",
        **changes,
    }


def set_phase(deployment: Deployment, node: str, phase: str, n: int = 1, **status: Any) -> None:
    """What the supervisor of a node writes."""
    folder = deployment.host(node).base / "state"
    folder.mkdir(exist_ok=True)
    generation = {"deployment": "d1", "head_incarnation": "abc", "n": n}
    (folder / "status.json").write_text(
        json.dumps({"phase": phase, "generation": generation, "updated": time.time(), **status})
    )


@pytest.fixture
def serving(deployment: Deployment) -> None:
    """Two ranks that serve, with their key."""
    path = key_path(deployment)
    path.parent.mkdir(parents=True)
    path.write_text(f"{MARKER}\n")
    started = {"StartedAt": "2026-01-01T00:00:00.0Z", "ExitCode": 0, "OOMKilled": False}
    deployment.host("spark-a").set_container("rank0", **started)
    deployment.host("spark-b").set_container("rank1", **started)
    set_phase(deployment, "spark-a", "serving")
    set_phase(deployment, "spark-b", "ray_ready")


@pytest.mark.usefixtures("serving")
def test_the_life_of_a_gate(deployment: Deployment, endpoint: ChatEndpoint) -> None:
    gate = deployment.manage(EndpointGateProvider)
    gate.create(gate_props(deployment, endpoint))
    assert gate.id == "dev/main"
    assert [authorization for _, authorization, _ in endpoint.asked] == [f"Bearer {MARKER}"]
    assert gate.refresh()
    assert gate.up(gate_props(deployment, endpoint)) == "same"
    assert len(endpoint.asked) == 1
    assert MARKER not in str(gate.outputs)
    gate.delete()
    assert [
        deployment.host(n).read()["containers"][c]["Running"] for n, c in (("spark-a", "rank0"), ("spark-b", "rank1"))
    ] == [
        False,
        False,
    ]
    gate.delete()


@pytest.mark.usefixtures("serving")
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("stopped", "spark-b: container stopped"),
        ("gone", "spark-b: no container"),
        ("loading", "spark-a: loading"),
        ("other generation", "spark-b: not in the head's generation"),
    ],
)
def test_a_group_that_does_not_serve_shows_as_drift_and_the_gate_proves_it_again(
    damage: str, told: str, deployment: Deployment, endpoint: ChatEndpoint
) -> None:
    gate = deployment.manage(EndpointGateProvider)
    gate.create(gate_props(deployment, endpoint))
    host = deployment.host("spark-b")
    whole = host.read()["containers"]
    if damage == "stopped":
        host.set_container("rank1", Running=False, StartedAt="2026-01-01T00:00:00Z")
    elif damage == "gone":
        host.change(containers={})
    elif damage == "loading":
        set_phase(deployment, "spark-a", "loading")
    else:
        set_phase(deployment, "spark-b", "ray_ready", n=7)
    assert gate.refresh()
    assert gate.inputs["state"] == told
    host.change(containers=whole)
    set_phase(deployment, "spark-a", "serving")
    set_phase(deployment, "spark-b", "ray_ready")
    assert gate.up(gate_props(deployment, endpoint)) == "update"
    assert len(endpoint.asked) == 2
    assert gate.refresh()
    assert gate.up(gate_props(deployment, endpoint)) == "same"


@pytest.mark.usefixtures("serving")
def test_a_group_that_is_stopped_on_request_is_left_so(deployment: Deployment, endpoint: ChatEndpoint) -> None:
    set_phase(deployment, "spark-a", "stopped", desired="stopped")
    gate = deployment.manage(EndpointGateProvider)
    gate.create(gate_props(deployment, endpoint))
    assert endpoint.asked == []
    assert gate.refresh()
    assert gate.inputs["state"] == gate.outputs["state"] == "spark-a: stopped on request"
    assert gate.up(gate_props(deployment, endpoint)) == "same"
    set_phase(deployment, "spark-a", "loading")
    assert gate.refresh()
    assert gate.inputs["state"] == "spark-a: loading"


@pytest.mark.usefixtures("serving")
def test_a_rank_that_failed_is_told_with_its_first_error(deployment: Deployment, endpoint: ChatEndpoint) -> None:
    set_phase(
        deployment,
        "spark-b",
        "failed",
        first_error={"at": 5, "line": "CUDA out of memory", "lines": ["log line"]},
    )
    with pytest.raises(ProviderError) as failed:
        deployment.manage(EndpointGateProvider).create(gate_props(deployment, endpoint))
    assert str(failed.value).strip().splitlines() == [
        "spark-vllm: spark-b, rank 1: CUDA out of memory",
        "  do: correct the cause and run up again",
        "  seen: log line",
    ]


@pytest.mark.usefixtures("serving")
@pytest.mark.parametrize("status", [401, 500])
def test_an_endpoint_that_answers_no_completion_does_not_pass_and_the_key_is_not_shown(
    status: int, deployment: Deployment, endpoint: ChatEndpoint
) -> None:
    endpoint.status = status
    gate = deployment.manage(EndpointGateProvider)
    with pytest.raises(ProviderError) as failed:
        gate.create(gate_props(deployment, endpoint))
    assert f"expected a completion, found HTTP {status}" in str(failed.value)
    assert MARKER not in str(failed.value)
    assert gate.id is None


@pytest.mark.usefixtures("serving")
def test_a_group_that_failed_and_kept_its_containers_is_asked_for_a_new_generation(
    deployment: Deployment, endpoint: ChatEndpoint
) -> None:
    gate = deployment.manage(EndpointGateProvider)
    gate.create(gate_props(deployment, endpoint))
    set_phase(deployment, "spark-a", "failed", first_error={"at": 1, "line": "old failure"})
    assert gate.refresh()
    state = deployment.host("spark-a").base / "state" / "status.json"
    generation = {"deployment": "d1", "head_incarnation": "abc", "n": 2}
    answer = json.dumps({"phase": "serving", "generation": generation, "updated": time.time()})
    deployment.host("spark-a").change(on_exec=[str(state), answer])
    set_phase(deployment, "spark-b", "ray_ready", n=2)
    assert gate.up(gate_props(deployment, endpoint)) == "update"
    assert [call for call in deployment.host("spark-a").calls("docker") if call[0] == "exec"] == [
        ["exec", "rank0", "python3", "/opt/spark-vllm/runtime.pyz", "restart"]
    ]


@pytest.mark.usefixtures("serving")
def test_an_open_group_is_asked_without_a_key(deployment: Deployment, endpoint: ChatEndpoint) -> None:
    deployment.manage(EndpointGateProvider).create(gate_props(deployment, endpoint, key_path=""))
    assert endpoint.asked[0][1] is None


@pytest.mark.usefixtures("serving")
def test_a_silent_node_is_no_group_that_does_not_serve(deployment: Deployment, endpoint: ChatEndpoint) -> None:
    gate = deployment.manage(EndpointGateProvider)
    gate.create(gate_props(deployment, endpoint))
    deployment.ssh.kill("spark-b")
    with pytest.raises(ProviderError) as failed:
        gate.refresh()
    assert str(failed.value).startswith("spark-vllm: spark-b, ")
    assert gate.outputs["state"] == "serving"
    with pytest.raises(ProviderError):
        gate.delete()
    assert deployment.host("spark-a").read()["containers"]["rank0"]["Running"] is True


def test_values_that_are_not_known_yet_pass_check_and_count_as_a_change(
    deployment: Deployment, endpoint: ChatEndpoint
) -> None:
    gate = deployment.manage(EndpointGateProvider)
    known = gate_props(deployment, endpoint)
    preview = known | {"deployment": UNKNOWN, "containers": [UNKNOWN, UNKNOWN]}
    checked = gate.check(preview)
    assert (checked["deployment"], checked["containers"]) == (UNKNOWN, [UNKNOWN, UNKNOWN])
    gate.id, gate.outputs = "x", known
    assert gate.diff(preview) == (True, [])
    key = deployment.manage(ApiKeyProvider)
    inputs = key.check(dict.fromkeys(key_props(deployment), UNKNOWN))
    assert inputs.keys() == key_props(deployment).keys()


def managed_key(deployment: Deployment) -> Managed:
    key = deployment.manage(ApiKeyProvider)
    key.create(key_props(deployment))
    return key


def test_a_key_is_not_taken_away_while_another_node_does_not_answer(deployment: Deployment) -> None:
    key = managed_key(deployment)
    deployment.ssh.kill("spark-b")
    with pytest.raises(ProviderError):
        key.delete()
    assert key_path(deployment).exists()
