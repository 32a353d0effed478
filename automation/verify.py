"""``verify``: every file of the weights read anew on every node, against what was verified when it came.

The cheap look of preview and drift trusts size, times and inode. A bit that turned over on a disk changes none of them;
this finds it. What it finds is remembered on the node, so that the next ``up`` brings the file again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from automation.engine import pulumi_json
from automation.exit_codes import Exit
from automation.group_nodes import open_nodes
from automation.reports import VerifyReport
from automation.stack_file import add_stack_argument, open_stack_file
from spark_core.errors import SparkError
from spark_core.hub.bring import git_ids
from spark_core.hub.listing import Listing, from_compact
from spark_core.transfer.distribution import at_once
from spark_core.transfer.look import contents_of
from spark_core.transfer.manifest import Manifest
from spark_core.transport.base import Transport
from spark_core.weights import local_manifest


@dataclass(frozen=True)
class Recorded:
    """The weights of a group as the state has them.

    Attributes:
        folders: For each node, their folder.
        roots: For each node, our folder.
        source: Where they came from.
        content: Hash of what was verified.
        listing: What the hub says of each file; None for a directory.
        in_place: Nodes whose folder is a hub cache's.
    """

    folders: Mapping[str, str]
    roots: Mapping[str, str]
    source: str
    content: str
    listing: Listing | None
    in_place: frozenset[str]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "verify",
        help="read every file of the weights anew on every node",
        description="Reads all weights of a stack on every node and compares them with what was verified when they "
        "came. Changes nothing; the next `up` brings what is wrong again. Exit status 0: all are right; 2: some are "
        "not, and are named by node and file.",
    )
    add_stack_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON (docs/schemas/)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Read, compare, tell."""
    nodes = open_nodes(open_stack_file(options.stack)).run
    recorded = recorded_weights(pulumi_json("stack", "export", "-s", options.stack))
    if recorded is None:
        raise SparkError("expected weights in the stack's state, found none", where="verify", do="run `up` first")
    wrong = differences({node: nodes.transport(node) for node in recorded.folders}, recorded)
    code = Exit.DRIFT if any(wrong.values()) else Exit.DONE
    if options.json:
        report = VerifyReport(command="verify", stack=options.stack, exit_code=code, wrong=wrong)
        print(report.model_dump_json(indent=2))
        return code
    for node, lines in wrong.items():
        for line in lines:
            print(f"{node}: {line}")
    if code == Exit.DRIFT:
        print("`up` brings again what is wrong, from a node where it is right")
    else:
        print(f"all files are right on {', '.join(recorded.folders)}")
    return code


def recorded_weights(state: Mapping[str, Any]) -> Recorded | None:
    """The weights that a state knows."""
    for resource in (state.get("deployment") or {}).get("resources") or []:
        if str(resource.get("type", "")).endswith("spark:WeightsCopy"):
            outputs = resource.get("outputs") or {}
            listed = outputs.get("listing") or {}
            return Recorded(
                outputs["folders"],
                outputs["roots"],
                str(outputs["source"]),
                str(outputs.get("content") or outputs.get("revision")),
                from_compact(str(outputs["commit"]), listed) if listed else None,
                frozenset(outputs.get("in_place") or ()),
            )
    return None


def differences(transports: Mapping[str, Transport], recorded: Recorded) -> dict[str, list[str]]:
    """For each node, its files that are not as they were verified, with what is wrong."""
    found = dict(
        zip(transports, at_once([_reading(t, recorded) for t in transports.values()], lambda: None), strict=True)
    )
    reference = _reference(recorded, found)
    wrong = {}
    for node, manifest in found.items():
        listing = recorded.listing
        if manifest is None:
            wrong[node] = [f"expected the weights in {recorded.folders[node]}, found no such folder"]
        elif listing is not None:
            ids = git_ids(transports[node], recorded.folders[node], listing.small)
            wrong[node] = listing.differences(manifest, ids)
        elif manifest.revision == recorded.content:
            wrong[node] = []
        elif reference is not None:
            wrong[node] = reference.differences(manifest)
        else:
            told = f"expected content {recorded.content[:12]} in {recorded.folders[node]}"
            wrong[node] = [f"{told}, found {manifest.revision[:12]}"]
    return wrong


def _reading(transport: Transport, recorded: Recorded) -> Any:
    folder, root = recorded.folders[transport.node], recorded.roots[transport.node]
    only = sorted(recorded.listing.files) if recorded.listing and transport.node in recorded.in_place else None
    cache = f"{root}/cache/hashes.json"

    def read() -> Manifest | None:
        names = contents_of(transport, folder, cache, only=only)
        return None if names is None else contents_of(transport, folder, cache, list(names.files), only)

    return read


def _reference(recorded: Recorded, found: Mapping[str, Manifest | None]) -> Manifest | None:
    """What a directory's content was when it was verified, from a node or the controller where it is still so."""
    right = [one for one in found.values() if one is not None and one.revision == recorded.content]
    if right:
        return right[0]
    if recorded.source.startswith("controller:"):
        try:
            manifest = local_manifest(recorded.source.removeprefix("controller:"))
        except SparkError:
            return None
        return manifest if manifest.revision == recorded.content else None
    return None
