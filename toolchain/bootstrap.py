"""Sets a checkout up: the Python environment from the lock file, then a Pulumi engine.

`python3 toolchain/bootstrap.py`, or `make bootstrap`. It may be stopped and run again at any moment; when all
is there it takes about a second. The engine is a good enough `pulumi` on PATH, which fetches its plugins by
itself; where there is none, the engine and the plugins are built from Go modules into the cache.
SPARK_VLLM_ENGINE=build or =path insists on one of the two.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - the one place that an older Python may reach
    _found = f"{sys.version_info[0]}.{sys.version_info[1]} ({sys.executable})"
    sys.exit(f"python: expected 3.11 or newer, found {_found}; use a newer one: python3.12 toolchain/bootstrap.py")

import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from toolchain import places
from toolchain.places import ROOT, Stop
from toolchain.steps import Steps, duration, quietly, run_command, say

UV_VERSION = "0.13.9"
UV_MINIMUM = (0, 9, 0)
"""Older ones do not read the revision of our lock file."""
PULUMI_VERSION = "3.276.0"
SDK_MODULE = "github.com/pulumi/pulumi/sdk/v3"
GO_MINIMUM = (1, 26, 6)
"""What the go.mod files ask for."""

PYTHON_LIMIT_S = 900.0
BUILD_LIMIT_S = 3600.0
ASK_LIMIT_S = 30.0
LOCK_LIMIT_S = 3600.0
Version = tuple[int, ...]


class Part(NamedTuple):
    """One Go program of the engine."""

    binary: str
    folder: str
    """Below toolchain/; holds its go.mod."""
    package: str
    cold: str
    """How long it takes on two cores with nothing cached, for the person who waits."""
    flags: str = ""


PARTS = (
    Part(
        "pulumi",
        "engine/cli",
        "github.com/pulumi/pulumi/pkg/v3/cmd/pulumi",
        "about 7 min",
        # Without it `pulumi version` is empty and the Automation API refuses the CLI.
        f"-X {SDK_MODULE}/go/common/version.Version={PULUMI_VERSION}",
    ),
    Part(
        "pulumi-language-python",
        "engine/language",
        f"{SDK_MODULE}/python/cmd/pulumi-language-python",
        "about 1 min",
    ),
    Part("pulumi-resource-docker", "engine/docker", ".", "about 5 min"),
    Part("pulumi-resource-command", "command", ".", "about 1 min"),
)
SCRIPTS = ("python/cmd/pulumi-language-python-exec", "python/dist/pulumi-resource-pulumi-python")
"""What the engine starts Python with: scripts in the SDK's module, of the CLI's version."""


def parse_version(text: str) -> Version | None:
    """The numbers of the first version in a text, such as (3, 276, 0) in `v3.276.0-dev.1`."""
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(number or 0) for number in match.groups()) if match else None


def show_version(version: Version) -> str:
    """3.276.0"""
    return ".".join(map(str, version))


def required_pulumi(root: Path = ROOT) -> Version:
    """The lowest engine that Pulumi.yaml's requiredPulumiVersion admits."""
    project = root / "Pulumi.yaml"
    match = re.search(r"^requiredPulumiVersion:\s*['\"]?>=\s*([\d.]+)", project.read_text("utf-8"), re.MULTILINE)
    version = parse_version(match.group(1)) if match else None
    if version is None:
        raise Stop(f'{project}: expected a line like `requiredPulumiVersion: ">=3.200.0"`, found none')
    return version


class Choice(NamedTuple):
    """Which engine, and the reason in words."""

    build: bool
    reason: str


def choose_engine(path: str | None, found: Version | None, required: Version, wish: str = "") -> Choice:
    """Decide between the pulumi on PATH and one built here."""
    if wish not in ("", "build", "path"):
        raise Stop(f"SPARK_VLLM_ENGINE: expected build or path, found {wish!r}; unset it to have it decided")
    if wish == "build":
        return Choice(True, "SPARK_VLLM_ENGINE=build")
    if path is None:
        verdict = Choice(True, "no pulumi on PATH")
    elif found is None:
        verdict = Choice(True, f"{path} does not tell its version")
    elif found < required:
        verdict = Choice(True, f"{path} is {show_version(found)}, older than the required {show_version(required)}")
    else:
        verdict = Choice(False, f"{path} is {show_version(found)}, at least the required {show_version(required)}")
    if wish == "path" and verdict.build:
        raise Stop(f"pulumi: {verdict.reason}, and SPARK_VLLM_ENGINE=path forbids to build one; install or update it")
    return verdict


def ask_version(argv: list[str]) -> Version | None:
    """The version that a tool tells of itself, or None if it cannot be run."""
    try:
        answer = subprocess.run(argv, capture_output=True, text=True, timeout=ASK_LIMIT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version(answer.stdout) if answer.returncode == 0 else None


def pulumi_on_path() -> str | None:
    """The first pulumi on PATH that is neither our launcher nor one built by us."""
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        candidate = Path(folder or ".") / "pulumi"
        ours = (candidate.parent.parent / "launcher.py").is_file() or places.cache_dir() in candidate.parents
        if candidate.is_file() and os.access(candidate, os.X_OK) and not ours:
            return str(candidate)
    return None


# Building


def build_key(part: Part, root: Path = ROOT) -> str:
    """What the built program depends on: our sources, the pinned modules, the flags, the platform."""
    told = json.dumps([part, platform.system(), platform.machine()])
    return hashlib.sha256((told + places.digest(root / "toolchain" / part.folder)).encode()).hexdigest()[:16]


def engine_key(root: Path = ROOT) -> str:
    """The same for all parts together."""
    return hashlib.sha256("".join(build_key(part, root) for part in PARTS).encode()).hexdigest()[:16]


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Let one process at a time work in a folder; the lock ends with its process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:
        start = told = time.monotonic()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                if now - start > LOCK_LIMIT_S:
                    raise Stop(f"{folder}: another set-up has held the lock for {duration(now - start)}") from None
                if now == told or now - told > 15 or start == told:
                    say(f"  another set-up is at work in {folder}; waiting")
                    told = now + 0.001
                time.sleep(0.5)
        yield


def fill(target: Path, make: Callable[[Path], None]) -> None:
    """Make a folder whole or not at all: built beside it, then renamed. Call it under the lock."""
    if target.is_dir():
        return
    for left in target.parent.glob("unfinished-*"):
        shutil.rmtree(left, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=target.parent))
    try:
        make(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def require_go() -> str:
    """The go command, new enough or able to fetch a newer one by itself."""
    go = shutil.which("go")
    if go is None:
        raise Stop(
            f"pulumi: none on PATH, and no go (at least {show_version(GO_MINIMUM)}) to build it with;"
            " install Pulumi (https://www.pulumi.com/docs/install/) or Go (https://go.dev/dl/), then repeat"
        )
    found = ask_version([go, "env", "GOVERSION"])
    fetches = "local" not in _output([go, "env", "GOTOOLCHAIN"])
    if found is None or (found < GO_MINIMUM and not fetches):
        shown = show_version(found) if found else "one that does not run"
        raise Stop(
            f"go: expected at least {show_version(GO_MINIMUM)}, found {shown} ({go});"
            " install a newer one, or set GOTOOLCHAIN=auto so that it fetches the right one"
        )
    return go


def _output(argv: list[str]) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=ASK_LIMIT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def build_part(go: str, part: Part, into: Path, root: Path = ROOT) -> None:
    """Build one program, reproducibly, as its go.mod and go.sum pin it."""
    flags = f"-s -w {part.flags}".strip()
    argv = [go, "build", "-mod=readonly", "-trimpath", "-buildvcs=false", "-ldflags", flags]
    quietly(
        f"building {part.binary}",
        [*argv, "-o", str(into / part.binary), part.package],
        cwd=root / "toolchain" / part.folder,
        env={**os.environ, "GOFLAGS": "", "GOWORK": "off"},
        limit_s=BUILD_LIMIT_S,
        remedy="a Go module proxy must be reachable (go env GOPROXY)",
    )


def copy_scripts(go: str, into: Path, root: Path = ROOT) -> None:
    """Put the SDK's scripts beside the programs, executable."""
    argv = [go, "mod", "download", "-json", SDK_MODULE]
    found = subprocess.run(
        argv, cwd=root / "toolchain" / PARTS[0].folder, capture_output=True, text=True, timeout=PYTHON_LIMIT_S
    )
    if found.returncode != 0:
        raise Stop(f"{SDK_MODULE}: `go mod download` failed: {(found.stderr or found.stdout).strip()}")
    module = Path(json.loads(found.stdout)["Dir"])
    for script in SCRIPTS:
        copy = into / Path(script).name
        shutil.copyfile(module / script, copy)
        copy.chmod(0o755)


def link_or_copy(source: Path, target: Path) -> None:
    """One copy of 120 MB on disk is enough, where the file system can share it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def build_engine(root: Path = ROOT) -> Path:
    """The folder with all programs, built as far as the cache lacks them."""
    base = places.cache_dir() / "toolchain"
    engine = base / engine_key(root)
    if (engine / "bin").is_dir():
        return engine / "bin"
    go = require_go()
    with only_one(base):
        parts: list[Path] = []
        for part in PARTS:
            built = base / "parts" / f"{part.binary}-{build_key(part, root)}"
            if not built.is_dir():
                say(f"  building {part.binary} from Go modules ({part.cold} with nothing cached)")
                start = time.monotonic()
                fill(built, lambda into, part=part: build_part(go, part, into, root))  # type: ignore[misc]
                say(f"  built {part.binary} in {duration(time.monotonic() - start)}")
            parts.append(built / part.binary)

        def assemble(into: Path) -> None:
            folder = into / "bin"
            folder.mkdir()
            for program in parts:
                link_or_copy(program, folder / program.name)
            copy_scripts(go, folder, root)

        fill(engine, assemble)
    return engine / "bin"


# The steps


def find_uv() -> str:
    """A good enough uv on PATH, or the pinned one in a venv of its own in the cache."""
    on_path = shutil.which("uv")
    if on_path is not None and (ask_version([on_path, "--version"]) or (0,)) >= UV_MINIMUM:
        return on_path
    private = places.cache_dir() / "uv" / f"{UV_VERSION}-python{sys.version_info[0]}.{sys.version_info[1]}"
    program = private / "bin" / "uv"
    if not program.exists():
        say(f"  fetching uv {UV_VERSION} into {private}")
        with only_one(private.parent):
            if private.is_dir() and not program.exists():
                shutil.rmtree(private)
            fill(private, _install_uv)
    return str(program)


def _install_uv(into: Path) -> None:
    quietly(
        "python venv",
        [sys.executable, "-m", "venv", str(into)],
        cwd=into,
        limit_s=PYTHON_LIMIT_S,
        remedy=f"{sys.executable} needs its venv module; on Debian and Ubuntu: apt install python3-venv",
    )
    pip = [
        str(into / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        f"uv=={UV_VERSION}",
    ]
    quietly("pip install uv", pip, cwd=into, limit_s=PYTHON_LIMIT_S, remedy="a PyPI index must be reachable")


def make_python(root: Path = ROOT) -> None:
    """The checkout's .venv, exactly as uv.lock says."""
    uv = find_uv()
    words = [uv, "sync", "--frozen", "--no-progress", "--python", _base_python()]
    # Compiled once: where nobody may write bytecode (PYTHONDONTWRITEBYTECODE), each `pulumi` would compile pip anew.
    compiled, lock = root / ".venv" / "compiled", hashlib.sha256((root / "uv.lock").read_bytes()).hexdigest()
    is_compiled = compiled.is_file() and compiled.read_text() == lock
    quietly(
        "uv sync",
        words if is_compiled else [*words, "--compile-bytecode"],
        cwd=root,
        env={**os.environ, "UV_PROJECT_ENVIRONMENT": str(root / ".venv"), "UV_PYTHON_DOWNLOADS": "never"},
        limit_s=PYTHON_LIMIT_S,
        remedy="a PyPI index must be reachable",
    )
    if not is_compiled:
        compiled.write_text(lock)


def _base_python() -> str:
    # Run from inside .venv, uv would be asked to build the environment upon itself.
    return getattr(sys, "_base_executable", None) or sys.executable


def make_engine(root: Path = ROOT) -> None:
    """Choose the engine, build it if need be, and note the choice for ./env."""
    path = pulumi_on_path()
    found = ask_version([path, "version"]) if path else None
    choice = choose_engine(path, found, required_pulumi(root), os.environ.get("SPARK_VLLM_ENGINE", ""))
    if choice.build:
        folder = str(build_engine(root))
        say(f"  engine: pulumi {PULUMI_VERSION} built from Go modules in {folder} ({choice.reason})")
    else:
        folder = ""
        say(f"  engine: the one on PATH ({choice.reason}); it fetches its plugins by itself")
    note = places.engine_choice(root)
    note.parent.mkdir(exist_ok=True)
    fresh = note.with_name(f"engine.{os.getpid()}")
    fresh.write_text(folder + "\n" if folder else "")
    fresh.replace(note)


def make_home() -> None:
    """The local backend and its passphrase, unless they are there or the person has their own."""
    home = places.home_dir()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    places.backend_dir().mkdir(mode=0o700, exist_ok=True)
    own = "PULUMI_CONFIG_PASSPHRASE" in os.environ
    named = os.environ.get("PULUMI_CONFIG_PASSPHRASE_FILE") or str(places.passphrase_file())
    if own or Path(named).absolute() != places.passphrase_file():
        return
    try:
        handle = os.open(places.passphrase_file(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if not places.passphrase_file().read_text().strip():
            raise Stop(
                f"{places.passphrase_file()}: expected a passphrase, found an empty file;"
                " restore it from your backup, or remove it if no stack was made with it"
            ) from None
        return
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_urlsafe(32) + "\n")
    say(
        f"  made a passphrase for the secrets in the state: {places.passphrase_file()} (mode 600)\n"
        f"    back it up: copy {home} (backend/ and passphrase) to a safe place;\n"
        "      without the passphrase the secrets in the state are lost\n"
        "    share it with CI: before `. ./env`, set PULUMI_BACKEND_URL to a shared one (s3://…, gs://…, https://…)\n"
        "      and PULUMI_CONFIG_PASSPHRASE or PULUMI_CONFIG_PASSPHRASE_FILE to the same passphrase\n"
        "    change it: `pulumi stack change-secrets-provider passphrase` for each stack, write the new\n"
        "      one to the file, and drop the salt that this put into Pulumi.<stack>.yaml (the state has it)"
    )


def bootstrap(root: Path = ROOT) -> None:
    """All of it, without the final word."""
    make_home()
    make_python(root)
    make_engine(root)


def main() -> int:
    """Set the checkout up, saying what is done."""
    if os.name != "posix":
        raise Stop(f"platform: expected Linux or macOS, found {platform.system()}; use one of these, or WSL")
    steps = Steps(3)
    with steps("state and passphrase"):
        make_home()
    with steps("Python environment (.venv)"):
        make_python()
    with steps("engine"):
        make_engine()
    say("ready: `. ./env` puts it on PATH")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
