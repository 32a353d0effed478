"""How long `pulumi preview --refresh` takes when nothing differs, beside an equivalent `ansible-playbook --check`.

Makes a lab of its own (instance `bench`, in a home of its own), deploys stack dev on two of its hosts, and measures
both programs in turns, so that both see the same noise; then the stack is given the other hosts as nodes that no group
uses, and is measured again. The playbook (bench/preview_playbook.yaml) learns the same facts of the same hosts, with
pipelining on; both programs find the connections of the run before still open. Needs root, like every lab; ansible-core
is installed into the cache and is no dependency of the project.

    python -m bench.preview [--runs 5] [--hosts 8]

Targets: two hosts below 5 s and below a quarter of Ansible; eight hosts at most three times the two-host time. Prints
minimum, median and maximum of all and writes them to bench/results/preview.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

PROJECT = Path(__file__).resolve().parent.parent
PLAYBOOK = Path(__file__).resolve().with_name("preview_playbook.yaml")
RESULTS = Path(__file__).resolve().parent / "results" / "preview.json"
ANSIBLE = "ansible-core==2.19.14"
"""The newest for Python 3.11."""
INSTANCE = "bench"
TARGET_S = 5.0
TARGET_SHARE = 0.25
TARGET_GROWTH = 3.0
_LIMIT_S = 1800
_FABRIC = ("enp1s0f1np1", "enP2p1s0f1np1")
_PARTS = {"enp1s0f1np1": "192.168.200", "enP2p1s0f1np1": "192.168.201"}


class Bench:
    """A lab, a stack on it, and the two programs that look at it.

    Args:
        home: Folder of the lab, the state and the stack file.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        others = ("PULUMI_", "SPARK_VLLM_ENV_", "ANSIBLE_", "PYTHON")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(others)}
        self.file = home / "Pulumi.dev.yaml"
        self.environ = kept | {"SPARK_VLLM_HOME": str(home), "PULUMI_OPTION_CONFIG_FILE": str(self.file)}
        self.lab = home / "lab" / INSTANCE
        self.ansible = ansible_playbook()

    def run(self, words: list[str], environ: dict[str, str] | None = None) -> tuple[float, str]:
        """Seconds and output of a command that must succeed."""
        start = time.monotonic()
        done = subprocess.run(
            words,
            cwd=PROJECT,
            env=self.environ | (environ or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if done.returncode != 0:
            sys.exit(f"{' '.join(words)}: ended with {done.returncode}\n{done.stdout[-6000:]}{done.stderr[-3000:]}")
        return time.monotonic() - start, done.stdout

    def in_env(self, *words: str) -> list[str]:
        """A command inside ``. ./env`` of the checkout."""
        return ["sh", "-c", '. ./env && exec "$@"', "sh", *words]

    def start(self, hosts: int) -> None:
        """Lab and stack; nothing is deployed yet."""
        self.run([sys.executable, "-m", "lab", "up", "--instance", INSTANCE, "--hosts", str(hosts)])
        self.run([sys.executable, "toolchain/bootstrap.py"])
        self.run(self.in_env("python3", "toolchain/stack.py", "dev"))

    def stop(self) -> None:
        """Everything of the lab."""
        self.run([sys.executable, "-m", "lab", "down", "--instance", INSTANCE])

    @property
    def addresses(self) -> dict[str, str]:
        """Management address of each host."""
        return dict(re.findall(r"^Host (\S+) (\S+)$", (self.lab / "ssh_config").read_text(), re.MULTILINE))

    def configure(self, hosts: list[str]) -> None:
        """The stack file of stack dev, with these hosts as nodes; its group stays on the first two."""
        text = (PROJECT / "Pulumi.dev.yaml").read_text()
        stack = yaml.safe_load(text.replace("~/.local/share/spark-vllm/lab/dev", str(self.lab)))
        stack["config"]["spark-vllm:nodes"] = [
            {
                "name": host,
                "management_address": self.addresses[host],
                "user": "spark",
                "fabric": [{"netdev": netdev, "address": f"{_PARTS[netdev]}.{number(host)}/24"} for netdev in _FABRIC],
            }
            for host in hosts
        ]
        self.file.write_text(yaml.safe_dump(stack, sort_keys=False))

    def up(self) -> None:
        """Deploy."""
        self.run(self.in_env("pulumi", "up", "-s", "dev", "--yes", "--skip-preview"))

    def preview(self) -> float:
        """Seconds of one preview, which must find nothing to change."""
        seconds, text = self.run(self.in_env("pulumi", "preview", "-s", "dev", "--refresh", "--color", "never"))
        if "unchanged" not in text or re.search(r"\d+ to (create|update|replace|delete)", text):
            sys.exit(f"expected a preview with nothing to change, found:\n{text[-3000:]}")
        return seconds

    def check(self, hosts: list[str]) -> float:
        """Seconds of one ``ansible-playbook --check``, which must find nothing to change."""
        inventory = self.home / "hosts.json"
        inventory.write_text(json.dumps({"all": {"hosts": {host: self._variables(host, hosts) for host in hosts}}}))
        settings = {
            "ANSIBLE_SSH_PIPELINING": "true",
            "ANSIBLE_SSH_ARGS": f"-F {self.lab / 'ssh_config'} -o BatchMode=yes -o ControlMaster=auto "
            "-o ControlPersist=60",
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self.home / "c"),
            "ANSIBLE_FORKS": str(max(5, len(hosts))),
            "ANSIBLE_HOST_KEY_CHECKING": "true",
            "ANSIBLE_PYTHON_INTERPRETER": "/usr/bin/python3",
            "ANSIBLE_HOME": str(self.home / "ansible"),
        }
        seconds, text = self.run(
            [str(self.ansible), "--check", "--diff", "-i", str(inventory), str(PLAYBOOK)], settings
        )
        recap = re.findall(
            r"^(\S+)\s+: ok=(\d+)\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", text, re.MULTILINE
        )
        if len(recap) != len(hosts) or any(row[2:] != ("0", "0", "0") for row in recap):
            sys.exit(f"expected a check with nothing to change, found:\n{text[-4000:]}")
        return seconds

    def _variables(self, host: str, hosts: list[str]) -> dict[str, Any]:
        rank = hosts.index(host)
        netplan = self._text(host, "sudo -S -p '' cat /etc/netplan/60-spark-vllm.yaml", password=True)
        return {
            "ansible_host": self.addresses[host],
            "ansible_user": "spark",
            "ansible_become_password": (self.lab / "sudo_password").read_text().strip(),
            "container": f"spark-vllm-dev-main-rank{rank}" if rank < 2 else "",
            "image_id": json.loads((self.lab / "image.json").read_text())["image_id"],
            "mtu_bytes": 9000,
            "netplan": netplan,
            "sysctl_file": self._text(host, "cat /etc/sysctl.d/60-spark-vllm-dev.conf"),
            "peers": [f"{part}.{number(peer)}" for peer in hosts if peer != host for part in _PARTS.values()],
            "sysctls": {"net.ipv4.tcp_keepalive_time": "120"},
            "root": "/home/spark/.spark-vllm",
        }

    def _text(self, host: str, shell: str, *, password: bool = False) -> str:
        """What a command on a host prints."""
        done = subprocess.run(
            ["ssh", "-F", str(self.lab / "ssh_config"), host, shell],
            input=(self.lab / "sudo_password").read_text() if password else "",
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout


def number(host: str) -> int:
    """Last number of a host's fabric addresses."""
    return 12 + "abcdefghijklmnopqrstuvwxyz".index(host[-1])


def ansible_playbook() -> Path:
    """ansible-playbook in an environment of its own in the cache; installed on first use."""
    base = os.environ.get("SPARK_VLLM_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "spark-vllm"
    folder = Path(base).expanduser() / "bench" / ANSIBLE.replace("==", "-")
    program = folder / "bin" / "ansible-playbook"
    if not program.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", "-q", ANSIBLE], check=True, timeout=600)
    return program


def figures(seconds: Iterable[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    kept = list(seconds)
    return {"min_s": min(kept), "median_s": statistics.median(kept), "max_s": max(kept)}


def measure(bench: Bench, hosts: list[str], runs: int) -> dict[str, dict[str, float]]:
    """Both programs in turns on these hosts."""
    bench.preview(), bench.check(hosts)
    pairs = [(bench.preview(), bench.check(hosts)) for _ in range(runs)]
    return {"preview": figures(pair[0] for pair in pairs), "ansible_check": figures(pair[1] for pair in pairs)}


def main() -> int:
    """Measure, write the results, and say whether the targets are met."""
    parser = argparse.ArgumentParser(description="No-op preview against an equivalent ansible-playbook --check.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=8, help="hosts of the larger stack (default: 8)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spark-bench-") as name:
        bench = Bench(Path(name))
        try:
            bench.start(options.hosts)
            hosts = list(bench.addresses)
            bench.configure(hosts[:2])
            bench.up()
            two = measure(bench, hosts[:2], options.runs)
            bench.configure(hosts)
            bench.up()
            many = measure(bench, hosts, options.runs)
        finally:
            bench.stop()
    share = two["preview"]["median_s"] / two["ansible_check"]["median_s"]
    growth = many["preview"]["median_s"] / two["preview"]["median_s"]
    result = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f} at the end",
        "command": f"python -m bench.preview --runs {options.runs} --hosts {options.hosts}",
        "ansible": ANSIBLE,
        "two_hosts": two,
        f"{options.hosts}_hosts": many,
        "share_of_ansible": share,
        "growth": growth,
        "target": {"median_s": TARGET_S, "share_of_ansible": TARGET_SHARE, "growth": TARGET_GROWTH},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    met = two["preview"]["median_s"] < TARGET_S and share < TARGET_SHARE and growth <= TARGET_GROWTH
    print("target met" if met else "target missed")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
