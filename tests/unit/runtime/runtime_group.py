"""A group of supervisors on loopback addresses, with stand-ins for `ray` and `vllm` on their PATH."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

FAKES = Path(__file__).parent / "fakes"
ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
PATIENCE_S = 60.0  # an upper bound for a busy machine; nothing waits for it when all is well
SCENARIO = "scenario"
KEY = "sk-marker-0123456789"


def eventually(what: Callable[[], Any], text: Callable[[], object] = str) -> Any:
    """Wait until ``what()`` is true and return it."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError(f"it did not happen within {PATIENCE_S:.0f} s: {text()}")


Scenario = Callable[["Group"], None]
Outcomes = dict[str, "Future[None]"]


def scenario(function: Scenario) -> Callable[[Outcomes], None]:
    """Make a test of a scenario. Scenarios mostly wait, so the selected ones run side by side."""

    def test(outcomes: Outcomes) -> None:
        outcomes[function.__name__].result()

    test.__name__, test.__doc__, test.__module__ = function.__name__, function.__doc__, function.__module__
    setattr(test, SCENARIO, function)
    return test


class Supervisor:
    """One rank as a process, and what it has written."""

    def __init__(self, argv: list[str], env: dict[str, str], state_dir: Path, mount: Path) -> None:
        self.state_dir, self.mount = state_dir, mount
        self.output = state_dir.with_suffix(".out")
        with self.output.open("ab") as file:
            self.process = subprocess.Popen(argv, env=env, cwd="/", stdout=file, stderr=subprocess.STDOUT)

    def status(self) -> dict[str, Any]:
        """The status file; empty while there is none."""
        try:
            text = (self.state_dir / "status.json").read_text()
        except FileNotFoundError:
            return {}
        document: dict[str, Any] = json.loads(text)  # whatever is there must be a whole document
        return document

    def wait_for(self, phase: str, **more: object) -> dict[str, Any]:
        """The status once it shows a phase (of this process: an older one's file does not count)."""

        def reached() -> dict[str, Any]:
            status = self.status()
            ours = status.get("pid") == self.process.pid or "unshare" in str(self.process.args)
            generation = (status.get("generation") or {}).get("n")
            wanted = more.get("generation", generation) == generation
            return status if ours and status.get("phase") == phase and wanted else {}

        found: dict[str, Any] = eventually(reached, lambda: f"{phase}: {self.status()}\n{self.text()[-3000:]}")
        return found

    def text(self) -> str:
        """What the container's own output would show."""
        return self.output.read_text(errors="replace")

    def command(self, name: str) -> subprocess.CompletedProcess[str]:
        """What `docker exec … python3 /opt/spark-vllm NAME` would do."""
        argv = [sys.executable, str(self.mount), name, "--state-dir", str(self.state_dir)]
        return subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)


class Group:
    """Starts ranks that belong together."""

    def __init__(self, folder: Path, mount: Path) -> None:
        self.folder, self.mount = folder, mount
        self.ports = [_free_port() for _ in range(4)]
        self.key_file = folder / "api_key"
        self.key_file.write_text(KEY + "\n")
        self.started: list[Supervisor] = []

    def start(self, rank: int, *options: str, wrapper: tuple[str, ...] = (), nodes: int = 2, **env: str) -> Supervisor:
        """Start a rank; ``options`` come last and so override what stands here."""
        ray_port, status_port, serve_port, master_port = self.ports
        before, _, behind = " ".join(options).partition("-- ")
        argv = [
            *wrapper,
            *(sys.executable, str(self.mount), "run", "--group", "main", "--deployment", "d1"),
            *("--rank", str(rank), "--nodes", str(nodes), "--gpus-per-node", "1", "--backend", "ray"),
            *("--head-address", ADDRESSES[0], "--node-address", ADDRESSES[rank], "--ray-port", str(ray_port)),
            *("--master-port", str(master_port)),
            *("--status-port", str(status_port), "--serve-port", str(serve_port), "--serve-host", "0.0.0.0"),
            *("--model", "/models/x", "--served-model-name", "name", "--api-key-file", str(self.key_file)),
            *("--state-dir", str(self.folder / f"state{rank}"), "--ray-folder", str(self.folder / "ray")),
            *("--join-timeout-s", "60", "--start-timeout-s", "60", "--canary-timeout-s", "30"),
            *("--lease-interval-s", "0.2", "--lease-timeout-s", "8", "--stop-grace-s", "5", "--heal", "report"),
            *before.split(),
            *("--", "--max-model-len", "512"),
            *behind.split(),
        ]
        environ = {
            **os.environ,
            "PATH": f"{FAKES}:{os.environ['PATH']}",
            "PYTHONPATH": str(FAKES / "lib"),
            "PYTHONSAFEPATH": "1",
            "FAKE_FOLDER": str(self.folder),
            "VLLM_HOST_IP": ADDRESSES[rank],
            **env,
        }
        supervisor = Supervisor(argv, environ, self.folder / f"state{rank}", self.mount)
        self.started.append(supervisor)
        return supervisor

    def events(self) -> list[str]:
        """What the stand-ins did, in order."""
        path = self.folder / "events"
        return [line.partition(" ")[2] for line in path.read_text().splitlines()] if path.exists() else []

    def ask(self, path: str, body: bytes | None = None, port: int | None = None) -> tuple[int, dict[str, Any]]:
        """A request to the head's status server."""
        url = f"http://{ADDRESSES[0]}:{port or self.ports[1]}{path}"
        request = urllib.request.Request(url, data=body)
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def left_over(self) -> list[int]:
        """Stand-ins and their children that are still alive."""
        return [int(path.name) for path in (self.folder / "pids").glob("*") if self._is_ours(int(path.name))]

    def close(self) -> None:
        """End what a test has left, by number and only if it is ours."""
        for supervisor in self.started:
            with contextlib.suppress(ProcessLookupError):
                supervisor.process.kill()
            supervisor.process.wait()
        for pid in self.left_over():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _is_ours(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            return state != "Z" and str(self.folder).encode() in Path(f"/proc/{pid}/environ").read_bytes()
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])
