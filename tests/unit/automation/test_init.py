"""``init`` against two fresh nodes: what is asked, what is written, and that nothing else changes."""

from __future__ import annotations

import getpass
import io
import json
import os
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from automation.__main__ import main
from automation.exit_codes import Exit
from automation.schemas import schema_of
from automation.stack_file import open_stack_file
from lab.hub import Hub
from spark_core.settings import Settings
from spark_core.transport.keys import fingerprint
from tests.fake_ssh import FakeSsh
from tests.unit.first_day.owners_things import IMAGE_ID, MODEL, SECRET, eugr_checkout, run_launcher

KEYS = {
    "spark-a": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAaBcDeF",
    "spark-b": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBbBcDeF",
}
PASSWORD = "marker-of-a-password-1b2c"
NUMBERS = {"spark-a": 12, "spark-b": 13}
PORT, TWIN = "enp1s0f1np1", "enP2p1s0f1np1"
NETPLAN = "/etc/netplan/98-spark-vllm-docker.yaml"


@dataclass
class Site:
    """Two nodes that take a password only, and what their owner has there.

    Attributes:
        file: The stack file that is written.
        identity: The key that the person's ssh configuration names.
    """

    ssh: FakeSsh
    file: Path
    identity: Path
    asked: list[str]

    def init(self, *words: str) -> int:
        return main(["init", "--stack", "t", *words])

    def settings(self) -> Settings:
        return open_stack_file("t").settings()

    def everything(self) -> dict[str, Any]:
        """All that the nodes have: state and files, without what only notes a look."""
        found: dict[str, Any] = {}
        for name, host in self.ssh.hosts.items():
            found[name] = {**host.read(), "calls": []}
            for path in sorted(host.base.rglob("*")):
                if path.is_file() and path.name not in ("state.json", "lock"):
                    found[str(path)] = (path.read_bytes(), path.stat().st_mode)
        return found


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with FakeSsh(tmp_path / "ssh", list(KEYS)) as fake:
        monkeypatch.setenv("PATH", f"{fake.programs}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("HOME", str(fake.home))
        monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
        this_user = types.SimpleNamespace(pw_dir=str(fake.home))
        monkeypatch.setattr("spark_core.transport.connection.pwd.getpwuid", lambda _: this_user)
        file = tmp_path / "Pulumi.t.yaml"
        monkeypatch.setenv("PULUMI_OPTION_CONFIG_FILE", str(file))
        identity = fake.home / ".ssh/id_ed25519"
        asked: list[str] = []

        def password(prompt: str) -> str:
            asked.append(prompt)
            return PASSWORD

        monkeypatch.setattr(getpass, "getpass", password)
        for name, key in KEYS.items():
            fake.offer(name, key)
            fake.want_key(name, identity, PASSWORD)
            furnish(fake, name)
        yield Site(fake, file, identity, asked)


def furnish(fake: FakeSsh, name: str) -> None:
    """Cables, netplan of eugr's launcher, its containers, an image, and a model."""
    host, number = fake.hosts[name], NUMBERS[name]
    host.set_link("enP7s7", 1500, f"10.1.230.{number + 168}/24")
    host.set_link(PORT, 9000, f"192.168.200.{number}/24")
    host.set_link(TWIN, 9000, f"192.168.201.{number}/24")
    netplan = Path(f"{host.base}{NETPLAN}")
    netplan.write_text(
        f"network:\n  ethernets:\n    {PORT}:\n      addresses: [192.168.200.{number}/24]\n    {TWIN}:\n"
        f"      addresses: [192.168.201.{number}/24]\n"
    )
    run_launcher(host)
    home = fake.home_of(name)
    eugr_checkout(home)
    model = home / "models/tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"max_position_embeddings": 4096}')
    (model / "model.safetensors").write_text("x" * 100)


def answer(monkeypatch: pytest.MonkeyPatch, *said: str) -> None:
    """Someone at a terminal says these things."""
    terminal = io.StringIO("".join(f"{text}\n" for text in said))
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)


def test_two_fresh_nodes_end_in_a_stack_file_that_fits_what_is_there(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "y", "y", "y")
    before = site.everything()
    code = site.init("--model", f"node:{site.ssh.home_of('spark-a')}/models/tiny", "spark-a", "user@spark-b")
    out = capsys.readouterr().out
    assert code == Exit.DONE, out
    # One question each for host keys, the new key, and its installation; one password for each node.
    assert out.count("[y/N]") == 3
    assert site.asked == ["Password of user@spark-a: ", "Password of user@spark-b: "]
    assert site.ssh.passwords == ["right", "right"]
    for key in KEYS.values():
        assert fingerprint(key) in out
    settings = site.settings()
    assert [node.host_key for node in settings.nodes] == list(KEYS.values())
    assert [node.user for node in settings.nodes] == ["user", "user"]
    assert [[one.address for one in node.fabric] for node in settings.nodes] == [
        ["192.168.200.12/24", "192.168.201.12/24"],
        ["192.168.200.13/24", "192.168.201.13/24"],
    ]
    assert (settings.fabric.manage, settings.fabric.mtu_bytes) == (False, 9000)
    assert settings.image.local_id == IMAGE_ID
    assert settings.replaces == ("vllm_node",)
    assert settings.groups["main"].serving.max_model_len == 4096
    assert settings.ssh.sudo_password_file is None  # nothing needs root
    # Nothing else has changed: each node only takes one more key.
    public = Path(f"{site.identity}.pub").read_text()
    for name in KEYS:
        taken = site.ssh.home_of(name) / ".ssh/authorized_keys"
        assert taken.read_text() == public
        taken.unlink()
        taken.parent.rmdir()
    assert site.everything() == before
    assert site.identity.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_the_file_explains_every_setting_and_why_it_is_so(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.init("--yes", "--password-file", password_file(site), "--model", model(site), "spark-a", "spark-b") == 0
    text = site.file.read_text()
    plain = re.sub(r"\n *# ", " ", text)
    assert f"here: the owner's own configuration fits: {host_name(site, 0)} {NETPLAN}; {host_name(site, 1)}" in plain
    assert "here: a safe start; the model was made for 4096 tokens" in plain
    assert "here: vllm-node:latest, on" in plain and "it serves now" in plain
    assert "  # the machines\n  spark-vllm:nodes:\n    # name of the node in resources, messages and outputs\n" in text
    assert text.count("# what ssh connects to") == 1
    assert max(len(line) for line in text.splitlines()) <= 120
    assert SECRET not in text and PASSWORD not in text
    assert "(spark-b)" in capsys.readouterr().out


def host_name(site: Site, place: int) -> str:
    return site.settings().nodes[place].name


def model(site: Site) -> str:
    return f"node:{site.ssh.home_of('spark-a')}/models/tiny"


def password_file(site: Site, text: str = PASSWORD) -> str:
    path = site.ssh.base / "password"
    path.write_text(f"{text}\n")
    path.chmod(0o600)
    return str(path)


@pytest.mark.slow
def test_without_a_terminal_options_answer_and_json_says_everything(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--yes-host-keys", "--yes-make-key", "--yes-install-key", "--password-file", password_file(site)]
    assert site.init("--json", *words, "--model", model(site), "spark-a", "spark-b") == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    jsonschema.validate(report, schema_of("init"))
    assert report["written"] and report["file"] == str(site.file)
    assert [question["option"] for question in report["questions"]] == [
        *("--yes-host-keys", "--yes-make-key", "--yes-install-key")
    ]
    assert [node["host_key"] for node in report["nodes"]] == list(KEYS.values())
    assert {finding["code"] for finding in report["findings"] if finding["severity"] == "fail"} == set()
    assert "launcher-to-replace" in {finding["code"] for finding in report["findings"]}
    found = "\n".join(report["nodes"][0]["found"])
    for told in (
        f"cable: {PORT} 192.168.200.12/24, MTU 9000",
        f"netplan: {NETPLAN}",
        "runs: vllm_node of eugr/spark-vllm-docker (vllm-node:latest), serves Qwen/Qwen3.5-35B-A3B",
        "nodes 192.168.200.12,",
        "images: 1, among them vllm-node:latest",
    ):
        assert told in found, found
    assert report["next"][-1] == "python -m automation cutover --stack t"
    assert SECRET not in printed.out + printed.err
    assert PASSWORD not in printed.out + printed.err


@pytest.mark.parametrize(
    ("words", "told", "code"),
    [
        ([], "the host keys of spark-a, spark-b were not agreed to", Exit.REFUSED),
        (["--yes-host-keys"], "the key was not to be installed|there is no key to log in with", Exit.REFUSED),
        (["--yes-host-keys", "--yes-make-key"], "the key was not to be installed", Exit.REFUSED),
        (["--yes"], "expected the password of user@spark-a, found nobody to ask", Exit.FAILED),
    ],
)
def test_what_nobody_said_yes_to_is_not_done(
    words: list[str], told: str, code: Exit, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    before = site.everything()
    assert site.init(*words, "spark-a", "spark-b") == code
    said = capsys.readouterr().err
    assert any(text in said for text in told.split("|")), said
    assert site.everything() == before
    assert not site.file.exists()
    assert site.ssh.passwords == []


def test_an_end_of_input_is_no_yes(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO("")
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert site.init("spark-a") == Exit.REFUSED
    assert "the host keys of spark-a were not agreed to" in capsys.readouterr().err


def test_a_wrong_password_is_given_once_and_shown_nowhere(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    before = site.everything()
    assert site.init("--yes", "--password-file", password_file(site, "wrong-marker-55"), "spark-a") == Exit.FAILED
    printed = capsys.readouterr()
    assert "expected that sshd takes the password of user, found that it refuses it" in printed.err
    assert "wrong-marker-55" not in printed.out + printed.err
    assert site.ssh.passwords == ["wrong"]
    assert site.everything() == before


@pytest.mark.slow
def test_a_file_that_is_there_is_replaced_on_a_yes_only(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.file.write_text("mine: true\n")
    assert site.init("--yes-host-keys", "spark-a") == Exit.REFUSED
    answer(monkeypatch, "n")
    assert site.init("spark-a") == Exit.REFUSED
    assert site.file.read_text() == "mine: true\n"
    assert f"nothing was changed: {site.file} is there already" in capsys.readouterr().err
    assert site.ssh.logins("spark-a") == []
    words = ["--yes", "--password-file", password_file(site), "--model", model(site)]
    assert site.init(*words, "spark-a", "spark-b") == 0
    assert "mine" not in site.file.read_text()
    # Run again it needs no password, and writes the same.
    text = site.file.read_text()
    assert site.init("--yes", "--model", model(site), "spark-a", "spark-b") == 0
    assert site.file.read_text() == text
    assert site.ssh.passwords == ["right", "right"]


@pytest.mark.slow
def test_a_user_without_docker_is_added_to_the_group_on_a_yes(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    host = site.ssh.hosts["spark-a"]
    site.ssh.be("spark-a", "user", sudo=PASSWORD)
    host.change(docker_error="permission denied while trying to connect to the Docker daemon socket")
    host._install("usermod", f'#!/bin/sh\necho "$@" > {host.base}/usermod\n')
    words = ["--yes-host-keys", "--yes-make-key", "--yes-install-key", "--model", model(site)]
    words += ["--password-file", password_file(site), "--yes-overwrite"]
    assert site.init(*words, "spark-a", "spark-b") == Exit.FAILED
    assert "may not use Docker. Add it to the docker group (its members can become root)? no" in capsys.readouterr().err
    assert not (host.base / "usermod").exists()
    assert site.init(*words, "--yes-docker-group", "--json", "spark-a", "spark-b") == Exit.FAILED  # the fake goes on
    assert (host.base / "usermod").read_text() == "-aG docker user\n"
    report = json.loads(capsys.readouterr().out)
    assert [one["answer"] for one in report["questions"] if one["option"] == "--yes-docker-group"] == [True]
    assert "docker-permission" in {finding["code"] for finding in report["findings"]}
    assert PASSWORD not in json.dumps(report)


def cached_from(hub: Hub, home: Path) -> str:
    """A hub cache that has the model as the hub's own client leaves it; the commit."""
    commit = str(hub.commit(MODEL))
    top = home / ".cache/huggingface/hub" / f"models--{MODEL.replace('/', '--')}"
    for folder in ("blobs", "refs", f"snapshots/{commit}"):
        (top / folder).mkdir(parents=True)
    (top / "refs/main").write_text(commit)
    for name, file in hub.files(MODEL, commit).items():
        blob = file.sha256 if file.large else file.git_id
        (top / "blobs" / blob).write_bytes(file.path.read_bytes())
        (top / "snapshots" / commit / name).symlink_to(f"../../blobs/{blob}")
    return commit


@pytest.mark.slow
def test_the_model_that_is_served_is_used_where_the_hub_cache_has_it_whole(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hub" / MODEL / "main"
    folder.mkdir(parents=True)
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 65536}))
    (folder / "model.safetensors").write_bytes(bytes(1000))
    with Hub(tmp_path / "hub") as hub:
        commits = {cached_from(hub, site.ssh.home_of(name)) for name in KEYS}
        words = ["--yes", "--json", "--password-file", password_file(site), "--hub-endpoint", hub.endpoint]
        code = site.init(*words, "spark-a", "spark-b")
        report = json.loads(capsys.readouterr().out)
        assert code == 0, report["findings"]
        assert [line for line in hub.requests if "safetensors" in line] == []
    group = site.settings().groups["main"]
    assert (group.model.source, group.model.served_name) == (f"hf://{MODEL}@{commits.pop()}", MODEL)
    assert (group.serving.port, group.serving.max_model_len) == (8000, 65536)
    assert site.settings().hub.endpoint == hub.endpoint


@pytest.mark.slow
def test_a_peer_on_the_cable_is_taken_in_on_a_yes_and_reached_through_the_head(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    neighbours = [{"dst": "192.168.200.13", "dev": PORT, "lladdr": "02:00:00:00:00:0b", "state": ["REACHABLE"]}]
    site.ssh.hosts["spark-a"].change(neighbours=neighbours)
    links = site.ssh.hosts["spark-b"].links()
    site.ssh.hosts["spark-b"].change(links=links | {PORT: links[PORT] | {"mac": "02:00:00:00:00:0b"}})
    site.ssh.move("spark-b", "192.168.200.13")
    words = ["--password-file", password_file(site), "--model", model(site), "--json"]
    words += ["--yes-host-keys", "--yes-make-key", "--yes-install-key", "--yes-overwrite"]
    site.init(*words, "spark-a")
    alone = json.loads(capsys.readouterr().out)
    assert [node["address"] for node in alone["nodes"]] == ["spark-a"]
    assert [one["question"] for one in alone["questions"] if one["option"] == "--yes-peers"][:1] == [
        f"192.168.200.13 answers on the cable at {PORT} of spark-a. Take it in?"
    ]
    assert site.init(*words, "--yes-peers", "spark-a") == 0
    both = json.loads(capsys.readouterr().out)
    assert [(node["address"], node["via"]) for node in both["nodes"]] == [
        ("spark-a", ""),
        ("192.168.200.13", "spark-a"),
    ]
    [head, peer] = site.settings().nodes
    assert (peer.via, peer.management_address) == (head.name, "192.168.200.13")
    assert any(f"KnownHostsCommand=/bin/echo %%H {KEYS['spark-a']}" in words for words in site.ssh.proxies("spark-b"))


def test_a_node_that_a_launcher_on_this_machine_has_written_down_is_offered(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = site.ssh.home / ".config/sparkrun/clusters"
    folder.mkdir(parents=True)
    (folder / "pair.yaml").write_text("name: pair\nhosts: [spark-a, spark-b]\n")
    (folder / ".default").write_text("pair\n")
    words = ["--json", "--yes-host-keys", "--yes-make-key", "--yes-install-key", "--password-file", password_file(site)]
    site.init(*words, "--model", model(site), "spark-a")
    report = json.loads(capsys.readouterr().out)
    offered = [one["question"] for one in report["questions"] if one["option"] == "--yes-peers"]
    assert "A launcher's file names spark-b, which is none of these nodes. Take it in?" in offered
    assert [node["address"] for node in report["nodes"]] == ["spark-a"]


def test_another_key_than_the_known_one_ends_it(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    known = site.ssh.know("spark-a", KEYS["spark-b"])
    assert site.init("--yes", "spark-a", "spark-b") == Exit.FAILED
    said = capsys.readouterr().err
    assert f"expected host key ssh-ed25519 {fingerprint(KEYS['spark-b'])}, found ssh-ed25519" in said
    assert f"ssh-keygen -R spark-a -f {known}" in said
    assert site.ssh.passwords == []


def test_a_known_key_needs_no_question(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.ssh.know("spark-a", KEYS["spark-a"])
    words = ["--yes-make-key", "--yes-install-key", "--password-file", password_file(site), "--json"]
    site.init(*words, "--model", model(site), "spark-a")
    report = json.loads(capsys.readouterr().out)
    assert "--yes-host-keys" not in {one["option"] for one in report["questions"]}


@pytest.mark.parametrize(
    ("hosts", "told"),
    [
        (["spark-a", "spark-a"], "expected every host once, found spark-a twice"),
        (["-x"], "expected \\[USER@\\]HOST"),
        (["A B@c"], "expected \\[USER@\\]HOST"),
        (["spark-z"], "expected sshd at"),
    ],
)
def test_hosts_that_cannot_be_are_told(
    hosts: list[str], told: str, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    assert site.init("--yes", "--", *hosts) == Exit.FAILED
    assert re.search(told, capsys.readouterr().err)


def test_an_ssh_configuration_that_is_not_there_is_told(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert site.init("--yes", "--ssh-config", "none/such", "spark-a") == Exit.FAILED
    assert "--ssh-config: expected an ssh configuration file, found none at /" in capsys.readouterr().err


@pytest.mark.slow
def test_the_file_is_yaml_that_preview_takes(site: Site) -> None:
    assert site.init("--yes", "--password-file", password_file(site), "--model", model(site), "spark-a", "spark-b") == 0
    config = yaml.safe_load(site.file.read_text())["config"]
    assert all(key.startswith("spark-vllm:") for key in config)
    assert config["spark-vllm:hardware"] == "cpu"
