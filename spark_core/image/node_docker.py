"""Runs on a node, sent there as text: which layers of an image its Docker daemon has, and loading those that come.

Standard library only. The classic image store takes an archive that lacks the content of layers which it has already
(tarexport of moby: a chain of layers that is there is not read). So layers are loaded as they come: each load is an
image of the layers so far, of no use but to keep them, and the last one is the image itself.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import IO, Any

PART_LABEL = "spark-vllm.part-of"
ANSWER_S = 60
LOAD_S = 300
"""Seconds for any load; a slow disk gets more for many bytes."""
SLOWEST_BYTES_PER_S = 10_000_000
TOGETHER_BYTES = 64 << 20
"""Layers below this go into one load: each load costs some tenths of a second."""
_COPY = 1 << 20


class DockerError(Exception):
    """The daemon did not do what it was asked for; the text is its own last line."""


def ask_docker(*words: str) -> str:
    """What a docker command prints.

    Raises:
        DockerError: it failed or gave no answer.
    """
    try:
        done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DockerError(f"no answer of docker {words[0]}: {error}") from None
    if done.returncode != 0:
        raise DockerError(_last_line(done.stderr) or f"exit status {done.returncode}")
    return done.stdout


def file_name(layer: str) -> str:
    """Name of the file that holds a layer, from its id."""
    return layer.removeprefix("sha256:") + ".tar"


def layers_there(layers: Sequence[str]) -> int:
    """How many of an image's layers, from the lowest on, the daemon has."""
    ids = ask_docker("image", "ls", "--all", "--quiet", "--no-trunc").split()
    if not ids:
        return 0
    most = 0
    for line in ask_docker("image", "inspect", "--format", "{{json .RootFS.Layers}}", *sorted(set(ids))).splitlines():
        same = 0
        for mine, other in zip(layers, json.loads(line) or [], strict=False):
            if mine != other:
                break
            same += 1
        most = max(most, same)
    return most


def store_state(layers: Sequence[str]) -> dict[str, Any]:
    """What the daemon has of an image and the space that it has for the rest."""
    info = json.loads(ask_docker("info", "--format", "{{json .}}"))
    root = str(info.get("DockerRootDir") or "/")
    disk = os.statvfs(root)
    return {
        "have": layers_there(layers),
        "root": root,
        "driver": info.get("Driver"),
        "containerd": "io.containerd.snapshotter" in json.dumps(info.get("DriverStatus") or []),
        "free": disk.f_bavail * disk.f_frsize,
    }


class Load:
    """One ``docker load`` that is fed as layers arrive, and takes them once it gets their manifest.

    The daemon first writes what it gets to a folder of its own, and then unpacks it; so the next load can be fed while
    this one is unpacked.
    """

    def __init__(self) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as this)
        self._process = subprocess.Popen(
            ["docker", "load", "--quiet"], stdin=subprocess.PIPE, stdout=self._said, stderr=subprocess.STDOUT
        )
        self.fed = 0

    def begin(self, name: str, size: int) -> None:
        """Announce a file."""
        self._write(_header(name, size))

    def feed(self, file: IO[bytes], offset: int, count: int) -> int:
        """Give some bytes of a file; how many were taken."""
        pipe = self._pipe
        try:
            taken = os.sendfile(pipe.fileno(), file.fileno(), offset, min(count, _COPY))
        except BrokenPipeError:
            raise DockerError(self._end(ANSWER_S)) from None
        self.fed += taken
        return taken

    def close_file(self, size: int) -> None:
        """End a file."""
        self._write(bytes(-size % tarfile.BLOCKSIZE))

    def commit(self, members: dict[str, bytes]) -> None:
        """Give the configuration and the manifest: now the daemon unpacks."""
        for name, content in members.items():
            self._write(_header(name, len(content)) + content + bytes(-len(content) % tarfile.BLOCKSIZE))
        self._write(bytes(2 * tarfile.BLOCKSIZE))
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()

    def wait(self, alive: Callable[[], object]) -> None:
        """Wait until the daemon has unpacked it.

        Args:
            alive: Called now and then, since the daemon does not say how far it is.

        Raises:
            DockerError: it did not take it, or did not end in time.
        """
        limit_s = LOAD_S + self.fed / SLOWEST_BYTES_PER_S
        end = time.monotonic() + limit_s
        while self._process.poll() is None:
            if time.monotonic() > end:
                self._process.kill()
                self._process.wait()
                raise DockerError(f"no end of docker load within {limit_s:.0f} s")
            alive()
            time.sleep(0.1)
        if self._process.returncode != 0:
            raise DockerError(self._end(0))

    def abort(self) -> None:
        """End it; the daemon throws away what it got."""
        self._process.kill()
        self._process.wait()

    @property
    def _pipe(self) -> IO[bytes]:
        if self._process.stdin is None:
            raise DockerError("docker load has no standard input")
        return self._process.stdin

    def _write(self, content: bytes) -> None:
        try:
            self._pipe.write(content)
            self._pipe.flush()
        except BrokenPipeError:
            raise DockerError(self._end(ANSWER_S)) from None

    def _end(self, patience_s: float) -> str:
        """What it said at its end."""
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.abort()
        self._said.seek(0)
        text = self._said.read().decode(errors="replace")
        return _last_line(text) or f"docker load ended with status {self._process.returncode}"


class Loader:
    """Gives an image to the daemon, some of its layers at a time.

    Args:
        image: ``id``, ``config`` (its text), ``layers`` (ids from the lowest on) and the ``tag`` that it gets.
    """

    def __init__(self, image: dict[str, Any]) -> None:
        self.image = image
        self.layers: list[str] = image["layers"]

    def batch(self, first: int, sizes: dict[str, int]) -> int:
        """Where to end a load that begins with a layer: small ones go together, and about eight loads make an image."""
        end, size, most = first, 0, max(TOGETHER_BYTES, sum(sizes.values()) // 8)
        while end < len(self.layers) and (end == first or size + sizes[file_name(self.layers[end])] <= most):
            size += sizes[file_name(self.layers[end])]
            end += 1
        return end

    def members(self, end: int) -> dict[str, bytes]:
        """The archive's own files: the configuration of the image, or of a part of it, and its manifest."""
        if end == len(self.layers):
            config, tags = str(self.image["config"]).encode(), [self.image["tag"]]
        else:
            whole = json.loads(self.image["config"])
            part = {key: whole[key] for key in ("architecture", "os", "variant") if key in whole}
            part["config"] = {"Labels": {PART_LABEL: self.image["id"]}}
            part["rootfs"] = {"type": "layers", "diff_ids": self.layers[:end]}
            config, tags = json.dumps(part, sort_keys=True).encode(), []
        name = sha256(config).hexdigest() + ".json"
        manifest = [{"Config": name, "RepoTags": tags, "Layers": [file_name(layer) for layer in self.layers[:end]]}]
        return {name: config, "manifest.json": json.dumps(manifest).encode()}

    def finish(self) -> None:
        """Remove the images that only kept its layers.

        Raises:
            DockerError: the daemon gave no answer.
        """
        parts = ask_docker(
            *("image", "ls", "--all", "--quiet", "--no-trunc", "--filter", f"label={PART_LABEL}={self.image['id']}")
        )
        if parts.split():
            with contextlib.suppress(DockerError):  # what stays does no harm, and goes with the next image
                ask_docker("image", "rm", *sorted(set(parts.split())))


def _header(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.GNU_FORMAT)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][-300:] if lines else ""


def main() -> None:
    """Answer the orders: what is there of an image; with ``load``, an image of which only the configuration lacks."""
    orders = json.loads(io.TextIOWrapper(sys.stdin.buffer).readline())
    try:
        if orders.get("load"):
            loader, load = Loader(orders["image"]), Load()
            load.commit(loader.members(len(loader.layers)))
            load.wait(lambda: None)
            loader.finish()
        print(json.dumps(store_state(orders["image"]["layers"])))
    except (DockerError, OSError, ValueError) as error:
        sys.exit(str(error))
