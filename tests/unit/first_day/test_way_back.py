"""Containers of another launcher are stopped by name and nothing else; how they come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_core.errors import CommandError
from spark_core.facts.containers import launcher_of
from spark_core.first_day.survey import FoundContainer, LauncherFolder, Server
from spark_core.first_day.way_back import Replaced, notes, stop_container, way_back
from spark_core.settings import Settings, read_settings
from tests.config_cases import load_base
from tests.fake_host import FakeHost
from tests.unit.first_day.owners_things import IMAGE_ID, run_launcher


def settings() -> Settings:
    return read_settings(load_base() | {"replaces": ["vllm_node", "ray-head", "ray-worker"]})


def node(name: str, **values: object) -> FoundContainer:
    launcher = launcher_of(name)
    return FoundContainer(name, "vllm-node", IMAGE_ID, True, launcher=launcher, **values)  # type: ignore[arg-type]


def test_a_stop_leaves_container_image_and_everybody_else(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "host")
    run_launcher(host)
    host.set_container("other")
    before = host.read()
    stop_container(host.node, "vllm_node")
    stop_container(host.node, "vllm_node")  # once more is no fault
    after = host.read()
    assert after["containers"]["vllm_node"] == {**before["containers"]["vllm_node"], "Running": False}
    assert after["containers"]["other"] == before["containers"]["other"]
    assert after["images"] == before["images"]
    assert [call[0] for call in host.calls("docker")] == ["stop", "ps", "stop", "ps"]


def test_one_that_goes_on_is_told(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "host")
    run_launcher(host, Deaf=True)
    with pytest.raises(CommandError, match="expected the container vllm_node to stop, found it running") as failed:
        stop_container(host.node, "vllm_node")
    assert failed.value.evidence == ("Error response from daemon: cannot stop container: vllm_node",)


def test_one_that_docker_removes_by_itself_counts_as_stopped(tmp_path: Path) -> None:
    host = FakeHost(tmp_path / "host")
    run_launcher(host, AutoRemove=True)
    stop_container(host.node, "vllm_node")
    assert host.read()["containers"] == {}


def test_kept_containers_come_back_by_docker_the_workers_first() -> None:
    known = settings()
    found = [Replaced(known.nodes[0], (node("ray-head"),)), Replaced(known.nodes[1], (node("ray-worker"),))]
    assert way_back(known, "mine", found) == [
        "python -m automation stop --stack mine",
        "ssh aurora@10.1.230.181 'docker start ray-worker'",
        "ssh aurora@10.1.230.180 'docker start ray-head'",
    ]


def test_containers_that_docker_removes_come_back_by_their_own_launcher() -> None:
    known = settings()
    server = Server("org/model", {"--port": "8000", "--trust-remote-code": ""}, ("--swap-space",))
    one = node("vllm_node", removed_when_stopped=True, servers=(server,))
    other = node("vllm_node", removed_when_stopped=True)
    found = [
        Replaced(known.nodes[0], (one,), (LauncherFolder("/home/aurora/spark vllm"),)),
        Replaced(known.nodes[1], (other,)),
    ]
    assert way_back(known, "mine", found)[1:] == [
        "ssh aurora@10.1.230.180 'cd '\"'\"'/home/aurora/spark vllm'\"'\"' && ./launch-cluster.sh -d exec vllm serve "
        "org/model --port 8000 --trust-remote-code'  # and its other flags: --swap-space"
    ]
    assert notes(found) == [
        f"{name}: vllm_node was started with --rm, so Docker itself removes it when it stops; image, cache and netplan "
        "stay"
        for name in ("spark-a", "spark-b")
    ]
    [last] = way_back(known, "mine", [Replaced(known.nodes[0], (node("sparkrun_1_head", removed_when_stopped=True),))])[
        1:
    ]
    assert (
        last == "# start sparkrun_1_head again with sparkrun, as before: Docker has removed what was started with --rm"
    )


def test_a_restart_policy_that_would_bring_one_back_by_itself_is_told() -> None:
    known = settings()
    [note] = notes([Replaced(known.nodes[0], (node("ray-head", restart="always"),))])
    assert "Docker starts it again at the next boot" in note
    assert notes([Replaced(known.nodes[0], (node("ray-head", restart="unless-stopped"),))]) == []


def test_a_node_behind_another_is_reached_through_it() -> None:
    raw = load_base() | {"ssh": {"config_file": "/etc/conf"}}
    raw["nodes"][1] |= {"via": "spark-a", "ssh_port": 2222}
    known = read_settings(raw)
    [_, line] = way_back(known, "mine", [Replaced(known.nodes[1], (node("ray-worker"),))])
    assert line == ("ssh -F /etc/conf -p 2222 -J aurora@10.1.230.180 aurora@10.1.230.181 'docker start ray-worker'")
