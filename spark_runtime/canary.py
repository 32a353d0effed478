"""Ask the server as a client would: its health, its counters, and a small completion through the real port.

/health stays 200 for minutes while a rank is dead, and a first request can kill an engine whose health was
fine. Only a completion proves that the group serves.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_ANY = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}  # noqa: S104 (what a wildcard is reached by)
_COUNTER = re.compile(
    r"^vllm:(generation_tokens_total|prompt_tokens_total|num_requests_running|kv_cache_usage_perc)"
    r"(?:\{[^}]*\})?\s+([0-9.eE+-]+)",
    re.MULTILINE,
)
_ANSWERS = ("content", "reasoning", "reasoning_content", "text", "tool_calls")
"""Reasoning models may put all of a short answer into their reasoning; vLLM has used both names for it."""
_MAX_BODY_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Counters:
    """How busy the server is: requests that run, tokens read and generated since its start, share of the KV cache.

    A long prompt is counted when it has been read as a whole; until then only the KV cache shows that it moves.
    """

    running: float
    tokens: float
    kv_cache: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """Outcome of one completion. ``text`` is a reason when it is not ok; it never contains a key.

    ``how`` is ``traffic`` where the tokens of real requests stand in for it. ``stalled``: no answer in time, and
    nothing moved for other requests either.
    """

    ok: bool
    ms: int
    text: str = ""
    how: str = "completion"
    stalled: bool = False


class Server:
    """The vLLM server of this group as seen from its own node."""

    def __init__(self, host: str, port: int, model: str, api_key_file: Path | None) -> None:
        self._host, self._port, self._model = _ANY.get(host, host), port, model
        self._api_key_file = api_key_file

    def is_healthy(self) -> bool:
        """Whether /health answers 200 within two seconds."""
        try:
            return self._ask("GET", "/health", None, {}, 2.0)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def counters(self) -> Counters | None:
        """Counters from /metrics, summed over engines; None if they cannot be read."""
        try:
            code, body = self._ask("GET", "/metrics", None, {}, 5.0)
        except (OSError, http.client.HTTPException):
            return None
        sums = dict.fromkeys(
            ("generation_tokens_total", "prompt_tokens_total", "num_requests_running", "kv_cache_usage_perc"), 0.0
        )
        for name, value in _COUNTER.findall(body.decode("utf-8", "replace")):
            with contextlib.suppress(ValueError):
                sums[name] += float(value)
        if code != 200:
            return None
        tokens = sums["generation_tokens_total"] + sums["prompt_tokens_total"]
        return Counters(sums["num_requests_running"], tokens, sums["kv_cache_usage_perc"])

    def answers_without_key(self) -> bool:
        """Whether the API can be used without a key: with a key file declared, that must never be so."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self._ask("GET", "/v1/models", None, {}, 10.0)[0] == 200
        return False

    def complete(self, timeout_s: float) -> Verdict:
        """One short completion. Content or reasoning must come back."""
        started = time.monotonic()
        deadline = started + timeout_s
        try:
            headers = self._authorization()
            body: dict[str, Any] = {"model": self._model, "max_tokens": 16, "temperature": 0, "stream": False}
            chat = {**body, "messages": [{"role": "user", "content": "Say OK."}]}
            code, answer = self._ask("POST", "/v1/chat/completions", chat, headers, timeout_s)
            if code in (400, 404) and b"template" in answer.lower():  # a base model has no chat template
                left = max(1.0, deadline - time.monotonic())
                code, answer = self._ask("POST", "/v1/completions", {**body, "prompt": "OK"}, headers, left)
            text = "" if code == 200 and _has_text(answer) else _explain(code, answer)
        except TimeoutError:
            text = f"the completion did not come back within {timeout_s:.0f} s"
            return Verdict(False, int((time.monotonic() - started) * 1000), text, stalled=True)
        except (OSError, http.client.HTTPException, ValueError) as error:
            text = f"the completion got no answer: {type(error).__name__}: {error}"
        return Verdict(not text, int((time.monotonic() - started) * 1000), text)

    def _authorization(self) -> dict[str, str]:
        if self._api_key_file is None:
            return {}
        lines = self._api_key_file.read_text(encoding="utf-8", errors="replace").splitlines()
        keys = [line.strip() for line in lines if line.strip()]
        # An unprintable character would make the HTTP client quote the whole header in its error.
        if not keys or not (keys[0].isascii() and keys[0].isprintable()):
            raise ValueError(f"{self._api_key_file} holds no usable key in its first line")
        return {"Authorization": f"Bearer {keys[0]}"}

    def _ask(
        self, method: str, path: str, body: object, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        # A socket's time limit is one for each read; the timer bounds the whole exchange.
        timer = threading.Timer(timeout_s, _cut, (connection,))
        timer.daemon = True
        started = time.monotonic()
        try:
            timer.start()
            data = None if body is None else json.dumps(body).encode()
            kind = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, body=data, headers={**kind, **headers})
            response = connection.getresponse()
            return response.status, response.read(_MAX_BODY_BYTES)
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() - started >= timeout_s - 0.05:
                raise TimeoutError(f"{method} {path}") from error
            raise
        finally:
            timer.cancel()
            connection.close()


class Canary:
    """A look at the server in the background, so that its wait does not keep the rank from watching the others.

    Args:
        before: Counters at the last look. If tokens have come since and requests run, no completion is needed, and
            one that fails only says that the server is full. None: only a completion counts.
    """

    def __init__(self, server: Server, timeout_s: float, before: Counters | None = None) -> None:
        self.counters = before
        self._verdict: Verdict | None = None
        self._timeout_s = timeout_s
        self._started = time.monotonic()
        threading.Thread(target=self._run, args=(server, before), name="canary", daemon=True).start()

    def _run(self, server: Server, before: Counters | None) -> None:
        now = server.counters()
        verdict = Verdict(True, 0, how="traffic")
        if not _serves_others(before, now):
            verdict, start = server.complete(self._timeout_s), now
            now = server.counters()
            if not verdict.ok and before is not None and _serves_others(start, now):
                verdict = Verdict(True, verdict.ms, how="traffic")  # slow because it is full, not dead
            elif verdict.stalled and (before is None or start is None or now is None):
                # The first one may compile for long, and a server too busy to show its counters may be alive.
                verdict = replace(verdict, stalled=False)
        self.counters = now
        self._verdict = verdict

    def result(self) -> Verdict | None:
        """The outcome, or None while it is still under way and in time."""
        if self._verdict is None and time.monotonic() - self._started > self._timeout_s + 15:
            return Verdict(False, int(self._timeout_s * 1000), "the completion hangs beyond its time limit")
        return self._verdict


def _serves_others(before: Counters | None, now: Counters | None) -> bool:
    if before is None or now is None or now.running == 0:
        return False
    return now.tokens > before.tokens or now.kv_cache != before.kv_cache


def _cut(connection: http.client.HTTPConnection) -> None:
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(socket.SHUT_RDWR)


def _has_text(answer: bytes) -> bool:
    choices = json.loads(answer).get("choices") or [{}]
    message = choices[0].get("message") or choices[0]
    return any(message.get(name) for name in _ANSWERS)


def _explain(code: int, answer: bytes) -> str:
    if code == 200:
        return "the completion came back empty: neither content nor reasoning"
    return f"the completion got HTTP {code}: {answer[:300].decode('utf-8', 'replace').strip()}"
