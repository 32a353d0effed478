"""A small model hub: the protocol of the Hugging Face hub over files, so that its real client has something to ask.

``FOLDER/ORG/NAME/BRANCH/…`` are the models. A branch's commit follows from its content, so changed files are another
commit; every commit that was asked for stays available. Large files are given by a redirect to another address, as the
real hub does, and with their SHA-256; small ones directly, with git's object id.

It can be slow, break off, send wrong bytes, hang, and refuse: ``rules`` say for which requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

LARGE_BYTES = 1 << 20
"""Files from this size on are given by a redirect; so are all weights."""
WEIGHTS = (".safetensors", ".bin", ".gguf")
_BLOCK = 1 << 16
_REFUSALS = {
    401: ("", "Invalid username or password."),
    403: ("GatedRepo", "Access to this model is restricted and you are not in the authorized list."),
    404: ("RepoNotFound", "Repository not found"),
    429: ("", "You have reached the rate limit"),
    503: ("", ""),
}
MODES = ("slow", "cut", "corrupt", "silent", *(str(status) for status in _REFUSALS))


@dataclass
class Rule:
    """What goes wrong, and when.

    Args:
        mode: One of ``MODES``.
        match: Part of the path of the requests that it is for.
        at: For ``slow`` the bytes per second, for ``cut`` and ``corrupt`` the number of a byte of the file.
        times: How often, or None for always.
    """

    mode: str
    match: str = ""
    at: int = 0
    times: int | None = None


@dataclass(frozen=True)
class Stored:
    """A file of a commit."""

    path: Path
    size: int
    sha256: str
    git_id: str

    @property
    def large(self) -> bool:
        return self.size >= LARGE_BYTES or self.path.name.endswith(WEIGHTS)


@dataclass
class Hub:
    """The hub; a context in which it answers.

    Args:
        folder: Folder of the models.
        address: Address that it listens at.
        port: Port, or 0 for one that the system chooses; ``store_port`` the one at which large files are given.
        token: If set, nothing is given to who does not show it.
    """

    folder: Path
    address: str = "127.0.0.1"
    port: int = 0
    store_port: int = 0
    token: str = ""
    rules: list[Rule] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    """``METHOD PATH`` of each request, with the range that it asked for, and ``+token`` if it showed one."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes of each file that were sent."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    _commits: dict[str, dict[str, Stored]] = field(default_factory=dict)
    _servers: list[http.server.ThreadingHTTPServer] = field(default_factory=list)

    def __enter__(self) -> Hub:
        self.port, self.store_port = self._serve(self.port), self._serve(self.store_port)
        return self

    def _serve(self, port: int) -> int:
        hub = self

        class Bound(_Handler):
            pass

        Bound.hub = hub
        server = http.server.ThreadingHTTPServer((self.address, port), Bound)
        server.daemon_threads = True
        self._servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return int(server.server_address[1])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._servers:
            server = self._servers.pop()
            server.shutdown()
            server.server_close()

    @property
    def endpoint(self) -> str:
        """Its address, as HF_ENDPOINT has it."""
        return f"http://{self.address}:{self.port}"

    def commit(self, repository: str, revision: str = "main") -> str | None:
        """The commit that a revision is at this moment; None if there is no such one."""
        if f"{repository}@{revision}" in self._commits:
            return revision
        branch = self.folder / repository / revision
        if not branch.is_dir():
            return None
        files = {str(path.relative_to(branch)): path for path in sorted(branch.rglob("*")) if path.is_file()}
        stored = {name: _stored(path) for name, path in files.items()}
        text = "".join(f"{name}\0{one.sha256}\n" for name, one in sorted(stored.items()))
        commit = hashlib.sha1(f"{repository}\n{text}".encode(), usedforsecurity=False).hexdigest()
        self._commits[f"{repository}@{commit}"] = stored
        return commit

    def files(self, repository: str, commit: str) -> dict[str, Stored]:
        """The files of a commit."""
        return self._commits[f"{repository}@{commit}"]

    def rule(self, path: str, *modes: str) -> Rule | None:
        """The first rule of these modes for a request; it counts as used."""
        with self.lock:
            for rule in self.rules:
                if rule.mode in modes and rule.match in path and rule.times != 0:
                    rule.times = None if rule.times is None else rule.times - 1
                    return rule
        return None


class _Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed; ``requests`` has them."""

    def _answer(self, *, with_body: bool) -> None:
        path = urllib.parse.unquote(self.path)
        shown = self.headers.get("Authorization", "")
        with self.hub.lock:
            part = f" {self.headers['Range']}" if "Range" in self.headers else ""
            self.hub.requests.append(f"{self.command} {path}{part}" + (" +token" if shown else ""))
        refused = self.hub.rule(path, *(str(status) for status in _REFUSALS))
        if refused is not None:
            return self._refuse(int(refused.mode))
        if self.hub.rule(path, "silent"):
            time.sleep(3600)
        if path.startswith("/cdn/"):
            repository, commit, name = self._cdn(path)
            return self._give(repository, commit, name, with_body=with_body)
        if self.hub.token and shown != f"Bearer {self.hub.token}":
            return self._refuse(401)
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/([^?]+)(\?.*)?", path)
        if found:
            return self._describe(found[1], found[2])
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)(\?.*)?", path)
        if found:
            return self._resolve(found[1], found[2], found[3], with_body=with_body)
        return self._refuse(404)

    def _cdn(self, path: str) -> tuple[str, str, str]:
        _, _, owner, model, commit, name = path.split("/", 5)
        return f"{owner}/{model}", commit, name

    def _refuse(self, status: int, code: str = "", message: str = "") -> None:
        known_code, known_message = _REFUSALS[status]
        self.send_response(status)
        if code or known_code:
            self.send_header("X-Error-Code", code or known_code)
        self.send_header("X-Error-Message", message or known_message)
        if status == 429:
            self.send_header("RateLimit", '"resolvers";r=0;t=210')
            self.send_header("Retry-After", "210")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _describe(self, repository: str, revision: str) -> None:
        commit = self.hub.commit(repository, revision)
        if commit is None:
            known = (self.hub.folder / repository).is_dir()
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}") if known else self._refuse(401)
        siblings = []
        for name, one in sorted(self.hub.files(repository, commit).items()):
            entry: dict[str, Any] = {"rfilename": name, "size": one.size, "blobId": one.git_id}
            if one.large:
                entry["lfs"] = {"sha256": one.sha256, "size": one.size, "pointerSize": 134}
            siblings.append(entry)
        body = json.dumps({"id": repository, "sha": commit, "gated": False, "siblings": siblings}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        return None

    def _resolve(self, repository: str, revision: str, name: str, *, with_body: bool) -> None:
        commit = self.hub.commit(repository, revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound")
        one = self.hub.files(repository, commit).get(name)
        if one is None:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        if not one.large:
            return self._give(repository, commit, name, with_body=with_body)
        self.send_response(302)
        self.send_header(
            "Location",
            f"http://{self.hub.address}:{self.hub.store_port}/cdn/{repository}/{commit}/{urllib.parse.quote(name)}",
        )
        self.send_header("X-Repo-Commit", commit)
        self.send_header("X-Linked-Size", str(one.size))
        self.send_header("X-Linked-ETag", f'"{one.sha256}"')
        self.send_header("Content-Length", "0")
        self.end_headers()
        return None

    def _give(self, repository: str, commit: str, name: str, *, with_body: bool) -> None:
        one = self.hub.files(repository, commit)[name]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        last = min(int(asked[2]) if asked and asked[2] else one.size - 1, one.size - 1)
        if asked and first >= one.size:
            self.send_response(416)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{one.sha256 if one.large else one.git_id}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last - first + 1))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{one.size}")
        self.end_headers()
        if with_body:
            self._send(one, name, first, last)

    def _send(self, one: Stored, name: str, first: int, last: int) -> None:
        slow, cut, corrupt = (self.hub.rule(self.path, mode) for mode in ("slow", "cut", "corrupt"))
        with contextlib.suppress(OSError):
            for offset, block in _blocks(one.path, first, last):
                if corrupt is not None and offset <= corrupt.at < offset + len(block):
                    at = corrupt.at - offset
                    block = block[:at] + bytes([block[at] ^ 1]) + block[at + 1 :]
                if cut is not None and offset + len(block) > cut.at:
                    block = block[: max(0, cut.at - offset)]
                self.wfile.write(block)
                with self.hub.lock:
                    self.hub.sent[name] = self.hub.sent.get(name, 0) + len(block)
                if cut is not None and offset + len(block) >= cut.at:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if slow is not None:
                    time.sleep(len(block) / slow.at)


def _blocks(path: Path, first: int, last: int) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        file.seek(first)
        while first <= last:
            block = file.read(min(_BLOCK, last + 1 - first))
            if not block:
                return
            yield first, block
            first += len(block)


def _stored(path: Path) -> Stored:
    sha256, git = hashlib.sha256(), hashlib.sha1(usedforsecurity=False)
    size = path.stat().st_size
    git.update(b"blob %d\0" % size)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            sha256.update(block)
            git.update(block)
    return Stored(path, size, sha256.hexdigest(), git.hexdigest())


def parse_rule(text: str) -> Rule:
    """A rule as it is given on the command line: ``MODE[:MATCH[:AT[:TIMES]]]``.

    Raises:
        ValueError: it is none.
    """
    mode, match, at, times, *_ = [*text.split(":"), "", "", ""]
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}: one of {', '.join(MODES)}")
    return Rule(mode, match, int(at or 0), int(times) if times else None)
