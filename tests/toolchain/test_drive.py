"""`make up` and `make down`: what they ask, show and leave alone."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from toolchain import down, show_endpoint
from toolchain.places import ROOT, Stop

KEY = "sk-planted-marker"


class Endpoint(BaseHTTPRequestHandler):
    """Answers completions for whoever has the key."""

    answer: ClassVar[Any] = {"choices": [{"message": {"content": " hello "}}]}
    asked: ClassVar[Any] = None

    def do_POST(self) -> None:
        """One completion."""
        type(self).asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        allowed = self.headers.get("Authorization") == f"Bearer {KEY}" and self.path == "/v1/chat/completions"
        body = json.dumps(self.answer).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def address() -> Iterator[str]:
    """An endpoint on loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(5)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_completion_is_asked_for_with_or_without_version(address: str, suffix: str) -> None:
    assert show_endpoint.complete(address + suffix, "m", KEY, 5) == "hello"
    assert Endpoint.asked["model"] == "m"


def test_a_refused_key_is_told_with_the_status(address: str) -> None:
    with pytest.raises(Stop, match=r"^endpoint http://.*: expected a completion, found status 401"):
        show_endpoint.complete(address, "m", "wrong", 5)


def test_a_silent_endpoint_is_told() -> None:
    with pytest.raises(Stop, match=r"^endpoint .*expected a completion, found none"):
        show_endpoint.complete("http://127.0.0.1:1", "m", KEY, 5)


@pytest.mark.parametrize("endpoint", ["", "file:///etc/passwd", "127.0.0.1:80"])
def test_an_endpoint_must_be_an_http_address(endpoint: str) -> None:
    with pytest.raises(Stop, match="expected an http or https address"):
        show_endpoint.completions_url(endpoint)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": " said "}, "said"),
        ({"content": None, "reasoning": "thought"}, "thought"),
        ({"content": "", "reasoning_content": "thought"}, "thought"),
        ({"content": None}, ""),
        ("rubbish", ""),
    ],
)
def test_reasoning_counts_as_text(message: Any, text: str) -> None:
    assert show_endpoint.text_of({"choices": [{"message": message}]}) == text


@pytest.mark.parametrize("answer", [None, {}, {"choices": []}, [], "x"])
def test_rubbish_has_no_text(answer: Any) -> None:
    assert show_endpoint.text_of(answer) == ""


def run(script: str, tmp_path: Path, outputs: dict[str, Any], *words: str) -> subprocess.CompletedProcess[str]:
    """A script of the toolchain beside a pulumi that knows only these outputs."""
    program = tmp_path / "pulumi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(outputs)}\nEND\n")
    program.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SPARK_VLLM_ENV_HOME": str(tmp_path)}
    argv = [sys.executable, f"toolchain/{script}", *words]
    return subprocess.run(argv, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=30)


def test_the_endpoint_is_shown_and_the_key_is_not(tmp_path: Path, address: str) -> None:
    outputs = {"endpoint": f"{address}/v1", "model": "tiny", "api_key": KEY}
    ended = run("show_endpoint.py", tmp_path, outputs, "dev")
    assert ended.returncode == 0, ended.stderr
    assert [line.split(maxsplit=1)[-1] for line in ended.stdout.splitlines()[:3]] == [
        f"{address}/v1",
        "tiny",
        "hello",
    ]
    assert KEY not in ended.stdout + ended.stderr


def test_a_stack_that_is_not_up_is_told_in_one_line(tmp_path: Path) -> None:
    ended = run("show_endpoint.py", tmp_path, {}, "dev")
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "found no endpoint and no model; run `pulumi up`" in ended.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"checkpoint": {"latest": {"resources": [{"urn": "x"}]}}}', True),
        ('{"checkpoint": {"latest": {}}}', False),
        ('{"checkpoint": {"latest": null}}', False),
        ("not json", True),
        ("{}", True),
    ],
)
def test_down_destroys_only_where_something_is(tmp_path: Path, text: str, expected: bool) -> None:
    path = tmp_path / "dev.json"
    path.write_text(text)
    assert down.resources_in(path) is expected
    packed = tmp_path / "dev.json.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert down.resources_in(packed) is expected


def test_without_a_stack_there_is_nothing_to_destroy() -> None:
    assert down.resources_in(None) is False
