"""Which key a person logs in with: a file, an agent's, none, or one that is locked."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spark_core.errors import UnreachableError
from spark_core.transport.connection import Connection, ConnectionSpec
from spark_core.transport.keys import agent_has_key
from spark_core.transport.own_key import find_own_key, install_key, make_own_key, place_for_key
from tests.local_node import LocalNode
from tests.toolchain.ssh_server import make_key

SPEC = ConnectionSpec("spark-a", "spark-a", "aurora", host_key="ssh-ed25519 AAAA")


def connection(*files: Path, agent: str | None = None) -> Connection:
    made = Connection(SPEC, "127.0.0.1", "aurora", 22, "ssh-ed25519 AAAA", None, agent, tuple(map(str, files)))
    return replace(made)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with tempfile.TemporaryDirectory(prefix="sv-") as folder:
        path = f"{folder}/agent"
        process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
        try:
            for _ in range(100):
                if Path(path).exists():
                    break
                process.poll()
                os.sched_yield()
                subprocess.run(["sleep", "0.05"], check=True)
            agent_has_key.cache_clear()
            yield path
        finally:
            process.terminate()
            process.wait(10)
            agent_has_key.cache_clear()


def test_a_file_without_a_passphrase_comes_first_and_needs_no_public_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    public = make_key(tmp_path / "id")
    (tmp_path / "id.pub").unlink()
    (tmp_path / "noise").write_bytes(b"\xff\xfe")
    found = find_own_key(connection(tmp_path / "none", tmp_path / "noise", tmp_path / "id"))
    assert found is not None
    assert found.public.split()[:2] == public.split()[:2]
    assert found.place == str(tmp_path / "id")
    assert found.told.startswith("ssh-ed25519 SHA256:")


def test_a_locked_key_is_used_through_the_agent_that_holds_it(tmp_path: Path, agent: str) -> None:
    make_key(tmp_path / "other")
    locked = make_key(tmp_path / "locked", "open sesame")
    subprocess.run(["ssh-keygen", "-p", "-q", "-P", "open sesame", "-N", "", "-f", tmp_path / "locked"], check=True)
    for name in ("other", "locked"):
        subprocess.run(["env", f"SSH_AUTH_SOCK={agent}", "ssh-add", "-q", tmp_path / name], check=True)
    subprocess.run(["ssh-keygen", "-p", "-q", "-P", "", "-N", "open sesame", "-f", tmp_path / "locked"], check=True)
    found = find_own_key(connection(tmp_path / "locked", agent=agent))
    assert found is not None
    assert (found.public.split()[:2], found.place) == (locked.split()[:2], "the ssh-agent")


def test_a_locked_key_without_an_agent_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    make_key(tmp_path / "locked", "open sesame")
    with pytest.raises(UnreachableError, match="found that a passphrase locks") as failed:
        find_own_key(connection(tmp_path / "locked"))
    assert f"ssh-add {tmp_path / 'locked'}" in failed.value.do


def test_a_new_key_goes_where_ssh_looks_and_never_over_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    files = (tmp_path / "id_rsa", tmp_path / "new/id_ed25519")
    assert find_own_key(connection(*files)) is None
    place = place_for_key(connection(*files))
    assert place == files[1]
    made = make_own_key(place)
    assert place.stat().st_mode & 0o777 == 0o600
    assert find_own_key(connection(*files)) is not None
    with pytest.raises(UnreachableError, match="expected to make a key"):
        make_own_key(place)
    assert Path(f"{place}.pub").read_text().strip() == made.public


def test_a_node_takes_a_key_once_and_keeps_every_other_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = make_own_key(tmp_path / "id_ed25519")
    for _ in range(2):
        assert LocalNode("spark-a").run(install_key(made)).ok
    file = tmp_path / ".ssh/authorized_keys"
    assert file.read_text() == made.public + "\n"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    file.write_text("ssh-rsa AAAA somebody")
    assert LocalNode("spark-a").run(install_key(made)).ok
    assert file.read_text() == f"ssh-rsa AAAA somebody\n{made.public}\n"
