"""Runs on a node, sent there as text: what its owner has there already. It writes nothing.

Standard library only. Orders are a line of JSON on standard input; the answer is a line of JSON on standard output. Of
files and command lines of others only what is asked for by name is told: a token or a key that stands beside it never
leaves the node.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ANSWER_S = 15
MOST_CONTAINERS = 40
MOST_MODELS = 200
LARGEST_FILE = 1 << 16
LARGEST_CONFIG = 1 << 20
WEIGHTS = (".safetensors", ".bin", ".gguf")
ENV_KEYS = ("CLUSTER_NODES", "COPY_HOSTS", "LOCAL_IP", "ETH_IF", "IB_IF", "MASTER_PORT", "CONTAINER_NAME")
"""Of the file .env of eugr/spark-vllm-docker; others of its keys hold tokens."""
CLUSTER_KEYS = ("name", "hosts", "user", "cache_dir")
"""Of a cluster's file of sparkrun."""
MODEL_FOLDERS = ("~/models", "/models", "/opt/models", "/data/models", "/mnt/models")
LABEL = "spark-vllm.stack"


def output_of(*words: str) -> str:
    """What a program prints; nothing if it fails or does not end."""
    try:
        done = subprocess.run(words, capture_output=True, timeout=ANSWER_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace") if done.returncode == 0 else ""


def text_of(path: Path) -> str:
    """A small file's text; nothing if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(LARGEST_FILE).decode(errors="replace")
    except OSError:
        return ""


def containers() -> list[dict[str, Any]]:
    """Containers that are none of ours, with what decides how they come back."""
    names = output_of("docker", "ps", "-a", "--format", "{{.Names}}").split()[:MOST_CONTAINERS]
    found = []
    for text in [output_of("docker", "inspect", name) for name in names]:
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError, AttributeError):
            found.append(container(json.loads(text)[0]))
    return [one for one in found if one is not None]


def container(value: dict[str, Any]) -> dict[str, Any] | None:
    """One container; None if it is of ours."""
    config, host = value["Config"], value.get("HostConfig") or {}
    if (config.get("Labels") or {}).get(LABEL):
        return None
    mounts = [one for one in value.get("Mounts") or [] if one.get("Type") == "bind"]
    name = value["Name"].removeprefix("/")
    running = bool(value["State"].get("Running"))
    return {
        "name": name,
        "labels": sorted(config.get("Labels") or {}),
        "image": config.get("Image") or "",
        "image_id": value.get("Image") or "",
        "running": running,
        "removed_when_stopped": bool(host.get("AutoRemove")),
        "restart": (host.get("RestartPolicy") or {}).get("Name") or "no",
        "caches": [one["Source"] + "/hub" for one in mounts if one.get("Destination", "").endswith("/huggingface")],
        "serving": list(served(name)) if running else [],
    }


def served(name: str) -> Iterator[dict[str, Any]]:
    """Servers of vLLM in a container: the model, and of its arguments those that are no secrets."""
    for line in output_of("docker", "top", name, "-ww", "-eo", "pid,args").splitlines()[1:]:
        words = line.split()[1:]
        start = server_words(words)
        if start is not None:
            yield arguments_of(start)


def server_words(words: list[str]) -> list[str] | None:
    """The arguments behind ``vllm serve`` or behind the name of its older entry point."""
    for place, word in enumerate(words[:8]):
        if word.rpartition("/")[2] == "vllm" and words[place + 1 : place + 2] == ["serve"]:
            return words[place + 2 :]
        if word == "vllm.entrypoints.openai.api_server":
            return words[place + 1 :]
    return None


def arguments_of(words: list[str]) -> dict[str, Any]:
    """A server's model and flags; of flags that nobody asked for only the names."""
    model, flags, others = "", {}, []
    left = list(words)
    if left and not left[0].startswith("-"):
        model = left.pop(0)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            continue
        name, sign, value = word.partition("=")
        name = SHORT.get(name, name).replace("_", "-")
        if not sign and left and not left[0].startswith("-"):
            value = left.pop(0)
        if name == "--model":
            model = value
        elif name in ASKED:
            flags[name] = value
        else:
            others.append(name)
    return {"model": model, "flags": flags, "others": sorted(set(others))}


SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size"}
ASKED = (
    "--port",
    "--served-model-name",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--max-model-len",
    "--gpu-memory-utilization",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--kv-cache-dtype",
    "--load-format",
    "--reasoning-parser",
    "--tool-call-parser",
    "--enable-auto-tool-choice",
    "--enable-prefix-caching",
    "--enable-expert-parallel",
    "--trust-remote-code",
    "--distributed-executor-backend",
    "--headless",
    "--nnodes",
)


def images() -> list[dict[str, Any]]:
    """Images of the node: id and names; ``docker image ls`` has the newest first."""
    found: dict[str, list[str]] = {}
    for line in output_of("docker", "image", "ls", "--no-trunc", "--format", "{{.ID}} {{.Repository}}:{{.Tag}}").split(
        "\n"
    ):
        image_id, _, name = line.partition(" ")
        if image_id.startswith("sha256:"):
            found.setdefault(image_id, []).extend([name] if "<none>" not in name else [])
    return [{"id": image_id, "names": names} for image_id, names in found.items()]


def models_of_cache(folder: str) -> Iterator[dict[str, Any]]:
    """Models of a hub cache; of each the revision of its branch main, or else the newest that is whole."""
    try:
        places = sorted(Path(folder).expanduser().glob("models--*"))[:MOST_MODELS]
    except OSError:
        return
    for place in places:
        main = text_of(place / "refs" / "main").strip()
        try:
            commits = sorted((place / "snapshots").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        except OSError:
            continue
        commits.sort(key=lambda path: path.name != main)
        looked = [model_in(path) for path in commits if re.fullmatch("[0-9a-f]{40}", path.name)]
        best = next((one for one in looked if not one["fault"]), looked[0] if looked else None)
        if best is not None:
            name = place.name.removeprefix("models--").replace("--", "/")
            yield {"repository": name, "commit": Path(best["path"]).name, **best}


def model_in(folder: Path) -> dict[str, Any]:
    """Whether a folder holds a whole model, as far as names and sizes tell."""
    found: dict[str, Any] = {"path": str(folder), "bytes": 0, "fault": "", "positions": None}
    try:
        sizes = {path.name: path.stat().st_size for path in folder.iterdir() if not path.is_dir()}
        config = json.loads((folder / "config.json").read_bytes()[:LARGEST_CONFIG])
        index = folder / "model.safetensors.index.json"
        wanted = set(json.loads(index.read_bytes())["weight_map"].values()) if index.exists() else set()
    except FileNotFoundError as error:
        return {**found, "fault": f"{Path(str(error.filename)).name} is missing"}
    except OSError:
        return {**found, "fault": "it cannot be read"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {**found, "fault": "its description cannot be understood"}
    missing = sorted(str(name) for name in wanted if not sizes.get(str(name)))
    if missing:
        found["fault"] = f"{missing[0]} is missing"
    elif not any(name.endswith(WEIGHTS) and size for name, size in sizes.items()):
        found["fault"] = "it has no weights"
    inner = config.get("text_config") if isinstance(config, dict) else None
    for value in (inner, config):
        positions = value.get("max_position_embeddings") if isinstance(value, dict) else None
        if isinstance(positions, int) and found["positions"] is None:
            found["positions"] = positions
    return {**found, "bytes": sum(sizes.values())}


def plain_models() -> Iterator[dict[str, Any]]:
    """Models that lie in folders where people keep them, one level deep, or two for ORG/NAME."""
    seen = 0
    for top in MODEL_FOLDERS:
        for pattern in ("*/config.json", "*/*/config.json"):
            for config in sorted(Path(top).expanduser().glob(pattern)):
                seen += 1
                if seen > MOST_MODELS:
                    return
                found = model_in(config.parent)
                if not found["fault"]:
                    yield found


def launcher_folders() -> Iterator[dict[str, Any]]:
    """Checkouts of eugr/spark-vllm-docker in the home folder, and what their .env says."""
    for depth in ("*/", "*/*/"):
        for script in sorted(Path.home().glob(f"{depth}launch-cluster.sh"))[:10]:
            values = {}
            for line in text_of(script.parent / ".env").splitlines():
                key, sign, value = line.strip().partition("=")
                if sign and key.strip() in ENV_KEYS:
                    values[key.strip()] = value.strip().strip("\"'")
            yield {"folder": str(script.parent), "env": values}


def clusters() -> Iterator[dict[str, Any]]:
    """Clusters that sparkrun has written down: plain YAML of a few keys."""
    folder = Path.home() / ".config" / "sparkrun" / "clusters"
    chosen = text_of(folder / ".default").strip()
    for path in sorted(folder.glob("*.yaml"))[:20]:
        values: dict[str, Any] = {"hosts": []}
        key = ""
        for line in text_of(path).splitlines():
            item = re.match(r"^\s*-\s+(\S.*)$", line)
            pair = re.match(r"^(\w+):\s*(.*)$", line)
            if pair:
                key, value = pair[1], pair[2].strip()
                if key == "hosts" and value.startswith("["):
                    values["hosts"] = [bare(word) for word in value.strip("[]").split(",") if word.strip()]
                elif key in CLUSTER_KEYS and key != "hosts":
                    values[key] = bare(value)
            elif item and key == "hosts":
                values["hosts"].append(bare(item[1]))
        yield {"file": str(path), "chosen": path.stem == chosen, **values}


def bare(word: str) -> str:
    """A word without its quotes."""
    return word.strip().strip("\"'")


def wake_neighbours(addresses: list[str]) -> None:
    """Send one byte to every address of small subnets, over their own interfaces, so that who is there shows itself."""
    sent = False
    for text in addresses:
        own = ipaddress.IPv4Interface(text)
        if own.network.prefixlen < 24:
            continue
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.bind((str(own.ip), 0))
            sender.setblocking(False)
            for address in own.network.hosts():
                with contextlib.suppress(OSError):
                    sender.sendto(b"\0", socket.MSG_DONTROUTE, (str(address), 9))
                    sent = True
    if sent:
        time.sleep(1.5)


def survey(orders: dict[str, Any]) -> dict[str, Any]:
    """Everything."""
    wake_neighbours(orders["wake"])
    found = containers()
    written_down = list(clusters())
    caches = dict.fromkeys(
        [
            *orders["caches"],
            *(folder for one in found for folder in one["caches"]),
            *(f"{one['cache_dir']}/hub" for one in written_down if one.get("cache_dir")),
        ]
    )
    return {
        "name": socket.gethostname(),
        "containers": found,
        "images": images(),
        "cached": [{"cache": folder, **model} for folder in caches for model in models_of_cache(folder)],
        "models": list(plain_models()),
        "launchers": list(launcher_folders()),
        "clusters": written_down,
        "neighbours": output_of("ip", "-j", "neigh", "show"),
    }


def main() -> None:
    """Answer the orders."""
    print(json.dumps(survey(json.loads(sys.stdin.buffer.readline()))))


if __name__ == "__main__":
    main()
