"""The NCCL, Gloo, Ray and vLLM environment of a rank, with the reason for each variable.

No value here was measured on a Spark by this project; sources are named by repository, and what disagrees with them is
in docs/explanation/environment.md. ``NCCL_IB_GID_INDEX`` is never set: the index of the RoCE v2 IPv4 entry differs per
node and drifts, an empty value is read as 0, the link-local GID (MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark PR 10,
tonyd2wild/DeepSeek-v4-Flash-Vision-Exp-DSpark-1M-NVFP4-KV-2x-DGX-Spark#38), and on a ring it must not be set
(spark-arena/sparkrun). NCCL finds it at each start.
"""

from __future__ import annotations

from typing import Literal

from spark_core.settings import GroupSettings, NodeSettings, Settings

CACHE_TARGET = "/var/cache/spark-vllm"
"""Folder of the cache volume in the containers."""

RING_ALGORITHM_FROM_NODES = 4

_COMMON = {
    # The weights are mounted; a start must not ask the hub.
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Ray's monitor kills workers at 95 % of node memory, which a loading model passes
    # (MiaAI-Lab/GLM-5.3-Flash-NVFP4-Dual-DGX-Spark PR 2).
    "RAY_memory_monitor_refresh_ms": "0",
    # Fewer idle processes on unified memory (eugr/spark-vllm-docker, timothystewart6/vllm-gb10).
    "RAY_num_prestart_python_workers": "0",
    "VLLM_CONFIG_ROOT": f"{CACHE_TARGET}/config",
}
_SPARK = {
    # Both are in use by spark-arena/sparkrun; it gives no reason for either.
    "NCCL_CROSS_NIC": "1",
    "NCCL_IGNORE_CPU_AFFINITY": "1",
    # Allocator segments otherwise take 10 GiB and more of unified memory after load (eugr/spark-vllm-docker).
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # In use by spark-arena/sparkrun and timothystewart6/vllm-gb10; neither gives a reason.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_RING = {
    # Three or more nodes without a switch (eugr/spark-vllm-docker, docs/NETWORKING.md; NCCL 2.30u1 or newer): each HCA
    # reaches one neighbour only, so NCCL must choose the HCA by its subnet, must not merge the two halves of a port
    # into one device, and no plugin may choose otherwise.
    "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_SUBNET_AWARE_ROUTING": "1",
    "NCCL_IB_MERGE_NICS": "0",
}


def rdma_policy(settings: Settings) -> Literal["required", "preferred", "off"]:
    """What ``fabric.rdma`` means for this hardware."""
    return settings.fabric.rdma or ("required" if settings.hardware == "spark" else "off")


def cache_environment(folder: str) -> dict[str, str]:
    """Where compile caches lie: in a Docker volume, so that they survive a replacement of the container.

    Triton and FlashInfer otherwise write below the home folder of the container, which goes with it. vLLM sets the
    first two anew where it compiles, below its own root.
    """
    return {
        "VLLM_CACHE_ROOT": folder,
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "FLASHINFER_WORKSPACE_BASE": f"{folder}/flashinfer",
    }


def rank_environment(
    settings: Settings, group: GroupSettings, node: NodeSettings, caches: str = CACHE_TARGET
) -> dict[str, str]:
    """Environment of one rank: the profile's, the owner's on top, and the node's own interface values, which stand.

    All ranks get the same values but for the last kind: vLLM copies variables from the head to Ray's workers by prefix
    (spark-arena/sparkrun#135) or not at all (TechPreacher/dgx-spark-vllm-cluster), so every container has its own from
    its start.

    Args:
        caches: Folder of the compile caches in the container.
    """
    serving = group.serving
    environment = _COMMON | cache_environment(caches)
    if settings.hardware == "spark":
        environment |= _SPARK | _rdma_variables(settings)
    if settings.fabric.topology == "ring":
        environment |= _RING
        if len(group.nodes) >= RING_ALGORITHM_FROM_NODES:
            # Trees would join nodes that no cable joins (eugr/spark-vllm-docker).
            environment["NCCL_ALGO"] = "Ring"
    environment |= serving.environment
    if serving.nccl_debug is not None:
        environment["NCCL_DEBUG"] = serving.nccl_debug
    return environment | _own_variables(settings, node)


def _rdma_variables(settings: Settings) -> dict[str, str]:
    policy = rdma_policy(settings)
    if policy == "off":
        return {"NCCL_IB_DISABLE": "1"}
    # 0 states the intent (eugr/spark-vllm-docker, spark-arena/sparkrun). NCCL falls back to TCP silently; told to use
    # IB and nothing else (spark-arena/sparkrun), it should fail instead, which only those who require RDMA want.
    return {"NCCL_IB_DISABLE": "0"} | ({"NCCL_NET": "IB"} if policy == "required" else {})


def _own_variables(settings: Settings, node: NodeSettings) -> dict[str, str]:
    """What follows from the node's own interfaces; the same value on all nodes breaks NCCL (NVIDIA/nccl#286)."""
    if not node.fabric:
        return {}
    netdev = node.control_netdev or node.fabric[0].netdev
    variables = {
        # vLLM otherwise takes the default route's address, which may not be the one that Ray registered: a placement
        # group that is never created (eugr/spark-vllm-docker#227, vllm-project/vllm#7815).
        "VLLM_HOST_IP": node.rank_address or node.fabric[0].ip,
        # NCCL's bootstrap; a wrong name fails loudly.
        "NCCL_SOCKET_IFNAME": netdev,
        # Gloo otherwise resolves the host's name, possibly to loopback (vllm-project/vllm#7074).
        "GLOO_SOCKET_IFNAME": netdev,
        "TP_SOCKET_IFNAME": netdev,
    }
    hcas = [interface.hca for interface in node.fabric if interface.hca]
    if hcas and rdma_policy(settings) != "off":
        # Both halves of a port carry its full speed (eugr/spark-vllm-docker: one gives about 111 Gb/s). "=" asks for
        # exactly these names: NCCL takes a name as a prefix, and one that matches nothing means TCP, silently
        # (spark-pulse). The rank supervisor leaves out those without an active port at each start.
        variables["NCCL_IB_HCA"] = "=" + ",".join(hcas)
    return variables
