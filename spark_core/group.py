"""A serving group as containers: pure functions from settings to what each node runs.

All ranks of a group get the same image, the same arguments and the same environment but for the values that follow
from the node's own fabric interfaces. The deployment id is a hash of all of it: when anything changes for one rank,
every rank is replaced, since ranks that differ must never join (rank 1 would pick other kernels than rank 0).
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from spark_core.fabric.environment import CACHE_TARGET, rank_environment, rdma_policy
from spark_core.journal import StackFolder
from spark_core.settings import GroupSettings, NodeSettings, ServingSettings, Settings
from spark_core.settings.root import GPUS_PER_NODE

RUNTIME_TARGET = "/opt/spark-vllm/runtime.pyz"
STATE_TARGET = "/var/lib/spark-vllm"
KEY_TARGET = "/run/secrets/spark-vllm/api_key"
LABEL = "spark-vllm"

_SERVE_FIELDS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "max_model_len",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_num_seqs",
    "max_num_batched_tokens",
    "trust_remote_code",
    "enforce_eager",
    "language_model_only",
    "enable_expert_parallel",
    "enable_prefix_caching",
    "kv_cache_dtype",
    "load_format",
    "reasoning_parser",
    "tool_call_parser",
    "enable_auto_tool_choice",
    "chat_template",
)


@dataclass(frozen=True)
class BindMount:
    """A path of the node inside a container."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True)
class RankContainer:
    """The container of one rank, in the words of ``docker run``.

    Attributes:
        node: Name of its node.
        rank: 0 is the head.
        name: Container name.
        entrypoint: Always explicit; the image's own would start a server by itself.
        command: Arguments of the rank supervisor; after ``--`` those of ``vllm serve``.
        environment: Variables, sorted.
        mounts: Bind mounts.
        cache_volume: Name of the Docker volume for compile caches.
        devices: Device nodes of the host.
        gpus: Value of ``--gpus``, or None.
        capabilities: Capabilities to add.
        memlock_unlimited: Whether locked memory is unlimited (RDMA registers memory).
        shm_size_mib: Size of /dev/shm.
        labels: By which our containers are known.
    """

    node: str
    rank: int
    name: str
    entrypoint: tuple[str, ...]
    command: tuple[str, ...]
    environment: tuple[str, ...]
    mounts: tuple[BindMount, ...]
    cache_volume: str
    devices: tuple[str, ...]
    gpus: str | None
    capabilities: tuple[str, ...]
    memlock_unlimited: bool
    shm_size_mib: int
    labels: dict[str, str]
    health_command: tuple[str, ...]


@dataclass(frozen=True)
class GroupPlan:
    """What a group runs, rank by rank, and the id that stands for all of it."""

    deployment: str
    containers: tuple[RankContainer, ...]


@dataclass(frozen=True)
class GroupFiles:
    """Where the files of a group lie on its nodes.

    Attributes:
        runtime: Path of the supervisor's file, below the node's folder of files.
        patches: Relative path of each patch, in the order of the settings.
        weights: For each node, the folder of the weights.
        in_place: For each node whose folder is a hub cache's, with links in it: name of each file to where its content
            lies. They are mounted one by one, since links would lead out of a folder that is mounted alone.
    """

    runtime: str
    patches: tuple[str, ...]
    weights: dict[str, str]
    in_place: dict[str, dict[str, str]] = field(default_factory=dict)

    def mounts(self, node: str, target: str) -> list[BindMount]:
        """The weights of a node, at a path in the container."""
        files = self.in_place.get(node)
        if files is None:
            return [BindMount(self.weights[node], target)]
        return [BindMount(source, f"{target}/{name}") for name, source in sorted(files.items())]


def plan_group(settings: Settings, group_name: str, stack: str, image_id: str, files: GroupFiles) -> GroupPlan:
    """Render the containers of a group.

    Args:
        image_id: Local id of the image; part of the deployment's id.
    """
    group = settings.groups[group_name]
    drafts = [_container(settings, group_name, stack, files, rank, image_id) for rank in range(len(group.nodes))]
    text = json.dumps([image_id, [_canonical(draft) for draft in drafts]], sort_keys=True)
    deployment = hashlib.sha256(text.encode()).hexdigest()[:12]
    finished = tuple(
        replace(
            draft,
            command=("run", "--deployment", deployment, *draft.command),
            labels={**draft.labels, f"{LABEL}.deployment": deployment},
        )
        for draft in drafts
    )
    return GroupPlan(deployment, finished)


def container_name(stack: str, group_name: str, rank: int) -> str:
    """Name of a rank's container, the same on every machine that runs the stack."""
    return f"spark-vllm-{stack}-{group_name}-rank{rank}"


def model_target(group: GroupSettings) -> str:
    """Path of the weights in the containers."""
    return "/models/" + re.sub(r"[^A-Za-z0-9._-]", "-", group.model.served_name)


def key_path(folder: StackFolder, group_name: str) -> str:
    """Path of a group's key file on the head."""
    return f"{folder.secrets}/{group_name}/api_key"


def public_endpoint(settings: Settings, group_name: str) -> str:
    """The OpenAI-compatible base URL of a group."""
    group = settings.groups[group_name]
    host = group.serving.public_host or settings.node(group.nodes[0]).management_address
    return f"http://{host}:{group.serving.port}/v1"


def serve_arguments(serving: ServingSettings) -> list[str]:
    """Arguments of ``vllm serve`` that follow from the settings; what is not set is not passed."""
    words: list[str] = []
    for name in _SERVE_FIELDS:
        value = getattr(serving, name)
        flag = "--" + name.replace("_", "-")
        default = ServingSettings.model_fields[name].default
        if value is True:
            words.append(flag)
        elif value is False and default is None:
            words.append("--no-" + flag.removeprefix("--"))
        elif value is not None and not isinstance(value, bool):
            words += [flag, str(value)]
    return [*words, *serving.extra_args]


def cache_folder(settings: Settings, image_id: str, weights: str) -> str:
    """Folder of the compile caches of an image and a model in the cache volume: what one compiled never meets another.

    Args:
        weights: Folder of the weights on the node; its name is their revision.
    """
    image = settings.image.registry or image_id
    digest = hashlib.sha256(f"{image}\0{PurePosixPath(weights).name}".encode()).hexdigest()
    return f"{CACHE_TARGET}/{digest[:12]}"


def _container(
    settings: Settings, group_name: str, stack: str, files: GroupFiles, rank: int, image_id: str
) -> RankContainer:
    group = settings.groups[group_name]
    serving = group.serving
    node = settings.node(group.nodes[rank])
    head = settings.node(group.nodes[0])
    folder = StackFolder(settings.root_of(node), stack)
    with_key = serving.api_key != "off" and rank == 0
    mounts = [
        BindMount(f"{folder.files}/{files.runtime}", RUNTIME_TARGET),
        BindMount(folder.state(group_name), STATE_TARGET, read_only=False),
        *files.mounts(node.name, model_target(group)),
        *(
            BindMount(f"{folder.files}/{path}", patch.target)
            for path, patch in zip(files.patches, serving.patches, strict=True)
        ),
        *(BindMount(mount.source, mount.target, mount.read_only) for mount in serving.mounts),
    ]
    if with_key:
        # The folder, not the file: a new key is a new file, and a bind of a file would keep the old one.
        mounts.append(BindMount(f"{folder.secrets}/{group_name}", KEY_TARGET.rpartition("/")[0]))
    spark = settings.hardware == "spark"
    caches = cache_folder(settings, image_id, files.weights[node.name])
    labels = {
        f"{LABEL}.stack": stack,
        f"{LABEL}.group": group_name,
        f"{LABEL}.rank": str(rank),
        f"{LABEL}.supervisor": files.runtime,
    }
    return RankContainer(
        node=node.name,
        rank=rank,
        name=container_name(stack, group_name, rank),
        entrypoint=(settings.image.python, RUNTIME_TARGET),
        command=("--rdma", rdma_policy(settings), *_supervisor_arguments(group_name, group, head, node, rank)),
        environment=tuple(f"{k}={v}" for k, v in sorted(rank_environment(settings, group, node, caches).items())),
        mounts=tuple(mounts),
        cache_volume=f"spark-vllm-{stack}-{group_name}-cache",
        devices=("/dev/infiniband",) if spark and any(i.hca for i in node.fabric) else (),
        gpus="all" if spark else None,
        capabilities=("IPC_LOCK",) if spark else (),
        memlock_unlimited=spark,
        shm_size_mib=serving.shm_size_mib,
        labels=labels,
        health_command=(settings.image.python, RUNTIME_TARGET, "health"),
    )


def _supervisor_arguments(
    group_name: str, group: GroupSettings, head: NodeSettings, node: NodeSettings, rank: int
) -> list[str]:
    serving = group.serving
    words = [
        "--group",
        group_name,
        "--rank",
        str(rank),
        "--nodes",
        str(len(group.nodes)),
        "--gpus-per-node",
        str(GPUS_PER_NODE),
        "--node-names",
        ",".join(group.nodes),
        "--heal",
        serving.heal,
        "--backend",
        serving.backend,
        "--head-address",
        head.rank_address or "127.0.0.1",
        "--node-address",
        node.rank_address or "127.0.0.1",
        "--ray-port",
        str(serving.ray_port),
        "--ray-token",
        serving.ray_token,
        "--master-port",
        str(serving.master_port),
        "--status-port",
        str(serving.status_port),
        "--serve-host",
        serving.host,
        "--serve-port",
        str(serving.port),
        "--model",
        model_target(group),
        "--served-model-name",
        group.model.served_name,
        "--state-dir",
        STATE_TARGET,
        "--object-store-bytes",
        str(serving.object_store_bytes),
        "--join-timeout-s",
        str(serving.join_timeout_s),
        "--start-timeout-s",
        str(serving.start_timeout_s),
        "--canary-timeout-s",
        str(serving.canary_timeout_s),
    ]
    if serving.api_key != "off" and rank == 0:
        words += ["--api-key-file", KEY_TARGET]
    return [*words, "--", *serve_arguments(serving)]


def _canonical(container: RankContainer) -> dict[str, object]:
    value = dict(vars(container))
    value["mounts"] = [vars(mount) for mount in container.mounts]
    return value
