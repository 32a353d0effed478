"""Flags of ``vllm serve`` that are more than a setting of their name: what each means, what is changed for safety."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_args

from spark_core.fit import HIGH_UTILIZATION
from spark_core.foreign_recipes.account import Verdict, shown
from spark_core.settings.group import OWN_FLAGS, LoadFormat

if TYPE_CHECKING:
    from spark_core.foreign_recipes.flags import Flag, Serving

_LENGTH = re.compile(r"(\d+(?:\.\d+)?)([kKmM]?)")
_LENGTH_UNITS = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 1024**2}
"""vLLM's: a small letter is decimal, a capital one binary."""


def typed(name: str, text: str) -> Any:
    """A value as a number where the setting is one."""
    if re.fullmatch(r"-?\d{1,18}", text):
        return int(text)
    if name == "gpu_memory_utilization" and re.fullmatch(r"\d*\.\d+", text):
        return float(text)
    return text


def _left_to_stack(serving: Serving, flag: Flag, place: str) -> None:
    serving.account.add(place, "left out", f"{OWN_FLAGS[flag.long]} is the stack's: clients would lose their endpoint")


def _backend(serving: Serving, flag: Flag, place: str) -> None:
    if flag.value in ("ray", "mp"):
        serving.put("backend", flag.value, place, f"serving.backend: {flag.value}")
    else:
        serving.account.add(place, "not understood", "expected ray or mp")


def _served_name(serving: Serving, flag: Flag, place: str) -> None:
    if not flag.values:
        serving.account.add(place, "not understood", "expected a name behind it")
        return
    serving.served_name = flag.value
    more = "" if len(flag.values) == 1 else f"; of {len(flag.values)} names the first one, others are not served"
    verdict: Verdict = "changed" if more else "taken"
    serving.account.add(place, verdict, f"model.served_name: {shown(flag.value)}{more}", "model.served_name")


def _revision(serving: Serving, flag: Flag, place: str) -> None:
    serving.revision = flag.value
    serving.account.add(place, "taken", "the revision of the weights", "model.source")


def _utilization(serving: Serving, flag: Flag, place: str) -> None:
    value = typed("gpu_memory_utilization", flag.value)
    if not isinstance(value, int | float) or not 0 < value <= 1 or len(flag.values) != 1:
        _gigabytes(serving, flag, place)
    elif value > HIGH_UTILIZATION:
        text = (
            f"serving.gpu_memory_utilization: {HIGH_UTILIZATION} instead of {value}; others ran out of memory above it"
        )
        serving.put("gpu_memory_utilization", HIGH_UTILIZATION, place, text, changed=True)
    else:
        serving.put("gpu_memory_utilization", value, place, f"serving.gpu_memory_utilization: {value}")


def _gigabytes(serving: Serving, flag: Flag, place: str) -> None:
    text = (
        f"serving.gpu_memory_utilization: {HIGH_UTILIZATION}, since vLLM's own default would be more; what the file "
        "says is no share of the memory"
    )
    serving.put("gpu_memory_utilization", HIGH_UTILIZATION, place, text, changed=True)


def _context(serving: Serving, flag: Flag, place: str) -> None:
    found = _LENGTH.fullmatch(flag.value)
    if found is None or len(flag.values) != 1:
        text = (
            "no number of tokens; vLLM takes the model's own length, and the memory plan is told if that does not fit"
        )
        serving.account.add(place, "left out", text)
        return
    tokens = int(float(found.group(1)) * _LENGTH_UNITS[found.group(2)])
    serving.put("max_model_len", tokens, place, f"serving.max_model_len: {tokens}")


def _load_format(serving: Serving, flag: Flag, place: str) -> None:
    if flag.value in get_args(LoadFormat):
        text = f"serving.load_format: {flag.value}; some formats need a package of the image, and hold files in memory"
        serving.put("load_format", flag.value, place, text)
    else:
        serving.account.add(place, "left out", "no load format that vLLM is known to have")


def _template(serving: Serving, flag: Flag, place: str) -> None:
    if re.fullmatch(r"/[^\x00:]+", flag.value):
        serving.put("chat_template", flag.value, place, "serving.chat_template; the file must be in the image")
    else:
        text = "a file that a mod of the tool brings; bring it with serving.patches and set serving.chat_template"
        serving.account.add(place, "left out", text)


def _data_parallel(serving: Serving, flag: Flag, place: str) -> None:
    if flag.value == "1":
        serving.account.add(place, "information", "one copy of the model, as here always")
    else:
        serving.account.add(place, "not understood", "a group serves one copy of a model")


def speculation(serving: Serving, flag: Flag, place: str) -> None:
    """A draft of the model itself is passed on; one of another model would need its weights on the nodes."""
    try:
        wanted = {} if "." in flag.long else json.loads(flag.value)
    except ValueError:
        wanted = None
    if isinstance(wanted, dict) and "model" not in wanted and not serving.drafts:
        serving.pass_on(flag, place)
    else:
        text = "speculation with a second model, which is not on the nodes; it changes the speed only"
        serving.account.add(place, "left out", text)


RULES: dict[str, Callable[[Serving, Flag, str], None]] = {
    "--model": lambda serving, flag, place: serving.read(flag.values, lambda _name: place),
    "--host": _left_to_stack,
    "--port": _left_to_stack,
    "--uds": _left_to_stack,
    "--distributed-executor-backend": _backend,
    "--served-model-name": _served_name,
    "--revision": _revision,
    "--gpu-memory-utilization": _utilization,
    "--gpu-memory-utilization-gb": _gigabytes,
    "--max-model-len": _context,
    "--load-format": _load_format,
    "--chat-template": _template,
    "--data-parallel-size": _data_parallel,
    "--nccl-debug": lambda serving, flag, place: serving.account.add(place, "not understood", "no flag of vLLM"),
    # Settings of ours whose names are no flags of vLLM.
    **dict.fromkeys(
        (
            "--backend",
            "--environment",
            "--mounts",
            "--patches",
            "--public-host",
            "--ray-port",
            "--ray-token",
            "--status-port",
            "--heal",
            "--shm-size-mib",
            "--object-store-bytes",
            "--join-timeout-s",
            "--start-timeout-s",
            "--canary-timeout-s",
        ),
        lambda serving, flag, place: serving.account.add(place, "not understood", "no flag of vLLM"),
    ),
}
