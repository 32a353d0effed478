"""Docker: what is in the way of using it, how it is set up, and the containers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spark_core.facts.answer import Answer, Unread
from spark_core.facts.containers import Container, launcher_of, parse_containers, published_ports
from spark_core.facts.docker import (
    DOCKER_VERSION,
    Docker,
    DockerProblem,
    docker_problem,
    parse_docker_info,
    parse_docker_version,
)
from spark_core.transport.base import parse_sections, run_checked, script
from tests.local_node import LocalNode
from tests.unit.facts.spark import ENGINE

PERMISSION = (
    "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock: "
    'Get "http://%2Fvar%2Frun%2Fdocker.sock/v1.50/info": dial unix /var/run/docker.sock: connect: permission denied'
)
DOWN = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
HALF = {"ID": "", "ServerVersion": "", "Driver": "", "Runtimes": None, "DockerRootDir": "", "SecurityOptions": None}
MISSING = DockerProblem("docker-missing", "no docker command on the PATH of a non-interactive shell")
REFUSED = DockerProblem(
    "docker-permission", "the deploy user may not use the Docker socket (is it in the docker group?)"
)
STOPPED = DockerProblem("docker-down", "the Docker daemon does not answer (is docker.service running?)")
SILENT = DockerProblem("docker-down", "the Docker daemon does not answer in 8 s")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("29.2.1 arm64\n", "29.2.1"),
        ("29.2.1\n", "29.2.1"),
        ("WARNING: Error loading config file\n20.10.24+dfsg1 amd64\n", "20.10.24+dfsg1"),
        ("missing\n", MISSING),
        ("no-answer\n", SILENT),
        (f"{PERMISSION}\n", REFUSED),
        (f"\n{DOWN}\n", STOPPED),
        ("error during connect: Get http://docker: EOF", STOPPED),
        ("", DockerProblem("docker-down", "no version but: nothing")),
        ("<html>502</html>", DockerProblem("docker-down", "no version but: <html>502</html>")),
    ],
)
def test_what_is_in_the_way_of_docker_is_told_apart(text: str, found: str | DockerProblem) -> None:
    assert parse_docker_version(text) == found


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (Answer(status=127), MISSING),
        (Answer("half", 124), SILENT),
        (Answer(json.dumps({**HALF, "ServerErrors": [PERMISSION]}), 1), REFUSED),
        (Answer(json.dumps({**HALF, "ServerErrors": [DOWN]}), 0), STOPPED),
        (Answer(f"{json.dumps(HALF)}\n{DOWN}\n", 1), STOPPED),
        (Answer(f"Client:\n Version: 29.2.1\n\nServer:\nERROR: {PERMISSION}\nerrors pretty printing info", 1), REFUSED),
        (Answer(json.dumps(HALF), 0), Unread("Docker's facts", "docker info", json.dumps(HALF)[:99] + "…")),
    ],
)
def test_the_same_is_told_from_the_whole_answer(answer: Answer, found: object) -> None:
    assert parse_docker_info(answer) == found


def test_each_way_that_docker_can_fail_is_a_finding_of_its_own_kind_with_a_cure_of_its_own() -> None:
    findings = [docker_problem("spark-a", problem) for problem in (MISSING, REFUSED, STOPPED)]
    assert [finding.code if finding else "" for finding in findings] == [
        "docker-missing",
        "docker-permission",
        "docker-down",
    ]
    assert len({finding.do if finding else "" for finding in findings}) == 3
    assert [docker_problem("spark-a", fine) for fine in ("29.2.1", Docker("29.2.1"))] == [None, None]


def test_a_daemon_that_is_set_up_is_read_from_its_own_words() -> None:
    assert parse_docker_info(Answer(json.dumps(ENGINE))) == Docker(
        "29.2.1",
        storage_driver="overlay2",
        image_store="classic",
        cgroup_driver="cgroupfs",
        runtimes=("io.containerd.runc.v2", "nvidia"),
        default_runtime="runc",
        cdi_directories=("/etc/cdi", "/var/run/cdi"),
        cdi_devices=("nvidia.com/gpu=all",),
        root="/var/lib/docker",
        engine_id="6f1c7c1e-0000-4000-8000-000000000001",
        rootless=False,
    )


def test_the_containerd_image_store_is_told_in_both_forms() -> None:
    store = {"Driver": "overlayfs", "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]}
    text = "Server:\n Server Version: 29.2.1\n Storage Driver: overlayfs\n  driver-type: io.containerd.snapshotter.v1\n"
    for answer in (Answer(json.dumps(ENGINE | store)), Answer(text)):
        docker = parse_docker_info(answer)
        assert isinstance(docker, Docker)
        assert (docker.storage_driver, docker.image_store) == ("overlayfs", "containerd")


def test_a_rootless_daemon_and_an_old_one_that_knows_no_device_descriptions() -> None:
    old = {key: value for key, value in ENGINE.items() if key not in ("CDISpecDirs", "DiscoveredDevices")}
    docker = parse_docker_info(Answer(json.dumps(old | {"SecurityOptions": ["name=seccomp", "name=rootless"]})))
    assert isinstance(docker, Docker)
    assert (docker.rootless, docker.cdi_directories, docker.cdi_devices) == (True, (), ())


def test_a_warning_before_the_answer_is_passed_over() -> None:
    docker = parse_docker_info(Answer("WARNING: bridge-nf-call-iptables is disabled\n" + json.dumps(ENGINE)))
    assert isinstance(docker, Docker)
    assert docker.version == "29.2.1"


def row(name: str, **changes: str) -> str:
    values = {
        "id": "1" * 64,
        "names": name,
        "image": "image:1",
        "status": "Up 3 days",
        "age": "3 days ago",
        "ports": "",
        "labels": "a=b",
        "stack": "",
    }
    return json.dumps(values | changes)


def test_containers_are_read_from_lines_of_json() -> None:
    ours = row("spark-vllm-dev-main-rank0", stack="dev", labels="spark-vllm.stack=dev,x=1,2")
    published = row("web", status="Exited (0) 2 hours ago", ports="0.0.0.0:8000->80/tcp, [::]:8000->80/tcp")
    containers = parse_containers(Answer(f"{ours}\n{published}\n"))
    mine = Container(
        "1" * 64,
        "spark-vllm-dev-main-rank0",
        "image:1",
        "Up 3 days",
        stack="dev",
        age="3 days ago",
        labels="spark-vllm.stack=dev,x=1,2",
    )
    other = replace(mine, name="web", status="Exited (0) 2 hours ago", stack="", ports=frozenset({8000}), labels="a=b")
    assert containers == (mine, other)
    assert (mine.running, other.running) == (True, False)
    assert parse_containers(Answer("")) == ()


@pytest.mark.parametrize(
    "text", ["Cannot connect", row("a") + "\n{", '{"names": 1}', '["a"]', "null", row("a")[:-2], "[" * 100_000]
)
def test_containers_that_cannot_be_listed_are_not_none(text: str) -> None:
    assert isinstance(parse_containers(Answer(text, 1)), Unread)
    assert isinstance(parse_containers(Answer("", 1)), Unread)


@pytest.mark.parametrize(
    ("name", "labels", "launcher"),
    [
        ("vllm_node", "", "eugr/spark-vllm-docker"),
        ("vllm_node_tf5", "", "eugr/spark-vllm-docker"),
        ("sparkrun_9e23ec987b7e4fc8_2699ff346a41_head", "", "sparkrun"),
        ("renamed", "a=b,sparkrun.cluster_id=9e23", "sparkrun"),
        ("anything", "spark-pulse.managed=true,spark-pulse.rank=0", "spark-pulse"),
        ("node-12345", "", "vLLM's run_cluster.sh"),
        ("ray-head", "", "a Ray launcher"),
        ("ray-worker-10.0.0.2", "", "a Ray launcher"),
        ("vllm-ray-head", "", "a Ray launcher"),
        ("vllm-ngc-ray-worker-spark-b", "", "a Ray launcher"),
        ("node-exporter", "", None),
        ("my_vllm_node", "", None),
        ("ollama", "maintainer=sparkrun.cluster_id", None),
        ("x-ray-head", "", None),
    ],
)
def test_other_launchers_are_known_by_their_names_and_labels(name: str, labels: str, launcher: str | None) -> None:
    assert launcher_of(name, labels) == launcher
    [container] = parse_containers(Answer(row(name, labels=labels)))  # type: ignore[misc]
    assert container.launcher == launcher


def test_a_container_of_a_stack_of_ours_is_no_other_launcher_s() -> None:
    containers = parse_containers(Answer(row("vllm_node", stack="prod")))
    assert isinstance(containers, tuple)
    assert [container.launcher for container in containers] == [None]


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("", set()),
        ("8000/tcp", set()),
        ("0.0.0.0:8000-8002->80-82/tcp, [::]:9000->9000/tcp, 22/tcp", {8000, 8001, 8002, 9000}),
        ("127.0.0.1:30000->8000/tcp", {30000}),
    ],
)
def test_published_ports(text: str, ports: set[int]) -> None:
    assert published_ports(text) == ports


@pytest.mark.parametrize(
    ("program", "found"),
    [
        (None, MISSING),
        ("echo 29.2.1 arm64", "29.2.1"),
        (f"echo '{DOWN}' >&2; exit 1", STOPPED),
        (f"echo '{PERMISSION}' >&2; exit 1", REFUSED),
        ("exit 124", SILENT),
    ],
)
def test_the_script_lets_them_be_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, found: object
) -> None:
    node = LocalNode(programs=tmp_path / "programs")
    node.install("timeout", '#!/bin/bash\nshift 3; exec "$@"\n')
    if program is None:
        for name in ("bash", "env"):
            (tmp_path / "programs" / name).symlink_to(f"/usr/bin/{name}")
        monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    else:
        node.install("docker", f"#!/bin/bash\n{program}\n")
    text = run_checked(node, script(DOCKER_VERSION), purpose="expected an answer")
    assert parse_docker_version(parse_sections(text)["docker"]) == found
