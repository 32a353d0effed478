"""Runs in a throw-away container of the serving image, sent there as text: vLLM's own serving benchmark.

Standard library only, whatever the image's python. Orders are a line of JSON on standard input; what the benchmark
prints goes to standard error, and its result is the last line of standard output. The API key comes from a file and
stays in this process: vLLM asks ``os.environ`` for it, where it is put in such a way that no child process and no
``/proc/PID/environ`` ever has it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

KEY_VARIABLE = "OPENAI_API_KEY"
"""Where ``vllm bench serve`` looks for the key (vllm/benchmarks/lib/endpoint_request_func.py)."""


class WithKey(MutableMapping[str, str]):
    """The environment, and the key beside it: asked for by name it is there, listed or copied it is not."""

    def __init__(self, environment: MutableMapping[str, str], key: str) -> None:
        self._environment, self._key = environment, key

    def __getitem__(self, name: str) -> str:
        return self._key if name == KEY_VARIABLE else self._environment[name]

    def __setitem__(self, name: str, value: str) -> None:
        self._environment[name] = value

    def __delitem__(self, name: str) -> None:
        del self._environment[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._environment)

    def __len__(self) -> int:
        return len(self._environment)

    def copy(self) -> dict[str, str]:
        """What a child process gets where one is started with a copy."""
        return dict(self._environment)


def first_key(path: str) -> str:
    """The first key of the file of keys; raises OSError, or ValueError if it holds none."""
    keys = Path(path).read_text().split()
    if not keys:
        raise ValueError(f"no key in {path}")
    return keys[0]


def vllm_command() -> Callable[[], object]:
    """What the image's ``vllm`` runs."""
    for entry in importlib.metadata.entry_points(group="console_scripts"):
        if entry.name == "vllm":
            found: Callable[[], object] = entry.load()
            return found
    raise LookupError("no vllm command is installed in this image")


def run_once(command: Callable[[], object], words: list[str], folder: Path) -> dict[str, Any]:
    """One benchmark; its result as vLLM saves it.

    Raises:
        SystemExit: vLLM refused the arguments.
    """
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    saved = ("--save-result", "--result-dir", str(folder), "--result-filename", result.name)
    sys.argv = ["vllm", "bench", "serve", *words, *saved]
    with contextlib.redirect_stdout(sys.stderr):
        command()
    value: dict[str, Any] = json.loads(result.read_text())
    return value


def main() -> int:
    """Warm up, measure, answer."""
    orders = json.loads(sys.stdin.readline())
    if orders["key_file"]:
        os.environ = WithKey(os.environ, first_key(orders["key_file"]))  # type: ignore[assignment]  # noqa: B003
    with contextlib.redirect_stdout(sys.stderr):  # vLLM's log takes the stream that it finds when it is loaded
        command = vllm_command()
    with tempfile.TemporaryDirectory() as folder:
        run_once(command, orders["warm_up"], Path(folder))
        answer = run_once(command, orders["measure"], Path(folder))
    print(json.dumps({key: value for key, value in answer.items() if isinstance(value, int | float | str)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
