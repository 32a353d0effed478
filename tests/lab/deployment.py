"""A deployment on a lab of its own, driven from outside as a person does: pulumi, ssh, HTTP.

The stack is `dev` with other addresses; its state, passphrase and lab lie in a folder of the test run. Stacks that are
only previewed need neither image nor model: with ``hosts_only`` they get the name of an image and a made-up folder of
weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.lab.runs import BackgroundRun
from tests.lab.runs import Outcome as Outcome

PROJECT = Path(__file__).resolve().parent.parent.parent
UP_TIMEOUT_S = 900
FABRIC = "enp1s0f1np1"

SNAPSHOT = Path(__file__).with_name("snapshot.sh")


@dataclass
class Deployment:
    """One lab and one stack.

    Attributes:
        instance: Name of the lab.
        home: Folder of state, passphrase and lab.
        hosts_only: Whether the lab has no image and no model; nothing can then be served.
        lab_options: Words for ``lab up``, such as ``--hosts 3``.
        stack: Name of the stack.
        printed: Everything that pulumi has printed so far.
    """

    instance: str
    home: Path
    hosts_only: bool = False
    lab_options: tuple[str, ...] = ()
    stack: str = "dev"
    printed: list[str] = field(default_factory=list)
    _namespaces: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.home / "lab" / self.instance

    @property
    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PULUMI_", "SPARK_VLLM_ENV_"))}
        return kept | {"SPARK_VLLM_HOME": str(self.home), "PULUMI_OPTION_CONFIG_FILE": str(self.config_file)}

    @property
    def config_file(self) -> Path:
        return self.home / f"Pulumi.{self.stack}.yaml"

    def lab(self, command: str, *words: str, timeout_s: float = 900) -> Outcome:
        """Run a command of the lab; it must succeed."""
        done = self._run(
            [sys.executable, "-m", "lab", command, "--instance", self.instance, *words], PROJECT, timeout_s
        )
        assert done.code == 0, done.text
        return done

    def start(self) -> None:
        """Start the lab and make the stack."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.lab("up", *self.lab_options, *(["--hosts-only"] if self.hosts_only else []))
        self.configure({})
        self.make_stack()

    def make_stack(self) -> None:
        """Make the stack where it is missing."""
        text = 'python3 toolchain/bootstrap.py && . ./env && python3 toolchain/stack.py "$0"'
        done = self._run(["sh", "-c", text, self.stack], PROJECT, 1800)
        assert done.code == 0, done.text

    def stop(self) -> None:
        """Stop the lab, whatever state it is in."""
        self._run([sys.executable, "-m", "lab", "down", "--instance", self.instance], PROJECT, 300)

    @property
    def addresses(self) -> dict[str, str]:
        """Management address of each host, as the lab's ssh_config has it."""
        text = (self.folder / "ssh_config").read_text()
        return dict(re.findall(r"^Host (\S+) (\S+)$", text, re.MULTILINE))

    def configure(self, serving: Mapping[str, Any], *, edit: Callable[[dict[str, Any]], object] | None = None) -> None:
        """Write the stack file: that of stack dev with this lab's addresses, and the given serving settings on top.

        Args:
            serving: Serving settings; one given as None is left out.
            edit: Changes any other setting; it gets all of them, by the names that docs/settings.md has.
        """
        subnet = next(iter(self.addresses.values())).rsplit(".", 1)[0]
        text = (PROJECT / "Pulumi.dev.yaml").read_text()
        text = text.replace("10.99.0.", f"{subnet}.").replace("~/.local/share/spark-vllm/lab/dev", str(self.folder))
        stack = yaml.safe_load(text)
        config = {key.removeprefix("spark-vllm:"): value for key, value in stack["config"].items()}
        group = config["groups"]["main"]
        config["ssh"]["boot_wait_s"] = 3  # hosts that are dead here are meant to be
        for node in config["nodes"]:
            node["management_address"] = self.addresses[node["name"]]
        for key, value in serving.items():
            if value is None:
                group["serving"].pop(key, None)
            else:
                group["serving"][key] = value
        if self.hosts_only:
            config["image"] = {"registry": f"localhost/none@sha256:{'0' * 64}"}
            group["model"]["source"] = f"controller:{self._weights()}"
        if edit is not None:
            edit(config)
        stack["config"] = {f"spark-vllm:{key}": value for key, value in config.items()}
        self.config_file.write_text(yaml.safe_dump(stack, sort_keys=False))

    def _weights(self) -> Path:
        """A folder that has the form of weights, for stacks that are only previewed."""
        folder = self.home / "weights"
        if not folder.is_dir():
            folder.mkdir()
            (folder / "config.json").write_text('{"model_type": "none"}\n')
            (folder / "model.safetensors").write_bytes(bytes(1000))
        return folder

    def pulumi(
        self,
        *words: str,
        timeout_s: float = UP_TIMEOUT_S,
        checkout: Path = PROJECT,
        environment: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Run pulumi inside ``. ./env``; what it prints is kept."""
        command = ["sh", "-c", '. ./env && exec pulumi "$@"', "sh", *words, "--color", "never"]
        done = self._run(command, checkout, timeout_s, environment)
        self.printed.append(done.text)
        return done

    def begin(self, *words: str) -> BackgroundRun:
        """Start pulumi and go on."""
        command = ["sh", "-c", '. ./env && exec pulumi "$@"', "sh", *words, "--color", "never"]
        return BackgroundRun(command, PROJECT, self.environment)

    def status(self, host: str) -> dict[str, Any]:
        """What a host's rank supervisor says of itself."""
        value: dict[str, Any] = json.loads(
            self.on(host, f"cat /home/spark/.spark-vllm/stacks/{self.stack}/state/main/status.json")
        )
        return value

    def inside(self, *words: str, timeout_s: float = 300) -> Outcome:
        """Run a command inside ``. ./env``."""
        return self._run(["sh", "-c", '. ./env && exec "$@"', "sh", *words], PROJECT, timeout_s)

    def up(self, *, targets: Iterable[str] = (), **kwargs: Any) -> Outcome:
        """``pulumi up`` without a question, of the whole stack or of resources whose URNs match a pattern."""
        chosen = [word for target in targets for word in ("--target", target)]
        return self.pulumi("up", "-s", self.stack, "--yes", "--skip-preview", *chosen, **kwargs)

    def preview(self, *words: str, **kwargs: Any) -> Outcome:
        """``pulumi preview --diff``."""
        return self.pulumi("preview", "-s", self.stack, "--diff", *words, **kwargs)

    def destroy(self, **kwargs: Any) -> Outcome:
        """``pulumi destroy`` without a question."""
        return self.pulumi("destroy", "-s", self.stack, "--yes", "--skip-preview", **kwargs)

    def refresh(self, **kwargs: Any) -> Outcome:
        """``pulumi refresh`` without a question."""
        return self.pulumi("refresh", "-s", self.stack, "--yes", "--skip-preview", **kwargs)

    def exported(self) -> dict[str, Any]:
        """The state as ``pulumi stack export`` gives it."""
        done = self._run(["sh", "-c", '. ./env && exec pulumi stack export -s "$0"', self.stack], PROJECT, 60)
        assert done.code == 0, done.text
        value: dict[str, Any] = json.loads(done.text)
        return value

    def outputs(self) -> dict[str, Any]:
        """The stack's outputs, secrets in clear, in this process only."""
        command = ["sh", "-c", '. ./env && exec pulumi stack output -s "$0" --json --show-secrets', self.stack]
        done = self._run(command, PROJECT, 60)
        assert done.code == 0, done.text
        value: dict[str, Any] = json.loads(done.text)
        return value

    def on(self, host: str, shell: str, *, root: bool = False, timeout_s: float = 120) -> str:
        """Run shell text on a host; it must succeed."""
        command = ["ssh", "-F", str(self.folder / "ssh_config"), "-o", "BatchMode=yes", host]
        data = shell
        if root:
            command.append("sudo -k -S -p '' bash -s")
            data = (self.folder / "sudo_password").read_text().strip() + "\n" + shell
        else:
            command.append("bash -s")
        done = subprocess.run(command, input=data, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"{host}: {shell[:200]}: {done.stderr[-500:]}"
        return done.stdout

    def console(self, host: str, shell: str, *, timeout_s: float = 60) -> str:
        """Run shell text as root on a host's console, without SSH; it must succeed."""
        done = subprocess.run(
            [sys.executable, "-m", "lab", "shell", "--instance", self.instance, host],
            cwd=PROJECT,
            env=self.environment,
            input=f"set -e\n{shell}\n",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{host}: {shell[:200]}: {done.stderr[-500:]}"
        return done.stdout

    def snapshot(self, host: str) -> dict[str, list[str]]:
        """What a host is: files, units, kernel parameters, filters, users, containers."""
        parts: dict[str, list[str]] = {}
        for line in self.on(host, SNAPSHOT.read_text(), root=True).splitlines():
            if line.startswith("## "):
                parts[line[3:]] = []
            else:
                parts[next(reversed(parts))].append(line)
        return parts

    def containers(self, host: str) -> list[str]:
        """Name, id and start time of every container on a host."""
        text = self.on(
            host,
            'for c in $(docker ps -aq); do docker inspect -f "{{.Name}} {{.Id}} {{.State.StartedAt}}" "$c"; done',
        )
        return sorted(text.splitlines())

    def counters(self, host: str, interface: str) -> int:
        """Bytes received and sent by an interface of a host, read from outside, so that reading adds none."""
        text = subprocess.run(
            ["ip", "-n", self._namespace(host), "-j", "-s", "link", "show", interface],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout
        stats = json.loads(text)[0]["stats64"]
        return int(stats["rx"]["bytes"]) + int(stats["tx"]["bytes"])

    def _namespace(self, host: str) -> str:
        if host in self._namespaces:  # asking the lab again would itself be traffic
            return self._namespaces[host]
        status = json.loads(self.lab("status", "--json").text)
        address = next(entry["address"] for entry in status["hosts"] if entry["name"] == host)
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=10).stdout
        for name in (line.split()[0] for line in names.splitlines() if line.split()[0].endswith(f"-{host}")):
            shown = subprocess.run(
                ["ip", "-n", name, "-4", "address", "show", "eth0"],
                capture_output=True,
                text=True,
                check=False,
                timeout=10,
            ).stdout
            if f" {address}/" in shown:
                self._namespaces[host] = str(name)
                return self._namespaces[host]
        raise AssertionError(f"no namespace of {host}")

    def _run(
        self, command: list[str], cwd: Path, timeout_s: float, environment: Mapping[str, str] | None = None
    ) -> Outcome:
        start = time.monotonic()
        done = subprocess.run(
            command,
            cwd=cwd,
            env=self.environment | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Outcome(done.returncode, done.stdout, time.monotonic() - start)


@dataclass
class Answer:
    """An HTTP answer."""

    status: int
    body: Any


def ask(url: str, key: str | None, body: Mapping[str, Any] | None = None, timeout_s: float = 120) -> Answer:
    """One request to the API; an error status is an answer."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, headers)  # noqa: S310
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            return Answer(response.status, json.load(response))
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode(errors="replace"))


def chat(outputs: Mapping[str, Any], key: str | None) -> Answer:
    """A short chat completion."""
    body = {"model": outputs["model"], "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
    return ask(f"{outputs['endpoint']}/chat/completions", key, body)


def copy_checkout(target: Path) -> Path:
    """A second checkout in another folder: the files that git knows, and the environment."""
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=PROJECT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        source = PROJECT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    return target


class SecretWatch(threading.Thread):
    """Looks at the arguments and environments of every process of the machine, the hosts' and containers' included."""

    def __init__(self, secrets: Iterable[str]) -> None:
        super().__init__(daemon=True)
        self._secrets = [secret.encode() for secret in secrets if secret]
        self._end = threading.Event()
        self.seen: list[str] = []
        self.looked_at: set[str] = set()

    def run(self) -> None:
        while not self._end.wait(0.05):
            for process in Path("/proc").glob("[0-9]*"):
                for name in ("cmdline", "environ"):
                    try:
                        content = (process / name).read_bytes()
                    except OSError:
                        continue
                    self.looked_at.add(hashlib.sha256(content).hexdigest())
                    if any(secret in content for secret in self._secrets):
                        self.seen.append(f"{process}/{name}: {content[:80]!r}")

    def learn(self, secret: str) -> None:
        """Look for one more secret from now on."""
        self._secrets.append(secret.encode())

    def finish(self) -> list[str]:
        """Stop looking; where a secret was seen."""
        self._end.set()
        self.join()
        return self.seen
