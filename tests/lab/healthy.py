"""A pair of emulated hosts that looks like two healthy Sparks set up by their owner, and what preview finds on it.

Everything that the preflight asks for is there: recordings in place of what the hosts lack, a fabric that the owner's
own netplan files configure, a runtime for the GPU. A preview of it finds nothing, so that a test that breaks one thing
sees what that one thing is told as.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from spark_core.findings import KINDS
from tests.lab.deployment import FABRIC, PROJECT, Deployment
from tests.lab.runs import Outcome

HOSTS = ("spark-a", "spark-b")
TWIN = "enP2p1s0f1np1"
NUMBERS = {"spark-a": 12, "spark-b": 13}
NETPLAN = "/etc/netplan/40-fabric-of-the-owner.yaml"
RECORDINGS = PROJECT / "tests" / "fixtures" / "spark"
KERNEL = RECORDINGS / "uname-a" / "6.17.0-1014.txt"

IMPOSSIBLE_HERE = {"memlock-limit", "image-unknown"}
"""Always found: no lab host may raise limits (CAP_SYS_RESOURCE), and hosts without an image have none to look into."""

_PREPARE = """
sed -i 's/^127.0.1.1 .*/{address} {host}/' /etc/hosts
umask 077
cat > {netplan} <<'END'
network:
  version: 2
  ethernets:
    {fabric}: {{mtu: 9000, link-local: [], addresses: [192.168.200.{number}/24]}}
    {twin}: {{mtu: 9000, link-local: [], addresses: [192.168.201.{number}/24]}}
END
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
"""


def pretend_kernel(deployment: Deployment, host: str) -> None:
    """Let a host show architecture and kernel of a Spark."""
    deployment.lab("pretend", host, "uname", str(KERNEL), "--arguments=-a")


def prepare(deployment: Deployment, host: str) -> None:
    """Make a host look like a healthy Spark."""
    pretend_kernel(deployment, host)
    text = _PREPARE.format(
        host=host,
        address=deployment.addresses[host],
        netplan=NETPLAN,
        fabric=FABRIC,
        twin=TWIN,
        number=NUMBERS[host],
    )
    deployment.console(host, text)
    deployment.lab("rdma", host)


def as_the_owner_left_it(config: dict[str, Any]) -> None:
    """Settings of a stack that only checks what is there: no managed fabric, no tuning, no root."""
    config["hardware"] = "spark"
    config["fabric"] = {"manage": False, "mtu_bytes": 9000}
    config["host"] = {}
    config["severities"] = dict.fromkeys(sorted(IMPOSSIBLE_HERE), "ignore")
    config["ssh"].pop("sudo_password_file", None)
    config["ssh"]["boot_wait_s"] = 0  # a test of a dead node need not wait for it
    # The memory is the machine's, and whatever else runs there has some of it.
    config["groups"]["main"]["serving"] |= {"mounts": [], "gpu_memory_utilization": 0.1}


def found(outcome: Outcome) -> list[tuple[str, str]]:
    """(severity, code) of every finding that a run of pulumi told; each once."""
    told: dict[tuple[str, str], None] = {}
    severity = ""
    for line in outcome.lines:
        mark = re.match(r"\s*(error|warning|info)\b", line)
        severity = mark.group(1) if mark else severity
        code = re.search(r" \[([a-z][a-z-]+)\]$", line)
        if code and code.group(1) in KINDS:
            told[(severity, code.group(1))] = None
    return list(told)


def codes(outcome: Outcome) -> set[str]:
    """Codes of all findings of a run."""
    return {code for _, code in found(outcome)}


@contextlib.contextmanager
def broken(deployment: Deployment, host: str, breaking: str, mending: str) -> Iterator[None]:
    """A host with one fault, made and mended on its console."""
    deployment.console(host, breaking)
    try:
        yield
    finally:
        deployment.console(host, mending)


@contextlib.contextmanager
def configured(deployment: Deployment, *edits: Callable[[dict[str, Any]], object]) -> Iterator[None]:
    """The stack of the owner with some settings changed."""

    def edit(config: dict[str, Any]) -> None:
        as_the_owner_left_it(config)
        for change in edits:
            change(config)

    deployment.configure({}, edit=edit)
    try:
        yield
    finally:
        deployment.configure({}, edit=as_the_owner_left_it)


def start(deployment: Deployment) -> None:
    """Start a lab with a healthy pair, and its stack."""
    deployment.start()
    for host in HOSTS:
        prepare(deployment, host)
    deployment.configure({}, edit=as_the_owner_left_it)
