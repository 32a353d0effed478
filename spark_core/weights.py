"""Model weights on the nodes: an immutable folder for each revision, every file judged by size and SHA-256.

A directory of the controller is copied; its revision is the hash of its content. A directory that the nodes already
have is used in place, read-only: every node's must hold the same files as the head's, and every shard that the index
names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from spark_core.errors import CommandError, ObservationError, SettingsError, SparkError, join_errors
from spark_core.transport.base import Transport, command, run_checked, script

CONTROLLER_CACHE = "~/.cache/spark-vllm/hashes.json"
"""Hashes of weights on the controller, by size, times and inode."""
HASH_TIMEOUT_S = 3600
COPY_TIMEOUT_S = 4 * 3600
_PROGRESS_EVERY_S = 10.0
_CHUNK = 1 << 20
_BATCH_BYTES = 1 << 30

_MANIFEST = r"""
import hashlib, json, os, sys
root, cache_file = sys.argv[1], sys.argv[2]
try:
    with open(cache_file) as f: cache = json.load(f)
except (OSError, ValueError): cache = {}
if not isinstance(cache, dict): cache = {}
fresh, files = {}, {}
if not os.path.isdir(root):
    print(json.dumps({"absent": True})); raise SystemExit(0)
for folder, _, names in sorted(os.walk(root, followlinks=True)):
    for name in sorted(names):
        path = os.path.join(folder, name)
        rel = os.path.relpath(path, root)
        try: st = os.stat(path)
        except OSError: files[rel] = [-1, "broken link"]; continue
        mark = [st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_ino]
        known = cache.get(path)
        if known and known[0] == mark: digest = known[1]
        else:
            h = hashlib.sha256()
            with open(path, "rb") as f:
                while True:
                    block = f.read(1 << 22)
                    if not block: break
                    h.update(block)
            digest = h.hexdigest()
        fresh[path] = [mark, digest]
        files[rel] = [st.st_size, digest]
cache = {k: v for k, v in cache.items() if not k.startswith(root + "/")} | fresh
tmp = cache_file + ".%d" % os.getpid()
os.makedirs(os.path.dirname(cache_file), exist_ok=True)
with open(tmp, "w") as f: json.dump(cache, f)
os.replace(tmp, cache_file)
print(json.dumps({"files": files}))
"""


@dataclass(frozen=True)
class Manifest:
    """The files of a weights folder: relative path to (size in bytes, SHA-256)."""

    files: Mapping[str, tuple[int, str]]

    @property
    def revision(self) -> str:
        """Hash of the content, 40 hex digits like a commit of the hub."""
        text = "".join(f"{name}\0{size}\0{digest}\n" for name, (size, digest) in sorted(self.files.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:40]

    @property
    def total_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    def differences(self, other: Manifest) -> list[str]:
        """Names of the files that are missing, extra or different in ``other``, each with what is wrong."""
        found = []
        for name, (size, digest) in sorted(self.files.items()):
            if name not in other.files:
                found.append(f"{name}: missing")
            elif other.files[name] != (size, digest):
                what = "size" if other.files[name][0] != size else "content"
                found.append(f"{name}: {what} differs")
        return found + [f"{name}: not part of it" for name in sorted(set(other.files) - set(self.files))]


def local_manifest(directory: str) -> Manifest:
    """The manifest of a directory on the controller, links resolved to content.

    Hashes are remembered in ``CONTROLLER_CACHE`` by size, times and inode, as on a node, so that a preview of an
    unchanged directory reads none of it. Nothing else is written; without a usable cache everything is hashed.

    Raises:
        SettingsError: there is no such directory, a link in it leads nowhere, a file cannot be read, or a shard of its
            index is missing.
    """
    root = Path(directory).expanduser()
    if not root.is_dir():
        raise SettingsError([f"model.source: found no directory {directory} on the controller"])
    files = {}
    cache = _Hashes()
    for path in sorted(root.rglob("*")):
        if path.is_dir():
            continue
        if not path.is_file():
            raise SettingsError([f"model.source: found {path.name} in {directory}, a link that leads nowhere"])
        try:
            files[str(path.relative_to(root))] = cache.size_and_digest(path)
        except OSError as error:
            raise SettingsError(
                [f"model.source: expected to read {path.name} in {directory}, found: {error.strerror or error}"]
            ) from error
    cache.keep()
    manifest = Manifest(files)
    index = root / "model.safetensors.index.json"
    missing = missing_shards(index.read_text() if index.is_file() else None, manifest)
    if missing:
        raise SettingsError([f"model.source: found no {missing[0]} in {directory}, which its index names"])
    return manifest


def missing_shards(index_text: str | None, manifest: Manifest) -> list[str]:
    """Shards that the index names and the folder has not; without an index, any weights file will do.

    Also names ``config.json`` if it is missing.
    """
    missing = [] if "config.json" in manifest.files else ["config.json"]
    if index_text is not None:
        shards = sorted(set(json.loads(index_text).get("weight_map", {}).values()))
        return missing + [shard for shard in shards if manifest.files.get(shard, (0, ""))[0] <= 0]
    if not any(name.endswith((".safetensors", ".bin", ".gguf")) for name in manifest.files):
        missing.append("*.safetensors")
    return missing


def observe_weights(transport: Transport, directory: str, root: str) -> Manifest | None:
    """The manifest of a folder on a node; None if there is no such folder.

    Hashes are cached on the node by size, times and inode, so that an unchanged folder costs one walk over it.
    """
    text = run_checked(
        transport,
        command("python3", "-I", "-c", _MANIFEST, directory, f"{root}/cache/hashes.json", timeout_s=HASH_TIMEOUT_S),
        purpose=f"expected to read the weights in {directory}",
        setting="model.source",
    )
    try:
        value = json.loads(text)
        if value.get("absent"):
            return None
        return Manifest({name: (int(size), str(digest)) for name, (size, digest) in value["files"].items()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ObservationError(
            "expected a list of weights files, found something else", where=transport.node
        ) from error


def copy_weights(
    transport: Transport, source: str, target: str, wanted: Manifest, root: str, progress: Callable[[str], None]
) -> None:
    """Bring a directory of the controller onto a node: only what is missing or different.

    A new folder becomes visible by one rename after all its files are whole and verified. In a folder that is already
    visible (a file was altered) each bad file is replaced by one rename, so that a container that has the folder
    mounted sees it too.
    """
    found = observe_weights(transport, target, root)
    if found is not None and not wanted.differences(found):
        return
    place = target if found is not None else f"{target}.partial"
    there = found if found is not None else observe_weights(transport, place, root) or Manifest({})
    run_checked(
        transport,
        script('umask 022; mkdir -p "$1"; rm -rf "$1/.incoming"', place),
        purpose=f"expected to create {place}",
    )
    bad = [name for name in wanted.files if there.files.get(name) != wanted.files[name]]
    size = sum(wanted.files[name][0] for name in bad)
    free = int(
        run_checked(transport, script('df -B1 --output=avail "$1" | tail -1', place), purpose="expected free space")
    )
    if free < size * 1.02:
        raise CommandError(
            f"expected {size / 1e9:.1f} GB of free space for the weights, found {free / 1e9:.1f} GB",
            where=f"{transport.node} (node_root)",
            do=f"free some space on the disk of {place}",
        )
    sent = 0
    for batch in _batches(bad, wanted):
        chunks = _tar_stream(
            Path(source).expanduser(), batch, size, lambda text: progress(f"{transport.node}: weights {text}"), sent
        )
        result = transport.stream(
            # Extracted beside its final name and renamed: nobody ever reads half a file.
            script(
                'umask 022; cd "$1"; tmp=.incoming; rm -rf "$tmp"; mkdir "$tmp"; '
                'tar -x --no-same-owner -C "$tmp" -f -; cd "$tmp"; '
                "find . -type f -print0 | while IFS= read -r -d '' f; do "
                'mkdir -p "../$(dirname "$f")"; mv -f "$f" "../$f"; done; '
                'cd ..; rm -rf "$tmp"',
                place,
                timeout_s=COPY_TIMEOUT_S,
                purpose=f"expected the weights to arrive in {place}",
            ),
            chunks,
        )
        if not result.ok:
            raise CommandError(
                f"expected the weights to arrive in {place}, found: {result.stderr.strip()[-160:]}",
                where=transport.node,
                do="run up again; files that have arrived whole are not sent again",
            )
        sent += sum(wanted.files[name][0] for name in batch)
    extra = [name for name in there.files if name not in wanted.files]
    if extra:
        run_checked(
            transport, script('cd "$1"; shift; rm -f -- "$@"', place, *extra), purpose="expected to remove files"
        )
    after = observe_weights(transport, place, root)
    left = wanted.differences(after) if after is not None else ["the folder: missing"]
    if left:
        raise CommandError(
            f"expected whole weights in {place}, found {left[0]}", where=transport.node, evidence=left[1:]
        )
    if place != target:
        run_checked(transport, command("mv", "-T", "--", place, target), purpose=f"expected to publish {target}")


def verify_in_place(transports: Mapping[str, Transport], directory: str, roots: Mapping[str, str]) -> Manifest:
    """Check a directory that every node already has; the head's (first) is the reference. All nodes hash at once.

    Raises:
        SparkError: a node has none, a shard is missing, or two nodes differ; what is wrong on all nodes is told.
    """
    if not transports:
        raise SparkError("expected at least one node", where="model.source")
    errors: list[SparkError] = []
    found: dict[str, Manifest] = {}
    with ThreadPoolExecutor(len(transports)) as pool:
        asked = {
            node: pool.submit(_whole_weights, transport, directory, roots[node])
            for node, transport in transports.items()
        }
    for node, answer in asked.items():
        try:
            found[node] = answer.result()
        except SparkError as error:
            errors.append(error)
    head = next(iter(transports))
    for node, manifest in found.items():
        wrong = found[head].differences(manifest) if head in found else []
        if wrong:
            errors.append(
                SparkError(
                    f"expected the same weights as on {head}, found {wrong[0]}",
                    where=f"{node} (model.source)",
                    evidence=wrong[1:],
                )
            )
    if errors:
        raise join_errors(errors)
    return found[head]


def _whole_weights(transport: Transport, directory: str, root: str) -> Manifest:
    """The manifest of a folder on a node that has every shard that its index names."""
    manifest = observe_weights(transport, directory, root)
    if manifest is None:
        raise SparkError(
            f"expected the weights in {directory}, found no such directory",
            where=f"{transport.node} (model.source)",
            do="put the model there on every node",
        )
    sections = run_checked(
        transport,
        script(
            'f="$1/model.safetensors.index.json"; '
            'if [ -e "$f" ] || [ -L "$f" ]; then echo present; cat "$f"; else echo absent; fi',
            directory,
        ),
        purpose=f"expected to read model.safetensors.index.json in {directory}",
        setting="model.source",
    )
    said, _, index = sections.partition("\n")
    if said not in ("present", "absent"):
        raise ObservationError(
            f"expected to learn whether {directory} has an index, found: {said[:80]!r}", where=transport.node
        )
    missing = missing_shards(index if said == "present" else None, manifest)
    if missing:
        raise SparkError(
            f"expected {missing[0]} in {directory}, found none",
            where=f"{transport.node} (model.source)",
            do="the download is not whole; run it again on this node",
            evidence=missing[1:],
        )
    return manifest


class _Hashes:
    """What the controller remembers of the files that it hashed. An unusable cache is as good as an empty one."""

    def __init__(self) -> None:
        self._known: dict[str, object] = {}
        self._fresh: dict[str, object] = {}
        self._path: Path | None = None
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._path = Path(CONTROLLER_CACHE).expanduser()  # RuntimeError: there is no home
            known = json.loads(self._path.read_text())
            self._known = known if isinstance(known, dict) else {}

    def size_and_digest(self, path: Path) -> tuple[int, str]:
        """Size and SHA-256 of a file; read only if it is not the one that is remembered."""
        key = str(path.absolute())
        mark = _mark(path)
        match self._known.get(key):
            case [known, str(digest)] if known == mark:
                return mark[0], digest
        digest = _sha256(path)
        if _mark(path) == mark:
            self._fresh[key] = [mark, digest]
        return mark[0], digest

    def keep(self) -> None:
        """Write down what was hashed now, and forget files that are gone."""
        if self._path is None or not self._fresh:
            return
        known = {key: value for key, value in self._known.items() if os.path.exists(key)}  # noqa: PTH110
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, beside = tempfile.mkstemp(prefix="hashes.", dir=self._path.parent)
            try:
                with os.fdopen(descriptor, "w") as file:
                    json.dump(known | self._fresh, file)
                Path(beside).replace(self._path)
            except OSError:
                Path(beside).unlink(missing_ok=True)


def _mark(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _batches(names: list[str], wanted: Manifest) -> Iterator[list[str]]:
    """Files in groups of about a gigabyte: what an interrupted copy has to send again is at most one group."""
    batch: list[str] = []
    for name in names:
        batch.append(name)
        if sum(wanted.files[part][0] for part in batch) >= _BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """A file of the controller that cannot be read any more, told in one line."""
    try:
        yield
    except OSError as error:
        raise SparkError(
            f"expected to read {path} to its end, found: {error.strerror or error}",
            where="model.source",
            do="let the directory lie as it is until up has ended",
        ) from error


def _tar_stream(
    root: Path, names: list[str], total: int, progress: Callable[[str], None], sent: int = 0
) -> Iterator[bytes]:
    said = time.monotonic()
    for name in names:
        path = root / name
        info = tarfile.TarInfo(name)
        with _read_errors(path):
            file = path.open("rb")
        with file:
            with _read_errors(path):
                info.size = os.fstat(file.fileno()).st_size
            info.mode = 0o644
            yield info.tobuf(tarfile.GNU_FORMAT)
            left = info.size
            while left:
                with _read_errors(path):
                    chunk = file.read(min(_CHUNK, left))
                if not chunk:
                    raise SparkError(f"expected {info.size} bytes in {path.name}, found less while copying")
                left -= len(chunk)
                sent += len(chunk)
                yield chunk
                if time.monotonic() - said >= _PROGRESS_EVERY_S:
                    said = time.monotonic()
                    progress(f"{sent / 1e9:.2f} of {total / 1e9:.2f} GB sent")
        yield b"\0" * (-info.size % tarfile.BLOCKSIZE)
    yield b"\0" * tarfile.RECORDSIZE
