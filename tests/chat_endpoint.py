"""An endpoint that answers chat completions as a test says, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatEndpoint:
    """An endpoint under a free port of this machine.

    Attributes:
        status: HTTP status of each answer.
        body: Bytes of each answer.
        asked: (path, authorization, body) of each request.
    """

    def __init__(self) -> None:
        self.status = 200
        self.say({"content": "hello"})
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self.url = ""

    def say(self, message: dict[str, Any]) -> None:
        self.body = json.dumps({"choices": [{"message": message}]}).encode()


@contextmanager
def chat_endpoint() -> Iterator[ChatEndpoint]:
    """Serve until the end of the block."""
    endpoint = ChatEndpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            endpoint.asked.append((self.path, self.headers.get("Authorization"), asked))
            self.send_response(endpoint.status)
            self.send_header("Content-Length", str(len(endpoint.body)))
            self.end_headers()
            self.wfile.write(endpoint.body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the requests are in ``asked``."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    endpoint.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
