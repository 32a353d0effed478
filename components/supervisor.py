"""The rank supervisor that a group runs, in this run of the program: see :mod:`spark_core.supervisor_choice`."""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import replace

import pulumi

from components.model_weights import WeightsPlaces
from components.node_files import FilesOfGroup
from components.runtime_bundle import NodeFile, keep_runtime, kept_runtime
from components.stack import Stack
from spark_core.errors import SparkError
from spark_core.group import plan_group
from spark_core.journal import StackFolder
from spark_core.supervisor_choice import supervisor_to_run
from spark_core.transport.base import command

_READ_TIMEOUT_S = 30


def with_supervisor_to_run(stack: Stack, group: str, files: FilesOfGroup, places: WeightsPlaces) -> FilesOfGroup:
    """The files of a group with the supervisor that it goes on with; a newer one alone restarts nothing."""
    running = stack.running.get(group)
    if running is None or stack.settings.groups[group].serving.supervisor_update == "now":
        return files
    image_id = stack.sources.image_id or running.image_id

    def deployment_with(runtime: str) -> str:
        placed = replace(files, runtime=_file(runtime)).placed(places.folders, places.in_place)
        return plan_group(stack.settings, group, stack.name, image_id, placed).deployment

    chosen = supervisor_to_run(running, files.runtime.remote, deployment_with)
    if chosen == files.runtime.remote:
        return files
    held = kept_runtime(_digest(chosen)) or _from_a_node(stack, group, chosen)
    if held is None:
        pulumi.log.warn(
            f"group {group}: no node has the rank supervisor that runs any more ({chosen}); the newest one takes its "
            "place, which restarts serving"
        )
        return files
    pulumi.log.info(
        f"group {group}: a newer rank supervisor waits for the next restart that a change asks for; "
        f"groups.{group}.serving.supervisor_update: now takes it at once"
    )
    return replace(files, runtime=held)


def _file(runtime: str) -> NodeFile:
    return NodeFile("", runtime, _digest(runtime))


def _digest(runtime: str) -> str:
    """The hash of a supervisor's file, which is the first part of its path."""
    return runtime.partition("/")[0]


def _from_a_node(stack: Stack, group: str, runtime: str) -> NodeFile | None:
    """A supervisor that this checkout did not build, from a node that runs it."""
    for name in stack.settings.groups[group].nodes:
        node = stack.settings.node(name)
        path = f"{StackFolder(stack.settings.root_of(node), stack.name).files}/{runtime}"
        try:
            result = stack.run.open_node(node).run(command("base64", path, timeout_s=_READ_TIMEOUT_S))
            content = base64.b64decode(result.stdout) if result.ok else b""
        except (SparkError, binascii.Error):
            continue
        if hashlib.sha256(content).hexdigest() == _digest(runtime):
            return keep_runtime(content)
    return None
