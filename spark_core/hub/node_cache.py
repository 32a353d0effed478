"""Runs on a node, sent there as text: what the node's hub cache says of a revision, as the hub itself would.

Standard library only; it reads no weights. The hub's client names the content of each file by the hash that the hub
gave it, so a revision that is whole in a cache can be known without the hub. Orders are a line of JSON on standard
input; the answer is that of ``node_ask``, or null where the revision is not there whole.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

CONFIG_BYTES = 1 << 20
INDEX = "model.safetensors.index.json"
HASH = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")


def look(orders: dict[str, str]) -> dict[str, Any] | None:
    """Commit, files, and the text of ``config.json``."""
    top = Path(orders["cache"]).expanduser() / f"models--{orders['repository'].replace('/', '--')}"
    folder = top / "snapshots" / orders["commit"]
    files = []
    for path in sorted(folder.rglob("*")):
        if not path.is_symlink():
            continue  # a folder, or somebody else's file
        name = path.readlink().name
        if not path.is_file() or not HASH.fullmatch(name):
            return None
        files.append([str(path.relative_to(folder)), path.stat().st_size, name])
    names = {name for name, size, _ in files if size}
    if "config.json" not in names:
        return None
    if INDEX in names and not set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()) <= names:
        return None
    config = (folder / "config.json").read_bytes()[:CONFIG_BYTES].decode(errors="replace")
    return {"commit": orders["commit"], "files": files, "config": config}


def main() -> None:
    """Answer the orders."""
    try:
        print(json.dumps(look(json.loads(sys.stdin.buffer.readline()))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        print("null")


if __name__ == "__main__":
    main()
