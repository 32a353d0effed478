"""docker of a node: containers are processes of this machine, run with a stand-in for torch.

``run`` starts what the container would start: the bundle that is mounted, with the environment that is given. Files of
the folder above say what is different: ``running`` (rows of ``inspect`` of other containers), ``run-error`` (docker
refuses), ``start-late`` (seconds until a container is there), ``mode`` (FAKE_TORCH of the container).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

BASE = Path(sys.argv[0]).absolute().parent.parent
FAKES = Path(os.environ["FAKE_LIBRARY"])
RUNTIME = "/opt/spark-vllm/runtime.pyz"
FLAGS = {"--rm"}


def option(words: list[str], name: str) -> list[str]:
    return [value for flag, value in itertools.pairwise(words) if flag == name]


def ps(words: list[str]) -> None:
    if words == ["-q"]:
        print("\n".join("id" for _ in lines_of("running")))
        return
    filters = dict(value.split("=", 1) for value in option(words, "--filter"))
    for path in sorted((BASE / "containers").glob("*")):
        name, label = f"^/{path.name}$", json.loads(path.read_text())["label"]
        if filters.get("name", name) == name and filters.get("label", label) == label and "-aq" in words:
            print(path.name)


def lines_of(name: str) -> list[str]:
    path = BASE / name
    return path.read_text().splitlines() if path.exists() else []


def remove(names: list[str]) -> None:
    for name in names:
        path = BASE / "containers" / name
        os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)
        path.unlink(missing_ok=True)


def run(words: list[str]) -> int:
    with (BASE / "runs").open("a") as file:
        file.write(json.dumps(words) + "\n")
    if (BASE / "run-error").exists():
        print((BASE / "run-error").read_text(), file=sys.stderr)
        return 125
    index = 0
    while words[index].startswith("--"):
        index += 1 if words[index] in FLAGS else 2
    command = words[index + 2 :]  # the image, and the path of the bundle, which stands in its mount
    mounts = [
        dict(part.split("=", 1) for part in value.split(",") if "=" in part) for value in option(words, "--mount")
    ]
    (bundle,) = (mount["source"] for mount in mounts if mount["target"] == RUNTIME)
    environ = dict(value.split("=", 1) for value in option(words, "--env"))
    mode = BASE / "mode"
    environ |= {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(FAKES),
        "FAKE_FOLDER": os.environ["FAKE_MEETING"],
        "FAKE_TORCH": mode.read_text() if mode.exists() else "",
    }
    for seconds in lines_of("start-late"):
        time.sleep(float(seconds))
    process = subprocess.Popen([sys.executable, bundle, *command], env=environ)
    path = BASE / "containers" / option(words, "--name")[0]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"pid": process.pid, "label": option(words, "--label")[0]}))
    code = process.wait()
    path.unlink(missing_ok=True)
    return code if code >= 0 else 137


def main(words: list[str]) -> int:
    if words[0] == "run":
        return run(words[1:])
    if words[0] == "ps":
        ps(words[1:])
    elif words[0] == "inspect":
        print("\n".join(lines_of("running")))
    elif words[0] == "rm":
        remove(words[2:])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
