"""OpenSSH as the carrier: which step failed, sudo without its password anywhere, one connection for all."""

from __future__ import annotations

import os
import socket
import threading
import traceback
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from spark_core.errors import CommandError, UnreachableError
from spark_core.transport.base import Command, command, run_checked, script
from spark_core.transport.connection import Connection, ConnectionSpec
from spark_core.transport.ssh import SshTransport
from tests.fake_ssh import FakeSsh

MARKER = "marker-a1b2c3d4"
PIN = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAaBcDeF"


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSsh]:
    with FakeSsh(tmp_path / "ssh", ["spark-a"]) as fake:
        monkeypatch.setenv("PATH", f"{fake.programs}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("HOME", str(fake.home))
        of_this_user = types.SimpleNamespace(pw_dir=str(fake.home))
        monkeypatch.setattr("spark_core.transport.connection.pwd.getpwuid", lambda _: of_this_user)
        yield fake


def transport(ssh: FakeSsh, password: str | None = None, **changes: object) -> SshTransport:
    spec = ConnectionSpec("spark-a", "spark-a", "aurora", host_key=PIN)
    connection = Connection(spec, "127.0.0.1", "aurora", ssh.port("spark-a"), PIN, None, None, ())
    return SshTransport(replace(connection, **changes), lambda: password)  # type: ignore[arg-type]


def failure(carrier: SshTransport, cmd: Command | None = None) -> UnreachableError:
    with pytest.raises(UnreachableError) as failed:
        carrier.run(cmd or command("true"))
    return failed.value


def test_a_command_runs_on_the_node_and_its_status_is_an_answer(ssh: FakeSsh) -> None:
    result = transport(ssh).run(script('cat; echo "$1" >&2; exit 7', "a 'word'", stdin=b"input"))
    assert (result.status, result.stdout, result.stderr) == (7, "input", "a 'word'\n")


def test_one_connection_serves_all_threads(ssh: FakeSsh) -> None:
    carrier = transport(ssh)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: carrier.run(command("echo", str(n))).stdout, range(12)))
    assert answers == [f"{n}\n" for n in range(12)]
    assert len(ssh.masters("spark-a")) == 1


def test_two_processes_that_start_at_once_open_one_connection(ssh: FakeSsh) -> None:
    carriers = [transport(ssh) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda carrier: carrier.run(command("true")), carriers))
    assert len(ssh.masters("spark-a")) == 1


def test_the_control_folder_is_for_its_owner_only(ssh: FakeSsh) -> None:
    transport(ssh).run(command("true"))
    assert (ssh.home / ".cache/spark-vllm/ctl").stat().st_mode & 0o777 == 0o700


def test_a_port_where_nobody_listens_is_refused_at_tcp(ssh: FakeSsh) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        error = failure(transport(ssh, port=free.getsockname()[1]))
    assert error.step == "connect (TCP)"
    assert error.line.endswith("found: connection refused")
    assert "sshd" in error.do
    assert ssh.masters("spark-a") == []


def test_a_name_that_cannot_be_resolved_is_told_as_such(ssh: FakeSsh) -> None:
    error = failure(transport(ssh, host_name="no-such-spark.invalid"))
    assert (error.step, "the name cannot be resolved" in error.line) == ("connect (TCP)", True)


@pytest.mark.parametrize(
    ("stderr", "step", "words"),
    [
        ("Host key verification failed.", "host key (nodes[].host_key)", "expected host key"),
        (
            "Unable to negotiate: no matching host key type found.",
            "host key (nodes[].host_key)",
            "found another key",
        ),
        (
            "aurora@spark-a: Permission denied (publickey).",
            "authentication",
            "expected a login as aurora without a prompt",
        ),
        (
            "kex_exchange_identification: Connection closed by remote host",
            "login",
            "Connection closed by remote host",
        ),
        ("", "login", "ssh ended without a word"),
    ],
)
def test_a_login_that_fails_names_its_step(stderr: str, step: str, words: str, ssh: FakeSsh) -> None:
    ssh.refuse_login("spark-a", stderr)
    error = failure(transport(ssh))
    assert (error.node, error.step) == ("spark-a", step)
    assert words in error.line


def test_a_connection_that_dies_between_two_commands_is_unreachable_and_opened_anew(ssh: FakeSsh) -> None:
    carrier = transport(ssh)
    assert carrier.run(command("true")).ok
    ssh.break_sessions("spark-a", "mux_client_request_session: read from master failed: Broken pipe")
    assert failure(carrier).step == "login"
    ssh.mend("spark-a")
    assert carrier.run(command("echo", "again")).stdout == "again\n"


def test_a_command_that_itself_ends_with_255_is_an_answer(ssh: FakeSsh) -> None:
    assert transport(ssh).run(script("echo own words >&2; exit 255")).status == 255


def test_a_command_without_an_end_is_given_up_without_its_input(ssh: FakeSsh) -> None:
    with pytest.raises(CommandError) as failed:
        transport(ssh).run(replace(command("tail", "-f", "/dev/null", stdin=MARKER.encode()), timeout_s=0.5))
    assert failed.value.line == "spark-a: expected an answer of `tail`: no answer in 0.5 s"
    assert MARKER not in "".join(traceback.format_exception(failed.value.with_traceback(None)))


@pytest.mark.parametrize("way", ["run", "stream"])
def test_a_connection_that_is_lost_without_a_word_is_no_answer_and_is_opened_anew(way: str, ssh: FakeSsh) -> None:
    carrier = transport(ssh)
    assert carrier.run(command("true")).ok
    ssh.lose("spark-a", "id -u")
    with pytest.raises(UnreachableError) as failed:
        carrier.run(command("id", "-u")) if way == "run" else carrier.stream(command("id", "-u"), [b"x"])
    assert failed.value.line == "spark-a, session: expected an answer, found: the connection was lost"
    ssh.mend("spark-a")
    assert carrier.run(command("echo", "again")).stdout == "again\n"
    assert len(ssh.masters("spark-a")) == 2


def test_what_a_command_said_before_the_connection_was_lost_is_no_answer_either(ssh: FakeSsh) -> None:
    cmd = script('echo half a word >&2; rm -f "$HOME"/../../home/.cache/spark-vllm/ctl/*[!k]; exit 255')
    error = failure(transport(ssh), cmd)
    assert error.line.endswith("found: the connection was lost")
    assert error.evidence == ("half a word",)


@pytest.mark.parametrize(
    ("user", "sudo", "line"),
    [("root", "free", "id -u"), ("user", "free", "sudo -kn true"), ("user", MARKER, "sudo -k -S -p '' -- true")],
)
def test_a_loss_while_sudo_is_tried_out_is_no_answer_about_it(user: str, sudo: str, line: str, ssh: FakeSsh) -> None:
    ssh.be("spark-a", user, sudo)
    carrier = transport(ssh, MARKER if sudo == MARKER else None)
    ssh.lose("spark-a", line)
    assert failure(carrier, command("id", "-u", sudo=True)).step == "session"
    ssh.mend("spark-a")
    assert carrier.run(command("true", sudo=True)).ok
    assert all("-S" not in call for call in ssh.sudo_calls("spark-a")) or sudo == MARKER
    assert (ssh.sudo_calls("spark-a") == []) == (user == "root")


def test_no_answer_in_time_is_told_by_the_purpose_and_not_by_the_script(ssh: FakeSsh) -> None:
    cmd = script("read -r line; exec tail -f /dev/null", stdin=b"x\n", timeout_s=0.5)
    with pytest.raises(CommandError) as failed:
        run_checked(transport(ssh), cmd, purpose="expected to read the facts of the host")
    assert failed.value.line == "spark-a: expected to read the facts of the host: no answer in 0.5 s"
    assert failed.value.do
    with pytest.raises(CommandError) as failed:
        transport(ssh).run(cmd)
    assert failed.value.line == "spark-a: expected an answer of a script: no answer in 0.5 s"
    with pytest.raises(CommandError) as failed:
        transport(ssh).stream(replace(cmd, purpose="expected docker to load it"), [b"x\n"])
    assert failed.value.line == "spark-a: expected docker to load it: no answer in 0.5 s"
    with pytest.raises(CommandError) as failed:
        transport(ssh).stream(command("tail", "-f", "/dev/null", timeout_s=0.5), [])
    assert failed.value.line == "spark-a: expected an answer of `tail`: no answer in 0.5 s"


def test_a_stuck_master_process_is_replaced(ssh: FakeSsh, monkeypatch: pytest.MonkeyPatch) -> None:
    assert transport(ssh).run(command("true")).ok
    monkeypatch.setattr("spark_core.transport.ssh.TCP_TIMEOUT_S", 0.5)
    ssh.slow_master("spark-a")
    assert transport(ssh).run(command("true")).ok
    assert len(ssh.masters("spark-a")) == 2


def test_a_source_that_fails_while_it_is_streamed_leaves_no_process_behind(ssh: FakeSsh) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x" * 100
        raise CommandError("expected the file, found none")

    with pytest.raises(CommandError, match="expected the file"):
        transport(ssh).stream(command("cat"), chunks())


def test_a_stream_arrives_whole(ssh: FakeSsh) -> None:
    result = transport(ssh).stream(script("wc -c"), (b"x" * 1000 for _ in range(300)))
    assert result.stdout.strip() == "300000"


def test_a_reader_that_stops_early_says_why_by_its_status(ssh: FakeSsh) -> None:
    result = transport(ssh).stream(script("echo full >&2; exit 9"), (b"x" * 100_000 for _ in range(50)))
    assert (result.status, result.stderr) == (9, "full\n")


def test_root_needs_no_sudo(ssh: FakeSsh) -> None:
    ssh.be("spark-a", "root")
    assert transport(ssh).run(command("id", "-u", sudo=True)).ok
    assert ssh.sudo_calls("spark-a") == []


def test_sudo_without_a_password_is_used_where_it_is_allowed(ssh: FakeSsh) -> None:
    ssh.be("spark-a", "user", sudo="free")
    assert transport(ssh).run(script("cat", sudo=True, stdin=b"input")).stdout == "input"


def test_the_password_travels_on_standard_input_before_the_command_s_own(ssh: FakeSsh) -> None:
    ssh.be("spark-a", "user", sudo=MARKER)
    result = transport(ssh, MARKER).run(script("cat", sudo=True, stdin=b"input"))
    assert (result.status, result.stdout) == (0, "input")
    assert not any(MARKER in line for line in ssh.lines("spark-a"))


def test_a_wrong_password_is_told_without_it(ssh: FakeSsh) -> None:
    ssh.be("spark-a", "user", sudo="right")
    with pytest.raises(CommandError) as failed:
        transport(ssh, MARKER).run(command("true", sudo=True))
    assert failed.value.line == (
        "spark-a (sudo_password): expected that sudo accepts the password of the settings, found that it refuses it"
    )
    assert MARKER not in "".join(traceback.format_exception(failed.value))


def test_a_needed_password_that_nobody_gave_names_the_command_and_the_secret(ssh: FakeSsh) -> None:
    ssh.be("spark-a", "user", sudo="right")
    with pytest.raises(CommandError) as failed:
        transport(ssh).run(command("sysctl", "-q", "-w", "a.b=1", sudo=True))
    assert failed.value.line == (
        "spark-a (sudo_password): expected root without a password for `sysctl -q -w …`, found that sudo asks for one"
    )


def test_our_own_sessions_are_bounded(ssh: FakeSsh) -> None:
    carrier = transport(ssh)
    running, most, lock = 0, 0, threading.Lock()
    original = carrier._session

    def counted(line: str, stdin: bytes, timeout_s: float, told: str) -> object:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        try:
            return original(line, stdin, timeout_s, told)
        finally:
            with lock:
                running -= 1

    carrier._session = counted  # type: ignore[method-assign, assignment]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda _: carrier.run(command("true")), range(12)))
    assert most <= 4
