"""What a file of another tool says of containers: variables, image, and how Docker starts them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spark_core.foreign_recipes.account import Account, shown
from spark_core.foreign_recipes.document import Document, place_of
from spark_core.foreign_recipes.secrets import is_secret_name, looks_secret
from spark_core.foreign_recipes.words import Word
from spark_core.settings.group import INTERFACE_VARIABLES

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LOADS_CODE = (
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "LD_AUDIT",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "PYTHONHOME",
    "PATH",
    "BASH_ENV",
)
_OURS = {
    "HF_HOME": "the weights are mounted",
    "HF_HUB_CACHE": "the weights are mounted",
    "HUGGINGFACE_HUB_CACHE": "the weights are mounted",
    "TRANSFORMERS_CACHE": "the weights are mounted",
    "HF_HUB_OFFLINE": "containers never ask the hub",
    "TRANSFORMERS_OFFLINE": "containers never ask the hub",
    "VLLM_CACHE_ROOT": "compile caches are kept in a volume of the group",
    "TRITON_CACHE_DIR": "compile caches are kept in a volume of the group",
    "TORCHINDUCTOR_CACHE_DIR": "compile caches are kept in a volume of the group",
    "FLASHINFER_WORKSPACE_BASE": "compile caches are kept in a volume of the group",
    "VLLM_CONFIG_ROOT": "the program writes there",
    "RAY_ADDRESS": "the program starts Ray",
    "CUDA_VISIBLE_DEVICES": "a Spark has one GPU",
    "MASTER_ADDR": "follows from the nodes of the group",
    "MASTER_PORT": "serving.master_port, which is the stack's",
}
_SIZE = re.compile(r"(?i)\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*")
_EXECUTOR = {
    "auto_remove": "containers are kept and started anew by Docker; the rank supervisor begins the next generation",
    "restart_policy": "containers are always started anew; the rank supervisor keeps ranks of one generation together",
    "privileged": "containers are never privileged; RDMA devices and locked memory are given one by one",
    "gpus": "each container gets the GPU of its node",
    "gpu_access_mode": "each container gets the GPU of its node",
    "ipc": "each container has memory of its own to share, which no logout can take away",
    "network": "containers use the host's network, as here always",
    "entrypoint": "the entrypoint is always the rank supervisor",
    "user": "containers run as the image says",
    "security_opt": "not taken over from a file",
    "cap_add": "containers get the one right that RDMA needs; no others are taken over from a file",
    "ulimit": "locked memory is unlimited on Sparks anyway",
    "devices": "RDMA devices are given where the fabric has them; no others are taken over from a file",
    "memory_limit": "host.memory_floor_mib keeps memory free for the machine instead",
    "labels": "containers have the labels of the program",
}
"""What each key of sparkrun's means here; all others are of executors without Docker."""


def take_variables(account: Account, document: Document, settings: dict[str, Any]) -> None:
    """Variables of a file as settings, beside those that are there already."""
    variables = document.value.get("env")
    for name, value in variables.items() if isinstance(variables, Mapping) else ():
        place = place_of("env", name)
        if isinstance(value, dict | list) or value is None:
            account.say_below(place, "left out", "expected one value; the tool would set a text that nobody wants")
        elif isinstance(name, str):
            text = str(value)
            take_variable(account, place, name, Word(text, "$" in text or "`" in text), settings)
        else:
            account.say_below(place, "not understood", "no name that a variable can have")


def take_variable(account: Account, place: str, name: str, value: Word, settings: dict[str, Any]) -> None:
    """One variable as a setting, or why not."""
    if is_secret_name(name) or looks_secret(value.text):
        account.add(place, "left out", "it is or may be a secret, which would show in docker inspect; it is not kept")
    elif not _VARIABLE.fullmatch(name):
        account.add(place, "not understood", "no name that a variable can have")
    elif value.expands or value.missing:
        account.add(place, "left out", "it names another variable, and nothing is read from an environment")
    elif name in INTERFACE_VARIABLES or name in ("NCCL_IB_GID_INDEX", "RAY_NODE_IP_ADDRESS", "MN_IF_NAME"):
        account.add(place, "left out", "a value of each node, which follows from nodes[].fabric")
    elif name in _LOADS_CODE:
        account.add(place, "left out", "it decides which code runs in the container; set it yourself if you trust it")
    elif name in _OURS:
        account.add(place, "left out", _OURS[name])
    elif name == "NCCL_DEBUG":
        account.add(place, "left out", "what NCCL tells is the stack's: serving.nccl_debug")
    else:
        settings["environment"] = {**settings.get("environment", {}), name: value.text}
        account.add(place, "taken", f"serving.environment.{name}: {shown(value.text)}", f"serving.environment.{name}")


def executor_settings(account: Account, document: Document) -> dict[str, Any]:
    """What a file says of how containers are started, as settings."""
    value, found = document.value, dict[str, Any]()
    wanted = value.get("executor_config")
    for key, item in wanted.items() if isinstance(wanted, Mapping) else ():
        place = place_of("executor_config", key)
        size = _SIZE.fullmatch(str(item)) if key == "shm_size" else None
        if size:
            mib = int(
                float(size.group(1)) * {"": 2**-20, "k": 2**-10, "m": 1, "g": 1024, "t": 2**20}[size.group(2).lower()]
            )
            if mib >= 64:
                found["shm_size_mib"] = mib
                account.say(place, "taken", f"serving.shm_size_mib: {mib}", "serving.shm_size_mib")
        text = _EXECUTOR.get(str(key), "belongs to executors without Docker, or is not known")
        account.say_below(place, "left out" if key in _EXECUTOR else "not understood", text)
    account.say_below("executor_config", "not understood", "expected keys and values")
    docker = value.get("executor") in (None, "docker")
    account.say_below("executor", "information" if docker else "left out", "ranks run in Docker, as here always")
    return found


def image(account: Account, document: Document) -> None:
    """What a file says of the image: it is the stack's, since a group of ranks has one."""
    container = document.value.get("container")
    if isinstance(container, str) and is_image_name(container):
        how = "image.registry" if "/" in container else "image.local_id, since the tool builds it on the node,"
        account.say("container", "left out", f"the image is the stack's: {how} for {shown(container)}")
    account.say_below("container", "left out", "the image is the stack's, see the settings of image")
    account.say_below("containers", "left out", "all ranks of a group run one image; ranks that differ never join")


def is_image_name(text: str) -> bool:
    """Whether a text is the name of an image that can be shown."""
    return re.fullmatch(r"\w[\w.:/-]{0,250}(@sha256:[0-9a-f]{64})?", text) is not None and not looks_secret(text)
