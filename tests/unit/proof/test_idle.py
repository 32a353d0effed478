"""A node is looked at before its link or its GPU is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from spark_core.errors import ObservationError
from spark_core.proof.idle import look_for_readiness, parse_readiness
from tests.local_node import LocalNode

QUIET = """\
=== containers
=== compute
=== load
0.08 0.03 0.01 1/512 4711
20
=== memory
MemAvailable:   118489012 kB
=== tools
ib_write_bw
python3
=== ports
34567 34568
"""
OURS = "/spark-vllm-dev-main-rank0|dev||null|[]|runc"
GPU = '[{"Driver":"","Count":-1,"Capabilities":[["gpu"]]}]'


def with_lines(section: str, *lines: str) -> str:
    return QUIET.replace(f"=== {section}\n", f"=== {section}\n" + "".join(f"{line}\n" for line in lines))


def test_an_idle_node_says_what_it_has() -> None:
    found = parse_readiness("spark-a", QUIET)
    assert found.busy == ()
    assert (found.memory_mib, set(found.tools), found.ports) == (115711, {"ib_write_bw", "python3"}, (34567, 34568))


@pytest.mark.parametrize(
    ("section", "line", "reason"),
    [
        ("containers", OURS, "container spark-vllm-dev-main-rank0 of the stack dev"),
        ("containers", f"/vllm_node|<no value>|<no value>|{GPU}|null|runc", "container vllm_node, which has the GPU"),
        ("containers", "/old|||null|null|nvidia", "container old, which has the GPU"),
        (
            "containers",
            '/cdi|||null|[{"PathOnHost":"/dev/nvidia0","PathInContainer":"/dev/nvidia0"}]|runc',
            "container cdi, which has the GPU",
        ),
        ("compute", "4711, /usr/bin/python3", "process 4711 (/usr/bin/python3) on the GPU"),
    ],
)
def test_what_uses_the_gpu_makes_a_node_busy(section: str, line: str, reason: str) -> None:
    assert parse_readiness("spark-a", with_lines(section, line)).busy == (reason,)


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("containers", "/grafana|||null|null|runc"),
        ("containers", "/spark-vllm-dev-main-rank0-probe|<no value>|dev|null|[]|runc"),
        ("containers", ""),
        ("compute", "No running processes found"),
        ("compute", "[Not Supported]"),
    ],
)
def test_what_does_not_use_the_gpu_leaves_it_idle(section: str, line: str) -> None:
    assert parse_readiness("spark-a", with_lines(section, line)).busy == ()


@pytest.mark.parametrize(("load", "busy"), [("9.99", False), ("10.01", True), ("40.5", True)])
def test_a_load_above_half_of_the_processors_is_busy(load: str, busy: bool) -> None:
    found = parse_readiness("spark-a", QUIET.replace("0.08 ", f"{load} "))
    assert found.busy == ((f"a load of {float(load):g} on 20 processors",) if busy else ())


@pytest.mark.parametrize("missing", ["containers", "load", "memory"])
def test_a_node_that_could_not_be_asked_is_never_taken_for_idle(missing: str) -> None:
    text = re.sub(rf"=== {missing}\n(?:[^=].*\n)*", "", QUIET)
    with pytest.raises(ObservationError) as failed:
        parse_readiness("spark-a", text)
    assert failed.value.line == f"spark-a: expected the node's {missing}, found no answer that could be read"


def test_a_cut_answer_is_idle_only_if_all_that_decides_is_there() -> None:
    for end in range(len(QUIET)):
        try:
            found = parse_readiness("spark-a", QUIET[:end])
        except ObservationError:
            continue
        assert found.busy == () and end > QUIET.index("MemAvailable")


DOCKER = """#!/bin/bash
case "$1" in
  ps) echo id1; echo id2 ;;
  inspect) echo "$3" > "$(dirname "$0")/../format"; echo '/vllm|||[{}]|null|runc' ;;
esac
"""


def test_the_look_runs_and_finds_ports_on_the_node_s_own_address(tmp_path: Path) -> None:
    node = LocalNode("spark-a", programs=tmp_path / "programs")
    node.install("docker", DOCKER)
    node.install("nvidia-smi", "#!/bin/sh\necho '99, /usr/bin/python3'\n")
    done = node.run(look_for_readiness("127.0.0.5", 3))
    assert done.status == 0, done.stderr
    found = parse_readiness("spark-a", done.stdout)
    assert found.busy[:2] == ("container vllm, which has the GPU", "process 99 (/usr/bin/python3) on the GPU")
    assert len(set(found.ports)) == 3 and "python3" in found.tools
    assert found.memory_mib > 0
    assert "spark-vllm.stack" in (tmp_path / "format").read_text()


def test_an_address_that_the_node_does_not_have_gives_no_port(tmp_path: Path) -> None:
    node = LocalNode("spark-a", programs=tmp_path / "programs")
    node.install("docker", "#!/bin/sh\n")
    done = node.run(look_for_readiness("203.0.113.7", 1))
    assert parse_readiness("spark-a", done.stdout).ports == ()


def test_a_docker_daemon_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    node = LocalNode("spark-a", programs=tmp_path / "programs")
    node.install("docker", "#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2; exit 1\n")
    assert node.run(look_for_readiness("127.0.0.5", 1)).status != 0
