"""Asks a deployed stack's endpoint for a completion and shows it: `python3 toolchain/show_endpoint.py STACK`.

The API key stays in this process; it is in no argument and on no screen.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from toolchain import places
from toolchain.places import ROOT, Stop
from toolchain.stack import run_pulumi
from toolchain.steps import duration, run_command, say

PROMPT = "Say in one sentence what you are."
MAX_TOKENS = 48
ANSWER_LIMIT_S = 120.0


def read_outputs(stack: str, environ: Mapping[str, str], root: Path = ROOT) -> dict[str, Any]:
    """The stack's outputs, secrets included; for this process only."""
    found = run_pulumi(["stack", "output", "--json", "--show-secrets", "-s", stack], cwd=root, environ=environ)
    if found.returncode != 0:
        raise Stop(f"stack {stack}: outputs cannot be read\n{found.stderr.strip()}")
    outputs: dict[str, Any] = json.loads(found.stdout)
    return outputs


def completions_url(endpoint: str) -> str:
    """Where completions are asked for, whether or not the endpoint names the API's version."""
    base = endpoint.rstrip("/")
    if urlsplit(base).scheme not in ("http", "https"):
        raise Stop(f"endpoint: expected an http or https address, found {endpoint!r}; run `pulumi up`")
    return f"{base}/chat/completions" if base.endswith("/v1") else f"{base}/v1/chat/completions"


def text_of(answer: Any) -> str:
    """What the model said; a reasoning model cut short has only reasoning."""
    try:
        message = answer["choices"][0]["message"]
        said = (message.get(key) for key in ("content", "reasoning", "reasoning_content"))
        return next((text.strip() for text in said if isinstance(text, str) and text.strip()), "")
    except (KeyError, IndexError, TypeError, AttributeError):
        return ""


def complete(endpoint: str, model: str, key: str | None, limit_s: float = ANSWER_LIMIT_S) -> str:
    """One bounded chat completion."""
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": MAX_TOKENS}
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    url = completions_url(endpoint)
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310 - http(s) only
    # The endpoint is a machine of one's own; a proxy meant for the internet has no business with the key.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=limit_s) as response:
            text = text_of(json.load(response))
    except urllib.error.HTTPError as fault:
        raise Stop(f"endpoint {url}: expected a completion, found status {fault.code} {fault.reason}") from None
    except (OSError, ValueError) as fault:
        raise Stop(f"endpoint {url}: expected a completion, found none ({fault}); see `pulumi preview`") from None
    if not text:
        raise Stop(f"endpoint {url}: expected a completion, found an answer without text")
    return text


def show(stack: str, environ: Mapping[str, str], root: Path = ROOT) -> None:
    """Print endpoint, model and what the model said."""
    outputs = read_outputs(stack, environ, root)
    missing = [name for name in ("endpoint", "model") if not isinstance(outputs.get(name), str)]
    if missing:
        raise Stop(
            f"stack {stack}: expected outputs endpoint and model, found no {' and no '.join(missing)}; run `pulumi up`"
        )
    key = outputs.get("api_key")
    start = time.monotonic()
    text = complete(outputs["endpoint"], outputs["model"], key if isinstance(key, str) else None)
    say(f"endpoint    {outputs['endpoint']}")
    say(f"model       {outputs['model']}")
    say(f"completion  {text}")
    say(f"            in {duration(time.monotonic() - start)}")


def main(words: Sequence[str] | None = None) -> int:
    """Command line."""
    given = sys.argv[1:] if words is None else list(words)
    if len(given) != 1 or given[0].startswith("-"):
        raise Stop("usage: python3 toolchain/show_endpoint.py STACK")
    environ = dict(os.environ) if os.environ.get("SPARK_VLLM_ENV_HOME") else places.environment()
    show(given[0], environ)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
