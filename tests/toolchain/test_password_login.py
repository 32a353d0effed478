"""A login by password with real OpenSSH on both sides: the key is installed, and the password is seen nowhere."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from automation.__main__ import main
from automation.exit_codes import Exit
from automation.stack_file import open_stack_file
from spark_core.errors import CommandError, UnreachableError
from spark_core.transport.base import command, script
from spark_core.transport.connection import Connection, ConnectionSpec
from spark_core.transport.own_key import find_own_key, install_key, make_own_key, place_for_key
from spark_core.transport.password_login import run_with_password
from tests.toolchain.ssh_server import find_sshd, free_port, make_key

USER, UID = "spark-tester", 65533
PASSWORD = r"marker 7f3a\ $HOME 'quoted'"


@dataclass
class Server:
    """A real sshd that takes passwords, and one user with a home of its own."""

    connection: Connection
    home: Path
    log: Path


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    sshd = find_sshd()
    if sshd is None or os.getuid() != 0 or shutil.which("openssl") is None:
        pytest.skip("needs an sshd, root (for a password file of its own) and openssl")
    folder = Path(tempfile.mkdtemp(prefix="spark-vllm-sshd-"))
    folder.chmod(0o755)
    home = folder / "home"
    home.mkdir()
    os.chown(home, UID, UID)
    key = make_key(folder / "host_key")
    hashed = subprocess.run(
        ["openssl", "passwd", "-6", "-stdin"], input=PASSWORD, capture_output=True, text=True, check=True, timeout=20
    ).stdout.strip()
    users = f"sshd:x:74:65534::/run/sshd:/usr/sbin/nologin\n{USER}:x:{UID}:65534::{home}:/bin/sh\n"
    (folder / "passwd").write_text(Path("/etc/passwd").read_text() + users)
    (folder / "shadow").write_text(f"root:*:19000::::::\n{USER}:{hashed}:19000::::::\n")
    port = free_port()
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host_key\nPidFile none\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication yes\nKbdInteractiveAuthentication no\nMaxStartups 100\n"
    )
    libraries = sorted({str(path.parent) for path in sshd.parents[2].glob("usr/lib/**/libwrap.so*")})
    preload = {"LD_LIBRARY_PATH": ":".join(libraries)} if sshd.parents[2] != Path("/") and libraries else {}
    quoted = shlex.quote(str(folder))
    text = (
        f"mount --bind {quoted}/passwd /etc/passwd && mount --bind {quoted}/shadow /etc/shadow && "
        f"mount -t tmpfs none /run && mkdir -m 755 /run/sshd && exec {sshd} -D -e -f {quoted}/config"
    )
    log = folder / "sshd.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", text], stdout=output, stderr=output, env=os.environ | preload
        )
    try:
        end = time.monotonic() + 15
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end, log.read_text()
                time.sleep(0.05)
        pin = " ".join(key.split()[:2])
        spec = ConnectionSpec("spark-a", "127.0.0.1", USER, port=port, host_key=pin, ssh_config="/dev/null")
        yield Server(Connection(spec, "127.0.0.1", USER, port, pin, None, None, ()), home, log)
    finally:
        process.terminate()
        process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


class Watch(threading.Thread):
    """Looks for the password in the arguments and environment of every process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.end, self.seen, self.looked = threading.Event(), list[str](), 0

    def run(self) -> None:
        own = str(os.getpid())
        while not self.end.wait(0.005):
            for process in Path("/proc").glob("[0-9]*"):
                for name in ("cmdline", "environ"):
                    try:
                        content = (process / name).read_bytes()
                    except OSError:
                        continue
                    self.looked += b"askpass" in content
                    if b"marker 7f3a" in content and process.name != own:
                        self.seen.append(str(process))


def test_a_key_is_installed_by_password_once_and_then_logs_in(server: Server, tmp_path: Path) -> None:
    authorized = server.home / ".ssh/authorized_keys"
    authorized.parent.mkdir(mode=0o700)
    authorized.write_text("ssh-ed25519 AAAAsomebody else's")  # without an end of its line
    os.chown(authorized.parent, UID, UID)
    os.chown(authorized, UID, UID)
    connection = replace(server.connection, identity_files=(str(tmp_path / "id_ed25519"),))
    assert find_own_key(connection) is None
    key = make_own_key(place_for_key(connection))
    assert find_own_key(connection) == replace(key, public=" ".join(key.public.split()))
    watch = Watch()
    watch.start()
    for _ in range(2):
        done = run_with_password(connection, PASSWORD, install_key(key))
        assert done.ok, done
    watch.end.set()
    watch.join()
    assert authorized.read_text().splitlines() == ["ssh-ed25519 AAAAsomebody else's", key.public]
    assert authorized.stat().st_mode & 0o777 == 0o644  # as its owner left it
    assert (watch.seen, watch.looked > 0) == ([], True)
    assert "marker" not in server.log.read_text()
    words = ["-i", key.place, "-o", "IdentitiesOnly=yes", *connection.own_options(), "-o", "ControlPath=none"]
    by_key = subprocess.run(
        ["ssh", *words, "-T", *connection.target(), "--", "id -un"], capture_output=True, text=True, timeout=30
    )
    assert by_key.stdout == f"{USER}\n", by_key.stderr


def test_init_goes_the_whole_way_over_a_real_sshd(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """This machine is the node: what it is does not matter, but that every step of the way is OpenSSH's own."""
    (server.home / ".ssh/authorized_keys").unlink(missing_ok=True)
    file = tmp_path / "Pulumi.t.yaml"
    monkeypatch.setenv("PULUMI_OPTION_CONFIG_FILE", str(file))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    config = tmp_path / "ssh_config"
    config.write_text(
        f"Host *\n  IdentityFile {tmp_path}/id_ed25519\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {tmp_path}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
    )
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    words = ["--stack", "t", "--json", "--ssh-config", str(config), "--password-file", str(tmp_path / "password")]
    words += ["--model", "node:/nowhere", f"{USER}@127.0.0.1:{server.connection.port}"]
    assert main(["init", *words]) == Exit.REFUSED
    assert not (tmp_path / "id_ed25519").exists()
    capsys.readouterr()
    main(["init", "--yes-host-keys", "--yes-make-key", "--yes-install-key", *words])
    report = json.loads(capsys.readouterr().out)
    assert report["written"], report
    [node] = report["nodes"]
    assert (node["user"], node["host_key"]) == (USER, server.connection.pin)
    settings = open_stack_file("t").settings()
    assert settings.nodes[0].ssh_port == server.connection.port
    assert PASSWORD not in json.dumps(report) and "marker" not in file.read_text()
    taken = (server.home / ".ssh/authorized_keys").read_text()
    assert taken == (tmp_path / "id_ed25519.pub").read_text()


def test_what_a_command_says_comes_back_and_its_status_is_an_answer(server: Server) -> None:
    result = run_with_password(server.connection, PASSWORD, script('cat; echo "$1" >&2; exit 7', "x", stdin=b"input"))
    assert (result.status, result.stdout) == (7, "input")
    assert result.stderr.strip().endswith("x")


def test_a_wrong_password_is_asked_once_and_told(server: Server) -> None:
    before = server.log.read_text().count("Failed password")
    with pytest.raises(UnreachableError, match="the password of spark-tester, found that it refuses it") as failed:
        run_with_password(server.connection, "wrong-marker", command("true"))
    assert failed.value.code == "authentication-failed"
    assert "wrong-marker" not in failed.value.render()
    assert server.log.read_text().count("Failed password") == before + 1


def test_another_host_key_is_refused_before_any_password_is_sent(server: Server) -> None:
    other = server.connection.pin[:-6] + "AAAAAA"
    before = server.log.read_text().count("password")
    with pytest.raises(UnreachableError) as failed:
        run_with_password(replace(server.connection, pin=other), PASSWORD, command("true"))
    assert failed.value.code == "host-key-mismatch"
    assert server.log.read_text().count("password") == before


def test_a_command_that_does_not_end_is_given_up(server: Server) -> None:
    start = time.monotonic()
    with pytest.raises(CommandError, match="no answer in 3 s"):
        run_with_password(server.connection, PASSWORD, command("sleep", "60", timeout_s=3))
    assert time.monotonic() - start < 10
