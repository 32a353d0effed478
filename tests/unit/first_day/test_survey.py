"""What is told of an owner's things, by the very program that runs on a node; and that nothing else leaves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_core.errors import ObservationError
from spark_core.first_day.node_survey import arguments_of, server_words
from spark_core.first_day.survey import Server, Survey, observe_survey, parse_survey
from tests.fake_host import FakeHost
from tests.unit.first_day.owners_things import (
    COMMIT,
    IMAGE_ID,
    MODEL,
    SECRET,
    cached_model,
    eugr_checkout,
    run_launcher,
    sparkrun_cluster,
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost(tmp_path / "host")


def told(host: FakeHost) -> Survey:
    return observe_survey(host.node)


def test_a_bare_node_has_nothing(home: Path, host: FakeHost) -> None:
    found = told(host)
    assert (found.containers, found.images, found.models, found.launchers, found.clusters) == ((), {}, (), (), ())
    assert found.name
    assert list(home.iterdir()) == []


def test_a_launcher_s_cluster_is_told_with_its_server_and_without_its_secrets(home: Path, host: FakeHost) -> None:
    run_launcher(
        host, AutoRemove=True, Mounts=[{"Type": "bind", "Source": "/data/hf", "Destination": "/r/huggingface"}]
    )
    host.set_container("spark-vllm-dev-main-rank0", Labels={"spark-vllm.stack": "dev"})
    host.set_container("other", Running=False, Restart="always", Labels={"spark-pulse.managed": SECRET})
    eugr_checkout(home)
    sparkrun_cluster(home)
    before = host.read()
    found = told(host)
    assert [one.name for one in found.containers] == ["vllm_node", "other"]
    node, other = found.containers
    assert (node.launcher, node.image_id, node.running) == ("eugr/spark-vllm-docker", IMAGE_ID, True)
    assert (node.removed_when_stopped, other.restart, other.running) == (True, "always", False)
    assert other.launcher == "spark-pulse"
    [server] = node.servers
    assert server.model == MODEL
    assert server.flags == {
        "--port": "8000",
        "--tensor-parallel-size": "2",
        "--max-model-len": "65536",
        "--enable-auto-tool-choice": "",
        "--tool-call-parser": "qwen3_coder",
    }
    assert server.others == ("--api-key", "--swap-space")
    assert found.images == {IMAGE_ID: ("vllm-node:latest",)}
    [checkout] = found.launchers
    assert checkout.addresses == ["192.168.200.12", "192.168.200.13"]
    assert dict(checkout.values) == {
        "CLUSTER_NODES": "192.168.200.12,192.168.200.13",
        "ETH_IF": "enp1s0f1np1",
        "IB_IF": "rocep1s0f1,roceP2p1s0f1",
    }
    assert {(one.name, one.hosts, one.user, one.chosen) for one in found.clusters} == {
        ("pair", ("10.1.230.180", "10.1.230.181"), "aurora", True),
        ("flow", ("10.0.0.1", "10.0.0.2"), "", False),
    }
    assert SECRET not in repr(found)
    assert {**host.read(), "calls": []} == {**before, "calls": []}


def test_of_a_cache_only_what_is_whole_can_be_used(home: Path, host: FakeHost) -> None:
    whole = cached_model(home)
    cached_model(home, "org/half", lacking="model-2.safetensors")
    cached_model(home, "org/newer", "b" * 40, lacking="model-1.safetensors")
    cached_model(home, "org/newer", "c" * 40)
    (home / ".cache/huggingface/hub/models--org--newer/refs/main").write_text("b" * 40)
    dangling = cached_model(home, "org/dangling")
    (dangling / "config.json").resolve().unlink()
    plain = home / "models/org/plain"
    plain.mkdir(parents=True)
    (plain / "config.json").write_text('{"max_position_embeddings": 4096}')
    (plain / "model.safetensors").write_text("x")
    found = {one.repository or Path(one.path).name: one for one in told(host).models}
    model = found[MODEL]
    assert (model.fault, model.commit, model.path, model.positions) == ("", COMMIT, str(whole), 262144)
    assert model.bytes > 200
    assert found["org/half"].fault == "model-2.safetensors is missing"
    assert (found["org/newer"].fault, found["org/newer"].commit) == ("", "c" * 40)
    assert found["org/dangling"].fault == "config.json is missing"
    assert (found["plain"].repository, found["plain"].positions) == ("", 4096)


@pytest.mark.parametrize(
    ("line", "model", "flags"),
    [
        ("vllm serve m --port=1", "m", {"--port": "1"}),
        ("python3 -m vllm.entrypoints.openai.api_server --model m -pp 2", "m", {"--pipeline-parallel-size": "2"}),
        ("/opt/bin/vllm serve --model /models/m --trust_remote_code", "/models/m", {"--trust-remote-code": ""}),
    ],
)
def test_servers_are_known_by_their_command_line(line: str, model: str, flags: dict[str, str]) -> None:
    words = server_words(line.split())
    assert words is not None
    assert arguments_of(words) == {"model": model, "flags": flags, "others": []}


def test_what_is_no_server_is_none_and_a_server_s_words_come_back() -> None:
    assert server_words(["sleep", "infinity"]) is None
    assert server_words(["vllm", "bench", "serve"]) is None
    assert Server("m", {"--port": "1", "--trust-remote-code": ""}).words == [
        *("vllm", "serve", "m", "--port", "1", "--trust-remote-code")
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"name": "a", "containers": [{}]}'])
def test_another_answer_is_told_as_one(text: str) -> None:
    with pytest.raises(ObservationError, match="spark-a: expected to learn what is on the node"):
        parse_survey(text, "spark-a")
