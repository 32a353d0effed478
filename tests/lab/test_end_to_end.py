"""From a lab that is just up to a served model, every kind of drift, faults of hosts, and back to what was there.

Only this shows that the parts fit together on real sshd, real Docker, real Ray and real vLLM. It needs root on Linux,
the lab's image in the cache (built on the first run), and about a quarter of an hour. The tests build on each other and
run in order; the first that fails stops the rest.

To clean up after an aborted run: ``SPARK_VLLM_HOME=… python -m lab down --instance t-e2e``.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.deployment import (
    FABRIC,
    PROJECT,
    Deployment,
    Outcome,
    SecretWatch,
    ask,
    chat,
    copy_checkout,
)
from tests.lab.in_order import in_order as in_order
from tests.lab.watching import launcher

pytestmark = pytest.mark.lab

HOSTS = ("spark-a", "spark-b")
COMPILERS = ("/usr/bin/g++", "/usr/bin/c++", "/usr/bin/gcc", "/usr/bin/cc")
CLEAR_LINE_S = 30
ASK_LAUNCHER = """
import time, urllib.request
for _ in range(20):
    try:
        print(urllib.request.urlopen("http://127.0.0.1:8000/", timeout=5).read().decode())
        break
    except OSError:
        time.sleep(1)
"""
WITHOUT_PINNED_ADDRESS = """
import http.client, json, socket
class Docker(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect("/var/run/docker.sock")
def ask(method, path, body=None):
    docker = Docker("localhost", timeout=100)
    docker.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
    answer = docker.getresponse()
    text = answer.read().decode()
    assert answer.status < 300, (path, answer.status, text)
    return json.loads(text) if text else None
name = "spark-vllm-dev-main-rank0"
found = ask("GET", f"/containers/{name}/json")
ask("DELETE", f"/containers/{name}?force=true")
config = found["Config"]
config["Env"] = [value for value in config["Env"] if not value.startswith("VLLM_HOST_IP=")]
ask("POST", f"/containers/create?name={name}", config | {"HostConfig": found["HostConfig"]})
ask("POST", f"/containers/{name}/start")
"""
"""Runs on a host: makes the head's container anew, as it was but for the address by which vLLM is to call its node."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment("t-e2e", tmp_path_factory.mktemp("home"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module", autouse=True)
def pristine(deployment: Deployment) -> dict[str, dict[str, list[str]]]:
    """What the hosts are before anything was deployed on them; on one, another launcher served until just now."""
    deployment.on("spark-a", launcher(serve=True))
    assert asked_of_launcher(deployment) == "ok"
    deployment.on("spark-a", "docker stop -t 1 vllm_node")
    return {host: deployment.snapshot(host) for host in HOSTS}


@pytest.fixture(scope="module")
def watch(deployment: Deployment) -> Iterator[SecretWatch]:
    """Looks at every process of the machine while the good deployment is made."""
    watching = SecretWatch([(deployment.folder / "sudo_password").read_text().strip()])
    watching.start()
    yield watching
    watching.finish()


def asked_of_launcher(deployment: Deployment) -> str:
    """The answer of the other launcher's server, asked on its host."""
    return deployment.on("spark-a", f"python3 - <<'END'\n{ASK_LAUNCHER}\nEND").strip()


def differences(before: dict[str, list[str]], after: dict[str, list[str]]) -> list[str]:
    """Lines that one snapshot has and the other has not."""
    found = []
    for part in before:
        found += [f"{part}: gone: {line}" for line in before[part] if line not in after[part]]
        found += [f"{part}: new: {line}" for line in after[part] if line not in before[part]]
    return found


def first_error(outcome: Outcome) -> str:
    """The first line of an output that tells an error."""
    return next((line for line in outcome.lines if "error:" in line), "")


# A deployment that cannot serve, and its end.


def test_an_engine_that_dies_on_its_first_completion_fails_the_up_though_health_said_200(
    deployment: Deployment, pristine: dict[str, dict[str, list[str]]]
) -> None:
    assert pristine["spark-a"]["etc"]
    deployment.configure(dying_at_its_first_completion())
    outcome = deployment.up()
    assert outcome.code != 0, outcome.text[-3000:]
    assert "first completion" in outcome.text, outcome.text[-3000:]
    assert "/health" in outcome.text
    assert re.search(r"spark-a, rank 0|spark-b, rank 1", outcome.text)  # both compile, and either may fail first
    assert "Traceback (most recent call last):\n  File" not in first_error(outcome)


def test_destroy_after_a_failed_up_leaves_the_hosts_as_they_were(
    deployment: Deployment, pristine: dict[str, dict[str, list[str]]]
) -> None:
    outcome = deployment.destroy()
    assert outcome.code == 0, outcome.text[-3000:]
    left = {host: differences(pristine[host], deployment.snapshot(host)) for host in HOSTS}
    assert left == {host: [] for host in HOSTS}, json.dumps(left, indent=1)


def test_destroy_after_an_up_that_was_killed_half_way_leaves_the_hosts_as_they_were(
    deployment: Deployment, pristine: dict[str, dict[str, list[str]]]
) -> None:
    deployment.configure({})
    run = deployment.begin("up", "-s", "dev", "--yes", "--skip-preview")
    run.wait_for("FabricLink fabric-spark-b creat", 120)
    run.kill()
    assert differences(pristine["spark-b"], deployment.snapshot("spark-b")) != []
    assert deployment.pulumi("cancel", "-s", "dev", "--yes").code == 0  # the lock of the killed run
    outcome = deployment.destroy()
    assert outcome.code == 0, outcome.text[-3000:]
    left = {host: differences(pristine[host], deployment.snapshot(host)) for host in HOSTS}
    assert left == {host: [] for host in HOSTS}, json.dumps(left, indent=1)


# The good deployment.


def test_up_ends_with_a_completion_through_the_endpoint(deployment: Deployment, watch: SecretWatch) -> None:
    deployment.configure({})
    outcome = deployment.up()
    assert outcome.code == 0, outcome.text[-4000:]
    assert "a completion came back" in outcome.text
    outputs = deployment.outputs()
    assert set(outputs) == {"endpoint", "model", "api_key", "nodes", "image_digest", "model_revision"}
    assert outputs["endpoint"].startswith("http://") and outputs["endpoint"].endswith(":30000/v1")
    answer = chat(outputs, outputs["api_key"])
    assert answer.status == 200
    message = answer.body["choices"][0]["message"]
    assert message.get("content") or message.get("reasoning")
    watch.learn(outputs["api_key"])
    assert watch.is_alive()


def test_without_the_key_or_with_a_wrong_one_the_answer_is_401(deployment: Deployment) -> None:
    outputs = deployment.outputs()
    assert chat(outputs, None).status == 401
    assert chat(outputs, "sk-wrong").status == 401
    assert ask(f"{outputs['endpoint']}/models", None).status == 401


def test_each_completion_crosses_the_fabric_and_not_the_management_network(deployment: Deployment) -> None:
    outputs = deployment.outputs()
    for host in HOSTS:
        assert deployment.counters(host, "eth0") > 0
    for _ in range(3):
        fabric = {host: deployment.counters(host, FABRIC) for host in HOSTS}
        management = deployment.counters("spark-b", "eth0")
        assert chat(outputs, outputs["api_key"]).status == 200
        for host in HOSTS:
            assert deployment.counters(host, FABRIC) - fabric[host] > 10_000
        # The worker's management port sees no part of a completion; a stray ARP or neighbour packet is not one.
        assert deployment.counters("spark-b", "eth0") - management < 2_000


def test_a_second_up_changes_nothing(deployment: Deployment) -> None:
    before = {host: deployment.containers(host) for host in HOSTS}
    outcome = deployment.up()
    assert outcome.code == 0, outcome.text[-3000:]
    for word in ("created", "updated", "replaced", "deleted"):
        assert outcome.count(word) == 0, outcome.text[-3000:]
    assert outcome.count("unchanged") > 20
    assert outcome.seconds < 30  # the figure proper, below 10 s on a quiet machine, is bench/noop_up.py's
    assert {host: deployment.containers(host) for host in HOSTS} == before


@pytest.fixture(scope="module")
def second_checkout(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same program in another folder, which has never built anything."""
    checkout = copy_checkout(tmp_path_factory.mktemp("elsewhere") / "checkout")
    made = subprocess.run(
        ["python3", "toolchain/bootstrap.py"],
        cwd=checkout,
        env=deployment.environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return checkout


def test_an_up_from_a_second_checkout_in_another_folder_changes_nothing(
    deployment: Deployment, second_checkout: Path
) -> None:
    before = {host: deployment.containers(host) for host in HOSTS}
    outcome = deployment.up(checkout=second_checkout)
    assert outcome.code == 0, outcome.text[-3000:]
    for word in ("created", "updated", "replaced", "deleted"):
        assert outcome.count(word) == 0, outcome.text[-3000:]
    assert {host: deployment.containers(host) for host in HOSTS} == before


def test_a_newer_supervisor_waits_for_a_restart_that_is_asked_for(
    deployment: Deployment, second_checkout: Path
) -> None:
    before = {host: deployment.containers(host) for host in HOSTS}
    with (second_checkout / "spark_runtime" / "supervisor.py").open("a") as source:
        source.write("# a newer release\n")
    shutil.rmtree(second_checkout / ".build")
    outcome = deployment.up(checkout=second_checkout)
    assert outcome.code == 0, outcome.text[-3000:]
    assert "a newer rank supervisor waits for the next restart" in outcome.text
    for word in ("created", "updated", "replaced", "deleted"):
        assert outcome.count(word) == 0, outcome.text[-3000:]
    assert {host: deployment.containers(host) for host in HOSTS} == before


def test_no_run_has_changed_a_file_of_the_checkout(deployment: Deployment) -> None:
    for name in ("Pulumi.yaml", "Pulumi.dev.yaml", "Pulumi.spark.yaml"):
        text = (PROJECT / name).read_text()
        assert "encryptionsalt" not in text and "secure:" not in text
    assert deployment.config_file.parent != PROJECT


def test_the_openai_client_lists_chats_streams_and_gets_the_servers_400(deployment: Deployment) -> None:
    import openai

    outputs = deployment.outputs()
    client = openai.OpenAI(base_url=outputs["endpoint"], api_key=outputs["api_key"], timeout=120, max_retries=0)
    assert [model.id for model in client.models.list()] == [outputs["model"]]
    messages: list[Any] = [{"role": "user", "content": "Hello"}]
    whole = client.chat.completions.create(model=outputs["model"], messages=messages, max_tokens=8)
    assert whole.usage is not None and whole.usage.completion_tokens > 0
    chunks = list(client.chat.completions.create(model=outputs["model"], messages=messages, max_tokens=8, stream=True))
    assert len(chunks) > 2
    long: list[Any] = [{"role": "user", "content": "word " * 2000}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=outputs["model"], messages=long, max_tokens=8)
    assert refused.value.status_code == 400
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=outputs["endpoint"], api_key="sk-wrong", max_retries=0).models.list()


def test_no_secret_is_anywhere_in_clear(deployment: Deployment, watch: SecretWatch) -> None:
    key = deployment.outputs()["api_key"]
    sudo = (deployment.folder / "sudo_password").read_text().strip()
    identity = [line for line in (deployment.folder / "id_ed25519").read_text().splitlines() if "-----" not in line]
    secrets = {"api key": key, "sudo password": sudo} | {f"ssh key, line {n}": line for n, line in enumerate(identity)}
    # Written anew while every process is looked at: the key goes to the node, and a completion is asked for with it.
    deployment.on("spark-a", "rm /home/spark/.spark-vllm/stacks/dev/secrets/main/api_key", root=True)
    assert deployment.up().count("updated") == 1
    assert chat(deployment.outputs(), key).status == 200
    logs = deployment.home / "engine.log"
    loud = deployment.pulumi(
        "up", "-s", "dev", "--yes", "--skip-preview", "-v", "11", "--logtostderr", "--logflow", timeout_s=300
    )
    assert loud.code == 0
    logs.write_text(loud.text)
    exported = deployment.pulumi("stack", "export", "-s", "dev").text
    assert '"resources"' in exported
    places = {
        "console": "\n".join(deployment.printed),
        "engine log at full verbosity": loud.text,
        "exported state": exported,
        "backend": "\n".join(
            p.read_text(errors="replace") for p in (deployment.home / "backend").rglob("*") if p.is_file()
        ),
    }
    for host in HOSTS:
        places[f"docker inspect on {host}"] = deployment.on(host, "docker inspect $(docker ps -aq)", root=True)
        places[f"docker logs on {host}"] = deployment.on(
            host, "for c in $(docker ps -aq); do docker logs $c 2>&1; done", root=True
        )
        places[f"rank logs and status on {host}"] = deployment.on(
            host, "find /home/spark/.spark-vllm -path '*/state/*' -type f -exec cat {} +", root=True
        )
        places[f"journal on {host}"] = deployment.on(host, "journalctl --no-pager -q", root=True)
    for place, text in places.items():
        assert len(text) > 20, place
        for name, secret in secrets.items():
            assert secret not in text, f"the {name} is in: {place}"
    assert watch.finish() == []
    assert len(watch.looked_at) > 50
    mode = deployment.on("spark-a", "stat -c '%a' /home/spark/.spark-vllm/stacks/dev/secrets/main/api_key", root=True)
    assert mode.strip() == "600"


def test_a_changed_max_model_len_shows_that_setting_and_what_it_restarts_and_nothing_else(
    deployment: Deployment,
) -> None:
    deployment.configure({"max_model_len": 640})
    preview = deployment.preview()
    assert preview.code == 0, preview.text[-3000:]
    changed = [line for line in preview.lines if re.match(r"^\s+[~+-]+ ", line) and "=>" in line]
    known = re.compile(
        r'"512" => "640"|max_model_len\s*: 512 => 640|=> \[unknown\]|"[0-9a-f]{12}" => "[0-9a-f]{12}"'
        r'|question\s*: "[0-9a-f]{20}" => "[0-9a-f]{20}"'
    )  # the setting in the command and in the kept settings, new ids, deployment id, what the image is asked
    assert any('"512" => "640"' in line for line in changed), preview.text[-4000:]
    assert [line for line in changed if not known.search(line)] == []
    assert preview.count("to replace") == 2 and preview.count("to update") == 3  # image check, gate, kept settings
    assert preview.count("to create") == 0 and preview.count("to delete") == 0
    outcome = deployment.up()
    assert outcome.code == 0, outcome.text[-3000:]
    outputs = deployment.outputs()
    models = ask(f"{outputs['endpoint']}/models", outputs["api_key"]).body
    assert models["data"][0]["max_model_len"] == 640


# Drift, one kind at a time.

DRIFT_IN_PLACE = {
    "a file of ours edited": (
        "f=$(ls /home/spark/.spark-vllm/stacks/dev/files/*/runtime.pyz); echo x >> $f",
        r"runtime\.pyz",
    ),
    "a kernel parameter of ours changed": (
        "sysctl -q -w net.ipv4.tcp_keepalive_time=77",
        r'tcp_keepalive_time: "77" => "120"',
    ),
    "the fabric MTU changed": (f"ip link set {FABRIC} mtu 1500", r"mtu_bytes: 1500 => 9000"),
    "the netplan file edited": ("echo '# x' >> /etc/netplan/60-spark-vllm.yaml", r"netplan"),
    "a weights file altered": (
        "echo >> $(ls -d /home/spark/.spark-vllm/weights/*)/config.json",
        r"spark-b: \"[0-9a-f]{40}\" =>",
    ),
    "the key file removed": (
        "rm /home/spark/.spark-vllm/stacks/dev/secrets/main/api_key",
        r'file\s*: "absent" => "in place"',
    ),
}


@pytest.mark.parametrize("kind", DRIFT_IN_PLACE)
def test_drift_is_shown_by_its_field_and_repaired_without_touching_a_container(
    deployment: Deployment, kind: str
) -> None:
    shell, shown = DRIFT_IN_PLACE[kind]
    host = "spark-a" if "key file" in kind else "spark-b"
    before = {h: deployment.containers(h) for h in HOSTS}
    deployment.on(host, shell, root=True)
    preview = deployment.preview()
    assert preview.code == 0, preview.text[-3000:]
    assert re.search(shown, preview.text), preview.text[-4000:]
    outcome = deployment.up()
    assert outcome.code == 0, outcome.text[-3000:]
    again = deployment.preview()
    assert again.code == 0 and again.count("unchanged") > 20, again.text[-3000:]
    assert again.count("to update") == again.count("to replace") == again.count("to create") == 0, again.text[-3000:]
    assert {h: deployment.containers(h) for h in HOSTS} == before
    assert chat(deployment.outputs(), deployment.outputs()["api_key"]).status == 200


@pytest.mark.parametrize(
    ("shell", "shown"),
    [
        ("docker rm -f spark-vllm-dev-main-rank1", r"\+ docker:index/container:Container"),
        ("docker stop -t 30 spark-vllm-dev-main-rank1", r"mustRun\s*: false => true"),
    ],
    ids=["removed", "stopped"],
)
def test_a_container_removed_or_stopped_by_hand_comes_back_and_the_other_is_not_touched(
    deployment: Deployment, shell: str, shown: str
) -> None:
    head, worker = deployment.containers("spark-a"), deployment.containers("spark-b")
    deployment.on("spark-b", shell)
    preview = deployment.preview()
    assert preview.code == 0, preview.text[-3000:]
    assert re.search(shown, preview.text), preview.text[-4000:]
    assert "spark-b: " in preview.text
    outcome = deployment.up()
    assert outcome.code == 0, outcome.text[-3000:]
    assert deployment.containers("spark-a") == head
    assert deployment.containers("spark-b") != worker
    assert chat(deployment.outputs(), deployment.outputs()["api_key"]).status == 200


def test_a_rank_without_its_pinned_address_says_what_does_not_match_and_serves_again_with_it(
    deployment: Deployment,
) -> None:
    """The same container but for VLLM_HOST_IP: what happens to those who run Ray by hand on two networks."""
    # What vLLM then asks the kernel: by which way would I get there? A lab host has no way out, and none is used.
    deployment.on("spark-a", "ip route replace 8.8.8.8/32 dev eth0", root=True)
    try:
        deployment.on("spark-a", f"python3 - <<'END'\n{WITHOUT_PINNED_ADDRESS}\nEND", timeout_s=120)
        deadline = time.monotonic() + 180
        while "VLLM_HOST_IP is not set" not in str(deployment.status("spark-a").get("first_error")):
            assert time.monotonic() < deadline, deployment.status("spark-a")
            time.sleep(2)
        line = deployment.status("spark-a")["first_error"]["line"]
    finally:
        deployment.on("spark-a", "ip route del 8.8.8.8/32 dev eth0", root=True)
    assert f"ask Ray for the node {deployment.addresses['spark-a']} (from the default route" in line
    assert "Ray registers this node as 192.168.200.12" in line
    deployment.on("spark-a", "docker rm -f spark-vllm-dev-main-rank0")
    outcome = deployment.up()
    assert outcome.code == 0, outcome.text[-3000:]
    assert chat(deployment.outputs(), deployment.outputs()["api_key"]).status == 200


# Interrupted runs.


def test_an_interrupted_gate_ends_soon_and_the_next_up_waits_on_without_a_restart(deployment: Deployment) -> None:
    deployment.on("spark-b", "docker restart -t 30 spark-vllm-dev-main-rank1")
    run = deployment.begin("up", "-s", "dev", "--yes", "--skip-preview")
    run.wait_for("rank 0: loading", 300)
    started = {host: deployment.containers(host) for host in HOSTS}
    generation = deployment.status("spark-a")["generation"]
    run.interrupt()
    assert run.wait(60) != 0
    assert "interrupted; the group goes on loading by itself" in run.text
    assert "Traceback" not in run.text
    outcome = deployment.up()
    assert outcome.code == 0, outcome.text[-3000:]
    assert {host: deployment.containers(host) for host in HOSTS} == started
    assert deployment.status("spark-a")["generation"] == generation


# Faults of hosts, and the end.


@pytest.mark.parametrize("fault", ["power", "docker"])
def test_a_dead_host_is_named_in_one_clear_line_by_preview_up_and_destroy(deployment: Deployment, fault: str) -> None:
    head = deployment.containers("spark-a")
    if fault == "power":
        deployment.lab("power-cut", "spark-b")
        step = "spark-b, connect (TCP): expected sshd at"
    else:
        deployment.on("spark-b", "systemctl stop docker.socket docker.service", root=True)
        step = "spark-b, docker: expected a Docker daemon that answers"
    before = deployment.snapshot("spark-a")
    for run in (deployment.preview, deployment.up, deployment.destroy):
        outcome = run(timeout_s=120)
        assert outcome.code != 0
        assert step in first_error(outcome), outcome.text[-3000:]
        assert outcome.seconds < CLEAR_LINE_S
        assert "Traceback" not in outcome.text
        assert "docker.example.com" not in outcome.text and "dial-stdio" not in outcome.text
    assert deployment.containers("spark-a") == head
    # The head's own supervisor notes that its peer is gone; that is its work and not ours.
    changed = [line for line in differences(before, deployment.snapshot("spark-a")) if "/state/main/" not in line]
    assert changed == [], json.dumps(changed, indent=1)
    if fault == "power":
        deployment.lab("power-on", "spark-b")
    else:
        deployment.on("spark-b", "systemctl start docker.socket docker.service", root=True)


def test_destroy_puts_back_what_was_there_also_when_a_container_is_gone_already(
    deployment: Deployment, pristine: dict[str, dict[str, list[str]]]
) -> None:
    deployment.on("spark-b", "docker rm -f spark-vllm-dev-main-rank1")
    outcome = deployment.destroy()
    assert outcome.code == 0, outcome.text[-3000:]
    assert "kept" in outcome.text and ".spark-vllm/weights" in outcome.text
    left = {host: differences(pristine[host], deployment.snapshot(host)) for host in HOSTS}
    assert left == {host: [] for host in HOSTS}, json.dumps(left, indent=1)


def test_a_launcher_that_was_there_before_starts_unchanged_after_destroy(deployment: Deployment) -> None:
    deployment.on("spark-a", "docker start vllm_node")
    assert asked_of_launcher(deployment) == "ok"


def test_a_second_destroy_finds_nothing_to_do(deployment: Deployment) -> None:
    outcome = deployment.destroy()
    assert outcome.code == 0, outcome.text[-3000:]
    assert json.loads(deployment.pulumi("stack", "export", "-s", "dev").text)["deployment"].get("resources", []) in (
        [],
        None,
    )


def lab_mounts() -> list[dict[str, Any]]:
    """The mounts that stack dev has."""
    import yaml

    stack = yaml.safe_load((PROJECT / "Pulumi.dev.yaml").read_text())
    mounts: list[dict[str, Any]] = stack["config"]["spark-vllm:groups"]["main"]["serving"]["mounts"]
    return mounts


def compilers_hidden() -> list[dict[str, Any]]:
    """Mounts that take the compilers out of the image: an empty device in place of each."""
    return [{"source": "/dev/null", "target": path} for path in COMPILERS]


def dying_at_its_first_completion() -> dict[str, Any]:
    """Serving settings with which only the gate fails: the image has no compiler."""
    variables = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "0",
        "VLLM_CACHE_ROOT": "/opt/vllm/cache",
    }
    # Healing would try twice more before its verdict (tests/lab/test_healing.py); here the first error is enough.
    return {"environment": variables, "mounts": [*lab_mounts(), *compilers_hidden()], "heal": "report"}
