"""What the hub says of a revision: its commit, and size and hash of each file that serving needs.

The hub gives the SHA-256 of large files (those that git keeps outside, LFS and Xet) and git's own object id of small
ones, the SHA-1 of ``blob SIZE NUL`` and the content. So every file is verified against the hub.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from spark_core.errors import ObservationError
from spark_core.transfer.manifest import Manifest

SHA256_DIGITS = 64
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
_BESIDE_WEIGHTS = (".json", ".txt", ".py", ".model", ".jinja", ".tiktoken", ".yaml", ".yml", ".spm", ".vocab")
_LEFT_OUT_FOLDERS = ("original", "onnx", "openvino", "metal", "coreml")
"""Folders in which the same weights lie once more, in a form that vLLM does not read."""


@dataclass(frozen=True)
class Listing:
    """A revision of a model of the hub.

    Attributes:
        commit: The commit, 40 hex digits.
        files: Relative path to (size in bytes, SHA-256 or git's object id), of the files that serving needs.
    """

    commit: str
    files: Mapping[str, tuple[int, str]]

    @property
    def total_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    def compact(self) -> dict[str, str]:
        """The files as they are kept in state: path to ``SIZE:DIGEST``."""
        return {name: f"{size}:{digest}" for name, (size, digest) in sorted(self.files.items())}

    def differences(self, found: Manifest, git_ids: Mapping[str, str]) -> list[str]:
        """Names of the files that are not in a folder as the hub has them, each with what is wrong.

        Args:
            found: What the folder holds.
            git_ids: Git's object id of the small files there.
        """
        wrong = []
        for name, (size, digest) in sorted(self.files.items()):
            has_size, sha256 = found.files.get(name, (-1, ""))
            if has_size < 0:
                wrong.append(f"{name}: missing")
            elif has_size != size:
                wrong.append(f"{name}: {has_size} bytes instead of {size}")
            elif digest != (sha256 if len(digest) == SHA256_DIGITS else git_ids.get(name)):
                wrong.append(f"{name}: content differs")
        return wrong

    def of(self, found: Manifest) -> Manifest:
        """What a folder holds of these files; what else is there does not count."""
        return Manifest({name: found.files[name] for name in sorted(self.files) if name in found.files})

    @property
    def small(self) -> list[str]:
        """Names of the files that the hub gives git's object id of."""
        return sorted(name for name, (_, digest) in self.files.items() if len(digest) != SHA256_DIGITS)


def from_compact(commit: str, files: Mapping[str, Any]) -> Listing:
    """The opposite of :meth:`Listing.compact`."""
    parted = {name: str(value).partition(":") for name, value in files.items()}
    return Listing(commit, {name: (int(size), digest) for name, (size, _, digest) in parted.items()})


def git_id(content: bytes) -> str:
    """Git's object id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def parse_listing(answer: Mapping[str, Any], where: str) -> Listing:
    """A listing from what the hub answered.

    Raises:
        ObservationError: it is not understood, or names a file outside of the model's folder.
    """
    try:
        commit = str(answer["commit"])
        files = {str(name): (int(size), str(digest)) for name, size, digest in answer["files"]}
    except (KeyError, TypeError, ValueError) as error:
        raise _not_understood(where, str(error)) from error
    if not re.fullmatch("[0-9a-f]{40}", commit):
        raise _not_understood(where, f"the commit {commit[:60]!r}")
    for name, (size, digest) in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name or "\n" in name:
            raise _not_understood(where, f"the file {name[:60]!r}")
        if size < 0 or not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", digest):
            raise _not_understood(where, f"neither SHA-256 nor git's object id of {name[:60]!r}")
    return Listing(commit, {name: files[name] for name in needed(files)})


def needed(names: Mapping[str, object]) -> list[str]:
    """Which of a repository's files serving needs: one form of the weights, and what is read beside them.

    Documents and pictures are left out, and other forms of the weights where there are safetensors.
    """
    kept = [name for name in names if PurePosixPath(name).parts[0] not in _LEFT_OUT_FOLDERS]
    forms = (".safetensors",) if any(name.endswith(".safetensors") for name in kept) else _OTHER_WEIGHTS
    return sorted(name for name in kept if name.endswith(forms) or _is_read_beside(name))


def _is_read_beside(name: str) -> bool:
    return name.endswith(_BESIDE_WEIGHTS) and not PurePosixPath(name).name.upper().startswith(("README", "LICENSE"))


def _not_understood(where: str, found: str) -> ObservationError:
    return ObservationError(f"expected a list of files with their hashes from the hub, found {found}", where=where)
