"""The head's small HTTP server on the fabric.

GET /status, /metrics and /health for readers, POST /lease for workers. It listens on the fabric address only.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from spark_runtime import metrics
from spark_runtime.messages import BadMessage, LeaseReply, LeaseRequest, Refused

MAX_BODY_BYTES = 64 * 1024
_KNOWN = {"error": "there are GET /status, /metrics, /health and POST /lease"}


class StatusServer:
    """Serves until closed. The two callables are called from its own threads."""

    def __init__(
        self,
        address: str,
        port: int,
        status: Callable[[], dict[str, Any]],
        lease: Callable[[LeaseRequest], LeaseReply],
    ) -> None:
        class Handler(_Handler):
            get_status = staticmethod(status)
            take_lease = staticmethod(lease)

        self._server = _Server((address, port), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.2,), name="status-server", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # of the socket: whoever sends half a request does not keep a thread
    get_status: Callable[[], dict[str, Any]]
    take_lease: Callable[[LeaseRequest], LeaseReply]

    def do_GET(self) -> None:
        """The whole status document, the metrics made of it, or its verdict."""
        if self.path == "/status":
            self._answer(200, self.get_status())
        elif self.path == "/metrics":
            text = metrics.render_metrics(self.get_status(), time.time())
            self._send(200, metrics.CONTENT_TYPE, text.encode())
        elif self.path == "/health":
            document = self.get_status()
            serves = document["phase"] == "serving"
            self._answer(200 if serves else 503, {"serving": serves, "phase": document["phase"]})
        else:
            self._answer(404, _KNOWN)

    def do_POST(self) -> None:
        """A lease of a worker, answered with its order."""
        if self.path != "/lease":
            self._answer(404, _KNOWN)
            return
        length = self.headers.get("Content-Length") or ""
        if not (length.isascii() and length.isdigit()):
            self._answer(411, {"error": "a body with a Content-Length is expected"})
            return
        if len(length) > 9 or int(length) > MAX_BODY_BYTES:
            self._answer(413, {"error": f"a lease has at most {MAX_BODY_BYTES} bytes"})
            return
        try:
            request = LeaseRequest.from_json(json.loads(self.rfile.read(int(length))))
            self._answer(200, self.take_lease(request).as_json())
        except (ValueError, RecursionError, BadMessage) as error:
            self._answer(400, {"error": f"not a lease: {error}"})
        except Refused as error:
            self._answer(409, {"error": str(error)})

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line every two seconds for each worker would bury the log."""

    def _answer(self, code: int, document: dict[str, Any]) -> None:
        self._send(code, "application/json", json.dumps(document).encode() + b"\n")

    def _send(self, code: int, content_type: str, body: bytes) -> None:
        self.close_connection = True
        with contextlib.suppress(ConnectionError):  # a rank that was killed while it asked wants no answer
            self.send_response(code)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
