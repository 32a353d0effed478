"""A Docker image as one file, made of folders, without a Docker daemon.

The file is what `docker save` would write: one tar per layer, a config, a manifest. Members are sorted and
carry one date, so the same folders give the same image id on every machine and at every build.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.command import run

FIXED_DATE_S = 1735689600
"""2025-01-01, the date of every file in the image."""

TAR_TIMEOUT_S = 900


@dataclass(frozen=True)
class Layer:
    """One layer: a folder that is laid over the ones before."""

    folder: Path
    created_by: str
    """What `docker history` says about it."""
    leave_out: tuple[str, ...] = ()
    """Paths inside the folder that the layer does not get, as patterns of GNU tar."""
    owned_by_root: bool = False
    """Whether to give everything to root, instead of keeping the owners."""


def write_image(target: Path, layers: list[Layer], *, tag: str, settings: dict[str, Any]) -> str:
    """Write the image file and return the image id. `settings` is the image's `config`: Env, Entrypoint, …"""
    work = target.with_name(f".{target.name}.layers")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        diff_ids, names = [], []
        for number, layer in enumerate(layers):
            tar = work / f"{number}.tar"
            _write_layer(layer, tar)
            digest = _sha256(tar)
            diff_ids.append(f"sha256:{digest}")
            name = f"{digest}/layer.tar"
            (work / digest).mkdir()
            tar.rename(work / name)
            names.append(name)
        created = "2025-01-01T00:00:00Z"
        config = {
            "architecture": "amd64",
            "os": "linux",
            "created": created,
            "config": settings,
            "rootfs": {"type": "layers", "diff_ids": diff_ids},
            "history": [{"created": created, "created_by": layer.created_by} for layer in layers],
        }
        config_bytes = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
        image_id = hashlib.sha256(config_bytes).hexdigest()
        manifest = [{"Config": f"{image_id}.json", "RepoTags": [tag], "Layers": names}]
        _write_outer(target, work, image_id, config_bytes, json.dumps(manifest).encode(), names)
    finally:
        shutil.rmtree(work)
    return f"sha256:{image_id}"


def _write_layer(layer: Layer, tar: Path) -> None:
    owners = ["--owner=0", "--group=0"] if layer.owned_by_root else []
    run(
        [
            "tar",
            "--create",
            f"--file={tar}",
            f"--directory={layer.folder}",
            "--format=gnu",
            "--sort=name",
            f"--mtime=@{FIXED_DATE_S}",
            "--numeric-owner",
            *owners,
            # Patterns are paths from the folder's top; this counts for those that follow.
            "--anchored",
            *[f"--exclude={pattern}" for pattern in layer.leave_out],
            ".",
        ],
        what=f"pack {layer.folder.name}",
        timeout_s=TAR_TIMEOUT_S,
    )


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write_outer(
    target: Path, work: Path, image_id: str, config: bytes, manifest: bytes, layer_names: list[str]
) -> None:
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as outer:
        for name in layer_names:
            member = _member(name, (work / name).stat().st_size)
            with (work / name).open("rb") as opened:
                outer.addfile(member, opened)
            # Frees its space at once; both copies of a layer of several GB are never needed.
            (work / name).unlink()
        for name, content in ((f"{image_id}.json", config), ("manifest.json", manifest)):
            outer.addfile(_member(name, len(content)), io.BytesIO(content))


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    member.mtime = FIXED_DATE_S
    member.mode = 0o644
    return member
