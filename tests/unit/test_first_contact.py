"""The key that a node offers, asked without trusting it, and what a person then reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spark_core.errors import UnreachableError
from spark_core.transport.connection import UNPINNED, Connection, ConnectionSpec
from spark_core.transport.first_contact import comparable_key, offered_key, refused_first_contact
from spark_core.transport.keys import fingerprint
from tests.fake_ssh import FakeSsh

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAaBcDeF"
REFUSAL = UnreachableError(
    "expected a pinned host key for spark-a, found none in the settings and none in known_hosts",
    node="spark-a",
    step="host key (nodes[].host_key)",
    code="host-key-unpinned",
)


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSsh]:
    with FakeSsh(tmp_path / "ssh", ["spark-a"]) as fake:
        monkeypatch.setenv("PATH", f"{fake.programs}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr("spark_core.transport.first_contact.time.sleep", lambda _: None)
        yield fake


def connection(ssh: FakeSsh, **changes: object) -> Connection:
    spec = ConnectionSpec("spark-a", "spark-a", "aurora")
    found = Connection(spec, "127.0.0.1", "aurora", ssh.port("spark-a"), UNPINNED, None, None, ())
    return replace(found, **changes)  # type: ignore[arg-type]


def test_a_first_contact_is_refused_with_the_fingerprint_and_the_line_that_pins_it(ssh: FakeSsh) -> None:
    ssh.offer("spark-a", KEY)
    error = refused_first_contact(connection(ssh), REFUSAL)
    assert str(error) == (
        "spark-a, host key (nodes[].host_key): expected a pinned host key for spark-a, found none in the settings and "
        f"none in known_hosts; the node offers ssh-ed25519 {fingerprint(KEY)}\n"
        "  do: compare with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the node's own console; if it is the "
        "same, pin it with this line under nodes, spark-a, or let `python -m automation pin-hosts` do so: "
        f"host_key: {KEY}"
    )
    assert error.code == "host-key-unpinned"
    assert ssh.lines("spark-a") == []
    assert ssh.masters("spark-a") == []


def test_a_node_that_does_not_even_answer_is_told_with_what_keeps_it(ssh: FakeSsh) -> None:
    ssh.kill("spark-a")
    error = refused_first_contact(connection(ssh), REFUSAL)
    assert error.line.endswith(
        f"its key cannot be seen either (connect (TCP): expected sshd at 127.0.0.1 port {ssh.port('spark-a')}, "
        "found: connection refused)"
    )
    assert error.code == "host-key-unpinned"
    assert "sshd runs" in error.do


def test_a_contact_that_sshd_drops_is_tried_again_and_then_told(ssh: FakeSsh) -> None:
    ssh.offer("spark-a", KEY)
    ssh.drop_logins("spark-a", 2)
    assert offered_key(connection(ssh)).line == KEY
    ssh.drop_logins("spark-a", 3)
    with pytest.raises(UnreachableError) as failed:
        offered_key(connection(ssh))
    assert failed.value.code == "key-exchange-failed"


def test_a_key_of_another_kind_than_the_pinned_one_is_seen_too(ssh: FakeSsh) -> None:
    ssh.offer("spark-a", KEY)
    ssh.has_only("spark-a", "ssh-ed25519")
    assert comparable_key(connection(ssh, pin="ecdsa-sha2-nistp256 AAAA")).kind == "ssh-ed25519"
    ssh.kill("spark-a")
    with pytest.raises(UnreachableError) as failed:
        comparable_key(connection(ssh, pin=KEY))
    assert failed.value.code == "connect-failed"
