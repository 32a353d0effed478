"""How nodes are reached when that is difficult, against the real sshd, sudo and firewall of two emulated hosts.

Only this shows what OpenSSH really says in each case, and that strict limits of sshd are enough. The lab is one of its
own, `t-ssh`; it needs root on Linux and about two minutes.

To clean up after an aborted run: ``python -m lab down --instance t-ssh``.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml

from lab import instance, paths
from lab.host import Host
from spark_core.errors import UnreachableError
from spark_core.transport import ssh as carrier
from spark_core.transport.base import Command, command, script
from spark_core.transport.connection import ConnectionSpec, jump_of, resolve
from spark_core.transport.first_contact import refused_first_contact
from spark_core.transport.keys import fingerprint
from spark_core.transport.master import Patience
from spark_core.transport.ssh import SshTransport
from tests.config_cases import load_base
from tests.lab.runs import run_lab

PROJECT = Path(__file__).resolve().parent.parent.parent
INSTANCE = "t-ssh"
USER = "spark"
TABLE = "inet spark_vllm_test"

pytestmark = pytest.mark.lab


lab = partial(run_lab, INSTANCE)
"""Run a command of the lab as a person would."""


def folder() -> Path:
    return paths.instance_dir(INSTANCE)


def host(name: str) -> Host:
    return Host(instance.require(INSTANCE), name)


def address(name: str) -> str:
    return instance.require(INSTANCE).address(name)


def as_root(name: str, shell: str, *words: str) -> str:
    """Run shell text as root inside a host, without its sshd."""
    return host(name).change(shell, *words, what="a step of the test")


def host_key(name: str) -> str:
    """The host key that a host really has."""
    return " ".join(as_root(name, "cat /etc/ssh/ssh_host_ed25519_key.pub").split()[:2])


def password() -> str:
    return (folder() / "sudo_password").read_text().strip()


@pytest.fixture(scope="module", autouse=True)
def two_hosts() -> Iterator[None]:
    """A lab of two hosts, removed at the end."""
    reason = None
    if platform.system() != "Linux":
        reason = f"the lab needs Linux, this is {platform.system()}"
    elif os.geteuid() != 0:
        reason = "the lab needs root"
    if reason is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must be able to run the lab: {reason}")
        pytest.skip(reason)
    lab("down")
    lab("up", "--hosts-only")
    yield
    lab("down")


@pytest.fixture(autouse=True)
def _mended(two_hosts: None) -> Iterator[None]:
    """After each test the hosts are as before, without a connection that is still open."""
    yield
    for name in ("spark-a", "spark-b"):
        as_root(
            name,
            f"nft delete table {TABLE} 2>/dev/null || true; rm -f /etc/ssh/sshd_config.d/test.conf /run/nologin; "
            "rm -f /etc/sudoers.d/test; gpasswd -a spark sudo > /dev/null; "
            'kill -CONT "$(systemctl show -P MainPID ssh)"; systemctl reload-or-restart ssh; '
            "pkill -f '^sshd: spark' || true",
        )


def spec(name: str, **changes: object) -> ConnectionSpec:
    base = ConnectionSpec(name, address(name), USER, host_key=host_key(name), ssh_config=str(folder() / "ssh_config"))
    return replace(base, **changes)  # type: ignore[arg-type]


def transport(name: str, patience_s: float = 0, said: list[str] | None = None, **changes: object) -> SshTransport:
    lines: list[str] = [] if said is None else said
    return SshTransport(resolve(spec(name, **changes)), password, patience=Patience(patience_s, lines.append))


def failure(node: SshTransport, cmd: Command | None = None) -> UnreachableError:
    with pytest.raises(UnreachableError) as failed:
        node.run(cmd or command("true"))
    return failed.value


def filter_ssh(name: str, verdict: str, match: str = "") -> None:
    """Let a host's packet filter drop or reject what comes to port 22; ``accept`` takes the rule away."""
    as_root(name, f"nft delete table {TABLE} 2>/dev/null || true")
    if verdict != "accept":
        as_root(
            name,
            f"nft add table {TABLE}; nft add chain {TABLE} input '{{ type filter hook input priority 0; }}'; "
            f"nft add rule {TABLE} input {shlex.quote(f'{match} tcp dport 22 {verdict}')}",
        )


def limit_sshd(name: str, text: str) -> None:
    as_root(
        name,
        # A reload is a restart in place: for a moment nothing listens.
        'printf "$1" > /etc/ssh/sshd_config.d/test.conf; systemctl reload ssh; sleep 0.3; '
        "until ss -Htln 'sport = :22' | grep -q .; do sleep 0.1; done",
        text,
    )


@pytest.mark.parametrize(
    ("verdict", "found", "at_most_s"),
    [("drop", "no answer in 8 s", 12), ("reject with tcp reset", "connection refused", 4)],
    ids=["dropped", "rejected"],
)
def test_a_host_whose_port_is_closed_is_told_in_time_with_its_name_and_step(
    verdict: str, found: str, at_most_s: float
) -> None:
    filter_ssh("spark-b", verdict)
    start = time.monotonic()
    error = failure(transport("spark-b"))
    assert time.monotonic() - start < at_most_s
    assert error.line == f"spark-b, connect (TCP): expected sshd at {address('spark-b')} port 22, found: {found}"
    assert error.code == "connect-failed"


@pytest.mark.parametrize("verdict", ["drop", "reject with tcp reset"], ids=["dropped", "rejected"])
def test_a_host_that_opens_its_port_later_is_waited_for(verdict: str) -> None:
    filter_ssh("spark-b", verdict)
    said: list[str] = []
    node = transport("spark-b", patience_s=40, said=said)
    opening = threading.Timer(12, filter_ssh, ("spark-b", "accept"))
    opening.start()
    start = time.monotonic()
    try:
        assert node.run(command("hostname")).stdout == "spark-b\n"
    finally:
        opening.join()
    assert 11 < time.monotonic() - start < 25
    assert len(said) == 1
    assert "spark-b, connect (TCP)" in said[0]
    assert said[0].endswith("waiting up to 40 s (ssh.boot_wait_s)")


def test_a_host_that_never_opens_its_port_is_given_up_when_the_time_is_over() -> None:
    filter_ssh("spark-b", "reject with tcp reset")
    start = time.monotonic()
    error = failure(transport("spark-b", patience_s=5))
    assert 4 < time.monotonic() - start < 9
    assert (error.node, error.step) == ("spark-b", "connect (TCP)")


def test_what_no_time_cures_is_not_waited_for(tmp_path: Path) -> None:
    start = time.monotonic()
    stranger = failure(transport("spark-b", patience_s=60, user="nobody"))
    assert stranger.code == "authentication-failed"
    assert failure(transport("spark-b", patience_s=60, host_key=host_key("spark-a"))).code == "host-key-mismatch"
    unknown = failure(transport("spark-b", patience_s=60, address="no-such-spark.invalid"))
    assert "the name cannot be resolved" in unknown.line
    assert time.monotonic() - start < 20


def test_an_sshd_that_accepts_and_never_speaks_is_told_as_such() -> None:
    as_root("spark-b", 'kill -STOP "$(systemctl show -P MainPID ssh)"')
    error = failure(transport("spark-b"))
    assert (error.step, error.code) == ("key exchange", "key-exchange-failed")
    assert "timed out" in error.line
    assert "wedged" in error.do


def test_a_host_that_is_still_booting_is_waited_for_after_the_login_too() -> None:
    words = "System is booting up. Unprivileged users are not permitted to log in yet."
    as_root("spark-b", 'echo "$1" > /run/nologin', words)
    error = failure(transport("spark-b"))
    assert (error.code, words in error.line) == ("session-refused", True)
    opening = threading.Timer(3, as_root, ("spark-b", "rm /run/nologin"))
    opening.start()
    assert transport("spark-b", patience_s=20).run(command("true")).ok
    opening.join()


def test_a_login_that_is_refused_tells_which_keys_were_offered_and_what_locks_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = failure(transport("spark-b", user="nobody"))
    key = fingerprint((folder() / "id_ed25519.pub").read_text().strip())
    assert f"nobody@{address('spark-b')}: Permission denied (publickey" in error.line
    assert f"offered: {key} ({folder()}/id_ed25519, from the agent)" in error.line
    assert "nodes[].user" in error.do
    locked = tmp_path / "locked"
    locked.write_bytes((folder() / "id_ed25519").read_bytes())
    locked.chmod(0o600)
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-P", "", "-N", "a passphrase", "-f", str(locked)], check=True, timeout=20
    )
    config = tmp_path / "config"
    config.write_text(f"IdentityFile {locked}\nIdentitiesOnly yes\nIdentityAgent {tmp_path}/none\n")
    error = failure(transport("spark-b", ssh_config=str(config)))
    assert error.code == "authentication-failed"
    assert "no ssh-agent answers" in error.line
    assert f"the node knows {key}, and a passphrase locks {locked}: this key needs an ssh-agent" in error.do


def test_another_host_key_is_refused_before_any_command_with_both_fingerprints_and_a_new_pin_works_at_once() -> None:
    old_key = host_key("spark-b")
    under_the_old_pin = transport("spark-b")
    assert under_the_old_pin.run(command("true")).ok
    as_root(
        "spark-b",
        "cd /etc/ssh; cp -p ssh_host_ed25519_key /root/old; cp -p ssh_host_ed25519_key.pub /root/old.pub; "
        "rm ssh_host_ed25519_key*; ssh-keygen -q -t ed25519 -N '' -f ssh_host_ed25519_key; systemctl restart ssh",
    )
    try:
        new_key = host_key("spark-b")
        # A pin of its own keeps it off the connection that is still open under the old one.
        assert transport("spark-b").run(command("hostname")).stdout == "spark-b\n"
        as_root("spark-b", "pkill -f '^sshd: spark' || true")
        error = failure(transport("spark-b", host_key=old_key), script("touch /tmp/was-here"))
        assert error.code == "host-key-mismatch"
        assert fingerprint(old_key) in error.line
        assert fingerprint(new_key) in error.line
        assert f"host_key: {new_key}" in error.do
        assert transport("spark-b").run(script("test -e /tmp/was-here")).status == 1
    finally:
        as_root(
            "spark-b", "mv /root/old /etc/ssh/ssh_host_ed25519_key; mv /root/old.pub /etc/ssh/ssh_host_ed25519_key.pub"
        )


def test_a_key_of_a_kind_that_the_node_has_not_is_told_with_the_one_it_has() -> None:
    other = "ecdsa-sha2-nistp256 AAAAE2VjZHNhLXNoYTItbmlzdHAyNTYAAAAIbmlzdHAyNTYAAABBBA=="
    error = failure(transport("spark-b", host_key=other))
    assert error.code == "host-key-mismatch"
    assert f"found ssh-ed25519 {fingerprint(host_key('spark-b'))}" in error.line


def test_a_first_contact_is_refused_with_the_fingerprint_and_the_line_that_pins_it(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(f"UserKnownHostsFile {tmp_path}/known\nGlobalKnownHostsFile /dev/null\n")
    unpinned = spec("spark-b", host_key=None, ssh_config=str(config))
    with pytest.raises(UnreachableError) as refused:
        resolve(unpinned)
    error = refused_first_contact(resolve(unpinned, render_only=True), refused.value)
    key = host_key("spark-b")
    assert error.code == "host-key-unpinned"
    assert error.line.endswith(f"the node offers ssh-ed25519 {fingerprint(key)}")
    assert error.do.endswith(f"host_key: {key}")
    assert not (tmp_path / "known").exists()
    filter_ssh("spark-b", "reject with tcp reset")
    error = refused_first_contact(resolve(unpinned, render_only=True), refused.value)
    assert (error.code, "connection refused" in error.line) == ("host-key-unpinned", True)


def docker_like(node: SshTransport, seconds: float) -> subprocess.Popen[bytes]:
    """What the Docker provider does: its own ssh with the options that it is given, over the open connection."""
    connection = node.connection
    config = ["-F", str(folder() / "ssh_config")]
    words = ["ssh", *config, *connection.shared_options(), "-l", USER, "-p", "22", "--", connection.spec.address]
    return subprocess.Popen(
        [*words, f"docker system dial-stdio < /dev/null > /dev/null; sleep {seconds}; echo done"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("limits", ["", "MaxSessions 4\nMaxStartups 3\n"], ids=["stock", "strict"])
def test_eight_users_at_once_and_the_docker_provider_are_served_within_the_limits_of_sshd(limits: str) -> None:
    if limits:
        limit_sshd("spark-a", limits)
    nodes = [transport("spark-a"), transport("spark-a")]
    nodes[0].open()
    others = [docker_like(nodes[0], 4) for _ in range(3)]

    def work(number: int) -> list[str]:
        return [
            nodes[number % 2].run(script('sleep 0.2; cat; echo " $1"', str(number), stdin=b"in")).stdout
            for _ in range(4)
        ]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(work, range(8)))
        streams = list(pool.map(lambda n: nodes[n % 2].stream(script("wc -c"), [b"x" * 50_000] * 20).stdout, range(8)))
    assert answers == [[f"in {number}\n"] * 4 for number in range(8)]
    assert streams == ["1000000\n"] * 8
    assert [other.communicate(timeout=30)[0] for other in others] == [b"done\n"] * 3


def test_an_sshd_without_room_for_a_session_is_told_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "BUSY_S", 2.0)
    limit_sshd("spark-a", "MaxSessions 0\n")
    error = failure(transport("spark-a"))
    assert (error.step, error.code) == ("session", "session-refused")
    assert "MaxSessions" in error.do


def test_an_sshd_that_drops_every_login_is_told_as_key_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_core.transport.master.BUSY_S", 2.0)
    limit_sshd("spark-a", "MaxStartups 1\n")
    held_open = [socket.create_connection((address("spark-a"), 22)) for _ in range(3)]
    try:
        error = failure(transport("spark-a"))
    finally:
        for one in held_open:
            one.close()
    assert (error.step, error.code) == ("key exchange", "key-exchange-failed")
    assert "MaxStartups" in error.do
    assert transport("spark-a").run(command("true")).ok


def test_a_connection_that_breaks_off_during_a_command_is_resumed() -> None:
    node = transport("spark-b")
    node.run(script("rm -f /tmp/runs"))
    cut = threading.Timer(1, as_root, ("spark-b", "pkill -f '^sshd: spark'"))
    cut.start()
    assert node.run(script("echo run >> /tmp/runs; sleep 3; cat /tmp/runs")).stdout == "run\nrun\n"
    cut.join()


def test_a_reboot_during_a_command_is_ridden_out_where_a_booting_host_is_waited_for() -> None:
    node = transport("spark-b", patience_s=60)
    before = host("spark-b").boot_id()
    restart = threading.Timer(1, lambda: host("spark-b").reboot())
    restart.start()
    assert node.run(script("sleep 4; hostname")).stdout == "spark-b\n"
    restart.join()
    assert host("spark-b").boot_id() != before


def test_a_power_cut_is_noticed_by_a_command_that_gets_no_answer_and_ridden_out() -> None:
    node = transport("spark-b", patience_s=60)
    node.open()
    # The packets vanish, as they do when a machine loses its power: nobody says that the connection is over.
    cut = threading.Timer(0.5, filter_ssh, ("spark-b", "drop"))
    back = threading.Timer(9, filter_ssh, ("spark-b", "accept"))
    cut.start()
    back.start()
    assert node.run(script("sleep 2; hostname", timeout_s=4)).stdout == "spark-b\n"
    cut.join()
    back.join()


def test_a_fresh_answer_needs_a_new_connection() -> None:
    node = transport("spark-b")
    assert node.fresh_answer(10)
    assert node.run(command("true")).ok
    # By the flags of the packet, not by its state: connection tracking knows only what began after its first rule.
    filter_ssh("spark-b", "drop", "tcp flags & (syn | ack) == syn")
    start = time.monotonic()
    assert not node.fresh_answer(3)
    assert time.monotonic() - start < 4
    assert node.run(command("true")).ok


@pytest.fixture
def only_through_the_head(tmp_path: Path) -> Iterator[SshTransport]:
    """spark-b at its fabric address, which only spark-a has a way to."""
    for number, name in ((12, "spark-a"), (13, "spark-b")):
        as_root(name, 'ip address replace "192.168.200.$1/24" dev enp1s0f1np1', str(number))
    filter_ssh("spark-b", "reject with tcp reset", "iifname eth0")
    config = tmp_path / "config"
    config.write_text(f"Host *\n  IdentityFile {folder()}/id_ed25519\n  IdentityAgent {folder()}/agent.sock\n")
    head = spec("spark-a", ssh_config=str(config))
    behind = spec("spark-b", address="192.168.200.13", ssh_config=str(config), via=head)
    yield SshTransport(resolve(behind), password, via=SshTransport(resolve(head), password))
    for name in ("spark-a", "spark-b"):
        as_root(name, "ip address flush dev enp1s0f1np1 scope global")


def test_a_node_whose_only_address_is_on_the_fabric_is_reached_through_the_head(
    only_through_the_head: SshTransport,
) -> None:
    node = only_through_the_head
    assert node.run(script("hostname; cat", stdin=b"input")).stdout == "spark-b\ninput"
    assert node.run(command("id", "-u", sudo=True)).stdout == "0\n"
    assert node.stream(script("wc -c"), [b"x" * 100_000] * 30).stdout == "3000000\n"
    assert node.fresh_answer(10)
    said = as_root("spark-b", 'ss -Htn state established "( sport = :22 )"')
    assert "192.168.200.12:" in said
    jump = jump_of(node.connection)
    assert jump is not None
    assert (jump.host_name, jump.pin) == (address("spark-a"), host_key("spark-a"))
    session = docker_like(node, 0)
    assert session.communicate(timeout=30)[0] == b"done\n"


def test_what_keeps_us_from_a_node_behind_the_head_is_told_apart(only_through_the_head: SshTransport) -> None:
    node = only_through_the_head
    as_root("spark-b", "systemctl stop ssh.socket ssh 2>/dev/null || systemctl stop ssh")
    try:
        error = failure(node)
    finally:
        as_root("spark-b", "systemctl start ssh")
    assert error.line == "spark-b, connect (TCP): expected sshd at 192.168.200.13 port 22, found: connection refused"
    assert error.do.endswith("the way to it goes through spark-a")
    limit_sshd("spark-a", "AllowTcpForwarding no\n")
    as_root("spark-a", "pkill -f '^sshd: spark' || true")
    assert "prohibited" in failure(node).line
    limit_sshd("spark-a", "")
    as_root("spark-a", "pkill -f '^sshd: spark' || true")
    filter_ssh("spark-a", "reject with tcp reset")
    error = failure(node)
    assert error.node == "spark-b"
    assert error.line.startswith(
        "spark-b, connect (TCP) of spark-a: it is reached through spark-a, where expected sshd"
    )
    wrong = resolve(replace(node.connection.spec, host_key=host_key("spark-a")))
    filter_ssh("spark-a", "accept")
    error = failure(SshTransport(wrong, via=transport("spark-a")))
    assert (error.node, error.code) == ("spark-b", "host-key-mismatch")
    assert fingerprint(host_key("spark-b")) in error.line


def test_sudo_that_allows_listed_commands_only_is_used_for_these_and_refuses_others_in_words() -> None:
    as_root(
        "spark-b",
        'echo "spark ALL=(root) NOPASSWD: /usr/bin/id -u" > /etc/sudoers.d/test; chmod 440 /etc/sudoers.d/test; '
        "gpasswd -d spark sudo > /dev/null",
    )
    without = SshTransport(resolve(spec("spark-b")))
    assert without.run(command("id", "-u", sudo=True)).stdout == "0\n"
    error = failure(without, command("id", "-g", sudo=True))
    assert error.line == "spark-b, sudo: expected an answer of `id` as root, found: sudoers does not list this command"
    as_root("spark-b", "gpasswd -a spark sudo > /dev/null; pkill -f '^sshd: spark' || true")
    error = failure(without, command("id", "-g", sudo=True))
    assert error.line.endswith("found: sudo asks for a password")
    with_password = transport("spark-b")
    assert with_password.run(script("id -g; cat", sudo=True, stdin=b"input")).stdout == "0\ninput"
    assert with_password.run(Command(("id", "-u"), sudo=True, stdin=b"x")).stdout == "0\n"
    wrong = SshTransport(resolve(spec("spark-b")), lambda: "wrong")
    assert "refuses it" in failure(wrong, command("id", "-g", sudo=True)).line
    as_root("spark-b", "rm /etc/sudoers.d/test; gpasswd -d spark sudo > /dev/null; pkill -f '^sshd: spark' || true")
    error = failure(transport("spark-b"), command("id", "-g", sudo=True))
    assert re.search(r"found: (spark is not in the sudoers file|Sorry, user spark may not run sudo)", error.line)
    assert error.code == "sudo-refused"


def test_pin_hosts_shows_every_key_and_writes_the_pins(tmp_path: Path) -> None:
    raw = load_base()
    raw["ssh"] = {"config_file": str(tmp_path / "config")}
    for node, name in zip(raw["nodes"], ("spark-a", "spark-b"), strict=True):
        node["management_address"], node["user"] = address(name), USER
        node.pop("host_key", None)
    (tmp_path / "config").write_text(f"UserKnownHostsFile {tmp_path}/known\nGlobalKnownHostsFile /dev/null\n")
    stack = tmp_path / "Pulumi.t.yaml"
    stack.write_text(json.dumps({"config": {f"spark-vllm:{key}": value for key, value in raw.items()}}))
    done = subprocess.run(
        [sys.executable, "-m", "automation", "pin-hosts", "--stack", "t", "--yes", "--json"],
        cwd=PROJECT,
        env=os.environ | {"PULUMI_OPTION_CONFIG_FILE": str(stack)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [(node["name"], node["fingerprint"]) for node in told["nodes"]] == [
        (name, fingerprint(host_key(name))) for name in ("spark-a", "spark-b")
    ]
    config = yaml.safe_load(stack.read_text())["config"]
    assert [node["host_key"] for node in config["spark-vllm:nodes"]] == [
        host_key(name) for name in ("spark-a", "spark-b")
    ]
