"""Runs on a node, sent there as text: who uses which weights and images there, and frees what is named.

Standard library only. Orders are a line of JSON on standard input: ``look`` changes nothing, ``claim`` writes down what
a group of a stack uses, ``free`` removes what is named, if at that moment nobody uses it.

A claim is ``<root>/stacks/<stack>/claims/<group>.json``: the revision and image of the last settings (``revision``,
``image``), of the last ones that served (``good``, ``good_image``), what was brought for later (``staged``,
``staged_image``), and the images of all of them (``images``), by which images that we brought are known.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ENDINGS = (".partial", ".incoming", ".lock", ".going")
IMAGES_KEPT = 20
DOCKER_S = 60


def docker(*words: str) -> str:
    """What docker says; it must succeed."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=DOCKER_S, check=False)
    if done.returncode != 0:
        sys.exit(f"docker {words[0]}: {done.stderr.strip()[-160:]}")
    return done.stdout


def containers() -> list[dict[str, Any]]:
    """Every container, also stopped ones: image, mounts, labels, health."""
    ids = docker("ps", "-aq", "--no-trunc").split()
    found = []
    for one in json.loads(docker("inspect", *ids)) if ids else []:
        mounts = [str(mount.get("Source", "")) for mount in one.get("Mounts") or []]
        health = ((one.get("State") or {}).get("Health") or {}).get("Status", "")
        labels = (one.get("Config") or {}).get("Labels") or {}
        found.append({"image": one.get("Image", ""), "mounts": mounts, "labels": labels, "health": health})
    return found


def claims(root: Path) -> dict[str, dict[str, Any]]:
    """``STACK/GROUP`` to its claim."""
    found = {}
    for path in sorted(root.glob("stacks/*/claims/*.json")):
        try:
            claim = json.loads(path.read_text())
        except (OSError, ValueError):
            claim = {"unreadable": True}
        found[f"{path.parents[1].name}/{path.stem}"] = claim if isinstance(claim, dict) else {"unreadable": True}
    return found


def holder(folder: Path, revision: str) -> int | None:
    """The process that fills a revision at this moment."""
    try:
        with (folder / f"{revision}.lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read() or 0)
    except (FileNotFoundError, ValueError):
        pass
    return None


def size_of(path: Path) -> int:
    """Bytes on the disk of a file or of all below a folder; nothing behind links."""
    total = 0
    for place in [path] if not path.is_dir() or path.is_symlink() else path.rglob("*"):
        try:
            status = place.lstat()
        except FileNotFoundError:
            continue
        total += status.st_blocks * 512
    return total


def revision_of(name: str) -> str:
    """The revision that an entry of the weights' folder belongs to."""
    return next((name.removesuffix(ending) for ending in ENDINGS if name.endswith(ending)), name)


def look(root: Path) -> dict[str, Any]:
    """All that is there, and who uses it."""
    folder = root / "weights"
    entries = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        revision = revision_of(path.name)
        entry = {"name": path.name, "revision": revision, "bytes": size_of(path), "at": path.lstat().st_mtime}
        entries.append(entry | {"held": holder(folder, revision)})
    known = claims(root)
    wanted = sorted({image for claim in known.values() for image in claim.get("images") or []})
    images = []
    for image in wanted:
        said = subprocess.run(
            ["docker", "image", "inspect", "--format", "{{.Id}} {{.Size}}", image],
            capture_output=True,
            text=True,
            timeout=DOCKER_S,
            check=False,
        )
        parts = said.stdout.split()
        if said.returncode == 0 and len(parts) == 2:
            images.append({"id": parts[0], "bytes": int(parts[1])})
    return {"entries": entries, "claims": known, "containers": containers(), "images": images}


def claim(root: Path, orders: dict[str, Any]) -> None:
    """Write down what a group uses from now on; what served until now stays good."""
    path = root / "stacks" / orders["stack"] / "claims" / f"{orders['group']}.json"
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):
        before = {}
    new = {**before, **orders["claim"]}
    changes = "revision" in orders["claim"] and any(before.get(key) != new[key] for key in orders["claim"])
    if changes and before.get("image") and serves(orders, before):
        new |= {"good": before.get("revision", ""), "good_image": before["image"]}
    images = [image for image in (*(before.get("images") or []), *orders["images"]) if image]
    new["images"] = list(dict.fromkeys(reversed(images)))[:IMAGES_KEPT][::-1]
    if new != before:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(new))
        beside.replace(path)


def serves(orders: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether a healthy container of the group has the image and the revision that it was said to use."""
    wanted = {"spark-vllm.stack": orders["stack"], "spark-vllm.group": orders["group"]}
    ending = f"/weights/{before['revision']}/" if before.get("revision") else "/"
    return any(
        one["health"] == "healthy"
        and one["image"] == before["image"]
        and all(one["labels"].get(key) == value for key, value in wanted.items())
        and any(f"{mount}/".endswith(ending) for mount in one["mounts"])
        for one in containers()
    )


def free(root: Path, orders: dict[str, Any]) -> dict[str, Any]:
    """Remove what is named, unless somebody has begun to use it."""
    folder, done, kept = root / "weights", [], []
    for name in orders["names"]:
        path, revision = folder / name, revision_of(name)
        mounts = [mount for one in containers() for mount in one["mounts"]]
        used = any(f"{mount}/".startswith(f"{path}/") for mount in mounts)
        claimed = any(
            revision in (one.get("revision"), one.get("good"), one.get("staged")) or one.get("unreadable")
            for one in claims(root).values()
        )
        if "/" in name or name in ("", ".", "..") or used or claimed or holder(folder, revision) is not None:
            kept.append(name)
            continue
        going = folder / f"{revision}.going"
        if path != going:
            # Never half of it under its own name.
            shutil.rmtree(going, ignore_errors=True)
            path.rename(going)
        shutil.rmtree(going) if going.is_dir() and not going.is_symlink() else going.unlink()
        done.append(name)
    for image in orders["images"]:
        said = subprocess.run(["docker", "image", "rm", image], capture_output=True, timeout=600, check=False)
        (done if said.returncode == 0 else kept).append(image)
    return {"done": done, "kept": kept}


def main() -> None:
    """Answer the orders."""
    os.umask(0o022)
    orders = json.loads(sys.stdin.buffer.readline())
    root = Path(orders["root"])
    try:
        if orders["do"] == "claim":
            claim(root, orders)
            print("{}")
        else:
            print(json.dumps(look(root) if orders["do"] == "look" else free(root, orders)))
    except OSError as error:
        sys.exit(f"{error.filename or root}: {error.strerror}")


if __name__ == "__main__":
    main()
