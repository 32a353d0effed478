"""Variables of other launchers that people still have in their shells, and the setting that means each.

Nothing is read from the environment; a variable that used to choose the image and is silently ignored cost the first
deployment of this kind a night, so it is said once.
"""

from __future__ import annotations

from collections.abc import Mapping

LAUNCHER_VARIABLES: dict[str, str] = {
    "IMAGE_NAME": "image.registry, image.archive or image.local_id",
    "VLLM_IMAGE": "image.registry, image.archive or image.local_id",
    "VLLM_SPARK_EXTRA_DOCKER_ARGS": "groups.<name>.serving.mounts, .environment and .shm_size_mib",
    "CLUSTER_NODES": "nodes and groups.<name>.nodes",
    "HEAD_IP": "groups.<name>.nodes (the first one is the head)",
    "HEAD_NODE_IP": "groups.<name>.nodes (the first one is the head)",
    "WORKER_IP": "nodes",
    "ETH_IF": "nodes[].fabric[].netdev",
    "IB_IF": "nodes[].fabric[].hca",
    "MASTER_PORT": "groups.<name>.serving.master_port",
    "NCCL_DEBUG": "groups.<name>.serving.nccl_debug",
    "NCCL_SOCKET_IFNAME": "nodes[].fabric[].netdev",
    "NCCL_IB_HCA": "nodes[].fabric[].hca",
    "GLOO_SOCKET_IFNAME": "nodes[].fabric[].netdev",
    "VLLM_HOST_IP": "nodes[].fabric[].address",
    "VLLM_API_KEY": "groups.<name>.serving.api_key",
    "MODEL_NAME": "groups.<name>.model.source",
    "TENSOR_PARALLEL": "groups.<name>.serving.tensor_parallel_size",
    "GPU_MEMORY_UTILIZATION": "groups.<name>.serving.gpu_memory_utilization",
    "GPU_MEM": "groups.<name>.serving.gpu_memory_utilization",
    "MAX_MODEL_LEN": "groups.<name>.serving.max_model_len",
}
"""Names seen in eugr/spark-vllm-docker, mark-ramsey-ri/vllm-dgx-spark, TechPreacher and vLLM's run_cluster.sh."""


def launcher_variable_notes(environment: Mapping[str, str]) -> list[str]:
    """One line for each well-known variable that is set; its value is never shown."""
    return [
        f"{name} is set in the environment and is not read; the setting is {meaning}"
        for name, meaning in LAUNCHER_VARIABLES.items()
        if environment.get(name)
    ]
