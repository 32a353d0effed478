"""A rank as a shell script without Pulumi."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from automation.events import GROUP
from automation.render import docker_run, script_of, scripts_of

UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
GOLDEN = Path(__file__).resolve().parents[2] / "engine" / "rendered_spark.json"


def container(root: Path) -> dict[str, Any]:
    return {
        "name": "rank0",
        "image": "sha256:1",
        "entrypoints": ["/usr/bin/python3", "/opt/runtime.pyz"],
        "command": ["run", "--model", "with 'a quote'"],
        "envs": ["A=b c"],
        "networkMode": "host",
        "shmSize": 512.0,
        "restart": "always",
        "stopTimeout": 90.0,
        "mounts": [
            {"type": "bind", "source": f"{root}/files/runtime.pyz", "target": "/opt/runtime.pyz", "readOnly": True},
            {"type": "bind", "source": f"{root}/state", "target": "/var/lib/spark-vllm", "readOnly": False},
            {"type": "bind", "source": f"{root}/secrets", "target": "/run/secrets/spark-vllm", "readOnly": True},
            {"type": "bind", "source": str(root), "target": "/models/x", "readOnly": True},
            {"type": "volume", "source": "cache", "target": "/root/.cache"},
        ],
        "labels": [{"label": "spark-vllm.stack", "value": "dev"}],
        "healthcheck": {"tests": ["CMD", "python3", "/x", "health"], "interval": "30s", "retries": 3.0},
        "logOpts": {"max-size": "10m"},
        "logDriver": "json-file",
    }


LINK = {
    "node": "spark-a",
    "managed": True,
    "interfaces": [{"netdev": "n0", "address": "192.168.200.12/24"}, {"netdev": "n1", "address": "192.168.201.12/24"}],
    "netplan_file": "/etc/netplan/60-spark-vllm.yaml",
    "netplan": "network: {version: 2}\n",
}
FAKE_HOST = """#!/bin/sh
case "$(basename "$0")" in
    id) echo 1000 ;;
    sudo) exec "$@" ;;
    ip) cat "$HOST/addresses" ;;
    install) echo "$@" >> "$HOST/done"; cat "$3" >> "$HOST/done" ;;
    netplan) echo "netplan $*" >> "$HOST/done"; cp "$HOST/wanted" "$HOST/addresses" ;;
esac
"""


def fabric_of(folder: Path, addresses: str, link: dict[str, Any]) -> tuple[int, str, str]:
    """Run the script on a host with these addresses: exit status, what root did, what was said."""
    host = folder / "host"
    (host / "bin").mkdir(parents=True)
    for name in ("id", "sudo", "ip", "install", "netplan", "docker"):
        (host / "bin" / name).write_text(FAKE_HOST)
        (host / "bin" / name).chmod(0o755)
    (host / "done").touch()
    (host / "addresses").write_text(addresses)
    (host / "wanted").write_text("2: n0 inet 192.168.200.12/24 brd x\n3: n1 inet 192.168.201.12/24 brd x\n")
    script = script_of("dev", "spark-a", {"name": "rank0", "image": "i", "entrypoints": ["python3"]}, {}, link)
    environment = {"PATH": f"{host / 'bin'}:/usr/bin:/bin", "HOST": str(host)}
    done = subprocess.run(
        ["sh"], input=script, text=True, env=environment, capture_output=True, timeout=60, check=False
    )
    return done.returncode, (host / "done").read_text(), done.stderr


def test_missing_addresses_of_a_managed_fabric_come_by_netplan_and_present_ones_are_left(tmp_path: Path) -> None:
    one = "2: n0 inet 192.168.200.12/24 brd x\n"
    code, done, said = fabric_of(tmp_path / "a", one, LINK)
    assert code == 0, said
    assert done.splitlines()[1:] == ["network: {version: 2}", "netplan apply"]
    assert done.startswith("-m 600 ") and "/etc/netplan/60-spark-vllm.yaml" in done
    both = f"{one}3: n1 inet 192.168.201.12/24 brd x\n"
    assert fabric_of(tmp_path / "b", both, LINK) == (0, "", "")


def test_missing_addresses_of_a_fabric_of_others_are_told(tmp_path: Path) -> None:
    code, done, said = fabric_of(tmp_path, "2: n0 inet 192.168.200.120/24 brd x\n", {**LINK, "managed": False})
    assert (code, done) == (1, "")
    assert said == "192.168.200.12/24 192.168.201.12/24 is missing\n"


def run(script: str, folder: Path) -> list[list[str]]:
    """Run a script with a docker that only writes down what it was asked; its calls."""
    docker = folder / "bin" / "docker"
    docker.parent.mkdir(exist_ok=True)
    docker.write_text('#!/bin/sh\npython3 -c \'import json, sys; print(json.dumps(sys.argv[1:]))\' "$@" >> "$CALLS"\n')
    docker.chmod(0o755)
    calls = folder / "calls"
    calls.unlink(missing_ok=True)
    environment = {"PATH": f"{docker.parent}:/usr/bin:/bin", "CALLS": str(calls)}
    done = subprocess.run(
        ["sh"], input=script, text=True, env=environment, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in calls.read_text().splitlines()]


def test_the_script_brings_its_files_makes_a_key_once_and_runs_the_container(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    bundle.write_bytes(bytes(range(256)) * 40)
    script = script_of("dev", "spark-a", container(tmp_path), {f"{tmp_path}/files/runtime.pyz": bundle})
    calls = run(script, tmp_path)
    assert calls[0] == ["volume", "create", "cache"]
    words = calls[1]
    assert words[:2] == ["run", "--detach"] and words[-5:] == [
        "sha256:1",
        "/opt/runtime.pyz",
        "run",
        "--model",
        "with 'a quote'",
    ]
    assert {"--env=A=b c", "--network=host", "--shm-size=512m", "--restart=always", "--stop-timeout=90"} <= set(words)
    assert f"--mount=type=bind,source={tmp_path}/state,target=/var/lib/spark-vllm" in words
    assert "--health-cmd=python3 /x health" in words and "--log-opt=max-size=10m" in words
    assert (tmp_path / "files" / "runtime.pyz").read_bytes() == bundle.read_bytes()
    key = tmp_path / "secrets" / "api_key"
    assert len(key.read_text()) > 40 and key.stat().st_mode & 0o777 == 0o600
    before = key.read_text()
    run(script, tmp_path)
    assert key.read_text() == before and before not in script


def test_weights_that_are_missing_are_told_and_nothing_is_started(tmp_path: Path) -> None:
    inputs = container(tmp_path)
    inputs["mounts"][3]["source"] = f"{tmp_path}/no-weights"
    script = script_of("dev", "spark-a", inputs, {f"{tmp_path}/files/runtime.pyz": GOLDEN})
    environment = {"PATH": "/usr/bin:/bin"}
    inputs["mounts"] = inputs["mounts"][:4]
    script = script_of("dev", "spark-a", inputs, {f"{tmp_path}/files/runtime.pyz": GOLDEN})
    done = subprocess.run(
        ["sh"], input=script, text=True, env=environment, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert f"{tmp_path}/no-weights is missing" in done.stderr


def test_every_part_of_the_reference_deployment_s_container_is_rendered() -> None:
    for inputs in json.loads(GOLDEN.read_text()).values():
        words = docker_run({**inputs, "image": "x"})
        assert {"--gpus=all", "--cap-add=IPC_LOCK", "--ulimit=memlock=-1:-1"} <= set(words)
        assert "--device=/dev/infiniband:/dev/infiniband:rwm" in words
        assert [word for word in words if word.startswith("--env=VLLM_HOST_IP=192.168.200.1")]


def test_what_is_not_known_yet_is_the_image_by_name_and_one_deployment_for_all_ranks() -> None:
    provider = "urn:pulumi:dev::p::spark:node:SparkNode$pulumi:providers:docker::{}-docker::" + UNKNOWN
    steps = [
        {
            "newState": {
                "type": "docker:index/container:Container",
                "urn": f"{GROUP}docker:index/container:Container::main-{node}",
                "provider": provider.format(node),
                "inputs": {
                    "name": f"rank-{node}",
                    "image": UNKNOWN,
                    "entrypoints": ["python3", "/x"],
                    "command": ["run", "--deployment", UNKNOWN],
                    "mounts": [],
                },
            }
        }
        for node in ("spark-a", "spark-b")
    ]
    scripts = scripts_of({"steps": steps}, "dev", "registry/image@sha256:1")
    assert list(scripts) == ["spark-a", "spark-b"]
    told = {text.partition("--deployment")[2].split()[1] for text in scripts.values()}
    assert len(told) == 1 and UNKNOWN not in "".join(scripts.values())
    assert all("registry/image@sha256:1" in text for text in scripts.values())
