"""Where the toolchain keeps things: a cache that may go at any time, data that may not, and the checkout."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT_LIMIT_S = 20


class Stop(Exception):
    """Ends a command with one line for the person at the terminal: expected, found, what to do."""


def cache_dir() -> Path:
    """Things built or downloaded once: the engine, uv, an unpacked sshd for the tests."""
    chosen = os.environ.get("SPARK_VLLM_CACHE")
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "spark-vllm"


def home_dir() -> Path:
    """Things to keep: the state backend and the passphrase that its secrets are encrypted with."""
    chosen = os.environ.get("SPARK_VLLM_HOME")
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "spark-vllm"


def passphrase_file() -> Path:
    """The passphrase of stacks that this project made, unless the environment names another."""
    return home_dir() / "passphrase"


def backend_dir() -> Path:
    """The state of stacks that this project made, unless the environment names another backend."""
    return home_dir() / "backend"


def engine_choice(root: Path = ROOT) -> Path:
    """The file in which bootstrap notes the folder of the engine it built; empty for the one on PATH."""
    return root / ".toolchain" / "engine"


def venv_python(root: Path = ROOT) -> Path:
    """The interpreter that bootstrap makes in the checkout."""
    return root / ".venv" / "bin" / "python"


def environment(root: Path = ROOT) -> dict[str, str]:
    """The process environment as `. ./env` leaves it."""
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    found = subprocess.run(
        ["/bin/sh", "-c", '. ./env && exec "$0" -I -c "$1"', sys.executable, show],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=ENVIRONMENT_LIMIT_S,
    )
    if found.returncode != 0:
        raise Stop(f"env: could not be sourced by /bin/sh: {(found.stderr or found.stdout).strip()}")
    values: dict[str, str] = json.loads(found.stdout)
    return values


def project_name(project: Path) -> str:
    """The name in a Pulumi.yaml; read without a YAML parser, since none is there yet."""
    match = re.search(r"^name:\s*['\"]?([A-Za-z0-9_.-]+)", project.read_text("utf-8"), re.MULTILINE)
    if match is None:
        raise Stop(f"{project}: no `name:` line found; a Pulumi project has one")
    return match.group(1)


def local_backend(url: str) -> Path | None:
    """The folder behind a file:// backend, or None for any other kind."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        return None
    path = unquote(parts.netloc + parts.path)
    return Path(path).expanduser()


def stack_state(environ: dict[str, str], project: str, stack: str) -> Path | None:
    """The checkpoint of a stack in a file:// backend, if it is there."""
    backend = local_backend(environ.get("PULUMI_BACKEND_URL", ""))
    if backend is None:
        return None
    folder = backend / ".pulumi" / "stacks" / project
    found = (folder / f"{stack}{ending}" for ending in (".json", ".json.gz", ".json.zst"))
    return next((path for path in found if path.is_file()), None)


def digest(*paths: Path) -> str:
    """A short hash of the files given and of those below the folders given, names included."""
    total = hashlib.sha256()
    for start in paths:
        files = sorted(start.rglob("*")) if start.is_dir() else [start]
        for path in files:
            if path.is_file():
                total.update(f"{path.relative_to(start.parent)}\0".encode())
                total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]
