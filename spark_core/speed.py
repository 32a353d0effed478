"""How fast a group serves: vLLM's own benchmark (``vllm bench serve``) against its endpoint, and two results compared.

The benchmark runs in a throw-away container on the head, of the very image and with the very mounts of rank 0, so that
its tokenizer is the one that serves. It asks the public endpoint, with the API key from its file on the node.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spark_core.errors import CommandError, GateError
from spark_core.gate import Rank
from spark_core.group import KEY_TARGET, LABEL, model_target, public_endpoint
from spark_core.proof.idle import PROBE_LABEL
from spark_core.settings import Settings
from spark_core.transport.base import run_checked, script, tail_lines

MEMORY_MIB = 3072
NEEDS_MIB = 4096
"""Less available memory than this, and nothing is started beside a model that serves: the node has one memory for all
(NVIDIA/open-gpu-kernel-modules#1358)."""
PROMPT_TOKENS, ANSWER_TOKENS = 512, 128
TOLERANCE = 0.10
_PROGRAM = Path(__file__).resolve().parents[1] / "spark_runtime" / "image" / "bench_serve.py"

# Interrupted, the container is ended by its own deadline at the latest; the next benchmark removes one of its name.
_RUN = """
name=$1 label=$2 rank=$3 limit=$4 needs=$5; shift 5
free=$(awk '/^MemAvailable:/ {print int($2 / 1024)}' /proc/meminfo)
if [ "$free" -lt "$needs" ]; then echo "=== memory $free"; exit 0; fi
image=$(docker inspect --format '{{.Image}}' "$rank")
remove() { docker ps -aq --filter "name=^/$name\\$" --filter "label=$label" | xargs -r docker rm -f >/dev/null 2>&1; }
remove || true; trap 'remove || true' EXIT
words=()
while [ "$1" != -- ]; do words+=("$1"); shift; done; shift
timeout -k 5 "$limit" docker run -i --rm --pull never --name "$name" --label "$label" --volumes-from "$rank:ro" \
  "${words[@]}" "$image" "$@"
"""
_REMOVE = 'docker ps -aq --filter "name=^/$1\\$" --filter "label=$2" | xargs -r docker rm -f >/dev/null'
_OWN = ("HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "VLLM_USE_RUST_BENCH=0")
"""Variables of the benchmark. vLLM's other one, in Rust, would be a process of its own, which has no key."""


@dataclass(frozen=True)
class Load:
    """What the endpoint is asked.

    Attributes:
        concurrency: Requests under way at a time.
        prompts: How many in all.
        input_tokens: Length of a prompt; its tokens are random, so that no cached prefix helps.
        output_tokens: Length of an answer, whatever the model would say.
    """

    concurrency: int
    prompts: int
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Speed:
    """What one benchmark has measured.

    Attributes:
        output_tokens_per_s: Of all requests together.
        ttft_median_ms: Time to the first token.
        at: When, in seconds since the epoch, by this machine's clock.
        image: Local id of the image that served.
    """

    concurrency: int
    prompts: int
    input_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    ttft_median_ms: float
    ttft_p99_ms: float
    tpot_median_ms: float
    at: float
    image: str = ""

    @property
    def load(self) -> tuple[int, int, int, int]:
        """Figures of another load are not to be compared with these."""
        return self.concurrency, self.prompts, self.input_tokens, self.output_tokens

    def as_json(self) -> dict[str, Any]:
        """The form in which it is kept."""
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """One figure beside an earlier one.

    Attributes:
        slower_by: Share by which it is worse; negative where it is better.
    """

    concurrency: int
    figure: str
    before: float
    now: float
    slower_by: float

    @property
    def fell(self) -> bool:
        return self.slower_by > TOLERANCE


def load_for(settings: Settings, group_name: str, concurrency: int) -> Load:
    """The load for a group; prompt and answer are shorter where the model's context is small."""
    limit = settings.groups[group_name].serving.max_model_len
    prompt, answer = PROMPT_TOKENS, ANSWER_TOKENS
    if limit is not None and limit < 2 * (prompt + answer):
        prompt, answer = max(1, limit // 4), max(1, limit // 16)
    return Load(concurrency, max(8, 4 * concurrency), prompt, answer)


def arguments_of(settings: Settings, group_name: str, load: Load, seed: int) -> list[str]:
    """Arguments of ``vllm bench serve``; its flags are those of vLLM 0.32 (vllm/benchmarks/serve.py)."""
    group = settings.groups[group_name]
    words = ["--backend", "openai", "--base-url", public_endpoint(settings, group_name).removesuffix("/v1")]
    words += ["--endpoint", "/v1/completions", "--model", group.model.served_name]
    words += ["--tokenizer", model_target(group), "--dataset-name", "random", "--seed", str(seed)]
    words += ["--random-input-len", str(load.input_tokens), "--random-output-len", str(load.output_tokens)]
    words += ["--num-prompts", str(load.prompts), "--max-concurrency", str(load.concurrency), "--ignore-eos"]
    words += ["--temperature", "0", "--percentile-metrics", "ttft,tpot", "--metric-percentiles", "99", "--disable-tqdm"]
    return [*words, *(["--trust-remote-code"] if group.serving.trust_remote_code else [])]


def measure(
    head: Rank, settings: Settings, group_name: str, stack: str, load: Load, *, now: float, timeout_s: float
) -> Speed:
    """Run one benchmark on the head; blocks until it has ended.

    Args:
        now: This machine's clock, in seconds since the epoch; the prompts differ with it.

    Raises:
        CommandError: it could not be run, or vLLM refused or failed.
        GateError: not every request was answered.
    """
    node = head.transport.node
    group = settings.groups[group_name]
    warm = Load(load.concurrency, load.concurrency, load.input_tokens, load.output_tokens)
    orders = {
        "key_file": "" if group.serving.api_key == "off" else KEY_TARGET,
        "warm_up": arguments_of(settings, group_name, warm, int(now) + 1),
        "measure": arguments_of(settings, group_name, load, int(now)),
    }
    words = ["--network", "host", "--memory", f"{MEMORY_MIB}m", "--memory-swap", f"{MEMORY_MIB}m"]
    words += ["--label", f"{LABEL}.stack={stack}", "--log-driver", "none", "--stop-signal", "KILL"]
    # No GPU: vLLM takes its CPU platform for a benchmark where it finds none (vllm/entrypoints/cli/main.py).
    for variable in (*(f"{name}={value}" for name, value in sorted(group.serving.environment.items())), *_OWN):
        words += ["--env", variable]
    words += ["--entrypoint", settings.image.python]
    name, label = _container(stack, group_name)
    text = run_checked(
        head.transport,
        script(
            _RUN,
            *(name, label, head.container, str(int(timeout_s)), str(NEEDS_MIB), *words, "--", "-c"),
            _PROGRAM.read_text(),
            stdin=json.dumps(orders).encode() + b"\n",
            timeout_s=timeout_s + 60,
        ),
        purpose=f"expected `vllm bench serve` to measure with {load.concurrency} at a time",
    )
    if text.startswith("=== memory"):
        raise CommandError(
            f"expected {NEEDS_MIB} MiB of available memory for the benchmark, found {text.split()[-1]} MiB",
            where=node,
            do="lower gpu_memory_utilization, or measure from another machine with `vllm bench serve`",
        )
    return parse_speed(node, text, load, now)


def remove_benchmark(head: Rank, stack: str, group_name: str) -> None:
    """End a benchmark that goes on; none is fine."""
    run_checked(
        head.transport, script(_REMOVE, *_container(stack, group_name)), purpose="expected to end the benchmark"
    )


def parse_speed(node: str, text: str, load: Load, now: float) -> Speed:
    """The figures from what the program printed; vLLM may log on the same stream. Pure."""
    # Its own answer is the last line that is one.
    said = [line for line in text.splitlines() if line.startswith("{")]
    try:
        value = json.loads((said or [""])[-1])
        done = int(value["completed"])
        figures = [
            float(value[key]) for key in ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms")
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise CommandError(
            f"expected the figures of `vllm bench serve`, found none that can be read ({error!r})",
            where=node,
            do="the image's vLLM may be one that this release does not know",
            evidence=tail_lines(text),
        ) from None
    if done < load.prompts or not all(math.isfinite(figure) for figure in figures) or figures[0] <= 0:
        raise GateError(
            f"expected {load.prompts} answers, found {done}",
            where=f"{node} (vllm bench serve)",
            do="look at `python -m automation logs`; the figures are not kept",
        )
    rate, median, most, each = (round(figure, 2) for figure in figures)
    shape = (load.concurrency, load.prompts, load.input_tokens, load.output_tokens)
    return Speed(*shape, rate, median, most, each, now)


def speed_of(kept: Mapping[str, Any]) -> Speed | None:
    """Figures as they were kept; None if a later release wrote them in another form."""
    try:
        return Speed(**kept)
    except TypeError:
        return None


def compare(before: Sequence[Speed], now: Sequence[Speed]) -> list[Difference]:
    """Each figure of the present that has an earlier one of the same load. Pure."""
    known = {speed.load: speed for speed in before}
    found = []
    for speed in now:
        earlier = known.get(speed.load)
        if earlier is None:
            continue
        rate, first = earlier.output_tokens_per_s, earlier.ttft_median_ms
        fall = (rate - speed.output_tokens_per_s) / rate if rate > 0 else 0.0
        rise = (speed.ttft_median_ms - first) / first if first > 0 else 0.0
        found += [
            Difference(speed.concurrency, "output tokens/s", rate, speed.output_tokens_per_s, round(fall, 3)),
            Difference(speed.concurrency, "median ms to first token", first, speed.ttft_median_ms, round(rise, 3)),
        ]
    return found


def _container(stack: str, group_name: str) -> tuple[str, str]:
    return f"spark-vllm-{stack}-{group_name}-bench", f"{PROBE_LABEL}=bench"
