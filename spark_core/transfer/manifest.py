"""What a folder of files must hold."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Manifest:
    """The files of a folder: relative path to (size in bytes, SHA-256)."""

    files: Mapping[str, tuple[int, str]]

    @property
    def revision(self) -> str:
        """Hash of the content, 40 hex digits like a commit of the hub."""
        text = "".join(f"{name}\0{size}\0{digest}\n" for name, (size, digest) in sorted(self.files.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:40]

    @property
    def total_bytes(self) -> int:
        return sum(size for size, _ in self.files.values())

    def lacking(self, other: Manifest) -> list[str]:
        """Names of the files that are missing or different in ``other``, the largest first."""
        names = [name for name, file in self.files.items() if other.files.get(name) != file]
        return sorted(names, key=lambda name: (-self.files[name][0], name))

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
