"""The first day: two hosts that take nothing but a password, with an owner's netplan, cache and cluster on them.

Only this shows that a password travels through real OpenSSH and PAM once for each host, that the real Pulumi takes the
file that is written, and that no byte beside the new key differs. It needs root on Linux and about two minutes; the
tests build on each other and run in order.

To clean up after an aborted run: ``SPARK_VLLM_HOME=… python -m lab down --instance t-first``.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from automation.exit_codes import Exit
from automation.schemas import schema_of
from lab.hub import Hub
from tests.lab import healthy, watching
from tests.lab.deployment import FABRIC, SNAPSHOT, Deployment, SecretWatch
from tests.lab.healthy import HOSTS, NUMBERS, TWIN
from tests.lab.in_order import in_order as in_order

pytestmark = [pytest.mark.lab, pytest.mark.campaign]

MODEL = "lab/first"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "max_position_embeddings": 2048,
}
WEIGHTS = bytes(1000)
TOKEN = "hf_marker-of-a-token-77"
NETPLAN = "/etc/netplan/98-spark-vllm-docker.yaml"
AUTHORIZED = "home/spark/.ssh/authorized_keys"
SERVE = ["/vllm", "serve", MODEL, "--port", "8000", "--max-model-len", "1024", "--api-key", TOKEN, "-tp", "2"]

_OWNER = """
umask 022
cat > {netplan} <<'END'
network:
  version: 2
  ethernets:
    {fabric}: {{dhcp4: false, dhcp6: false, link-local: [], mtu: 9000, addresses: [192.168.200.{number}/24]}}
    {twin}: {{dhcp4: false, dhcp6: false, link-local: [], mtu: 9000, addresses: [192.168.201.{number}/24]}}
END
chmod 600 {netplan}
netplan apply 2>/dev/null
python3 - <<'END'
import json
path = "/etc/docker/daemon.json"
value = json.load(open(path))
value["runtimes"] = {{"nvidia": {{"path": "/usr/bin/runc"}}}}
json.dump(value, open(path, "w"))
END
systemctl restart docker
for _ in $(seq 50); do ip -br address show {twin} | grep -q 192.168.201 && break; sleep 0.1; done
{launcher}
"""
_HOME = """
umask 022
top=~/.cache/huggingface/hub/models--lab--first
mkdir -p "$top/blobs" "$top/refs" "$top/snapshots/{commit}"
printf %s '{config}' > "$top/blobs/{config_id}"
head -c {size} /dev/zero > "$top/blobs/{weights_id}"
ln -s "../../blobs/{config_id}" "$top/snapshots/{commit}/config.json"
ln -s "../../blobs/{weights_id}" "$top/snapshots/{commit}/model.safetensors"
printf %s {commit} > "$top/refs/main"
mkdir -p ~/spark-vllm-docker
printf '#!/bin/bash\\n' > ~/spark-vllm-docker/launch-cluster.sh
printf 'CLUSTER_NODES="192.168.200.12,192.168.200.13"\\nETH_IF={fabric}\\nCONTAINER_HF_TOKEN={token}\\n' \
    > ~/spark-vllm-docker/.env
"""


@dataclass
class FirstDay:
    """The lab, and who comes to it for the first time.

    Attributes:
        made: The lab; its stack file is the one that is written.
        folder: Home of who comes: key, known hosts, ssh configuration.
        hub: The hub that the model came from.
    """

    made: Deployment
    folder: Path
    hub: Hub

    @property
    def password(self) -> str:
        return (self.made.folder / "sudo_password").read_text().strip()

    @property
    def ssh_config(self) -> Path:
        return self.folder / "ssh_config"

    def init(self, *words: str, hosts: tuple[str, ...] = HOSTS) -> tuple[Any, str]:
        """The report of a run, or None, and all that it printed."""
        report = self.folder / "report.json"
        command = [
            "python",
            "-m",
            "automation",
            "init",
            "--stack",
            "dev",
            "--json",
            "--hub-endpoint",
            self.hub.endpoint,
        ]
        command += ["--ssh-config", str(self.ssh_config), *words]
        command += [f"spark@{self.made.addresses[host]}" for host in hosts]
        text = f"exec 2>&1 > {shlex.quote(str(report))}; . ./env; unset SSH_AUTH_SOCK; exec {shlex.join(command)}"
        done = self.made.inside("sh", "-c", text, timeout_s=300)
        printed = report.read_text()
        self.made.printed += [done.text, printed]
        value = json.loads(printed)
        jsonschema.validate(value, schema_of("init"))
        assert value["exit_code"] == done.code, (value, done.text)
        return value, done.text

    def forget_keys(self) -> None:
        """Let every host take passwords only again, end the connections that are open, and the person know no host."""
        for host in HOSTS:
            self.made.console(host, f"rm -f /{AUTHORIZED}; loginctl terminate-user spark 2>/dev/null || true")
        (self.folder / "known_hosts").unlink(missing_ok=True)

    def snapshot(self, host: str) -> list[str]:
        """What a host is, asked on its console."""
        text = f"bash <<'END_OF_SNAPSHOT'\n{SNAPSHOT.read_text()}\nEND_OF_SNAPSHOT"
        return self.made.console(host, text, timeout_s=120).splitlines()

    def containers(self, host: str) -> str:
        """Id and start of each container."""
        shown = "docker inspect -f '{{.Name}} {{.Id}} {{.State.StartedAt}}'"
        return self.made.console(host, f"docker ps -aq | xargs -r {shown}")


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FirstDay]:
    made = Deployment("t-first", tmp_path_factory.mktemp("home"), hosts_only=True)
    folder = tmp_path_factory.mktemp("person")
    models = tmp_path_factory.mktemp("hub")
    main = models / "lab" / "first" / "main"
    main.mkdir(parents=True)
    (main / "config.json").write_text(json.dumps(CONFIG))
    (main / "model.safetensors").write_bytes(WEIGHTS)
    try:
        made.start()
        subnet = next(iter(made.addresses.values())).rsplit(".", 1)[0]
        with Hub(models, f"{subnet}.1") as hub:
            found = FirstDay(made, folder, hub)
            furnish(found)
            made.config_file.unlink()
            yield found
    finally:
        made.stop()


def furnish(day: FirstDay) -> None:
    """Put the owner's things onto the hosts, and take away the key that the lab gave them."""
    commit = str(day.hub.commit(MODEL))
    config = json.dumps(CONFIG)
    ids = {
        "config_id": hashlib.sha1(f"blob {len(config)}\0{config}".encode(), usedforsecurity=False).hexdigest(),
        "weights_id": hashlib.sha256(WEIGHTS).hexdigest(),
    }
    for host in HOSTS:
        launcher = watching.launcher().replace("docker run -d", "docker run -d --runtime nvidia")
        owner = _OWNER.format(netplan=NETPLAN, fabric=FABRIC, twin=TWIN, number=NUMBERS[host], launcher=launcher)
        day.made.console(host, owner, timeout_s=180)
        home = _HOME.format(commit=commit, config=config, size=len(WEIGHTS), fabric=FABRIC, token=TOKEN, **ids)
        day.made.on(host, home)
    serve = (
        "import os; open('/vllm', 'w').write('#!/bin/sh\\nsleep 100000\\n'); os.chmod('/vllm', 0o755); "
        f"os.execv('/vllm', {SERVE!r})"
    )
    day.made.console(HOSTS[0], f"docker exec -d vllm_node python3 -c {shlex.quote(serve)}")
    day.ssh_config.write_text(
        f"Host *\n  IdentityFile {day.folder}/id_ed25519\n  IdentitiesOnly yes\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {day.folder}/known_hosts\n  GlobalKnownHostsFile /dev/null\n"
    )
    day.forget_keys()


def password_file(day: FirstDay) -> str:
    path = day.folder / "password"
    path.touch(0o600)
    path.write_text(day.password + "\n")
    return str(path)


def yes(day: FirstDay, *more: str) -> list[str]:
    """What a job says yes to."""
    return ["--yes-host-keys", "--yes-make-key", "--yes-install-key", "--password-file", password_file(day), *more]


def test_without_a_yes_nothing_differs_anywhere(day: FirstDay) -> None:
    before = {host: watching.disk(day.made, host) for host in HOSTS}
    report, said = day.init()
    assert report["exit_code"] == Exit.REFUSED, said
    report, said = day.init("--yes-host-keys")
    assert report["exit_code"] == Exit.REFUSED, said
    assert not day.made.config_file.exists()
    assert not (day.folder / "id_ed25519").exists()
    changed = {host: watching.differing(before[host], watching.disk(day.made, host)) for host in HOSTS}
    assert changed == {host: [] for host in HOSTS}


def test_two_fresh_hosts_end_in_a_stack_file_that_fits_and_no_other_byte_differs(day: FirstDay) -> None:
    disks = {host: watching.disk(day.made, host) for host in HOSTS}
    looks = {host: day.snapshot(host) for host in HOSTS}
    containers = {host: day.containers(host) for host in HOSTS}
    watch = SecretWatch([day.password])
    watch.start()
    report, said = day.init(*yes(day))
    assert watch.finish() == []
    assert len(watch.looked_at) > 50
    assert report["exit_code"] == Exit.DONE, (report, said)
    assert report["written"] and report["file"] == str(day.made.config_file)
    outcome = day.made.preview(timeout_s=180)
    assert outcome.code == 0, outcome.text[-4000:]
    assert "error:" not in outcome.text
    assert "launcher-to-replace" in healthy.codes(outcome)
    for host in HOSTS:
        changed = watching.differing(disks[host], watching.disk(day.made, host))
        names = {line.split(": ")[0] for line in changed}
        assert names == {f"upper/{AUTHORIZED}", "upper/home/spark/.ssh"}, changed
        after = day.snapshot(host)
        assert [line for line in after if line not in looks[host]] == [f"/{AUTHORIZED} 600 spark:spark"]
        assert [line for line in looks[host] if line not in after] == []
    assert containers == {host: day.containers(host) for host in HOSTS}
    for text in (*day.made.printed, day.made.config_file.read_text()):
        assert day.password not in text and TOKEN not in text


def test_what_is_written_is_what_is_there(day: FirstDay) -> None:
    config = {
        key.removeprefix("spark-vllm:"): value
        for key, value in yaml.safe_load(day.made.config_file.read_text())["config"].items()
    }
    assert [node["name"] for node in config["nodes"]] == list(HOSTS)
    known = dict(line.split(",", 1) for line in (day.made.folder / "known_hosts").read_text().splitlines())
    assert [node["host_key"] for node in config["nodes"]] == [known[host].split(" ", 1)[1] for host in HOSTS]
    assert [node["fabric"] for node in config["nodes"]] == [
        [
            {"netdev": FABRIC, "address": f"192.168.200.{NUMBERS[host]}/24"},
            {"netdev": TWIN, "address": f"192.168.201.{NUMBERS[host]}/24"},
        ]
        for host in HOSTS
    ]
    assert config["fabric"] == {"manage": False, "mtu_bytes": 9000}
    assert config["replaces"] == ["vllm_node"]
    image_id = day.made.console(HOSTS[0], "docker inspect -f '{{.Image}}' vllm_node").strip()
    assert config["image"] == {"local_id": image_id}
    group = config["groups"]["main"]
    assert group["model"] == {"source": f"hf://{MODEL}@{day.hub.commit(MODEL)}", "served_name": MODEL}
    assert group["serving"]["port"] == 8000
    assert group["serving"]["max_model_len"] == 1024
    # Preview uses the model where it lies: nothing of its content was asked of the hub.
    assert [line for line in day.hub.requests if "safetensors" in line and "resolve" in line] == []


def test_run_again_it_needs_no_password_and_keeps_the_file(day: FirstDay) -> None:
    # The preview of the file put the salt of the stack's secrets beneath it.
    text = re.sub(r"^encryptionsalt:.*\n", "", day.made.config_file.read_text(), flags=re.MULTILINE)
    report, said = day.init()
    assert report["exit_code"] == Exit.REFUSED, said
    report, said = day.init("--yes-host-keys", "--yes-overwrite")
    assert report["exit_code"] == Exit.DONE, (report, said)
    assert day.made.config_file.read_text() == text
    assert {one["option"] for one in report["questions"]} == {"--yes-host-keys", "--yes-overwrite"}


def test_a_wrong_password_is_tried_once_for_a_host(day: FirstDay) -> None:
    day.forget_keys()
    failures = "journalctl -q -u ssh | grep -c 'Failed password' || true"
    before = int(day.made.console(HOSTS[0], failures))
    wrong = day.folder / "wrong"
    wrong.touch(0o600)
    wrong.write_text("not-the-password\n")
    report, said = day.init(*yes(day, "--yes-overwrite"), "--password-file", str(wrong))
    assert report["exit_code"] == Exit.FAILED
    assert "found that it refuses it" in report["error"]["what"], said
    assert int(day.made.console(HOSTS[0], failures)) == before + 1


def test_the_peer_is_found_on_the_cable_of_the_head(day: FirstDay) -> None:
    report, said = day.init(*yes(day, "--yes-overwrite", "--yes-peers"), hosts=HOSTS[:1])
    assert report["exit_code"] == Exit.DONE, (report, said)
    assert "answers on the cable at" in " ".join(one["question"] for one in report["questions"])
    # Its own address off the cable shows the same host key, so it is reached there and not through the head.
    assert [(node["name"], node["address"], node["via"]) for node in report["nodes"]] == [
        (host, day.made.addresses[host], "") for host in HOSTS
    ]
    outcome = day.made.preview(timeout_s=180)
    assert outcome.code == 0, outcome.text[-4000:]


def test_a_user_outside_the_docker_group_is_added_on_a_yes(day: FirstDay) -> None:
    day.made.console(HOSTS[1], "gpasswd -d spark docker > /dev/null; loginctl terminate-user spark 2>/dev/null || true")
    report, said = day.init(*yes(day, "--yes-overwrite"))
    assert report["exit_code"] == Exit.FAILED
    assert "docker-permission" in {finding["code"] for finding in report["findings"]}, said
    assert "spark" not in day.made.console(HOSTS[1], "getent group docker").strip().rpartition(":")[2]
    report, said = day.init(*yes(day, "--yes-overwrite", "--yes-docker-group"))
    assert report["exit_code"] == Exit.DONE, (report, said)
    assert day.made.console(HOSTS[1], "getent group docker").strip().endswith(":spark")
    assert day.made.preview(timeout_s=180).code == 0
