"""Model weights on the nodes: an immutable folder for each revision, every file judged by size and SHA-256.

A directory of the controller is copied (:mod:`spark_core.transfer.distribution`); its revision is the hash of its
content. A directory that the nodes already have is used in place, read-only: every node's must hold the same files as
the head's, and every shard that the index names.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spark_core.errors import ObservationError, SettingsError, SparkError, join_errors
from spark_core.transfer.look import contents_of
from spark_core.transfer.manifest import Manifest
from spark_core.transport.base import Transport, run_checked, script

CONTROLLER_CACHE = "~/.cache/spark-vllm/hashes.json"
"""Hashes of weights on the controller, by size, times and inode."""


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


def observe_weights(
    transport: Transport, directory: str, root: str, only: Sequence[str] | None = None
) -> Manifest | None:
    """The manifest of a folder on a node; None if there is no such folder.

    Hashes are cached on the node by size, times and inode, so that an unchanged folder costs one walk over it.

    Args:
        only: Names of the files that count; all if it is None.
    """
    return contents_of(transport, directory, f"{root}/cache/hashes.json", only=only)


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
