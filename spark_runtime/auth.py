"""The API key check, as an ASGI middleware that vLLM loads with ``--middleware``.

vLLM's own ``--api-key`` would put the key into its argument list, and the variable it also reads into
`docker inspect`. Here vLLM knows only the path of a file. It holds one key a line and is read again when it
changes, so keys are rotated without a restart. Without a usable file every guarded request is refused.

vLLM wraps its whole application in middlewares given this way, also mounted routes, and guards by itself only
/v1 and a few more; here everything is guarded except what it leaves open for probes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY_FILE_VARIABLE = "SPARK_VLLM_API_KEY_FILE"
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/metrics/", "/load"})


class KeyFileUnusable(Exception):
    """The key file is missing, unreadable or empty. The text says which; it names no content."""


class ApiKeyMiddleware:
    """Lets a request through if it bears one of the keys, or asks for an open path."""

    def __init__(self, app: App, key_file: str | None = None) -> None:
        self.app = app
        self._path = Path(key_file or os.environ.get(KEY_FILE_VARIABLE) or "/nonexistent")
        self._stamp: tuple[int, int, int] | None = None
        self._digests: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection: http and websocket are judged, anything else (lifespan) passes."""
        if scope["type"] not in ("http", "websocket") or self._is_open(scope):
            await self.app(scope, receive, send)
            return
        try:
            allowed = self._bears_key(scope, self._load())
        except KeyFileUnusable as error:
            await _refuse(scope, send, 503, f"The server cannot check API keys: {error}.", "server_error")
            return
        if not allowed:
            await _refuse(scope, send, 401, "Missing or wrong API key.", "invalid_request_error")
            return
        await self.app(scope, receive, send)

    @staticmethod
    def _is_open(scope: Scope) -> bool:
        # CORS preflight requests carry no credentials by design. A websocket has no method.
        if scope["type"] == "http" and scope.get("method") == "OPTIONS":
            return True
        path, root = str(scope.get("path", "")), str(scope.get("root_path", ""))
        if root and path.startswith(root + "/"):
            path = path[len(root) :]
        return scope["type"] == "http" and path in OPEN_PATHS

    @staticmethod
    def _bears_key(scope: Scope, digests: list[bytes]) -> bool:
        given = [value for name, value in scope.get("headers", ()) if name.lower() == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        digest = hashlib.sha256(key.strip()).digest()
        # Every key is compared, so that the time says nothing about which one matched.
        return sum(hmac.compare_digest(digest, known) for known in digests) > 0

    def _load(self) -> list[bytes]:
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if stamp != self._stamp:
                keys = self._path.read_bytes().split(b"\n")
                self._digests = [hashlib.sha256(key.strip()).digest() for key in keys if key.strip()]
                self._stamp = stamp
        except OSError as error:
            self._stamp, self._digests = None, []
            raise KeyFileUnusable(f"the key file cannot be read ({error.strerror})") from None
        if not self._digests:
            raise KeyFileUnusable("the key file holds no key")
        return self._digests


async def _refuse(scope: Scope, send: Send, code: int, text: str, kind: str) -> None:
    if scope["type"] == "websocket":
        # Closing before accepting makes the server answer the upgrade with 403.
        await send({"type": "websocket.close", "code": 1008 if code == 401 else 1011, "reason": text})
        return
    name = "invalid_api_key" if code == 401 else "key_file_unusable"
    error = {"message": text, "type": kind, "param": None, "code": name}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if code == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})
