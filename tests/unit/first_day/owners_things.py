"""What an owner has on a Spark before this program comes: caches, launchers' files, containers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fake_host import FakeHost

COMMIT = "a" * 40
IMAGE_ID = "sha256:" + "5" * 64
SECRET = "marker-of-a-secret-7c1f"
MODEL = "Qwen/Qwen3.5-35B-A3B"
SERVE = (
    f"/usr/bin/python3 /usr/local/bin/vllm serve {MODEL} --port 8000 --api-key {SECRET} -tp 2 --max-model-len=65536 "
    "--enable-auto-tool-choice --tool-call-parser qwen3_coder --swap-space 4"
)


def cached_model(home: Path, repository: str = MODEL, commit: str = COMMIT, lacking: str = "") -> Path:
    """A hub cache with a model of two shards; the folder of the revision."""
    top = home / ".cache/huggingface/hub" / f"models--{repository.replace('/', '--')}"
    snapshot = top / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (top / "blobs").mkdir(exist_ok=True)
    (top / "refs").mkdir(exist_ok=True)
    (top / "refs/main").write_text(commit)
    shards = ["model-1.safetensors", "model-2.safetensors"]
    files = {shard: "x" * 100 for shard in shards if shard != lacking}
    files["config.json"] = json.dumps({"text_config": {"max_position_embeddings": 262144}})
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {f"w{n}": s for n, s in enumerate(shards)}})
    for number, (name, text) in enumerate(files.items()):
        (top / "blobs" / str(number)).write_text(text)
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    return snapshot


def eugr_checkout(home: Path, nodes: str = "192.168.200.12,192.168.200.13") -> Path:
    """A checkout of eugr/spark-vllm-docker with a .env that also holds a token."""
    folder = home / "spark-vllm-docker"
    folder.mkdir(parents=True)
    (folder / "launch-cluster.sh").write_text("#!/bin/bash\n")
    (folder / ".env").write_text(
        f'# shared\nCLUSTER_NODES="{nodes}"\nETH_IF=enp1s0f1np1\nIB_IF="rocep1s0f1,roceP2p1s0f1"\n'
        f"CONTAINER_HF_TOKEN={SECRET}\n"
    )
    return folder


def sparkrun_cluster(home: Path) -> Path:
    """A cluster as sparkrun writes it down."""
    folder = home / ".config/sparkrun/clusters"
    folder.mkdir(parents=True)
    path = folder / "pair.yaml"
    path.write_text(f"name: pair\nhosts:\n- 10.1.230.180\n- 10.1.230.181\nuser: aurora\nenv:\n  HF_TOKEN: {SECRET}\n")
    (folder / "flow.yaml").write_text("name: flow\nhosts: [10.0.0.1, '10.0.0.2']\n")
    (folder / ".default").write_text("pair\n")
    return path


def run_launcher(host: FakeHost, name: str = "vllm_node", **values: Any) -> None:
    """A container of a launcher that runs."""
    host.set_container(
        name, Image="vllm-node:latest", ImageId=IMAGE_ID, **{"Processes": [f"bash -c true {SECRET}", SERVE], **values}
    )
    host.change(images={"vllm-node:latest": {"image_id": IMAGE_ID, "architecture": "arm64", "layers": ["l1"]}})
