"""The API key check, called as an ASGI server calls it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from spark_runtime.auth import OPEN_PATHS, ApiKeyMiddleware

Sent = list[MutableMapping[str, Any]]


class Client:
    """Calls the middleware around an application that echoes its body."""

    def __init__(self, key_file: Path) -> None:
        self.reached = 0
        self.app = ApiKeyMiddleware(self._echo, str(key_file))

    def ask(self, path: str = "/v1/models", key: bytes | None = None, **scope: Any) -> Sent:
        """One connection; returns what was sent back."""
        headers = [] if key is None else [(b"authorization", key)]
        full = {"type": "http", "method": "GET", "path": path, "headers": headers, **scope}
        sent: Sent = []
        parts = iter([b"one", b"two", b"three"])

        async def receive() -> MutableMapping[str, Any]:
            part = next(parts)
            return {"type": "http.request", "body": part, "more_body": part != b"three"}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        asyncio.run(self.app(full, receive, send))
        return sent

    def code(self, *given: Any, **scope: Any) -> int:
        """The HTTP status of one connection."""
        status: int = self.ask(*given, **scope)[0]["status"]
        return status

    async def _echo(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        more = scope["type"] == "http"
        while more:
            message = await receive()
            more = message["more_body"]
            await send({"type": "http.response.body", "body": message["body"], "more_body": more})


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """Two keys, and what an editor may leave around them."""
    path = tmp_path / "key"
    path.write_text("sk-one\n\n  sk-two  \r\n")
    return path


def test_the_right_keys_pass_and_the_body_streams_through_untouched(key_file: Path) -> None:
    client = Client(key_file)
    for key in (b"Bearer sk-one", b"bearer sk-two"):
        sent = client.ask("/v1/chat/completions", key)
        assert [message.get("body") for message in sent] == [None, b"one", b"two", b"three"]


@pytest.mark.parametrize(
    "key",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer sk-on",
        b"Bearer sk-one2",
        b"Basic sk-one",
        b"sk-one",
        b"Bearer \xff",
    ],
)
def test_anything_else_is_401_in_the_form_of_the_api(key_file: Path, key: bytes | None) -> None:
    client = Client(key_file)
    start, body = client.ask("/v1/chat/completions", key)
    assert start["status"] == 401 and (b"www-authenticate", b"Bearer") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == "invalid_api_key"
    assert client.reached == 0


def test_two_authorization_headers_are_no_key(key_file: Path) -> None:
    headers = [(b"authorization", b"Bearer sk-one"), (b"authorization", b"Bearer sk-two")]
    assert Client(key_file).code(headers=headers) == 401


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_probes_need_no_key(key_file: Path, path: str) -> None:
    assert Client(key_file).code(path) == 200
    assert Client(key_file).code("/root" + path, root_path="/root") == 200


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1/models",
        "/tokenize",
        "/invocations",
        "/docs",
        "/openapi.json",
        "/health/",
        "/healthz",
        "/metrics/x",
        "//health",
        "",
    ],
)
def test_everything_else_needs_one(key_file: Path, path: str) -> None:
    assert Client(key_file).code(path) == 401


def test_a_preflight_request_needs_no_key(key_file: Path) -> None:
    assert Client(key_file).code("/v1/models", method="OPTIONS") == 200


def test_a_websocket_needs_a_key_whatever_it_calls_itself(key_file: Path) -> None:
    client = Client(key_file)
    assert client.ask("/health", type="websocket", method="OPTIONS")[0]["type"] == "websocket.close"
    assert client.reached == 0
    client.ask("/v1/realtime", b"Bearer sk-one", type="websocket")
    assert client.reached == 1


def test_the_lifespan_passes(tmp_path: Path) -> None:
    client = Client(tmp_path / "none")
    client.ask(type="lifespan")
    assert client.reached == 1


def test_a_rotated_key_counts_at_once(key_file: Path) -> None:
    client = Client(key_file)
    assert client.code("/v1/models", b"Bearer sk-one") == 200
    beside = key_file.with_name("new")
    beside.write_text("sk-three\n")
    beside.replace(key_file)
    assert client.code("/v1/models", b"Bearer sk-one") == 401
    assert client.code("/v1/models", b"Bearer sk-three") == 200
    key_file.write_text("sk-four!\n")
    os.utime(key_file, ns=(1, 1))
    assert client.code("/v1/models", b"Bearer sk-four!") == 200


@pytest.mark.parametrize("content", [None, "", "\n \n"])
def test_without_a_usable_file_nothing_passes_but_probes(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    client = Client(path)
    for key in (None, b"Bearer ", b"Bearer sk-one"):
        start, body = client.ask("/v1/models", key)
        assert start["status"] == 503 and b"cannot check API keys" in body["body"]
    assert client.code("/health") == 200
    path.write_text("sk-one")
    assert client.code("/v1/models", b"Bearer sk-one") == 200


def test_a_vanished_file_closes_the_api_again(key_file: Path) -> None:
    client = Client(key_file)
    assert client.code("/v1/models", b"Bearer sk-one") == 200
    key_file.unlink()
    assert client.code("/v1/models", b"Bearer sk-one") == 503


def test_the_path_comes_from_the_environment(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_VLLM_API_KEY_FILE", str(key_file))
    client = Client(key_file)
    client.app = ApiKeyMiddleware(client._echo)
    assert client.code("/v1/models", b"Bearer sk-one") == 200
    monkeypatch.delenv("SPARK_VLLM_API_KEY_FILE")
    client.app = ApiKeyMiddleware(client._echo)
    assert client.code("/v1/models", b"Bearer sk-one") == 503
