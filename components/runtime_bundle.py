"""The rank supervisor as one file: a zip of spark_runtime/ that the image's own python runs.

One file, because the command provider's directory copy nests the folder when the target exists already. The same
sources give the same bytes on every machine, so that the hash in its path changes only when the supervisor does.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
BUILD = ".build"
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class NodeFile:
    """A file that lies on nodes for us.

    Attributes:
        local: Path relative to the project folder.
        remote: Path relative to the stack's folder of files; the content's hash is part of it.
        sha256: Hash of the content.
    """

    local: str
    remote: str
    sha256: str


def build_runtime() -> NodeFile:
    """Build the supervisor's file, or reuse the one that was built from the same sources."""
    source = PROJECT / "spark_runtime"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as bundle:
        _add(bundle, "__main__.py", (source / "entry" / "__main__.py").read_bytes())
        for path in sorted(source.glob("*.py")):
            _add(bundle, f"spark_runtime/{path.name}", path.read_bytes())
    return keep_runtime(buffer.getvalue())


def keep_runtime(content: bytes) -> NodeFile:
    """Keep a supervisor's file in the checkout, from where it is copied to nodes."""
    digest = hashlib.sha256(content).hexdigest()
    kept = kept_runtime(digest)
    if kept is not None:
        return kept
    local = PROJECT / _local(digest)
    local.parent.mkdir(exist_ok=True)
    partial = local.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(local)
    return _node_file(digest)


def kept_runtime(digest: str) -> NodeFile | None:
    """The supervisor's file with this hash, if this checkout has it."""
    local = PROJECT / _local(digest)
    whole = local.is_file() and hashlib.sha256(local.read_bytes()).hexdigest() == digest
    return _node_file(digest) if whole else None


def _local(digest: str) -> str:
    return f"{BUILD}/runtime-{digest[:16]}.pyz"


def _node_file(digest: str) -> NodeFile:
    return NodeFile(_local(digest), f"{digest}/runtime.pyz", digest)


def project_file(path: str) -> NodeFile:
    """A file of the project folder, such as a patch.

    Raises:
        FileNotFoundError: there is no such file.
    """
    digest = hashlib.sha256((PROJECT / path).read_bytes()).hexdigest()
    return NodeFile(path, f"{digest}/{Path(path).name}", digest)


def _add(bundle: zipfile.ZipFile, name: str, content: bytes) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.external_attr = 0o644 << 16
    bundle.writestr(info, content)
