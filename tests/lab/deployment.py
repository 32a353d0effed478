"""A deployment on a lab of its own, driven from outside as a person does: pulumi, ssh, HTTP.

The stack is `dev` with other addresses; its state, passphrase and lab lie in a folder of the test run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

PROJECT = Path(__file__).resolve().parent.parent.parent
UP_TIMEOUT_S = 900
FABRIC = "enp1s0f1np1"

SNAPSHOT = Path(__file__).with_name("snapshot.sh")


@dataclass
class Outcome:
    """How a command ended and what it printed."""

    code: int
    text: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def count(self, what: str) -> int:
        """The number before a word in the summary of resources, such as ``27 unchanged``."""
        found = re.findall(rf"^\s*[~+-]*\s*(\d+) {what}\b", self.text, re.MULTILINE)
        return int(found[-1]) if found else 0


class BackgroundRun:
    """A run of pulumi that can be watched, interrupted and killed."""

    def __init__(self, command: list[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self.text = ""
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Wait until the run has printed a text."""
        end = time.monotonic() + timeout_s
        while text not in self.text:
            assert self._process.poll() is None, f"ended before it printed {text!r}: {self.text[-3000:]}"
            assert time.monotonic() < end, f"has not printed {text!r} in {timeout_s} s: {self.text[-3000:]}"
            time.sleep(0.1)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def wait(self, timeout_s: float) -> int:
        """Exit status."""
        code = self._process.wait(timeout_s)
        self._close()
        return code

    def kill(self) -> None:
        """Kill the run and every plugin and program that it has started, at once."""
        family = [self._process.pid]
        for pid in family:
            children = Path(f"/proc/{pid}/task/{pid}/children")
            family += [int(child) for child in children.read_text().split()] if children.is_file() else []
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(10)
        self._close()

    def _close(self) -> None:
        self._reader.join(30)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.text += line


@dataclass
class Deployment:
    """One lab and one stack.

    Attributes:
        instance: Name of the lab.
        home: Folder of state, passphrase and lab.
        printed: Everything that pulumi has printed so far.
    """

    instance: str
    home: Path
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
        return self.home / "Pulumi.dev.yaml"

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
        self.lab("up")
        self.configure({})
        done = self._run(
            ["sh", "-c", "python3 toolchain/bootstrap.py && . ./env && python3 toolchain/stack.py dev"],
            PROJECT,
            1800,
        )
        assert done.code == 0, done.text

    def stop(self) -> None:
        """Stop the lab, whatever state it is in."""
        self._run([sys.executable, "-m", "lab", "down", "--instance", self.instance], PROJECT, 300)

    def configure(self, serving: Mapping[str, Any]) -> None:
        """Write the stack file: that of stack dev with this lab's addresses, and the given serving settings on top.

        A setting given as None is left out.
        """
        status = json.loads(self.lab("status", "--json").text)
        first = next(host["address"] for host in status["hosts"])
        subnet = first.rsplit(".", 1)[0]
        text = (PROJECT / "Pulumi.dev.yaml").read_text()
        text = text.replace("10.99.0.", f"{subnet}.").replace("~/.local/share/spark-vllm/lab/dev", str(self.folder))
        stack = yaml.safe_load(text)
        group = stack["config"]["spark-vllm:groups"]["main"]
        for key, value in serving.items():
            if value is None:
                group["serving"].pop(key, None)
            else:
                group["serving"][key] = value
        self.config_file.write_text(yaml.safe_dump(stack, sort_keys=False))

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
            self.on(host, "cat /home/spark/.spark-vllm/stacks/dev/state/main/status.json")
        )
        return value

    def up(self, **kwargs: Any) -> Outcome:
        """``pulumi up`` without a question."""
        return self.pulumi("up", "-s", "dev", "--yes", "--skip-preview", **kwargs)

    def preview(self, *words: str, **kwargs: Any) -> Outcome:
        """``pulumi preview --diff``."""
        return self.pulumi("preview", "-s", "dev", "--diff", *words, **kwargs)

    def destroy(self, **kwargs: Any) -> Outcome:
        """``pulumi destroy`` without a question."""
        return self.pulumi("destroy", "-s", "dev", "--yes", "--skip-preview", **kwargs)

    def outputs(self) -> dict[str, Any]:
        """The stack's outputs, secrets in clear, in this process only."""
        command = ["sh", "-c", ". ./env && exec pulumi stack output -s dev --json --show-secrets"]
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
