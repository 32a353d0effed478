"""Run the program under a mocked engine and print what it registered, as JSON; one process per run.

On standard input: ``{"stack": …, "preview": …, "config": {key: text}, "secrets": {key: text},
"state": {URN: resource}}``.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pulumi
from google.protobuf import json_format
from pulumi.runtime import mocks as engine_mocks
from pulumi.runtime.settings import SETTINGS
from pulumi.runtime.stack import Stack, run_pulumi_func
from pulumi.runtime.sync_await import _sync_await

PROJECT = Path(__file__).resolve().parents[2]
IMAGE = "sha256:" + "f" * 64
COMPUTED: dict[str, dict[str, Any]] = {
    "pulumi-python:dynamic/spark:ImageCopy": {"found_id": IMAGE},
    "pulumi-python:dynamic/spark:WeightsCopy": {"revision": "0123456789abcdef0123456789abcdef01234567"},
    "pulumi-python:dynamic/spark:ApiKey": {"api_key": "sk-marker-generated"},
    "pulumi-python:dynamic/spark:NodeHost": {
        "architecture": "arm64",
        "kernel": "6.14",
        "os": "Ubuntu",
        "docker": "29.2.1",
        "gpu": "NVIDIA GB10",
        "repair": "none",
    },
}
"""What only ``up`` knows."""


class Mocks(engine_mocks.Mocks):
    """An engine that makes everything it is asked for."""

    def __init__(self, preview: bool, state: dict[str, Any]) -> None:
        self.preview = preview
        self.state = state

    def call(self, args: engine_mocks.MockCallArgs) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        if args.token == "pulumi:pulumi:readStackResourceOutputs":
            return {"name": args.args["stackName"], "outputs": self.state}, []
        return {}, []

    def new_resource(self, args: engine_mocks.MockResourceArgs) -> tuple[str, dict[str, Any]]:
        if self.preview:
            return "", dict(args.inputs)
        return f"{args.name}-id", {**args.inputs, **COMPUTED.get(args.typ, {})}


class Monitor(engine_mocks.MockMonitor):
    """Keeps each registration as the engine would get it."""

    def __init__(self, mocks: Mocks) -> None:
        super().__init__(mocks)
        self.registered: list[dict[str, Any]] = []

    def RegisterResource(self, request: Any) -> Any:
        self.registered.append(
            {
                "type": request.type,
                "name": request.name,
                "parent": _name_of(request.parent),
                "inputs": json_format.MessageToDict(request.object),
                "dependencies": sorted(_name_of(urn) for urn in request.dependencies),
                "provider": request.provider.split("::")[3] if request.provider else "",
                "deleted_with": _name_of(request.deletedWith),
                "replace_on_changes": list(request.replaceOnChanges),
                "delete_before_replace": request.deleteBeforeReplace,
                "ignore_changes": list(request.ignoreChanges),
                "secret_outputs": list(request.additionalSecretOutputs),
                "before_create": list(request.hooks.before_create),
            }
        )
        return super().RegisterResource(request)  # type: ignore[no-untyped-call]


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _name_of(urn: str) -> str:
    return urn.split("::")[3] if urn else ""


async def _exported(output: pulumi.Output[Any]) -> dict[str, Any]:
    known = await output.is_known()
    return {
        "known": known,
        "secret": await output.is_secret(),
        "value": await output.future() if known else None,
    }


def program() -> None:
    """What the engine's Python host does with the project folder."""
    runpy.run_path(str(PROJECT / "__main__.py"), run_name="__main__")


def main() -> None:
    asked = json.load(sys.stdin)
    os.chdir(PROJECT)
    log = Log()
    logger = logging.getLogger("engine")
    logger.setLevel(logging.INFO)
    logger.addHandler(log)
    mocks = Mocks(asked["preview"], asked["state"])
    monitor = Monitor(mocks)
    engine_mocks.set_mocks(
        mocks,
        project="spark-vllm",
        stack=asked["stack"],
        preview=asked["preview"],
        logger=logger,
        monitor=monitor,
    )
    SETTINGS.root_directory = str(PROJECT)
    values = {f"spark-vllm:{key}": value for key, value in {**asked["config"], **asked["secrets"]}.items()}
    pulumi.runtime.set_all_config(values, [f"spark-vllm:{key}" for key in asked["secrets"]])
    error = ""
    outputs: dict[str, Any] = {}
    try:
        _sync_await(run_pulumi_func(program))
        root = pulumi.runtime.get_root_resource()
        for key, value in (root.outputs if isinstance(root, Stack) else {}).items():
            outputs[key] = _sync_await(_exported(pulumi.Output.from_input(value)))
    except pulumi.RunError as refused:
        error = str(refused)
    json.dump({"registered": monitor.registered, "outputs": outputs, "log": log.lines, "error": error}, sys.stdout)


if __name__ == "__main__":
    main()
