"""Runs on a node, sent there as text: downloads a revision of the hub into a folder.

Standard library only. The client of the hub runs in a throw-away container of the serving image
(``spark_core/hub/image_fetch.py``) and writes into ``<folder>.incoming``; here each file is verified as soon as it is
whole, and moved. What a hub cache of the node has of it is copied instead, if it is right. The container ends with this
process: its standard input then does.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from spark_core.transfer.node_folder import BLOCK, sha256_of, sizes
from spark_core.transfer.node_links import started
from spark_core.transfer.node_mover import Mover
from spark_core.transfer.node_store import Store

SHA256_DIGITS = 64
KILL_S = 3
TAIL = 400
INDEX = "model.safetensors.index.json"


class HubStore(Store):
    """A folder whose small files are known by git's object id until they are there."""

    lacked: frozenset[str] = frozenset()
    """Files that were missing when this process took the folder."""

    def progress(self) -> int:
        """Bytes that are there of what was missing; the client writes them, so the folder is asked."""
        whole: int = sum(self.files[name][0] for name in self.lacked if name in self.whole)
        return whole + sum(size for name, size in sizes(self.incoming).items() if name in self.lacked - self.whole)

    def _prepare(self) -> bool:
        if not super()._prepare():
            return False
        for name in [name for name in self.todo if len(self.files[name][1]) != SHA256_DIGITS]:
            self.settle(name, self.root / name)
        with self.changed:
            self.whole |= {name for name in self.todo if self._is_settled(name)}
            self.todo = [name for name in self.todo if name not in self.whole]
            self.total = sum(self.files[name][0] for name in self.todo)
        self.lacked = frozenset(self.todo)
        return True

    def _is_settled(self, name: str) -> bool:
        path = self.root / name
        return path.is_file() and self.files[name] == [path.stat().st_size, self.hashes.recall(path)]

    def settle(self, name: str, path: Path) -> bool:
        """If a small file has git's object id, know it by its SHA-256 from now on."""
        size, wanted = self.files[name]
        if len(wanted) == SHA256_DIGITS:
            return True
        try:
            if path.stat().st_size != size or git_id_of(path, size) != wanted:
                return False
            self.files[name] = [size, sha256_of(path)]
        except OSError:
            return False
        if path.is_relative_to(self.root):
            self.hashes.note(path, self.files[name][1])
        return True

    def verify(self, name: str) -> None:
        """Take a file that has arrived whole, or drop it with a fault."""
        path = self.incoming / name
        if self.settle(name, path):
            self.take(name, lambda _offset: iter(()))
        else:
            self.fault("wrong", name)

    def adopt(self, name: str, path: Path) -> None:
        """Take a file that a hub cache has; if it is not right there, it is downloaded."""

        def rest(offset: int) -> Iterator[memoryview]:
            block = memoryview(bytearray(BLOCK))
            with path.open("rb", buffering=0) as file:
                file.seek(offset)
                while count := file.readinto(block):
                    yield block[:count]
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        try:
            right = path.stat().st_size == self.files[name][0] and self.settle(name, path)
        except OSError:
            return
        if right:
            before = len(self.faults)
            self.take(name, rest)
            if name not in self.whole and self.faults[before:] and self.faults[-1]["kind"] == "wrong":
                del self.faults[before:]
                self.have[name] = 0
                (self.incoming / name).unlink(missing_ok=True)


def git_id_of(path: Path, size: int) -> str:
    """Git's object id of a small file."""
    return hashlib.sha1(b"blob %d\0" % size + path.read_bytes(), usedforsecurity=False).hexdigest()


class Downloader(Mover):
    """Brings the files of a revision to this node."""

    def __init__(self, orders: dict[str, Any], stdin: io.BufferedReader) -> None:
        super().__init__(orders, stdin)
        self.hub: dict[str, Any] = orders["from"]["hub"]
        self.store = self.folder = HubStore(orders["target"], orders["files"], orders["cache"], onward=False)
        self.client: subprocess.Popen[bytes] | None = None
        self.arrived_before = 0

    def run(self) -> None:
        """Follow the orders to the end of this process."""
        self.passed_on.set()
        started(self.tell)
        started(self.conclude)
        started(self.folder.fill, self.bring)
        for _ in self.messages():
            pass

    def bring(self) -> None:
        """Take what a cache of the node has, and download the rest."""
        store = self.folder
        self.arrived_before = store.progress()
        for name in store.todo if self.hub["snapshot"] else ():
            store.adopt(name, Path(self.hub["snapshot"]) / name)
        copied = store.progress() - self.arrived_before
        left = [name for name in store.todo if name not in store.whole]
        if left:
            self.download(left)
        store.received = store.progress() - self.arrived_before - copied
        store.todo = []
        self.check_index()

    def download(self, names: list[str]) -> None:
        """Run the client of the hub in the serving image, and verify each file that it has brought."""
        subprocess.run(["docker", "rm", "-f", self.hub["container"]], capture_output=True, check=False)
        incoming = self.folder.incoming
        for folder in {(incoming / name).parent for name in names}:
            folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                if (incoming / name).stat().st_size > self.folder.files[name][0]:
                    (incoming / name).unlink()
        words = [word.replace("{incoming}", str(incoming)) for word in self.hub["run"]]
        user = ["--user", f"{os.getuid()}:{os.getgid()}"]
        errors = bytearray()
        client = subprocess.Popen(
            ["docker", "run", *user, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.client = client
        if client.stdin is None or client.stdout is None or client.stderr is None:
            raise AssertionError("a process without pipes")
        reading = started(lambda pipe: errors.extend(pipe.read()), client.stderr)
        files = [[name, self.folder.files[name][0]] for name in names]
        with contextlib.suppress(BrokenPipeError):
            client.stdin.write(json.dumps(self.hub["orders"] | {"files": files}).encode() + b"\n")
            client.stdin.flush()  # it stays open: the container ends with it
        ended = False
        for line in client.stdout:
            with contextlib.suppress(ValueError):
                ended = self.heed(json.loads(line)) or ended
        status = client.wait()
        reading.join(1)
        if not ended:
            said = errors[-TAIL:].decode(errors="replace").strip().splitlines()
            told = f"exit status {status}" + (f" ({said[-1]})" if said else "")
            self.store.faults.append({"kind": "hub:died", "found": told})

    def heed(self, told: Any) -> bool:
        """What the client says; True with its last word."""
        if not isinstance(told, dict):
            return False
        if "file" in told and "fault" not in told:
            self.folder.verify(str(told["file"]))
        elif told.get("fault") == "disk":
            self.store.fault("disk", str(told["file"]), told["found"])
        elif "fault" in told:
            fault = {"kind": f"hub:{told['fault']}", "file": str(told["file"]), "found": str(told["found"])}
            self.store.faults.append(fault | {"wait_s": int(told["wait_s"])})
        return "end" in told

    def check_index(self) -> None:
        """Nothing becomes visible whose index names a shard that is not there."""
        store = self.folder
        if not store.is_whole() or INDEX not in store.files:
            return
        try:
            shards = sorted(set(json.loads((store.root / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            store.fault("hub:index", INDEX, "no index")
            shards = []
        missing = [str(shard) for shard in shards if shard not in store.files]
        if missing:
            store.fault("hub:index", missing[0], f"that {INDEX} names {missing[0]} and the hub has none")
        if store.faults:
            store.whole.discard(INDEX)

    def end(self, status: int) -> NoReturn:
        """End this process and the container, whatever they do."""
        client = self.client
        if client is not None and client.poll() is None:
            kill = ["docker", "kill", self.hub["container"]]
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(kill, capture_output=True, timeout=KILL_S, check=False)
            client.kill()
        super().end(status)


def main() -> None:
    """Answer the orders."""
    os.umask(0o022)
    stdin = os.fdopen(0, "rb")
    Downloader(json.loads(stdin.readline()), stdin).run()
