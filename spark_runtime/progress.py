"""Read from vLLM's log how far a start has come.

The texts are shown to people and renew the start deadline whenever they change, so a text must not change
while nothing moves ("waited 150 seconds" does not count).
"""

from __future__ import annotations

import re

_STEPS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"Loading \w+ (?:checkpoint shards|using .*?):.*?(\d+)/(\d+) \["), "shards {0}/{1} loaded"),
    (re.compile(r"Capturing CUDA graphs?.*?(\d+)/(\d+) \["), "CUDA graphs {0}/{1} captured"),
    (re.compile(r"Waiting for creating a placement group"), "waiting for Ray's placement group"),
    (re.compile(r"Starting to load model"), "loading the model"),
    (re.compile(r"Loading weights took"), "weights loaded"),
    (re.compile(r"Model loading took"), "model loaded"),
    (
        re.compile(r"Dynamo bytecode transform|torch\.compile takes|(?:Compiling a|Cache the) graph"),
        "compiling",
    ),
    (re.compile(r"[Aa]utotun(?:ing|er)"), "tuning kernels"),
    (re.compile(r"Available KV cache memory|GPU KV cache size"), "KV cache sized"),
    (re.compile(r"Graph capturing finished"), "CUDA graphs captured"),
    (re.compile(r"init engine .* took"), "engine initialised"),
    (re.compile(r"Starting vLLM (?:API )?server"), "server starting"),
    (re.compile(r"Application startup complete"), "server started"),
)


def read_progress(text: str) -> str | None:
    """The step that a line of the log speaks of, or None."""
    for pattern, step in _STEPS:
        match = pattern.search(text)
        if match is not None:
            return step.format(*match.groups())
    return None
