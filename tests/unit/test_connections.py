"""The connections of one run: first contact, the way through another node, waiting, and nodes of earlier settings."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from providers.connections import Run, connection_facts
from spark_core.errors import SparkError, UnreachableError
from spark_core.transport.base import command
from spark_core.transport.keys import fingerprint
from spark_core.transport.ssh import SshTransport
from tests.config_cases import load_base
from tests.fake_ssh import FakeSsh

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAaBcDeF"


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSsh]:
    with FakeSsh(tmp_path / "ssh", ["spark-a", "spark-b"]) as fake:
        monkeypatch.setenv("PATH", f"{fake.programs}{os.pathsep}{os.environ['PATH']}")
        of_this_user = types.SimpleNamespace(pw_dir=str(fake.home))
        monkeypatch.setattr("spark_core.transport.connection.pwd.getpwuid", lambda _: of_this_user)
        yield fake


def run_of_two(ssh: FakeSsh, **changes: dict[str, Any]) -> Run:
    """A run whose nodes are the fake ones; changed by name, with None for what is taken away."""
    raw = load_base()
    for node in raw["nodes"]:
        node |= {"management_address": node["name"], "ssh_port": ssh.port(node["name"])}
        node |= changes.get(node["name"].replace("-", "_"), {})
        for key in [key for key, value in node.items() if value is None]:
            del node[key]
    return Run(raw | changes.get("top", {}))


def opened(run: Run, name: str) -> SshTransport:
    transport = run.transport(name)
    assert isinstance(transport, SshTransport)
    return transport


def test_an_unpinned_node_is_asked_for_its_key_and_refused(ssh: FakeSsh) -> None:
    ssh.offer("spark-a", KEY)
    with pytest.raises(UnreachableError) as refused:
        run_of_two(ssh, spark_a={"host_key": None}).transport("spark-a")
    assert refused.value.code == "host-key-unpinned"
    assert fingerprint(KEY) in refused.value.line
    assert refused.value.do.endswith(f"host_key: {KEY}")


def test_a_node_behind_another_goes_over_the_connection_of_that_one(ssh: FakeSsh) -> None:
    run = run_of_two(ssh, spark_b={"via": "spark-a"})
    assert run.transport("spark-b").run(command("echo", "behind")).stdout == "behind\n"
    assert len(ssh.masters("spark-a")) == len(ssh.masters("spark-b")) == 1
    [line, *_] = ssh.proxies("spark-b")
    assert f"ControlPath={opened(run, 'spark-a').connection.control_path}" in line


def test_an_unpinned_node_on_the_way_is_told_of_the_one_behind(ssh: FakeSsh) -> None:
    ssh.offer("spark-a", KEY)
    with pytest.raises(UnreachableError) as refused:
        run_of_two(ssh, spark_a={"host_key": None}, spark_b={"via": "spark-a"}).transport("spark-b")
    assert (refused.value.node, refused.value.code) == ("spark-b", "host-key-unpinned")
    assert refused.value.line.startswith(
        "spark-b, host key (nodes[].host_key) of spark-a: it is reached through spark-a, where expected a pinned"
    )


def test_waiting_for_a_booting_host_begins_when_the_run_says_so(ssh: FakeSsh) -> None:
    run = run_of_two(ssh, top={"ssh": {"boot_wait_s": 7}})
    before = opened(run, "spark-a")
    assert before.patience.seconds == 0
    said: list[str] = []
    run.wait_for_boot(said.append)
    assert (before.patience.seconds, opened(run, "spark-b").patience.seconds) == (7, 7)
    opened(run, "spark-b").patience.say("waiting")
    assert said == ["waiting"]


def test_a_node_of_earlier_settings_is_reached_as_it_was_then(ssh: FakeSsh) -> None:
    run = run_of_two(ssh, spark_b={"via": "spark-a"})
    [head, behind] = run.settings.nodes
    assert "via" not in connection_facts(head)
    facts = connection_facts(behind)
    assert facts["via"] == "spark-a"
    alone = run_of_two(ssh)
    assert alone.transport("spark-old", facts | {"address": "spark-b"}).run(command("true")).ok
    assert len(ssh.proxies("spark-b")) > 0
    with pytest.raises(SparkError) as refused:
        alone.transport("spark-old2", facts | {"via": "spark-gone"})
    assert "expected the node spark-gone in the settings, since spark-old2 is reached through it" in str(refused.value)
    with pytest.raises(SparkError, match="expected the node spark-z in the settings, found none of that name"):
        alone.transport("spark-z")
