"""Debian root folders, built once into the cache from the package mirror that this machine already uses.

A root is named by the hash of its recipe, built under a temporary name and published by one rename, so an
interrupted build leaves nothing that looks finished. debootstrap is used where it is installed and otherwise
unpacked beside the cache: the machine itself gets no package installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab import paths
from lab.command import die_with_parent, evidence, run
from lab.errors import StepFailed
from lab.lock import locked
from lab.progress import say, step

SUITE = "bookworm"
"""Debian 12: its Python 3.11 is the interpreter that the serving image's packages are built for."""

DEFAULT_MIRROR = "http://deb.debian.org/debian"
BUILD_TIMEOUT_S = 1500


@dataclass(frozen=True)
class Recipe:
    """What a root is made of. Everything here is part of the name under which it is cached."""

    name: str
    """Subject of the root, first part of its folder name."""
    packages: tuple[str, ...]
    """Packages on top of debootstrap's minbase."""
    finish: str = ""
    """Shell text run inside the root at the end, as root."""
    version: int = 1
    """Raise to rebuild although nothing else changed."""

    @property
    def key(self) -> str:
        """The name of the built root: subject and hash of the recipe."""
        text = json.dumps([SUITE, self.packages, self.finish, self.version])
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


CONFINED = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
"""Starts a program whose mounts and processes end with it."""

SCRATCH = "/tmp"  # noqa: S108
"""A folder inside a root that is fresh and in memory for each `run_inside`; the root keeps nothing of it."""

MINBASE = Recipe(name="minbase", packages=())


def ensure_root(recipe: Recipe) -> Path:
    """Return the folder of the recipe's root, building it first when the cache has none."""
    target = paths.cache_dir() / "roots" / recipe.key
    if target.is_dir():
        return target
    with locked(paths.cache_dir() / "roots" / f"{recipe.key}.lock", what=recipe.name, timeout_s=BUILD_TIMEOUT_S):
        if not target.is_dir():
            _sweep(target.parent, recipe.key)
            if recipe is MINBASE:
                _publish(target, "Debian base root built", _debootstrap)
            else:
                base = ensure_root(MINBASE)
                _publish(target, f"Debian root for the {recipe.name} built", lambda new: _extend(base, recipe, new))
    return target


def _sweep(folder: Path, key: str) -> None:
    """Remove what interrupted builds of this root left."""
    for left in folder.glob(f".{key}.*"):
        shutil.rmtree(left)


def _publish(target: Path, text: str, build: Callable[[Path], None]) -> None:
    """Build under a temporary name, then rename: the finished name only ever holds a finished root."""
    temporary = target.parent / f".{target.name}.{os.getpid()}"
    temporary.parent.mkdir(parents=True, exist_ok=True)
    with step(text):
        build(temporary)
        temporary.rename(target)


def mirror() -> str:
    """The Debian mirror in this machine's apt sources, or Debian's own when it has none (as on Ubuntu)."""
    chosen = os.environ.get("SPARK_VLLM_LAB_MIRROR")
    if chosen:
        return chosen
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for file in files:
        if file.suffix not in (".list", ".sources") or not file.is_file():
            continue
        for line in file.read_text(errors="replace").splitlines():
            if line.lstrip().startswith("#"):
                continue
            found = re.search(r"https?://\S+/debian/?(?=\s|$)", line)
            if found:
                return found.group(0).rstrip("/")
    return DEFAULT_MIRROR


def _debootstrap(target: Path) -> None:
    program, env = _debootstrap_program()
    argv = [*program, "--variant=minbase", SUITE, str(target), mirror()]
    # Namespaces of its own: whatever debootstrap mounts and starts goes away with it, also when it is killed.
    run(
        [*CONFINED, *argv],
        what="Debian base root",
        timeout_s=BUILD_TIMEOUT_S,
        env=env,
        die_with_us=True,
    )
    shutil.rmtree(target / "debootstrap", ignore_errors=True)
    _write_sources(target)


def _debootstrap_program() -> tuple[list[str], dict[str, str]]:
    """The debootstrap to run: this machine's, or one unpacked into the cache."""
    if shutil.which("debootstrap"):
        return ["debootstrap"], {}
    tools = paths.cache_dir() / "tools" / "debootstrap"
    script = tools / "usr/sbin/debootstrap"
    if not script.is_file():
        say("debootstrap is not installed here: unpacking it into the cache")
        _fetch_packages(tools, ["debootstrap"])
    # Machines that are not Debian lack the key that the Debian archive is signed with.
    keyring = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
    extra: list[str] = []
    if not keyring.is_file():
        keyring = tools / "usr/share/keyrings/debian-archive-keyring.gpg"
        if not keyring.is_file():
            _fetch_packages(tools, ["debian-archive-keyring"])
        extra = [f"--keyring={keyring}"]
    return [str(script), *extra], {"DEBOOTSTRAP_DIR": str(tools / "usr/share/debootstrap")}


def _fetch_packages(folder: Path, names: list[str]) -> None:
    """Download packages with apt and unpack them into `folder`, without installing them."""
    download = folder / "download"
    shutil.rmtree(download, ignore_errors=True)
    download.mkdir(parents=True)
    argv = ["apt-get", "download", *names]
    try:
        run(argv, what="fetch debootstrap", timeout_s=120, cwd=download)
    except StepFailed:
        run(["apt-get", "update"], what="read the package lists", timeout_s=300)
        run(argv, what="fetch debootstrap", timeout_s=120, cwd=download)
    for package in sorted(download.glob("*.deb")):
        run(["dpkg-deb", "-x", str(package), str(folder)], what=f"unpack {package.name}", timeout_s=60)
    shutil.rmtree(download)


def _write_sources(root: Path) -> None:
    """Give the root the release and its updates; security updates come where the mirror has them."""
    base = mirror()
    lines = [f"deb {base} {SUITE} main", f"deb {base} {SUITE}-updates main"]
    if re.search(r"/debian$", base):
        lines.append(f"deb {base}-security {SUITE}-security main")
    (root / "etc/apt/sources.list").write_text("\n".join(lines) + "\n")


def _extend(base: Path, recipe: Recipe, target: Path) -> None:
    """Copy the base root and install the recipe's packages in the copy."""
    run(
        ["cp", "-a", "--reflink=auto", str(base), str(target)],
        die_with_us=True,
        what=f"copy the Debian base root for the {recipe.name}",
        timeout_s=300,
    )
    script = "\n".join(
        [
            "set -e",
            # Packages must not start services in a folder that is not a running system.
            "printf '#!/bin/sh\\nexit 101\\n' > /usr/sbin/policy-rc.d; chmod 755 /usr/sbin/policy-rc.d",
            "apt-get -q update",
            f"apt-get -q install -y --no-install-recommends {' '.join(recipe.packages)}",
            "apt-get clean; rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin /var/log/apt /var/log/*.log",
            recipe.finish,
            "rm -f /usr/sbin/policy-rc.d /etc/machine-id /var/lib/dbus/machine-id",
            ": > /etc/machine-id",
        ]
    )
    run_inside(target, ["sh", "-c", script], what=f"install packages for the {recipe.name}")


def run_inside(
    root: Path,
    argv: list[str],
    *,
    what: str,
    binds: tuple[tuple[Path, str], ...] = (),
    env: dict[str, str] | None = None,
    timeout_s: float = BUILD_TIMEOUT_S,
) -> str:
    """Run a program inside a root folder, with this machine's network and name resolution.

    The mounts it needs live in a mount namespace of their own, and its processes in a PID namespace, so
    nothing is left behind however it ends. `binds` are folders of this machine and where they appear
    inside.
    """
    lines = [
        "set -e",
        'root="$1"; shift',
        'mount --bind "$root" "$root"',
        'mount -t proc proc "$root/proc"',
        f'mount -t tmpfs tmpfs "$root{SCRATCH}"',
        'mount --rbind /dev "$root/dev"',
        # The target may be a link to a file that is not there in the root.
        'rm -f "$root/etc/resolv.conf"; : > "$root/etc/resolv.conf"',
        'mount --bind "$(readlink -f /etc/resolv.conf)" "$root/etc/resolv.conf"',
    ]
    for source, inside in binds:
        lines += [f'mkdir -p "$root{inside}"', f'mount --rbind "{source}" "$root{inside}"']
    lines.append('exec chroot "$root" "$@"')
    inside_env = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "DEBIAN_FRONTEND": "noninteractive",
        "LC_ALL": "C.UTF-8",
        "HOME": "/root",
        **(env or {}),
    }
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        if name in os.environ:
            inside_env[name] = os.environ[name]
    command = [*CONFINED, "sh", "-c", "\n".join(lines), "sh", str(root), *argv]
    start = time.monotonic()
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=inside_env,
            preexec_fn=die_with_parent,
        )
    except subprocess.TimeoutExpired as error:
        raise StepFailed(f"{what}: not done after {time.monotonic() - start:.0f} s") from error
    if done.returncode != 0:
        raise StepFailed(f"{what}: ended with {done.returncode}{evidence(done.stdout + done.stderr, 25)}")
    return done.stdout
