"""Connections: what OpenSSH's own configuration says, and which host key a node must show."""

from __future__ import annotations

import asyncio
import base64
import os
import pwd
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.spark_node import _key_material
from spark_core.errors import UnreachableError
from spark_core.transport.connection import (
    UNPINNED,
    Connection,
    ConnectionSpec,
    jump_of,
    parse_ssh_g,
    resolve,
    ssh_path,
)
from spark_core.transport.keys import agent_has_key, choose_pin, fingerprint, locked_private_keys

ED25519 = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAaBcDeF"
RSA = "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAB"
SPEC = ConnectionSpec(node="spark-a", address="10.1.230.180", user="aurora", host_key=ED25519)


def connection(**changes: object) -> Connection:
    base = Connection(SPEC, "10.1.230.180", "aurora", 22, ED25519, None, None, ("/home/someone/.ssh/id_ed25519",))
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def host_keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Public host keys by kind."""
    folder = tmp_path_factory.mktemp("keys")
    keys = {}
    for kind, bits in (("ed25519", "256"), ("rsa", "2048"), ("ecdsa", "256")):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", kind, "-b", bits, "-N", "", "-f", str(folder / kind)],
            check=True,
            timeout=60,
        )
        keys[kind] = " ".join((folder / f"{kind}.pub").read_text().split()[:2])
    return keys


@pytest.fixture
def ssh_config(tmp_path: Path) -> Iterator[Path]:
    """A configuration of OpenSSH that knows nobody, and the known-hosts file beside it."""
    path = tmp_path / "ssh_config"
    (tmp_path / "known_hosts").touch()
    path.write_text(f"UserKnownHostsFile {tmp_path}/known_hosts\nGlobalKnownHostsFile /dev/null\n")
    yield path


def spec(config: Path, **changes: object) -> ConnectionSpec:
    return replace(SPEC, **{"host_key": None, "ssh_config": str(config), **changes})  # type: ignore[arg-type]


def test_keywords_of_ssh_g_are_lower_case_and_keep_their_order() -> None:
    text = "Host spark\nport 2222\nidentityfile ~/.ssh/a\nidentityfile ~/.ssh/b\nclearallforwardings\n\n"
    assert parse_ssh_g(text) == {
        "host": ["spark"],
        "port": ["2222"],
        "identityfile": ["~/.ssh/a", "~/.ssh/b"],
        "clearallforwardings": [""],
    }


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], None),
        (["# Host 10.0.0.1 found: line 1"], None),
        (["10.0.0.1 " + RSA], RSA),
        (["10.0.0.1 " + RSA, "10.0.0.1 " + ED25519], ED25519),
        (["|1|hash|salt= " + ED25519 + " a comment"], ED25519),
        (["@revoked 10.0.0.1 " + ED25519], None),
        (["@cert-authority *.example " + ED25519, "10.0.0.1 " + RSA], RSA),
        (["10.0.0.1 ssh-ed25519"], None),
        (["10.0.0.1 ssh-dss AAAA"], None),
        (["10.0.0.1 ssh-ed25519 FIRST", "10.0.0.1 ssh-ed25519 SECOND"], "ssh-ed25519 FIRST"),
    ],
    ids=[
        "nothing",
        "comment",
        "rsa",
        "ed25519 first",
        "hashed",
        "revoked",
        "certificate",
        "cut line",
        "dss",
        "twice",
    ],
)
def test_the_pin_chosen_from_known_hosts(lines: list[str], expected: str | None) -> None:
    assert choose_pin(lines) == expected


def test_only_the_pinned_key_is_accepted_and_no_file_is_asked() -> None:
    options = connection().pin_options()
    values = options[1::2]
    assert set(options[::2]) == {"-o"}
    assert f"KnownHostsCommand=/bin/echo %H {ED25519}" in values
    for wanted in (
        "StrictHostKeyChecking=yes",
        "UserKnownHostsFile=/dev/null",
        "GlobalKnownHostsFile=/dev/null",
        "HostKeyAlgorithms=ssh-ed25519",
        "UpdateHostKeys=no",
        "BatchMode=yes",
    ):
        assert wanted in values


def test_an_rsa_pin_asks_for_signatures_that_are_not_sha_1() -> None:
    assert "HostKeyAlgorithms=rsa-sha2-512,rsa-sha2-256" in connection(pin=RSA).pin_options()


def test_options_for_others_hold_nothing_of_this_person_or_machine() -> None:
    theirs = replace(SPEC, ssh_config="~/lab/ssh_config")
    options = connection(spec=theirs, identity_agent="/run/user/1000/agent", proxy_jump="someone@gate").shared_options()
    text = " ".join(options)
    for private in (
        "/home",
        "someone",
        "aurora",
        "id_ed25519",
        "agent",
        "ssh_config",
        "gate",
        str(Path.home()),
    ):
        assert private not in text
    assert [option for option in options if option.startswith("/")] == []
    assert "ControlMaster=no" in options
    assert any(option.startswith("ControlPath=~/") for option in options)


def test_options_for_others_are_the_same_for_everyone_who_runs_the_stack() -> None:
    assert connection(identity_files=("/a",)).shared_options() == connection(identity_files=("/b",)).shared_options()


@pytest.mark.parametrize(
    "changed",
    [
        {"pin": RSA},
        {"port": 2222},
        {"proxy_jump": "gate"},
        {"spec": replace(SPEC, user="root")},
        {"spec": replace(SPEC, address="10.1.230.181")},
        {"spec": replace(SPEC, ssh_config="~/other")},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_another_way_to_the_node_is_another_control_socket(changed: dict[str, object]) -> None:
    assert connection(**changed).control_path != connection().control_path


@given(
    address=st.text(min_size=1, max_size=300),
    user=st.text(min_size=1, max_size=32),
    key=st.text(min_size=1, max_size=800),
)
def test_the_control_path_stays_below_the_limit_of_a_socket(address: str, user: str, key: str) -> None:
    long = connection(spec=replace(SPEC, address=address, user=user), pin=f"ssh-rsa {key}")
    long_home = "/home/" + "u" * 32
    assert len(long.control_path.replace("~", long_home, 1).encode()) < 100


def test_the_words_of_a_destination_leave_alias_and_user_apart() -> None:
    assert connection(port=2222).target() == ["-p", "2222", "-l", "aurora", "10.1.230.180"]


def test_an_alias_is_resolved_to_address_port_and_jump_host(ssh_config: Path) -> None:
    ssh_config.write_text(
        "Host spark-head\n  HostName 10.9.8.7\n  Port 2222\n  ProxyJump gate.example\n"
        "  IdentityFile ~/.ssh/id_spark\n  IdentityAgent ~/agent.sock\n" + ssh_config.read_text()
    )
    found = resolve(spec(ssh_config, address="spark-head", host_key=ED25519))
    assert (found.host_name, found.port, found.proxy_jump, found.pin) == (
        "10.9.8.7",
        2222,
        "gate.example",
        ED25519,
    )
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)  # ssh asks the user database, not HOME
    assert found.identity_files == (str(home / ".ssh/id_spark"),)
    assert found.identity_agent == str(home / "agent.sock")


def test_the_settings_port_and_user_stand_above_the_configuration(ssh_config: Path) -> None:
    ssh_config.write_text("Host *\n  Port 2222\n  User someone\n" + ssh_config.read_text())
    found = resolve(spec(ssh_config, port=2200, host_key=ED25519))
    assert found.target() == ["-p", "2200", "-l", "aurora", "10.1.230.180"]


def test_a_comment_behind_the_key_is_no_part_of_the_pin(ssh_config: Path) -> None:
    assert resolve(spec(ssh_config, host_key=f"{ED25519} root@spark-a")).pin == ED25519


def test_without_a_setting_the_known_hosts_entry_is_the_pin(ssh_config: Path, host_keys: dict[str, str]) -> None:
    (ssh_config.parent / "known_hosts").write_text(
        f"10.1.230.180 {host_keys['rsa']}\n10.1.230.180 {host_keys['ed25519']}\n"
    )
    assert resolve(spec(ssh_config)).pin == host_keys["ed25519"]


def test_an_entry_for_another_port_is_no_pin_of_this_one(ssh_config: Path, host_keys: dict[str, str]) -> None:
    (ssh_config.parent / "known_hosts").write_text(f"[10.1.230.180]:2222 {host_keys['ed25519']}\n")
    assert resolve(spec(ssh_config, port=2222)).pin == host_keys["ed25519"]
    with pytest.raises(UnreachableError):
        resolve(spec(ssh_config))


def test_a_hashed_entry_is_found(ssh_config: Path, host_keys: dict[str, str]) -> None:
    known = ssh_config.parent / "known_hosts"
    known.write_text(f"10.1.230.180 {host_keys['ecdsa']}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known)], check=True, capture_output=True, timeout=20)
    assert resolve(spec(ssh_config)).pin == host_keys["ecdsa"]


def test_a_host_key_alias_names_the_entry(ssh_config: Path, host_keys: dict[str, str]) -> None:
    ssh_config.write_text("Host *\n  HostKeyAlias the-spark\n" + ssh_config.read_text())
    (ssh_config.parent / "known_hosts").write_text(f"the-spark {host_keys['ed25519']}\n")
    assert resolve(spec(ssh_config, port=2222)).pin == host_keys["ed25519"]


def test_a_node_without_a_pin_is_refused(ssh_config: Path) -> None:
    with pytest.raises(UnreachableError) as refused:
        resolve(spec(ssh_config))
    assert refused.value.line == (
        "spark-a, host key (nodes[].host_key): expected a pinned host key for 10.1.230.180, "
        "found none in the settings and none in known_hosts"
    )
    assert refused.value.code == "host-key-unpinned"


def test_a_revoked_key_is_no_pin(ssh_config: Path, host_keys: dict[str, str]) -> None:
    (ssh_config.parent / "known_hosts").write_text(f"@revoked 10.1.230.180 {host_keys['ed25519']}\n")
    with pytest.raises(UnreachableError):
        resolve(spec(ssh_config))


def test_a_plan_that_is_only_rendered_gets_a_pin_that_no_host_can_show(ssh_config: Path) -> None:
    assert resolve(spec(ssh_config), render_only=True).pin == UNPINNED


def test_a_plan_that_is_only_rendered_needs_no_configuration_file(tmp_path: Path) -> None:
    found = resolve(replace(SPEC, ssh_config=str(tmp_path / "none")), render_only=True)
    assert found.spec.ssh_config is None


def test_without_a_user_in_the_settings_the_configuration_s_one_is_told(ssh_config: Path) -> None:
    ssh_config.write_text("Host *\n  User someone\n" + ssh_config.read_text())
    assert resolve(spec(ssh_config, user="", host_key=ED25519)).user == "someone"
    assert resolve(spec(ssh_config, host_key=ED25519)).user == "aurora"


def test_a_node_that_is_reached_directly_has_no_jump_host() -> None:
    assert jump_of(connection()) is None


def test_a_jump_host_is_resolved_and_pinned_like_a_node(ssh_config: Path, host_keys: dict[str, str]) -> None:
    (ssh_config.parent / "known_hosts").write_text(f"[10.0.0.1]:2200 {host_keys['ed25519']}\n")
    jump = jump_of(connection(spec=spec(ssh_config), proxy_jump="admin@10.0.0.1:2200"))
    assert jump is not None
    assert (jump.node, jump.user, jump.host_name, jump.port) == (
        "spark-a (jump host 10.0.0.1)",
        "admin",
        "10.0.0.1",
        2200,
    )
    assert jump.pin == host_keys["ed25519"]


def test_a_jump_host_without_a_pin_is_refused(ssh_config: Path) -> None:
    with pytest.raises(UnreachableError) as refused:
        jump_of(connection(spec=spec(ssh_config), proxy_jump="10.0.0.1"))
    assert refused.value.node == "spark-a (jump host 10.0.0.1)"
    assert refused.value.code == "host-key-unpinned"
    assert refused.value.do.endswith("connect to it once by hand")


def test_two_jumps_are_refused(ssh_config: Path) -> None:
    with pytest.raises(UnreachableError) as refused:
        jump_of(connection(spec=spec(ssh_config), proxy_jump="a,b"))
    assert "expected one jump host, found a,b" in refused.value.line


def test_a_proxy_command_cannot_be_given_to_pulumi_command(ssh_config: Path) -> None:
    ssh_config.write_text("Host *\n  ProxyCommand nc %h %p\n" + ssh_config.read_text())
    found = resolve(spec(ssh_config, host_key=ED25519))
    with pytest.raises(UnreachableError) as refused:
        jump_of(found)
    assert "expected one jump host, found ProxyCommand" in refused.value.line
    assert refused.value.code == "ssh-configuration"


def through_the_head(ssh_config: Path, **changes: object) -> ConnectionSpec:
    head = spec(ssh_config, host_key=ED25519)
    behind = spec(ssh_config, node="spark-b", address="192.168.200.13", host_key=RSA, via=head)
    return replace(behind, **changes)  # type: ignore[arg-type]


def test_a_node_behind_another_is_reached_by_our_own_pinned_ssh_to_that_one(ssh_config: Path) -> None:
    ssh_config.write_text("Host 192.168.*\n  ProxyJump elsewhere\n" + ssh_config.read_text())
    found = resolve(through_the_head(ssh_config))
    assert found.via is not None
    assert (found.proxy_jump, found.pin, found.via.pin) == (None, RSA, ED25519)
    jump = jump_of(found)
    assert jump == found.via
    told = subprocess.run(
        ["ssh", "-G", *found.own_options(), *found.target()], capture_output=True, text=True, check=True, timeout=10
    ).stdout
    values = parse_ssh_g(told)
    assert "proxyjump" not in values
    [line] = values["proxycommand"]
    words = shlex.split(line.replace("%%", "%"))
    assert words[0] == "ssh"
    assert words[words.index("-F") + 1] == str(ssh_config)
    assert f"KnownHostsCommand=/bin/echo %H {ED25519}" in words
    assert f"ControlPath={found.via.control_path}" in words
    assert words[-7:] == ["-W", "[%h]:%p", "-p", "22", "-l", "aurora", "10.1.230.180"]


def test_others_go_through_the_same_node_without_anything_of_this_machine(ssh_config: Path) -> None:
    options = resolve(through_the_head(ssh_config)).shared_options()
    [line] = [option for option in options if option.startswith("ProxyCommand=")]
    assert str(ssh_config) not in " ".join(options)
    assert "-l aurora 10.1.230.180" in line
    assert "%%H" in line


def test_another_way_to_the_node_before_is_another_control_socket_of_the_one_behind(ssh_config: Path) -> None:
    found = resolve(through_the_head(ssh_config))
    again = resolve(through_the_head(ssh_config, via=spec(ssh_config, host_key=RSA)))
    assert found.control_path != again.control_path


def test_a_node_on_the_way_without_a_pin_is_told_of_the_one_behind(ssh_config: Path) -> None:
    with pytest.raises(UnreachableError) as refused:
        resolve(through_the_head(ssh_config, via=spec(ssh_config)))
    assert (refused.value.node, refused.value.code) == ("spark-b", "host-key-unpinned")
    assert "it is reached through spark-a, where expected a pinned host key" in refused.value.line


def test_a_node_behind_a_node_behind_a_jump_host_is_refused(ssh_config: Path) -> None:
    ssh_config.write_text("Host 10.1.*\n  ProxyJump gate\n" + ssh_config.read_text())
    with pytest.raises(UnreachableError) as refused:
        jump_of(resolve(through_the_head(ssh_config)))
    assert "expected one jump host, found a node that is reached through another host" in refused.value.line


def test_a_missing_configuration_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError) as refused:
        resolve(spec(tmp_path / "none"))
    assert str(refused.value).startswith(
        "spark-a, ssh configuration (ssh_config): expected the ssh configuration file "
        f"{tmp_path}/none, found no such file"
    )


def test_a_broken_configuration_is_told_in_ssh_s_own_words(ssh_config: Path) -> None:
    ssh_config.write_text("Nonsense yes\n")
    with pytest.raises(UnreachableError) as refused:
        resolve(spec(ssh_config))
    assert refused.value.step == "local OpenSSH"
    assert any("bad configuration option: nonsense" in line.lower() for line in refused.value.evidence)


def test_a_machine_without_openssh_is_told_so(
    ssh_config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnreachableError) as refused:
        resolve(spec(ssh_config))
    assert refused.value.line == "spark-a, local OpenSSH: expected the program ssh on PATH, found none"


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An ``ssh-add`` that finds a key behind sockets named "full" only, and never answers for "stuck"."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh-add").write_text(
        '#!/bin/sh\n[ "$*" = -l ] || exit 9\n'
        'case "$SSH_AUTH_SOCK" in *full) exit 0 ;; *empty) exit 1 ;; *stuck) exec sleep 30 ;; esac; exit 2\n'
    )
    (tmp_path / "bin" / "ssh-add").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("spark_core.transport.keys._AGENT_TIMEOUT_S", 0.3)
    agent_has_key.cache_clear()
    yield "/run/agent"
    agent_has_key.cache_clear()


@pytest.mark.parametrize(
    ("identity_agent", "variable", "expected"),
    [
        (None, "", False),
        (None, "/tmp/full", True),
        ("/run/full", "", True),
        ("/run/empty", "/tmp/full", False),
        (None, "/tmp/empty", False),
        (None, "/tmp/stuck", False),
        (None, "/tmp/none", False),
    ],
)
@pytest.mark.usefixtures("agents")
def test_only_an_agent_that_holds_a_key_counts(
    identity_agent: str | None, variable: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", variable)
    assert connection(identity_agent=identity_agent).has_agent is expected
    assert os.environ["SSH_AUTH_SOCK"] == variable


def test_without_openssh_s_tool_no_agent_can_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent_has_key.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert connection(identity_agent="/run/agent").has_agent is False
    agent_has_key.cache_clear()


@pytest.fixture(scope="module")
def private_keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Key files by what they are."""
    folder = tmp_path_factory.mktemp("private")
    for name, words in {
        "open": ["-t", "ed25519", "-N", ""],
        "locked": ["-t", "ed25519", "-N", "passphrase"],
        "open pem": ["-t", "rsa", "-m", "PEM", "-N", ""],
        "locked pem": ["-t", "rsa", "-m", "PEM", "-N", "passphrase"],
        "locked pkcs8": ["-t", "rsa", "-m", "PKCS8", "-N", "passphrase"],
    }.items():
        subprocess.run(["ssh-keygen", "-q", *words, "-f", str(folder / name)], check=True, timeout=60)
    (folder / "rubbish").write_text(
        "-----BEGIN OPENSSH PRIVATE KEY-----\nno base64\n-----END OPENSSH PRIVATE KEY-----\n"
    )
    (folder / "binary").write_bytes(b"\xff\xfe")
    hardware = base64.b64encode(b"openssh-key-v1\0\0\0\0\4none" + b"\0\0\0\x1ask-ssh-ed25519@openssh.com").decode()
    (folder / "hardware").write_text(
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{hardware}\n-----END OPENSSH PRIVATE KEY-----\n"
    )
    names = [*(path.name for path in folder.iterdir()), "none"]
    return {name: folder / name for name in names}


UNUSABLE = ("none", "locked", "locked pem", "locked pkcs8", "rubbish", "binary", "open.pub", "hardware")


@pytest.mark.parametrize("name", ["open", "open pem"])
def test_the_first_key_without_a_passphrase_is_taken(name: str, private_keys: dict[str, Path]) -> None:
    files = tuple(str(private_keys[other]) for other in (*UNUSABLE, name, "open"))
    assert connection(identity_files=files).private_key() == private_keys[name].read_text()


def test_keys_that_a_passphrase_locks_are_known(private_keys: dict[str, Path]) -> None:
    files = {name: str(path) for name, path in private_keys.items()}
    locked = {name for name in files if files[name] in locked_private_keys(list(files.values()))}
    assert locked == {"locked", "locked pem", "locked pkcs8"}


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_a_fingerprint_is_the_one_that_ssh_keygen_prints(kind: str, host_keys: dict[str, str]) -> None:
    told = subprocess.run(
        ["ssh-keygen", "-l", "-f", "-"], input=host_keys[kind], capture_output=True, text=True, check=True, timeout=10
    ).stdout
    assert fingerprint(host_keys[kind] + " a comment") == told.split()[1]


def test_a_key_without_content_has_no_fingerprint() -> None:
    assert fingerprint("ssh-ed25519 not=base64") == fingerprint("ssh-ed25519") == "ssh-ed25519 that cannot be read"


def test_without_a_usable_key_there_is_none(private_keys: dict[str, Path]) -> None:
    assert connection(identity_files=tuple(str(private_keys[name]) for name in UNUSABLE)).private_key() is None


@pytest.mark.usefixtures("agents")
def test_pulumi_command_gets_a_key_only_where_no_agent_holds_one(
    private_keys: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # An Output needs a loop, and an earlier test of this process may have closed the one there was.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    files = (str(private_keys["locked"]), str(private_keys["open"]))
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/full")
    assert _key_material(connection(identity_files=files)) is None
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/empty")
    assert _key_material(connection(identity_files=files)) is not None
    assert _key_material(connection(identity_files=files[:1])) is None


def test_the_control_socket_lies_where_ssh_itself_looks_for_it_whatever_home_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    told = subprocess.run(
        ["ssh", "-F", "/dev/null", "-G", "-o", "ControlPath=~/.cache/spark-vllm/ctl/x", "host"],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    ).stdout
    assert parse_ssh_g(told)["controlpath"] == [str(ssh_path("~/.cache/spark-vllm/ctl/x"))]
    assert not str(ssh_path("~/x")).startswith(str(tmp_path))
