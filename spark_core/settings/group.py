"""Settings of a serving group: its model, how it is served, in which containers."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from spark_core.settings.base import AbsolutePath, FrozenModel, Name, Port

OWN_FLAGS: dict[str, str] = {
    "--model": "model.source",
    "--served-model-name": "model.served_name",
    "--host": "serving.host",
    "--port": "serving.port",
    "--api-key": "serving.api_key",
    "--middleware": "(the supervisor's own; it guards the API key)",
    "--distributed-executor-backend": "serving.backend",
    "--nnodes": "nodes",
    "--node-rank": "nodes",
    "--master-addr": "nodes",
    "--master-port": "serving.master_port",
    "--headless": "nodes",
    "--uds": "serving.port",
    "-n": "nodes",
    "-r": "nodes",
    "-tp": "serving.tensor_parallel_size",
    "-pp": "serving.pipeline_parallel_size",
}
"""vLLM flags that the program renders itself, and the setting that means each."""

INTERFACE_VARIABLES = (
    "VLLM_HOST_IP",
    "NCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
    "TP_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "UCX_NET_DEVICES",
    "OMPI_MCA_btl_tcp_if_include",
)
"""Per-node variables that follow from nodes[].fabric. One cluster-wide value of them breaks NCCL (NVIDIA/nccl#286)."""

_SECRET_VARIABLES = {
    "VLLM_API_KEY": "use serving.api_key",
    "HF_TOKEN": "remove it, containers download nothing",
    "HUGGING_FACE_HUB_TOKEN": "remove it, containers download nothing",
}

_HUB_SOURCE = re.compile(r"hf://[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*(@[A-Za-z0-9_][\w./-]*)?")

LoadFormat = Literal[
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
    "runai_streamer_sharded",
    "sharded_state",
    "pt",
    "npcache",
    "mistral",
    "tensorizer",
    "modelexpress",
    "gguf",
    "bitsandbytes",
    "dummy",
]
"""Load formats that vLLM knows (vllm/config/load.py; gguf and bitsandbytes are of older versions)."""


class ModelSettings(FrozenModel):
    """The model and where its weights come from."""

    source: str = Field(
        description="hf://ORG/NAME@REVISION, a model of the hub (a branch or tag is resolved once and recorded); or "
        "controller:DIR, a directory on the controller that is copied to every node; or "
        "node:/DIR, a directory that every node already has and that is used in place, read-only"
    )
    served_name: Annotated[str, StringConstraints(min_length=1, pattern=r"^[^\s-]\S*$")] = Field(
        description="name of the model in the API"
    )

    @field_validator("source")
    @classmethod
    def _known_source(cls, value: str) -> str:
        if value.startswith("hf:") and not _HUB_SOURCE.fullmatch(value):
            raise ValueError("must be hf://ORG/NAME@REVISION, such as hf://Qwen/Qwen3-0.6B@main")
        if not re.match(r"^controller:.+|^node:/.+|^hf://", value):
            raise ValueError("must be hf://ORG/NAME@REVISION, controller:DIR or node:/DIR")
        return value

    @property
    def kind(self) -> Literal["controller", "node", "hub"]:
        if self.source.startswith("hf://"):
            return "hub"
        return "controller" if self.source.startswith("controller:") else "node"

    @property
    def directory(self) -> str:
        """The directory of a source that is one."""
        return self.source.split(":", 1)[1]

    @property
    def repository(self) -> str:
        """``ORG/NAME`` of a model of the hub."""
        return self.source.removeprefix("hf://").partition("@")[0]

    @property
    def hub_revision(self) -> str:
        """The branch, tag or commit of a model of the hub; the hub's own default is the branch main."""
        return self.source.partition("@")[2] or "main"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which can never become another one."""
        return re.fullmatch("[0-9a-f]{40}", self.hub_revision) is not None


class MountSettings(FrozenModel):
    """A path of the host inside the containers."""

    source: AbsolutePath = Field(description="path on the node; it must exist")
    target: AbsolutePath = Field(description="path in the container")
    read_only: bool = Field(default=True, description="whether the container may only read it")


class PatchSettings(FrozenModel):
    """A file of the project folder that replaces or adds a file in the containers, read-only."""

    source: str = Field(description="file in the project folder", pattern=r"^[^/~][^\x00]*$")
    target: AbsolutePath = Field(description="path in the container")

    @field_validator("source")
    @classmethod
    def _inside(cls, value: str) -> str:
        if ".." in value.split("/"):
            raise ValueError("must be inside the project folder")
        return value


class ServingSettings(FrozenModel):
    """How vLLM serves the model. A field that is not set is not passed: vLLM's own default holds."""

    backend: Literal["ray", "mp"] = Field(
        default="ray",
        description="what distributes the ranks: ray, or mp for vLLM's own processes on every node without Ray",
    )
    supervisor_update: Literal["planned", "now"] = Field(
        default="planned",
        description="when a newer rank supervisor of this program is taken: planned, with the next restart that "
        "another change asks for, or now, which restarts serving",
    )
    host: str = Field(default="0.0.0.0", description="address on which the head serves the API")  # noqa: S104
    port: Port = Field(default=30000, description="port of the API on the head")
    public_host: str | None = Field(
        default=None, description="host in the exported endpoint; default: the head's management_address"
    )
    ray_port: Port = Field(default=6379, description="port of Ray's control store on the head; backend ray")
    ray_token: Literal["auto", "off"] = Field(
        default="off",
        description="whether Ray asks for a token, drawn anew for each generation: off, or auto where its version can",
    )
    master_port: Port = Field(default=29501, description="port on the head where the ranks meet; backend mp")
    status_port: Port = Field(default=30001, description="port of the supervisor's status on the head, fabric only")
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    pipeline_parallel_size: int = Field(default=1, ge=1, le=64)
    max_model_len: int | None = Field(default=None, ge=1, description="context length in tokens")
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1, description="share of memory vLLM may use")
    kv_cache_memory_bytes: str | int | None = Field(default=None, description="size of the KV cache, such as 64M")
    max_num_seqs: int | None = Field(default=None, ge=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    trust_remote_code: bool = False
    enforce_eager: bool = False
    language_model_only: bool = Field(default=False, description="leave out the vision part of a multimodal model")
    enable_expert_parallel: bool = False
    enable_prefix_caching: bool | None = None
    kv_cache_dtype: str | None = None
    load_format: LoadFormat | None = Field(
        default=None,
        description="how vLLM reads the weights; what a format takes of the memory while it loads is part of the fit "
        "check. Formats that the image has no package for fail when the model loads",
    )
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    chat_template: AbsolutePath | None = Field(
        default=None, description="path in the container (a patch brings it there)"
    )
    extra_args: tuple[str, ...] = Field(default=(), description="further vllm serve arguments, as they are")
    api_key: Literal["generated", "own", "off"] = Field(
        default="generated", description="generated by the stack, own (the secret api_key), or off"
    )
    nccl_debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = Field(default=None, description="NCCL_DEBUG")
    environment: dict[str, str] = Field(
        default_factory=dict, description="variables of every container, the same on all"
    )
    mounts: tuple[MountSettings, ...] = ()
    patches: tuple[PatchSettings, ...] = ()
    shm_size_mib: int = Field(default=16384, ge=64, description="size of /dev/shm of each container")
    object_store_bytes: int = Field(default=1 << 30, ge=75 << 20, description="size of Ray's object store on each node")
    join_timeout_s: int = Field(default=600, ge=10, description="how long the head waits for every rank")
    heal: Literal["restart", "report"] = Field(
        default="restart",
        description="when a generation has failed: restart begins the next one, with a back-off, and ends in a verdict "
        "if it is a crash loop; report stays down until the next up",
    )
    start_timeout_s: int = Field(default=3600, ge=30, description="how long loading may go on without any progress")
    canary_timeout_s: int = Field(default=120, ge=5, description="bound of one canary completion")

    @field_validator("environment", mode="before")
    @classmethod
    def _plain_values(cls, value: object) -> object:
        if isinstance(value, dict):
            return {
                k: (str(v).lower() if isinstance(v, bool) else str(v)) if isinstance(v, bool | int | float) else v
                for k, v in value.items()
            }
        return value

    @field_validator("environment")
    @classmethod
    def _not_ours(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"{name!r} is not a variable name")
            if name in INTERFACE_VARIABLES:
                raise ValueError(f"{name} is a per-node value and follows from nodes[].fabric; remove it")
            if name in _SECRET_VARIABLES:
                raise ValueError(f"{name} would show in docker inspect; {_SECRET_VARIABLES[name]}")
            if name == "NCCL_DEBUG":
                raise ValueError("NCCL_DEBUG is the setting serving.nccl_debug")
        return value

    @field_validator("extra_args")
    @classmethod
    def _not_rendered_elsewhere(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for word in value:
            flag = word.split("=", 1)[0]
            if flag.startswith("--"):
                flag = flag.replace("_", "-")  # vLLM takes both spellings
            if flag in OWN_FLAGS:
                raise ValueError(f"{flag} is rendered by the program; use {OWN_FLAGS[flag]}")
            field = flag.removeprefix("--no-").removeprefix("--").replace("-", "_")
            if flag.startswith("--") and field in cls.model_fields:
                raise ValueError(f"{flag} is the setting serving.{field}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> ServingSettings:
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ValueError("enable_auto_tool_choice needs tool_call_parser (vLLM refuses it otherwise)")
        ports = {field: getattr(self, field) for field in self.port_fields}
        if len(set(ports.values())) != len(ports):
            raise ValueError(f"{', '.join(ports)} must differ; found {ports}")
        targets = [mount.target for mount in self.mounts] + [patch.target for patch in self.patches]
        if len(set(targets)) != len(targets):
            raise ValueError("two mounts or patches have the same target")
        return self

    @property
    def port_fields(self) -> tuple[str, ...]:
        """The settings that name a fixed port of the head."""
        return ("port", "ray_port" if self.backend == "ray" else "master_port", "status_port")

    @property
    def world_size(self) -> int:
        """Number of ranks: tensor times pipeline parallel size."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class NotifySettings(FrozenModel):
    """Who is told of a verdict, of a group that does not heal, and of a lost node. The webhook is a secret."""

    command: tuple[str, ...] = Field(
        default=(),
        description="run in the head's container with the notice as JSON in SPARK_VLLM_NOTICE; mount it with mounts",
    )
    deadline_s: int = Field(default=1800, ge=60, description="how long the group may be down before that is told")


class GroupSettings(FrozenModel):
    """One model served by a set of nodes; the first node is the head."""

    nodes: tuple[Name, ...] = Field(min_length=1, description="names of the nodes, the head first")
    recipe: str | None = Field(
        default=None,
        description="recipe (docs/recipes.md) that `model` and `serving` start from; what the stack says itself wins, "
        "and null takes a value of the recipe away",
    )
    model: ModelSettings
    serving: ServingSettings = Field(default_factory=ServingSettings)
    notify: NotifySettings = Field(default_factory=NotifySettings)
