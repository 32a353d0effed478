"""The script that asks a node, run for real: on this machine, with the programs of a Spark before its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from spark_core.facts import FactsSpec, NodeFacts, facts_fragment, parse_facts
from spark_core.facts.answer import Unread
from spark_core.facts.clock import ClockOffset
from spark_core.facts.docker import Docker, DockerProblem
from spark_core.facts.gpu import Gpu, GpuProcess, NoGpu
from spark_core.transport.base import Fragment, compose, parse_sections
from tests.local_node import LocalNode
from tests.unit.facts.spark import ENGINE

ID = "ab12" * 16
CONTAINER = json.dumps(
    {
        "id": ID,
        "names": "vllm_node",
        "image": "vllm-node",
        "status": "Up 1 hour",
        "age": "2 hours ago",
        "ports": "",
        "labels": "",
        "stack": "",
    }
)
PROGRAMS = {
    "uname": 'echo "Linux spark-a 6.17.0-1014-nvidia #14-Ubuntu SMP aarch64 aarch64 aarch64 GNU/Linux"',
    "id": 'case $1 in -un) echo user ;; *) echo "uid=1000(user) gid=1000(user) groups=1000(user),988(docker)" ;; esac',
    "sudo": '[ "$*" = "-kn -l" ]',
    "busctl": "echo 'v b true'",
    "getent": "echo '127.0.1.1 spark-a'",
    "ss": 'echo "LISTEN 0 1 *:30000 *:* users:((\\"python\\",pid=$PPID,fd=3))"',
    "nvidia-ctk": "exit 0",
    "nvidia-smi": 'case $1 in --query-gpu*) echo "NVIDIA GB10, 580.142, [N/A]" ;; *) echo 1, python, 19135 ;; esac',
}


@pytest.fixture
def node(tmp_path: Path) -> LocalNode:
    node = LocalNode(programs=tmp_path / "programs", sandbox=tmp_path / "host")
    for name, text in PROGRAMS.items():
        node.install(name, f"#!/bin/bash\n{text}\n")
    install_docker(node, ENGINE | {"DockerRootDir": str(tmp_path)})
    parameter = tmp_path / "host/proc/sys/net/core/rmem_max"
    parameter.parent.mkdir(parents=True)
    parameter.write_text("1\n")
    return node


def install_docker(node: LocalNode, engine: Mapping[str, object]) -> None:
    answers = "".join(f"{verb}) echo '{said}' ;;\n" for verb, said in (("info", json.dumps(engine)), ("ps", CONTAINER)))
    node.install("docker", f"#!/bin/bash\ncase $1 in\n{answers}esac\n")


def ask(node: LocalNode, spec: FactsSpec) -> NodeFacts:
    result = node.run(compose(facts_fragment(spec), Fragment("echo '=== other'; echo 1")))
    assert (result.status, result.stderr) == (0, "")
    sections = parse_sections(result.stdout)
    assert sections["other"] == "1"
    return parse_facts(spec, sections)


def test_a_node_is_asked_everything_in_one_script(node: LocalNode, tmp_path: Path) -> None:
    spec = FactsSpec((f"{tmp_path}/not/there yet",), (30000,), ("net.core.rmem_max", "net.core.no_such"))
    facts = ask(node, spec)
    assert (facts.architecture, facts.kernel) == ("arm64", "6.17.0-1014-nvidia")
    assert facts.gpus == (Gpu("NVIDIA GB10", "580.142"),)
    assert facts.gpu_processes == (GpuProcess(1, "python", 19135 << 20),)
    assert isinstance(facts.docker, Docker)
    assert facts.docker.version == "29.2.1"
    assert isinstance(facts.containers, tuple)
    assert [container.launcher for container in facts.containers] == ["eugr/spark-vllm-docker"]
    assert facts.missing_sysctls == ("net.core.no_such",)
    assert (facts.sudo, facts.remove_ipc, facts.own_addresses) == ("free", True, ("127.0.1.1",))
    assert isinstance(facts.disks, tuple)
    assert [disk.paths for disk in facts.disks] == [(f"{tmp_path}/not/there yet", str(tmp_path))]
    assert isinstance(facts.listeners, tuple)
    assert [(listener.port, listener.program) for listener in facts.listeners] == [(30000, "python")]
    assert isinstance(facts.clock, ClockOffset)
    assert -1 < facts.clock.low_s <= 0 <= facts.clock.high_s < 1
    assert isinstance(facts.present, frozenset)
    assert "nvidia-ctk" in facts.present
    assert facts.unread == ()


def test_the_containerd_store_s_own_disk_and_the_programs_are_asked_for(node: LocalNode, tmp_path: Path) -> None:
    status = [["driver-type", "io.containerd.snapshotter.v1"]]
    install_docker(node, {**ENGINE, "DriverStatus": status, "DockerRootDir": str(tmp_path)})
    facts = ask(node, FactsSpec((), programs=("bash", "no-such-program")))
    assert isinstance(facts.disks, tuple)
    assert [path for disk in facts.disks for path in disk.paths] == [str(tmp_path), "/var/lib/containerd"]
    assert facts.missing_programs == ("no-such-program",)


def test_nothing_is_written_and_no_root_is_needed(
    node: LocalNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    ask(node, FactsSpec((str(tmp_path),), (30000,), ("net.core.rmem_max",)))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert [cmd.sudo for cmd in node.asked] == [False]


def test_a_node_without_gpu_is_asked_about_none_and_one_without_ports_about_no_ports(node: LocalNode) -> None:
    for name in ("nvidia-smi", "ss"):
        node.install(name, "#!/bin/bash\nexit 66\n")
    facts = ask(node, FactsSpec((), gpu=False))
    assert (facts.gpus, facts.gpu_processes, facts.driver, facts.next_boot) == (None, None, None, None)
    assert facts.listeners is None
    assert facts.unread == ()


def test_programs_that_are_not_there_are_absent(
    node: LocalNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in (
        "bash",
        "env",
        "timeout",
        "cat",
        "date",
        "df",
        "sed",
        "grep",
        "sort",
        "tail",
        "tr",
        "readlink",
        "find",
    ):
        (bare / name).symlink_to(f"/usr/bin/{name}")
    node.programs = bare
    monkeypatch.setenv("PATH", str(bare))
    facts = ask(node, FactsSpec(("/",), (30000,)))
    assert facts.docker == DockerProblem("docker-missing", "no docker command on the PATH of a non-interactive shell")
    assert facts.gpus == NoGpu("no nvidia-smi on the PATH of a non-interactive shell", installed=False)
    assert (facts.sudo, facts.own_addresses, facts.containers, facts.gpu_processes) == (None, None, None, None)
    assert {unread.source for unread in facts.unread} == {"uname", "id", "ss"}
    assert {unread.found for unread in facts.unread} == {"no such program or file"}


def test_programs_that_hang_cost_no_more_than_their_limit_and_are_told(node: LocalNode) -> None:
    for name in ("docker", "nvidia-smi", "ss", "getent", "sudo"):
        node.install(name, "#!/bin/bash\nexec sleep 60\n")
    node.install(
        "timeout",
        '#!/bin/bash\nif [ "$1" = -k ]; then exec /usr/bin/timeout -k 1 1 "${@:4}"; fi\nexec /usr/bin/timeout "$@"\n',
    )
    facts = ask(node, FactsSpec(("/",), (30000,)))
    assert facts.docker == DockerProblem("docker-down", "the Docker daemon does not answer in 8 s")
    assert {(unread.source, unread.found) for unread in facts.unread} == {
        (source, "no answer in time") for source in ("nvidia-smi", "ss", "getent", "sudo")
    }


def test_a_program_that_cannot_be_ended_is_left_alone(node: LocalNode) -> None:
    # A child that keeps the pipe open stands for one that the kernel does not let go of.
    node.install("nvidia-smi", "#!/bin/bash\nsleep 60 &\necho half\n")
    node.install(
        "timeout",
        '#!/bin/bash\nif [ "$2" = cat ]; then exec /usr/bin/timeout 0.5 cat; fi\nexec /usr/bin/timeout "$@"\n',
    )
    facts = ask(node, FactsSpec(("/",)))
    assert facts.gpus == Unread("the GPU", "nvidia-smi", "no answer in time")


@pytest.mark.parametrize("noise", ["", "\\0\\0\\0", "Zugriff verweigert", "{", "=== f:docker", "--status 0"])
def test_programs_that_say_something_else_are_told(node: LocalNode, noise: str) -> None:
    for name in [*PROGRAMS, "docker"]:
        node.install(name, f"#!/bin/bash\nprintf -- '{noise}\\n'\nexit 3\n")
    facts = ask(node, FactsSpec(("/",), (30000,)))
    assert {"uname", "id", "ss", "nvidia-smi"} <= {unread.source for unread in facts.unread}
    assert all(unread.line.isprintable() for unread in facts.unread)
