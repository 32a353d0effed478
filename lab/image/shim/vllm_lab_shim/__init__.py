"""A lab device: vLLM's CPU platform, made to accept Ray on nodes that each declare one GPU.

Registered as a platform plugin. `register` only names the class, because vLLM's platform module is in the
middle of its own import when it is called; the classes are made on first access in
`vllm_lab_shim.platform`.

On a CPU build of torch a third duty would be needed (naming torchvision's operators before transformers
imports it). The environment here has the CUDA build, where torchvision registers them itself and a second
declaration aborts the process.
"""


def register() -> str:
    """Qualified name of the platform class for vLLM to load."""
    return "vllm_lab_shim.platform.RayCpuPlatform"
