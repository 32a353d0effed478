"""The serving image and the model, ready in the cache, and their stable names in a lab's folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TypedDict

from lab import debian, disk, machine, paths
from lab.image import archive, environment, image_root
from lab.image.environment import CUDA_LIBRARIES_IN_CONTAINER, PREFIX
from lab.instance import Instance, write_whole
from lab.lock import locked
from lab.progress import say, step

BUILD_TIMEOUT_S = 3600
REPOSITORY = "spark-lab/vllm-cpu"
RECIPE_VERSION = 1
"""Raise to assemble the image anew although no input changed."""

LEFT_OUT_OF_ROOT = (
    "./dev/*",
    "./proc/*",
    "./sys/*",
    "./run/*",
    "./tmp/*",
    "./opt/vllm",
    "./var/cache/apt/*",
    "./var/lib/apt/lists/*",
    "./etc/resolv.conf",
    "./etc/hostname",
)


class ImageFacts(TypedDict):
    """What image.json holds and `image --json` prints."""

    archive: str
    image_id: str
    tag: str
    size: int
    cuda_libs_host_path: str
    cuda_libs_container_path: str
    model: str


def tag() -> str:
    """Name and tag of the image."""
    return f"{REPOSITORY}:{environment.pinned('vllm-cpu')}"


def _settings() -> dict[str, object]:
    return {
        "Env": [
            f"PATH={PREFIX}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            f"VLLM_CACHE_ROOT={environment.VLLM_CACHE}",
            "LC_ALL=C.UTF-8",
            # The image has no compiler. Set to 0, /health still turns 200 and the first completion ends the
            # engine.
            "TORCHDYNAMO_DISABLE=1",
            # The environment is complete and compiled; nothing is to be written beside it.
            "PYTHONDONTWRITEBYTECODE=1",
        ],
        "Entrypoint": ["/usr/local/bin/start-server"],
        "Cmd": [],
        "WorkingDir": "/",
        "ExposedPorts": {"8000/tcp": {}},
        "Labels": {
            "org.opencontainers.image.title": REPOSITORY,
            "org.opencontainers.image.version": environment.pinned("vllm-cpu"),
            "org.opencontainers.image.description": "vLLM for CPU over Ray, for emulated hosts",
            "spark-lab.vllm": environment.pinned("vllm-cpu"),
            "spark-lab.ray": environment.pinned("ray"),
            "spark-lab.torch": environment.pinned("torch"),
            "spark-lab.transformers": environment.pinned("transformers"),
            "spark-lab.python": "3.11",
        },
    }


def _entrypoint() -> Path:
    return paths.package_dir() / "image" / "entrypoint.sh"


def ensure() -> ImageFacts:
    """Return the facts of image and model, building first what the cache lacks."""
    inputs = json.dumps([environment.key(), image_root.recipe().key, _settings(), LEFT_OUT_OF_ROOT, RECIPE_VERSION])
    key = hashlib.sha256(inputs.encode() + _entrypoint().read_bytes()).hexdigest()[:12]
    folder = paths.cache_dir() / "images" / key
    built = environment.ensure()
    if not (folder / "facts.json").is_file():
        with locked(folder.with_suffix(".lock"), what="serving image", timeout_s=BUILD_TIMEOUT_S):
            if not (folder / "facts.json").is_file():
                _assemble(folder, built)
    stored = json.loads((folder / "facts.json").read_text())
    file = folder / "serving-image.tar"
    return {
        "archive": str(file),
        "image_id": stored["image_id"],
        "tag": tag(),
        "size": file.stat().st_size,
        "cuda_libs_host_path": built.cuda_libraries,
        "cuda_libs_container_path": CUDA_LIBRARIES_IN_CONTAINER,
        "model": str(ensure_model(built)),
    }


def _assemble(folder: Path, built: environment.Environment) -> None:
    root = debian.ensure_root(image_root.recipe())
    for left in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(left)
    temporary = folder.parent / f".{folder.name}.{os.getpid()}"
    scripts = temporary / "scripts"
    program = scripts / "usr/local/bin/start-server"
    program.parent.mkdir(parents=True)
    shutil.copyfile(_entrypoint(), program)
    program.chmod(0o755)
    layers = [
        archive.Layer(root, "Debian 12 with Python 3.11", leave_out=LEFT_OUT_OF_ROOT),
        archive.Layer(built.folder, "vLLM for CPU and Ray", owned_by_root=True),
        archive.Layer(scripts, "entry point that starts a server", owned_by_root=True),
    ]
    with step(f"serving image {tag()} assembled"):
        file = temporary / "serving-image.tar"
        image_id = archive.write_image(file, layers, tag=tag(), settings=_settings())
        shutil.rmtree(scripts)
        write_whole(temporary / "facts.json", json.dumps({"image_id": image_id}) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)


def ensure_model(built: environment.Environment) -> Path:
    """Return the folder of the lab's model, writing it first when the cache has none."""
    program = paths.package_dir() / "tiny_model.py"
    digest = hashlib.sha256(program.read_bytes() + built.key.encode()).hexdigest()[:12]
    target = paths.cache_dir() / "models" / f"tiny-qwen3.5-moe-{digest}"
    if target.is_dir():
        return target
    with locked(target.with_name(f"{target.name}.lock"), what="tiny model", timeout_s=BUILD_TIMEOUT_S):
        if not target.is_dir():
            for left in target.parent.glob(f".{target.name}.*"):
                shutil.rmtree(left)
            temporary = target.parent / f".{target.name}.{os.getpid()}"
            temporary.mkdir(parents=True)
            with step("tiny model written"):
                _write_model(program, built, temporary)
                temporary.rename(target)
    return target


def _write_model(program: Path, built: environment.Environment, target: Path) -> None:
    inside = debian.SCRATCH
    script = target.parent / f".{target.name}.script"
    script.mkdir()
    try:
        shutil.copyfile(program, script / program.name)
        libraries = disk.cuda_libraries_dir() / Path(built.cuda_libraries).name
        debian.run_inside(
            debian.ensure_root(image_root.recipe()),
            [f"{PREFIX}/bin/python", f"{inside}/script/{program.name}", f"{inside}/model"],
            what="write the tiny model",
            binds=(
                (built.folder / PREFIX.lstrip("/"), PREFIX),
                (libraries, CUDA_LIBRARIES_IN_CONTAINER),
                (script, f"{inside}/script"),
                (target, f"{inside}/model"),
            ),
            env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
    finally:
        shutil.rmtree(script)


def link_into(lab: Instance) -> ImageFacts:
    """Give image and model their stable names in the lab's folder: serving-image.tar, model/, image.json."""
    machine.require_build_tools()
    facts = ensure()
    _link(lab.folder / "serving-image.tar", Path(facts["archive"]))
    _copy_model(Path(facts["model"]), lab.folder / "model")
    write_whole(lab.folder / "image.json", json.dumps(facts, indent=2) + "\n")
    say(f"image {facts['tag']} and model: {lab.folder}")
    return facts


def _link(name: Path, target: Path) -> None:
    if name.is_symlink() and name.readlink() == target:
        return
    temporary = name.with_name(f".{name.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.rename(name)


def _copy_model(source: Path, target: Path) -> None:
    """A copy, not a link: a person's change to it must not reach other labs."""
    origin = target.with_name(".model-origin")
    if target.is_dir() and origin.is_file() and origin.read_text() == source.name:
        return
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    write_whole(origin, source.name)
