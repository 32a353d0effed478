"""What a person is told before anything changes: the acceptance cases of the preflight, by the real Pulumi.

Only this shows that the first line of preview, up, refresh and destroy is ours and not a plugin's, that eight faults
are told together, that no secret is printed, and that looking leaves no trace and costs next to nothing. It needs root
on Linux and about five minutes.

To clean up after an aborted run: ``SPARK_VLLM_HOME=… python -m lab down --instance t-pre``.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.lab import healthy, watching
from tests.lab.deployment import FABRIC, Deployment
from tests.lab.faults import DOCKER, FABRIC_FAULTS, MACHINE, REACHING, Fault
from tests.lab.healthy import HOSTS, TWIN, configured
from tests.lab.runs import Outcome

pytestmark = pytest.mark.lab

CLEAR_LINE_S = 30
PEAK_SESSION_BYTES = 100 << 20
CPU_S = 3.0
EIGHT = (
    "docker-runtime-missing",  # first, since it restarts Docker
    "port-taken",
    "foreign-container",
    "launcher-running",
    "driver-not-loaded",
    "fact-unreadable",
    "mtu-differs",
    "gid-missing",
)
MARKER = "marker-5f0c1d"
"""Part of every secret that is planted."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment("t-pre", tmp_path_factory.mktemp("home"), hosts_only=True)
    try:
        healthy.start(made)
        yield made
    finally:
        made.stop()


def fault(code: str) -> Fault:
    """The fault of that kind."""
    return next(one for one in [*REACHING, *DOCKER, *MACHINE, *FABRIC_FAULTS] if one.code == code)


def first_error(outcome: Outcome) -> str:
    """The first line that tells an error."""
    return next((line for line in outcome.lines if "error:" in line), "")


def all_runs(pair: Deployment) -> dict[str, Outcome]:
    """Preview, up, refresh and destroy, one after the other."""
    return {
        "preview": pair.preview(timeout_s=120),
        "up": pair.up(timeout_s=120),
        "refresh": pair.refresh(timeout_s=120),
        "destroy": pair.destroy(timeout_s=120),
    }


# A node that does not answer, or that shows another key.


@pytest.mark.parametrize("code", ["connect-failed", "host-key-mismatch", "host-key-unpinned", "docker-down"])
def test_the_first_line_is_the_node_and_what_is_wrong_for_every_run(pair: Deployment, code: str) -> None:
    broken = fault(code)
    with broken.made(pair):
        before = watching.disk(pair, "spark-a")
        runs = {name: run for name, run in all_runs(pair).items() if name != "destroy" or run.code != 0}
        changed = watching.differing(before, watching.disk(pair, "spark-a"))
    assert {"preview", "up", "refresh"} <= set(runs)
    for name, run in runs.items():
        assert run.code != 0, name
        assert re.search(broken.told, first_error(run)), f"{name}: {run.text[-3000:]}"
        assert run.seconds < CLEAR_LINE_S, name
        assert "Traceback" not in run.text and "docker.example.com" not in run.text and "dial-stdio" not in run.text
    assert changed == []


def test_a_node_that_drops_packets_is_named_with_the_step_within_the_deadline(pair: Deployment) -> None:
    drop = "nft add table inet drops; nft add chain inet drops in '{ type filter hook input priority 0; }'\n"
    drop += "nft add rule inet drops in iifname eth0 tcp dport 22 drop"
    with healthy.broken(pair, "spark-b", drop, "nft delete table inet drops"):
        outcome = pair.preview(timeout_s=120)
    assert outcome.code != 0
    assert "spark-b, connect (TCP): expected sshd at" in first_error(outcome)
    assert outcome.seconds < CLEAR_LINE_S


def test_another_host_key_is_refused_before_any_command_runs(pair: Deployment) -> None:
    with fault("host-key-mismatch").made(pair):
        logins = "journalctl -q -u ssh | grep -c 'Accepted publickey' || true"
        before = pair.console("spark-b", logins)
        outcome = pair.preview()
        assert pair.console("spark-b", logins) == before
    assert len(set(re.findall(r"SHA256:[\w+/]{43}", first_error(outcome)))) == 2


# Secrets.


def test_a_misspelt_connection_field_prints_no_secret_anywhere(pair: Deployment) -> None:
    """Secrets of the stack, and what somebody typed into a field that there is none of."""
    stored = {name: f"{MARKER}-{name}" for name in ("sudo_password", "api_key")}
    typed = {name: f"{MARKER}-{name}" for name in ("key", "token", "api_kee")}
    for name, value in stored.items():
        planted = pair.pulumi("config", "set", "--secret", "-s", "dev", f"spark-vllm:{name}", value)
        assert planted.code == 0, planted.text
    text = pair.config_file.read_text()
    assert text.count("secure:") == 2 and MARKER not in text
    encrypted = {key: value for key, value in _config(pair).items() if isinstance(value, dict) and "secure" in value}

    def edit(config: dict[str, Any]) -> None:
        config["nodes"][1] |= {"private_kee": typed["key"], "connection": {"privatKey": typed["key"]}}
        config["ssh"]["tokn"] = typed["token"]
        config["groups"]["main"]["serving"]["api_kee"] = typed["api_kee"]
        config |= {key.removeprefix("spark-vllm:"): value for key, value in encrypted.items()}

    with configured(pair, edit):
        runs = [pair.preview("-v", "9", "--logtostderr", "--logflow"), pair.up(), pair.refresh(), pair.destroy()]
        state = json.dumps(pair.exported())
    for field in ("private_kee", "connection", "tokn", "api_kee"):
        assert field in runs[0].text, field
    assert runs[0].code != 0 and len(runs[0].text) > 10_000
    for place, shown in {"console and engine log": "".join(run.text for run in runs), "exported state": state}.items():
        assert MARKER not in shown, place
    # The engine's own history holds the stack file as it was written; what is encrypted there stays so.
    backend = "".join(path.read_text(errors="replace") for path in (pair.home / "backend").rglob("*") if path.is_file())
    assert len(backend) > 1000
    assert [name for name, value in stored.items() if value in backend] == []


def _config(pair: Deployment) -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load(pair.config_file.read_text())["config"]
    return value


# Docker, four ways.


@pytest.mark.parametrize("code", ["docker-permission", "docker-down", "docker-missing", "docker-runtime-missing"])
def test_each_way_of_not_having_docker_is_a_diagnosis_of_its_own(pair: Deployment, code: str) -> None:
    broken = fault(code)
    others = {"docker-permission", "docker-down", "docker-missing", "docker-runtime-missing"} - {code}
    with broken.made(pair):
        before = watching.disk(pair, "spark-a")
        preview, up = pair.preview(), pair.up()
        changed = watching.differing(before, watching.disk(pair, "spark-a"))
    for run in (preview, up):
        assert run.code != 0
        assert healthy.codes(run) == {code}
        assert re.search(broken.told, first_error(run)), run.text[-3000:]
        assert not any(f"[{other}]" in run.text for other in others)
    assert changed == []


# MTU.


def test_mtu_9000_against_1500_tells_both_values_and_the_direction(pair: Deployment) -> None:
    with healthy.broken(pair, "spark-b", f"ip link set {FABRIC} mtu 1500", f"ip link set {FABRIC} mtu 9000"):
        outcome = pair.preview()
    assert outcome.code != 0
    [line] = [line for line in outcome.lines if "[mtu-differs]" in line]
    assert f"expected MTU 9000 on {FABRIC}, found 1500" in line
    assert f"spark-a's {FABRIC} has 9000" in line
    assert "packets of that size from spark-a to spark-b are lost" in line


# Everything at once.


def test_one_pair_with_eight_faults_has_eight_findings_in_one_preview(pair: Deployment) -> None:
    faults = [fault(code) for code in EIGHT]
    with contextlib.ExitStack() as stack:
        for one in faults:
            stack.enter_context(one.made(pair))
        outcome = pair.preview()
    assert healthy.codes(outcome) == set(EIGHT), outcome.text[-5000:]
    assert outcome.code != 0


# Looking changes nothing.


def test_preview_beside_a_foreign_cluster_under_load_changes_no_byte_and_restarts_nothing(pair: Deployment) -> None:
    with contextlib.ExitStack() as stack:
        for host in HOSTS:
            stack.enter_context(
                healthy.broken(pair, host, watching.launcher(serve=True), "docker rm -f vllm_node > /dev/null")
            )
        time.sleep(2)  # until the servers answer
        containers = {host: pair.containers(host) for host in HOSTS}
        live = {host: pair.snapshot(host) for host in HOSTS}
        disks = {host: watching.disk(pair, host) for host in HOSTS}
        load = watching.Load(pair, "spark-a", 20)
        load.start()
        outcome = pair.preview()
        good, bad = load.finish()
        after = {host: watching.differing(disks[host], watching.disk(pair, host)) for host in HOSTS}
        assert after == {host: [] for host in HOSTS}, json.dumps(after, indent=1)
        assert {host: pair.snapshot(host) for host in HOSTS} == live
        assert {host: pair.containers(host) for host in HOSTS} == containers
    assert healthy.codes(outcome) == {"launcher-running"}, outcome.text[-3000:]
    assert all(len(seen) > 100 for seen in disks.values())
    assert bad == 0 and good > 500


def test_what_preview_starts_on_a_host_stays_within_its_bounds(pair: Deployment) -> None:
    pair.preview()  # what only a first look starts is no part of it
    watches = [watching.CostWatch(pair, host) for host in HOSTS]
    for watch in watches:
        watch.start()
    outcome = pair.preview()
    costs = [watch.finish() for watch in watches]
    assert outcome.code == 0, outcome.text[-3000:]
    for watch, cost in zip(watches, costs, strict=True):
        assert watch.looks > 20
        assert 0 < cost.peak_session_bytes < PEAK_SESSION_BYTES, costs
        assert 0 < cost.cpu_s < CPU_S, costs


def test_preview_needs_no_sudo_and_says_what_would(pair: Deployment) -> None:
    outcome = pair.preview()
    assert outcome.code == 0 and "as root" not in outcome.text
    password = str(pair.folder / "sudo_password")

    def managed(config: dict[str, Any]) -> None:
        config["ssh"]["sudo_password_file"] = password
        config["fabric"]["manage"] = True
        config["host"] = {"sysctls": {"net.ipv4.tcp_keepalive_time": "120"}}

    before = {host: watching.disk(pair, host) for host in HOSTS}
    with configured(pair, managed):
        outcome = pair.preview()
    assert outcome.code == 0, outcome.text[-3000:]
    for host in HOSTS:
        assert f"{host}: as root, up and destroy would" in outcome.text
        assert watching.differing(before[host], watching.disk(pair, host)) == []
    assert "/etc/netplan/60-spark-vllm.yaml" in outcome.text and "sysctl" in outcome.text


def test_both_halves_of_a_port_are_told_with_their_devices(pair: Deployment) -> None:
    def undeclared(config: dict[str, Any]) -> None:
        for node in config["nodes"]:
            del node["fabric"]

    with configured(pair, undeclared):
        outcome = pair.preview()
    assert outcome.code == 0, outcome.text[-3000:]
    assert f"spark-b: fabric {FABRIC} 192.168.200.13/24 (hca rocep1s0f1), {TWIN} 192.168.201.13/24" in outcome.text
