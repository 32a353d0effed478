"""Runs on a node, sent there as text: gives the layers of an image to other nodes, or takes and loads them.

Standard library only. Who gives runs in a throw-away container that sees the daemon's layers read-only: a layer's tar
is put together from ``tar-split.json.gz`` (headers) and the files of its folder, so nothing is written for it.
Who takes runs as the deploy user: layers arrive as files by the rules of every transfer, and go into the daemon while
the next ones arrive.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import io
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from spark_core.image.node_docker import DockerError, Load, Loader, file_name
from spark_core.transfer.node_folder import sha256_of
from spark_core.transfer.node_links import said, started
from spark_core.transfer.node_mover import Mover
from spark_core.transfer.node_store import FLUSH, OF_THE_DISK, Store

_SMALL = 1 << 16
_BUFFER = 1 << 20
_TICK_S = 0.5
_DIRECTORY = 2
"""Kinds of lines in tar-split: 1 is a file, whose content lies in the layer's folder; 2 is a piece as it is."""


class LayerStore:
    """The layers of a daemon with the classic store on overlay2.

    Args:
        metadata: Folder of its ``image/overlay2``.
        content: Folder of its ``overlay2``.
    """

    def __init__(self, metadata: Path, content: Path) -> None:
        self.metadata, self.content = metadata, content
        self.folders: dict[str, tuple[Path, Path]] = {}

    def open_image(self, image_id: str) -> dict[str, Any]:
        """The text of an image's configuration, and its layers with the sizes of their tars."""
        text = (self.metadata / "imagedb/content/sha256" / image_id.removeprefix("sha256:")).read_text()
        layers: list[str] = json.loads(text)["rootfs"]["diff_ids"]
        chain, sizes = "", {}
        for layer in layers:
            chain = f"sha256:{sha256(f'{chain} {layer}'.encode()).hexdigest()}" if chain else layer
            folder = self.metadata / "layerdb/sha256" / chain.removeprefix("sha256:")
            cache = (folder / "cache-id").read_text().strip()
            self.folders.setdefault(file_name(layer), (folder / "tar-split.json.gz", self.content / cache / "diff"))
        for name in self.folders:
            sizes[name] = sum(len(piece) if isinstance(piece, bytes) else piece[1] for piece in self.pieces(name))
        return {"config": text, "layers": layers, "sizes": sizes}

    def pieces(self, name: str) -> Iterator[bytes | tuple[Path, int]]:
        """What a layer's tar consists of: bytes as they are, and files with their sizes."""
        split, folder = self.folders[name]
        with gzip.open(split, "rt") as lines:
            for line in lines:
                entry = json.loads(line)
                if entry["type"] == _DIRECTORY:
                    yield base64.b64decode(entry.get("payload") or "")
                elif entry.get("size"):
                    raw = entry.get("name_raw")
                    path = os.fsdecode(base64.b64decode(raw)) if raw else entry["name"]
                    yield folder / os.path.normpath("/" + path).lstrip("/"), entry["size"]


class Giver(Mover):
    """Gives layers out of the daemon's own folders."""

    def __init__(self, orders: dict[str, Any], stdin: io.BufferedReader, layers: LayerStore) -> None:
        super().__init__(orders, stdin)
        self.layers = layers

    def send(self, link: socket.socket, name: str, offset: int) -> bool:
        """Send a layer from an offset on; False if its content is not as its tar-split says."""
        waiting = bytearray()
        for piece in self.layers.pieces(name):
            size = len(piece) if isinstance(piece, bytes) else piece[1]
            if offset >= size:
                offset -= size
                continue
            if isinstance(piece, bytes):
                waiting += piece[offset:]
            else:
                try:
                    file = piece[0].open("rb", buffering=0)
                except OSError as error:
                    self.store.fault("altered", name, f"{piece[0].name}: {error.strerror}")
                    return False
                with file:
                    if size - offset <= _SMALL:
                        content = os.pread(file.fileno(), size - offset, offset)
                        waiting += content
                        whole = len(content) == size - offset
                    else:
                        self._flush(link, waiting)
                        whole = self._send_file(link, file, offset, size)
                if not whole:
                    self.store.fault("altered", name, f"{piece[0].name} became shorter")
                    return False
            offset = 0
            if len(waiting) >= _BUFFER:
                self._flush(link, waiting)
        self._flush(link, waiting)
        return True

    def _flush(self, link: socket.socket, waiting: bytearray) -> None:
        link.sendall(waiting)
        with self.store.changed:
            self.sent += len(waiting)
        waiting.clear()

    def _send_file(self, link: socket.socket, file: IO[bytes], offset: int, size: int) -> bool:
        start = offset
        while offset < size:
            count = os.sendfile(link.fileno(), file.fileno(), offset, size - offset)
            if not count:
                return False
            offset += count
            with self.store.changed:
                self.sent += count
        os.posix_fadvise(file.fileno(), start, size - start, os.POSIX_FADV_DONTNEED)
        return True


class LayerFolder(Store):
    """The layers on their way: not hashed while they arrive, since Docker does that when it takes them.

    On a Spark's processor a second hash is cheap, in the lab it was the half of what the transfer costs. Files of an
    interrupted run are hashed when the next one looks at them.
    """

    def take(self, name: str, rest: Callable[[int], Iterator[memoryview]]) -> bool:
        """Bring a layer to its end, from what has arrived of it before; False if the rest does not come."""
        size, path, flushed = self.files[name][0], self.incoming / name, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b", buffering=0) as file:
                before = min(os.fstat(file.fileno()).st_size, size)
                file.truncate(before)
                file.seek(before)
                offset = self._advance(name, before)
                for view in rest(offset):
                    written = 0
                    while written < len(view):
                        written += file.write(view[written:])
                    offset = self._advance(name, len(view), received=len(view))
                    if offset - flushed >= FLUSH:
                        flushed = self._settle(file.fileno(), offset)
            with self.changed:
                path.replace(self.root / name)
                self.whole.add(name)
        except OSError as error:
            self.fault("disk" if error.errno in OF_THE_DISK else "cut", name, said(error))
            return False
        return True

    def remember(self) -> None:
        """Write nothing down: no hash is known."""

    def throw_away_wrong(self, names: Iterable[str]) -> None:
        """Of layers that Docker did not take, remove those that arrived wrong."""
        for name in names:
            path = self.path(name)
            if path.is_file() and sha256_of(path) != self.files[name][1]:
                path.unlink()
                self.fault("wrong", name)


class Taker(Mover):
    """Takes the layers that are missing, passes them on, and loads them into the daemon."""

    def __init__(self, orders: dict[str, Any], stdin: io.BufferedReader, image: dict[str, Any]) -> None:
        super().__init__(orders, stdin)
        self.layers = self.store = LayerFolder(
            orders["target"], orders["files"], orders["cache"], onward=orders["onward"]
        )
        self.loader, self.have = Loader(image), int(image["have"])
        self.order = {file_name(layer): place for place, layer in reversed(list(enumerate(image["layers"])))}
        self.loaded, self.in_docker, self._seen = threading.Event(), False, 0.0

    def run(self) -> None:
        """Follow the orders to the end of this process."""
        started(self.load_all)
        super().run()

    def fetch(self, link: socket.socket) -> None:
        """Take layers over one connection, the lowest first: they are loaded in that order."""
        with self.store.changed:
            self.store.todo.sort(key=lambda name: self.order[name])
        super().fetch(link)

    def load_all(self) -> None:
        """Load layers as they arrive, until all are there or the rest does not come."""
        layers, at = self.loader.layers, self.have
        sizes = {name: size for name, (size, _) in self.store.files.items()}
        before: Load | None = None
        try:
            while at < len(layers):
                end = self.loader.batch(at, sizes)
                names = list(dict.fromkeys(file_name(layer) for layer in layers[at:end]))
                load = Load()
                try:
                    if not all(self._feed(load, name, sizes[name]) for name in names):
                        load.abort()
                        return
                    if before is not None:  # its layers are below these
                        before.wait(self._alive)
                    load.commit(self.loader.members(end))
                except (DockerError, OSError):
                    load.abort()
                    raise
                before, at = load, end
            if before is not None:
                before.wait(self._alive)
            self.loader.finish()
            self.in_docker = True
        except DockerError as error:
            self.store.fault("load", file_name(layers[min(at, len(layers) - 1)]), error)
            self.layers.throw_away_wrong(self.store.names)
        except OSError as error:
            self.store.fault("disk", file_name(layers[min(at, len(layers) - 1)]), error.strerror)
        finally:
            if before is not None and not self.in_docker:
                with contextlib.suppress(DockerError):  # what it holds is kept for the next run
                    before.wait(self._alive)
            self.loaded.set()

    def _feed(self, load: Load, name: str, size: int) -> bool:
        """Give a layer to a load while it arrives; False if the rest does not come, or it is not what it must be."""
        store, offset = self.store, 0
        load.begin(name, size)
        with contextlib.ExitStack() as stack:
            file: IO[bytes] | None = None
            while True:
                with store.changed:
                    while not store.changed.wait_for(partial(self._has_more, name, offset), _TICK_S):
                        pass  # that nothing will come is set without a word
                    ready = store.have[name]
                    if offset >= size and name in store.whole:
                        break
                    if ready <= offset:
                        return False
                    if file is None:
                        file = stack.enter_context(store.path(name).open("rb", buffering=0))
                while offset < ready:
                    offset += load.feed(file, offset, ready - offset)
        load.close_file(size)
        return True

    def _has_more(self, name: str, offset: int) -> bool:
        store = self.store
        return store.have[name] > offset or name in store.whole or store.arrived.is_set()

    def _alive(self) -> None:
        """That the daemon is at work counts as progress."""
        if time.monotonic() - self._seen > 1:
            self._seen = time.monotonic()
            with self.store.changed:
                self.store.moved += 1

    def conclude(self) -> None:
        """Say how it ended. The files have done their work once the daemon has the image and nobody takes them."""
        self.store.arrived.wait()
        self.passed_on.wait()
        self.loaded.wait()
        if self.in_docker and self.store.is_whole():
            shutil.rmtree(self.store.target, ignore_errors=True)
        super().conclude()


def main() -> None:
    """Answer the orders: a line about the image, then those of a transfer; without a transfer, tell about the image."""
    os.umask(0o022)
    stdin = os.fdopen(0, "rb")
    image = json.loads(stdin.readline())
    if "metadata" not in image:
        Taker(json.loads(stdin.readline()), stdin, image).run()
    layers = LayerStore(Path(image["metadata"]), Path(image["content"]))
    try:
        told = layers.open_image(image["id"])
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if image.get("tell"):
        print(json.dumps(told))
        return
    Giver(json.loads(stdin.readline()), stdin, layers).run()
