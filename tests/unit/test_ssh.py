"""OpenSSH as the carrier: one connection for all, waiting and resuming, sudo without its password anywhere."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
import traceback
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from spark_core.errors import CommandError, SparkError, UnreachableError
from spark_core.transport.base import Command, command, run_checked, script
from spark_core.transport.connection import Connection, ConnectionSpec, ssh_path
from spark_core.transport.keys import fingerprint
from spark_core.transport.master import Patience
from spark_core.transport.openssh import attempt
from spark_core.transport.ssh import SshTransport, begun
from tests.fake_ssh import FakeSsh

MARKER = "marker-a1b2c3d4"
PIN = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAaBcDeF"
OTHER = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIZZZZZZZ"
SUDO = "env LC_ALL=C sudo -k"


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSsh]:
    with FakeSsh(tmp_path / "ssh", ["spark-a"]) as fake:
        monkeypatch.setenv("PATH", f"{fake.programs}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("HOME", str(fake.home))
        of_this_user = types.SimpleNamespace(pw_dir=str(fake.home))
        monkeypatch.setattr("spark_core.transport.connection.pwd.getpwuid", lambda _: of_this_user)
        monkeypatch.setattr("spark_core.transport.backoff._FIRST_S", 0.05)
        monkeypatch.setattr("spark_core.transport.backoff._LONGEST_S", 0.3)
        yield fake


def connection(ssh: FakeSsh, **changes: object) -> Connection:
    spec = ConnectionSpec("spark-a", "spark-a", "aurora", host_key=PIN)
    found = Connection(spec, "127.0.0.1", "aurora", ssh.port("spark-a"), PIN, None, None, ())
    return replace(found, **changes)  # type: ignore[arg-type]


def transport(ssh: FakeSsh, password: str | None = None, **changes: object) -> SshTransport:
    return SshTransport(connection(ssh, **changes), lambda: password)


def patient(ssh: FakeSsh, patience_s: float, said: list[str]) -> SshTransport:
    return SshTransport(connection(ssh), patience=Patience(patience_s, said.append))


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


def test_a_host_that_never_answers_is_told_by_its_time(ssh: FakeSsh) -> None:
    ssh.kill("spark-a", "Connection timed out")
    error = failure(transport(ssh))
    assert (error.step, error.code) == ("connect (TCP)", "connect-failed")
    assert error.line.endswith("found: no answer in 8 s")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for an sshd that is too busy takes a moment only."""
    monkeypatch.setattr("spark_core.transport.master.BUSY_S", 0.5)
    monkeypatch.setattr("spark_core.transport.ssh.BUSY_S", 0.5)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize(
    ("stderr", "step", "code", "words"),
    [
        (
            "aurora@spark-a: Permission denied (publickey).",
            "authentication",
            "authentication-failed",
            "expected a login as aurora without a prompt, found: aurora@spark-a: Permission denied (publickey).",
        ),
        (
            "kex_exchange_identification: Connection closed by remote host",
            "key exchange",
            "key-exchange-failed",
            "found: kex_exchange_identification: Connection closed by remote host",
        ),
        ("", "login", "connect-failed", "ssh ended without a word"),
    ],
)
def test_a_login_that_fails_names_its_step(stderr: str, step: str, code: str, words: str, ssh: FakeSsh) -> None:
    ssh.greet("spark-a", "Authorised use only.")
    ssh.refuse_login("spark-a", stderr)
    error = failure(transport(ssh))
    assert (error.node, error.step, error.code) == ("spark-a", step, code)
    assert words in error.line
    assert "Authorised" not in str(error)


@pytest.mark.parametrize(
    "stderr", ["Host key verification failed.", "Unable to negotiate: no matching host key type found."]
)
def test_another_host_key_is_told_with_both_fingerprints_and_the_line_that_pins_it(stderr: str, ssh: FakeSsh) -> None:
    ssh.refuse_login("spark-a", stderr)
    ssh.offer("spark-a", OTHER)
    error = failure(transport(ssh))
    assert error.line == (
        f"spark-a, host key (nodes[].host_key): expected host key ssh-ed25519 {fingerprint(PIN)} at 127.0.0.1 port "
        f"{ssh.port('spark-a')}, found ssh-ed25519 {fingerprint(OTHER)}"
    )
    assert error.code == "host-key-mismatch"
    assert f"change the pin to host_key: {OTHER}; if not, somebody else answers" in error.do
    assert ssh.lines("spark-a") == []


def test_a_host_key_that_is_shown_only_once_is_told_in_ssh_s_words(ssh: FakeSsh) -> None:
    ssh.refuse_login("spark-a", "Host key verification failed.")
    error = failure(transport(ssh, pin_file="/home/x/.ssh/known_hosts"))
    assert error.line.endswith("found Host key verification failed.")
    assert "ssh-keygen -R spark-a -f /home/x/.ssh/known_hosts" in error.do


def test_a_host_that_boots_is_waited_for_by_time_and_told_once(ssh: FakeSsh) -> None:
    said: list[str] = []
    ssh.kill("spark-a")
    mending = threading.Timer(1.5, ssh.mend, ("spark-a",))
    mending.start()
    assert patient(ssh, 20, said).run(command("echo", "up")).stdout == "up\n"
    mending.join()
    assert said == [
        f"spark-a, connect (TCP): expected sshd at 127.0.0.1 port {ssh.port('spark-a')}, found: connection refused; "
        "waiting up to 20 s (ssh.boot_wait_s)"
    ]


def test_a_host_that_stays_away_is_given_up_when_the_time_is_over(ssh: FakeSsh) -> None:
    ssh.kill("spark-a", "No route to host")
    start = time.monotonic()
    error = failure(patient(ssh, 1, []))
    assert 1 <= time.monotonic() - start < 4
    assert error.line.endswith("found: no route to host")


def test_threads_that_wait_for_the_same_host_wait_once(ssh: FakeSsh) -> None:
    ssh.kill("spark-a")
    carrier = patient(ssh, 1.5, [])
    start = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        errors = list(pool.map(lambda _: failure(carrier), range(4)))
    assert {error.step for error in errors} == {"connect (TCP)"}
    assert time.monotonic() - start < 3.5


@pytest.mark.parametrize("stderr", ["aurora@spark-a: Permission denied (publickey).", "Host key verification failed."])
def test_what_no_time_cures_is_not_waited_for(stderr: str, ssh: FakeSsh) -> None:
    said: list[str] = []
    ssh.refuse_login("spark-a", stderr)
    start = time.monotonic()
    failure(patient(ssh, 60, said))
    assert (time.monotonic() - start < 5, said) == (True, [])


def test_an_interrupt_ends_the_wait_for_a_host(ssh: FakeSsh) -> None:
    ssh.kill("spark-a")
    said: list[str] = []

    def check() -> None:
        if said:
            raise SparkError("interrupted")

    carrier = SshTransport(connection(ssh), patience=Patience(60, said.append, check))
    start = time.monotonic()
    with pytest.raises(SparkError, match="interrupted"):
        carrier.run(command("true"))
    assert (time.monotonic() - start < 5, len(said)) == (True, 1)


def test_an_interrupt_ends_a_login_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "ssh"
    program.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec tail -f /dev/null\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    pid = tmp_path / "pid"

    def check() -> None:
        if pid.is_file() and pid.read_text():
            raise SparkError("interrupted")

    with pytest.raises(SparkError, match="interrupted"):
        attempt(["spark-a"], 30, check)
    assert not Path("/proc", pid.read_text().strip()).exists()
    assert attempt(["spark-a"], 0.2).status is None


def test_a_login_that_sshd_drops_is_tried_again_without_patience_too(ssh: FakeSsh) -> None:
    ssh.drop_logins("spark-a", 3)
    assert transport(ssh).run(command("true")).ok
    assert len(ssh.logins("spark-a")) == 4


def test_a_session_that_sshd_has_no_room_for_is_tried_again(ssh: FakeSsh) -> None:
    carrier = transport(ssh)
    carrier.open()
    ssh.refuse_sessions("spark-a", 3)
    assert carrier.run(script("cat", stdin=b"input")).stdout == "input"
    ssh.refuse_sessions("spark-a", 2)
    assert carrier.stream(script("wc -c"), [b"x" * 40_000] * 30).stdout.strip() == "1200000"


@pytest.mark.usefixtures("hurried")
def test_a_session_that_never_gets_room_is_told_as_such(ssh: FakeSsh) -> None:
    carrier = transport(ssh)
    carrier.open()
    ssh.refuse_sessions("spark-a", 1000)
    error = failure(carrier)
    assert error.line == (
        "spark-a, session: expected a session, found: mux_client_request_session: session request failed: "
        "Session open refused by peer"
    )
    assert error.code == "session-refused"
    with pytest.raises(UnreachableError, match="Session open refused"):
        carrier.stream(script("cat"), [b"x"])


def test_a_connection_that_dies_between_two_commands_is_opened_anew(ssh: FakeSsh) -> None:
    carrier = transport(ssh)
    assert carrier.run(command("true")).ok
    ssh.break_sessions("spark-a", "mux_client_request_session: read from master failed: Broken pipe")
    error = failure(carrier)
    assert (error.step, error.code) == ("session", "connection-lost")
    assert error.evidence == ("mux_client_request_session: read from master failed: Broken pipe",)
    ssh.mend("spark-a")
    assert carrier.run(command("echo", "again")).stdout == "again\n"


def test_a_command_that_itself_ends_with_255_is_an_answer(ssh: FakeSsh) -> None:
    assert transport(ssh).run(script("echo own words >&2; exit 255")).status == 255


def test_a_command_without_an_end_is_given_up_without_its_input(ssh: FakeSsh) -> None:
    with pytest.raises(CommandError) as failed:
        transport(ssh).run(
            replace(command("timeout", "20", "tail", "-f", "/dev/null", stdin=MARKER.encode()), timeout_s=0.5)
        )
    assert failed.value.line == "spark-a: expected an answer of `timeout 20 tail`: no answer in 0.5 s"
    assert MARKER not in "".join(traceback.format_exception(failed.value.with_traceback(None)))


@pytest.mark.parametrize("way", ["run", "stream"])
def test_a_connection_that_is_always_lost_without_a_word_is_no_answer(way: str, ssh: FakeSsh) -> None:
    carrier = transport(ssh)
    assert carrier.run(command("true")).ok
    ssh.lose("spark-a", "id -u")
    with pytest.raises(UnreachableError) as failed:
        carrier.run(command("id", "-u")) if way == "run" else carrier.stream(command("id", "-u"), [b"x"])
    assert failed.value.line == "spark-a, session: expected an answer, found: the connection was lost"
    assert failed.value.code == "connection-lost"
    assert ssh.lines("spark-a").count("id -u") == (3 if way == "run" else 1)
    ssh.mend("spark-a")
    assert carrier.run(command("echo", "again")).stdout == "again\n"


@pytest.mark.parametrize("times", [1, 2])
def test_a_command_whose_connection_was_lost_is_run_again_over_a_new_one(times: int, ssh: FakeSsh) -> None:
    carrier = transport(ssh)
    ssh.lose("spark-a", "cat", times)
    assert carrier.run(command("cat", stdin=b"input")).stdout == "input"
    assert len(ssh.masters("spark-a")) == 1 + times


def test_a_reboot_during_a_command_is_waited_for(ssh: FakeSsh) -> None:
    carrier = patient(ssh, 20, [])
    ssh.lose("spark-a", "cat", 1)
    carrier.open()
    ssh.refuse_login("spark-a", "ssh: connect to host spark-a port 22: Connection refused")
    back = threading.Timer(1, ssh.accept_logins, ("spark-a",))
    back.start()
    assert carrier.run(command("cat", stdin=b"input")).stdout == "input"
    back.join()


def test_what_a_command_said_before_the_connection_was_lost_is_no_answer_either(ssh: FakeSsh) -> None:
    cmd = script('echo half a word >&2; rm -f "$HOME"/../../home/.cache/spark-vllm/ctl/*[!k]; exit 255')
    error = failure(transport(ssh), cmd)
    assert error.line.endswith("found: the connection was lost")
    assert error.evidence == ("half a word",)


def test_no_answer_in_time_over_a_dead_connection_is_a_lost_connection(
    ssh: FakeSsh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spark_core.transport.master.REQUEST_TIMEOUT_S", 0.5)
    carrier = transport(ssh)
    carrier.open()
    ssh.slow_master("spark-a")
    error = failure(carrier, command("timeout", "20", "tail", "-f", "/dev/null", timeout_s=0.3))
    assert error.code == "connection-lost"
    assert len(ssh.masters("spark-a")) == 3


@pytest.mark.parametrize(
    ("user", "sudo", "line"),
    [
        ("root", "free", "id -u"),
        ("user", "free", f"{SUDO} -n -- true"),
        ("user", MARKER, f"{SUDO} -n -- true"),
        ("user", MARKER, f"{SUDO} -n -l -- true"),
        ("user", MARKER, f"{SUDO} -S -p '' -v"),
        ("user", MARKER, f"{SUDO} -S -p '' -- true"),
    ],
)
def test_a_loss_while_sudo_is_tried_out_is_no_answer_about_it(user: str, sudo: str, line: str, ssh: FakeSsh) -> None:
    ssh.be("spark-a", user, sudo)
    carrier = transport(ssh, MARKER if sudo == MARKER else None)
    if " -l " in line:  # what the rules are is asked for once sudo asks again
        assert carrier.run(command("cat", sudo=True)).ok
    ssh.lose("spark-a", line)
    assert failure(carrier, command("true", sudo=True, stdin=b"input")).step == "session"
    ssh.mend("spark-a")
    assert carrier.run(command("true", sudo=True)).ok
    assert all("-S" not in call for call in ssh.sudo_calls("spark-a")) or sudo == MARKER
    assert (ssh.sudo_calls("spark-a") == []) == (user == "root")


def test_no_answer_in_time_is_told_by_the_purpose_and_not_by_the_script(ssh: FakeSsh) -> None:
    cmd = script("read -r line; exec timeout 20 tail -f /dev/null", stdin=b"x\n", timeout_s=0.5)
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
        transport(ssh).stream(command("timeout", "20", "tail", "-f", "/dev/null", timeout_s=0.5), [])
    assert failed.value.line == "spark-a: expected an answer of `timeout 20 tail`: no answer in 0.5 s"


def test_a_stuck_master_process_is_replaced(ssh: FakeSsh, monkeypatch: pytest.MonkeyPatch) -> None:
    assert transport(ssh).run(command("true")).ok
    monkeypatch.setattr("spark_core.transport.master.REQUEST_TIMEOUT_S", 0.5)
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


def test_sudo_without_a_password_is_used_where_it_is_allowed_and_nothing_else_is_tried(ssh: FakeSsh) -> None:
    ssh.be("spark-a", "user", sudo="free")
    assert transport(ssh).run(command("cat", sudo=True, stdin=b"input")).stdout == "input"
    assert ssh.sudo_calls("spark-a") == ["-k -n -- cat"]


def test_the_password_travels_on_standard_input_before_the_command_s_own(ssh: FakeSsh) -> None:
    ssh.be("spark-a", "user", sudo=MARKER)
    carrier = transport(ssh, MARKER)
    result = carrier.run(script("cat", sudo=True, stdin=b"input"))
    assert (result.status, result.stdout) == (0, "input")
    assert not any(MARKER in line for line in ssh.lines("spark-a"))
    assert carrier.run(command("cat", sudo=True, stdin=b"more")).stdout == "more"
    # Where no rule goes without a password, it is not tried again without one.
    before = len(ssh.sudo_calls("spark-a"))
    assert carrier.run(command("cat", sudo=True, stdin=b"still more")).stdout == "still more"
    assert ssh.sudo_calls("spark-a")[before:] == ["-k -S -p  -- cat"]


def test_one_command_without_input_as_root_takes_two_sessions(ssh: FakeSsh) -> None:
    ssh.be("spark-a", "user", sudo=MARKER)
    assert transport(ssh, MARKER).run(command("cat", sudo=True)).ok
    assert ssh.sudo_calls("spark-a") == ["-k -n -- cat", "-k -S -p  -- cat"]


def test_a_command_that_is_refused_with_the_password_is_told_in_sudo_s_words(ssh: FakeSsh) -> None:
    ssh.be("spark-a", "user", sudo=MARKER, listed=["cat"], only_listed=True)
    error = failure(transport(ssh, MARKER), command("tac", sudo=True))
    assert error.code == "sudo-refused"
    assert "is not allowed to" in error.line


def test_a_command_that_sudo_lists_gets_its_whole_input_and_never_the_password(ssh: FakeSsh) -> None:
    ssh.be("spark-a", "user", sudo=MARKER, listed=["cat"])
    carrier = transport(ssh, MARKER)
    assert carrier.run(command("tac", sudo=True, stdin=b"b\na\n")).stdout == "a\nb\n"
    assert carrier.run(command("cat", sudo=True, stdin=b"input")).stdout == "input"


def test_a_command_that_sudo_does_not_list_is_told_apart_from_one_that_needs_a_password(ssh: FakeSsh) -> None:
    ssh.be("spark-a", "user", sudo="right", listed=["cat"], only_listed=True)
    assert transport(ssh).run(command("cat", sudo=True, stdin=b"input")).stdout == "input"
    error = failure(transport(ssh), command("tac", sudo=True))
    assert error.line == "spark-a, sudo: expected an answer of `tac` as root, found: sudoers does not list this command"
    assert error.code == "sudo-refused"
    assert "python -m automation sudoers" in error.do
    ssh.be("spark-a", "user", sudo="right", listed=["cat"], only_listed=False)
    assert failure(transport(ssh), command("tac", sudo=True)).line.endswith("found: sudo asks for a password")


def test_a_user_whom_sudo_does_not_know_is_told_in_its_words(ssh: FakeSsh) -> None:
    ssh.be("spark-a", "user", sudo=MARKER, no_sudoer=True)
    error = failure(transport(ssh, MARKER), command("tac", sudo=True))
    assert error.line.endswith("found: user is not in the sudoers file.")
    assert error.code == "sudo-refused"


def test_a_wrong_password_is_told_without_it(ssh: FakeSsh) -> None:
    ssh.be("spark-a", "user", sudo="right")
    error = failure(transport(ssh, MARKER), command("true", sudo=True))
    assert error.line == (
        "spark-a, sudo (sudo_password): expected that sudo accepts the password of the settings, "
        "found that it refuses it"
    )
    assert error.code == "sudo-refused"
    assert MARKER not in "".join(traceback.format_exception(error))
    assert sum("-S" in call for call in ssh.sudo_calls("spark-a")) == 1


def test_a_needed_password_that_nobody_gave_names_the_command_and_the_secret(ssh: FakeSsh) -> None:
    ssh.be("spark-a", "user", sudo="right")
    error = failure(transport(ssh), command("sysctl", "-q", "-w", "a.b=1", sudo=True))
    assert error.line == "spark-a, sudo: expected an answer of `sysctl` as root, found: sudo asks for a password"
    assert error.do.startswith("set the secret sudo_password (or sudo_password_file), or allow it in sudoers")


def test_a_fresh_answer_comes_over_a_connection_of_its_own(ssh: FakeSsh) -> None:
    carrier = transport(ssh)
    carrier.open()
    assert carrier.fresh_answer(5) is True
    assert len(ssh.masters("spark-a")) == 1
    assert ssh.logins("spark-a")[-1] == "-- true"
    ssh.drop_logins("spark-a", 1)
    assert carrier.fresh_answer(5) is False
    ssh.lose("spark-a", "nothing")
    assert carrier.run(command("true")).ok


def test_a_new_login_is_made_when_asked_for(ssh: FakeSsh) -> None:
    carrier = transport(ssh)
    carrier.open()
    carrier.log_in_again()
    assert carrier.run(command("true")).ok
    assert len(ssh.logins("spark-a")) == 2


def test_a_node_behind_another_is_opened_after_that_one(ssh: FakeSsh) -> None:
    head = transport(ssh)
    behind = connection(ssh, spec=ConnectionSpec("spark-b", "spark-a", "aurora", host_key=PIN), via=head.connection)
    carrier = SshTransport(behind, via=head)
    assert carrier.run(command("echo", "through")).stdout == "through\n"
    assert ssh.masters("spark-a") == [str(ssh_path(c.control_path)) for c in (head.connection, behind)]
    head.forget()
    carrier.forget()
    ssh.kill("spark-a")
    error = failure(SshTransport(behind, via=transport(ssh)))
    assert error.line == (
        "spark-b, connect (TCP) of spark-a: it is reached through spark-a, where expected sshd at 127.0.0.1 port "
        f"{ssh.port('spark-a')}, found: connection refused"
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


@pytest.mark.parametrize("noise", ["echo Welcome", "printf Welcome", "echo; echo Welcome; echo"])
@pytest.mark.parametrize("cmd", [command("id"), command("base64", "/etc/hostname", sudo=True), script("true")])
def test_a_login_shell_that_prints_is_told_and_its_words_are_no_answer(ssh: FakeSsh, noise: str, cmd: Command) -> None:
    ssh.start_shell_with("spark-a", noise)
    error = failure(transport(ssh), cmd)
    assert (error.code, error.step) == ("login-shell", "login shell")
    assert error.what == "expected a login shell of aurora that prints nothing by itself, found: Welcome"
    assert "~/.bashrc" in error.do


def test_what_a_login_shell_prints_is_no_answer_to_a_stream_either(ssh: FakeSsh) -> None:
    ssh.start_shell_with("spark-a", "echo Welcome")
    with pytest.raises(UnreachableError, match="prints nothing by itself, found: Welcome"):
        transport(ssh).stream(command("cat"), [b"x"])


@pytest.mark.parametrize(
    ("start", "found"),
    [
        ("exit 0", "ended with 0: nothing"),
        ("echo 'This account is currently not available.'; exit 1", "ended with 1: This account is currently not"),
        ("echo 'no such shell' >&2; exit 127", "ended with 127: no such shell"),
    ],
)
def test_a_command_that_the_login_shell_never_ran_has_not_succeeded(ssh: FakeSsh, start: str, found: str) -> None:
    ssh.start_shell_with("spark-a", start)
    error = failure(transport(ssh))
    assert error.code == "login-shell"
    assert found in error.what


def test_an_empty_line_of_a_login_shell_is_told_too(ssh: FakeSsh) -> None:
    ssh.start_shell_with("spark-a", "echo; echo told aside >&2")
    assert failure(transport(ssh)).what.endswith("found: an empty line")


@pytest.mark.parametrize("shell", [shell for shell in ("sh", "bash", "zsh", "fish", "tcsh") if shutil.which(shell)])
def test_a_login_shell_runs_a_script_wholly_or_not_at_all(shell: str, tmp_path: Path) -> None:
    text = 'for f in "$@"; do\n  touch "$f"\ndone\ntouch /dev/null\necho "it\'s \\\\ done"'
    line = begun(script(text, f"{tmp_path}/a b", f"{tmp_path}/c").remote_line())
    done = subprocess.run([shell, "-c", line], capture_output=True, text=True, timeout=20, check=False)
    made = sorted(path.name for path in tmp_path.iterdir())
    if shell == "tcsh":
        assert (done.returncode, done.stdout, made) == (90, "", [])
    else:
        assert (done.returncode, made) == (0, ["a b", "c"])
        assert done.stdout == "spark-vllm-begins\nit's \\ done\n"


def test_a_csh_is_told_as_such(ssh: FakeSsh) -> None:
    ssh.start_shell_with("spark-a", "shell=/bin/tcsh")
    error = failure(transport(ssh))
    assert error.line == (
        "spark-a, login shell: expected a login shell of aurora that takes POSIX quotes (sh, bash, zsh, fish), "
        "found a csh"
    )


def test_what_a_login_shell_writes_to_standard_error_is_let_pass(ssh: FakeSsh) -> None:
    ssh.start_shell_with("spark-a", "echo 'tput: No value for $TERM' >&2")
    assert transport(ssh).run(command("echo", "spark-vllm-begins")).stdout == "spark-vllm-begins\n"
