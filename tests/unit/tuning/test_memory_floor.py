"""The memory floor, run as its unit runs it, against a socket that speaks Docker's API."""

from __future__ import annotations

import json
import socketserver
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from spark_runtime.host import memory_floor

SCRIPT = Path(memory_floor.__file__)


class Docker(socketserver.ThreadingUnixStreamServer):
    """Docker's API, as far as the floor uses it."""

    daemon_threads = True
    containers: list[dict[str, Any]]
    killed: list[str]
    asked: list[dict[str, Any]]


class Api(BaseHTTPRequestHandler):
    server: Docker

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        query = urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query)
        self.server.asked.append(json.loads(query["filters"][0]))
        self._answer(200, json.dumps(self.server.containers).encode())

    def do_POST(self) -> None:
        self.server.killed.append(self.path)
        self._answer(204, b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def docker(tmp_path: Path) -> Iterator[Docker]:
    with Docker(str(tmp_path / "docker.sock"), Api) as server:
        server.containers = [
            {"Id": "old", "Names": ["/main-rank0"], "Created": 100},
            {"Id": "new", "Names": ["/other-rank0"], "Created": 200},
        ]
        server.killed, server.asked = [], []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def begin(tmp_path: Path, available_kib: int, patience_s: float = 0.3) -> subprocess.Popen[str]:
    """The floor of 1024 MiB with a host's memory in a file, and with less patience."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 127535084 kB\nMemAvailable: {available_kib} kB\n")
    text = SCRIPT.read_text()
    for old, new in (
        ("PATIENCE_S = 10.0", f"PATIENCE_S = {patience_s}"),
        ("INTERVAL_S = 1.0", "INTERVAL_S = 0.05"),
        ("/var/run/docker.sock", f"{tmp_path}/docker.sock"),
        ("/proc/meminfo", f"{tmp_path}/meminfo"),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "floor.py").write_text(text)
    return subprocess.Popen(
        [sys.executable, "-I", str(tmp_path / "floor.py"), "dev", "1024", str(tmp_path / "floor.log")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(what: Any, timeout_s: float = 20) -> bool:
    end = time.monotonic() + timeout_s
    while not what() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(what())


def test_the_newest_container_of_the_stack_is_killed_and_that_is_written_down(tmp_path: Path, docker: Docker) -> None:
    floor = begin(tmp_path, 1023 * 1024)
    try:
        assert wait_for(lambda: docker.killed and (tmp_path / "floor.log").exists())
    finally:
        floor.kill()
        floor.communicate()
    assert docker.killed[0] == "/containers/new/kill"
    assert docker.asked[0] == {"label": ["spark-vllm.stack=dev"], "status": ["running"]}
    line = (tmp_path / "floor.log").read_text().splitlines()[0]
    assert line.endswith(" 1023 MiB available, floor 1024 MiB: killed other-rank0")


def test_memory_that_comes_back_in_time_kills_nothing(tmp_path: Path, docker: Docker) -> None:
    floor = begin(tmp_path, 1024 * 1024, patience_s=5)
    try:
        for kib in (1000, 1024 * 1024, 1000, 1024 * 1024):
            time.sleep(0.2)
            (tmp_path / "meminfo").write_text(f"MemAvailable: {kib} kB\n")
        time.sleep(0.2)
    finally:
        floor.kill()
        floor.communicate()
    assert docker.killed == []


def test_without_a_container_nothing_is_killed_and_nothing_written(tmp_path: Path, docker: Docker) -> None:
    docker.containers = []
    floor = begin(tmp_path, 1000)
    try:
        assert wait_for(lambda: len(docker.asked) > 1)
    finally:
        floor.kill()
        floor.communicate()
    assert docker.killed == []
    assert not (tmp_path / "floor.log").exists()


def test_a_docker_that_does_not_answer_ends_the_floor_and_systemd_starts_it_again(tmp_path: Path) -> None:
    floor = begin(tmp_path, 1000)
    output = floor.communicate(timeout=30)[0]
    assert floor.returncode == 1
    assert "FileNotFoundError" in output


def test_it_is_small_and_stands_alone() -> None:
    lines = SCRIPT.read_text().splitlines()
    assert len(lines) < 80
    assert not any(line.startswith(("from spark", "import spark")) for line in lines)
