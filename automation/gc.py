"""``gc``: what older revisions, images and interrupted copies take on the nodes, freed only on a yes."""

from __future__ import annotations

import argparse
import concurrent.futures
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from automation.engine import pulumi_json
from automation.exit_codes import Exit
from automation.group_nodes import open_nodes
from automation.reports import GcReport, ItemReport
from automation.stack_file import add_stack_argument, open_stack_file
from providers.connections import Run
from spark_core.errors import SparkError, join_errors
from spark_core.garbage.unused import Item, free, look_at_unused

_KINDS = {"revision": "weights", "copy": "interrupted copy", "image": "image"}


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "gc",
        help="list what older weights and images take on the nodes, and free it on a yes",
        description="Lists revisions of weights, what interrupted copies left, and images that this program brought on "
        "every node, with who uses each. What a container, the settings of any stack, their last good settings or a "
        "stage uses is kept, and so is every hub cache. Frees the rest on a yes.",
    )
    add_stack_argument(parser)
    parser.add_argument("--yes", action="store_true", help="free without asking")
    parser.add_argument("--json", action="store_true", help="print the result as JSON (docs/schemas/)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """List, ask, free."""
    file = open_stack_file(options.stack)
    nodes = open_nodes(file).run
    revisions, images = used_by_state(pulumi_json("stack", "export", "-s", options.stack))
    items = _each(nodes, lambda node: look_at_unused(nodes.transport(node), _root(nodes, node), revisions, images))
    unused = [item for item in items if not item.used_by]
    if options.json:
        freed = _free(nodes, unused, sys.stderr) if options.yes else []
        report = GcReport(
            command="gc", stack=options.stack, exit_code=Exit.DONE, items=_told(items), freed=_told(freed)
        )
        print(report.model_dump_json(indent=2))
        return Exit.DONE
    print(table(items))
    if not unused:
        print("nothing to free")
        return Exit.DONE
    total = sum(item.size for item in unused) / 1e9
    if not options.yes and not _agreed(f"free {len(unused)} of these, {total:.2f} GB?"):
        print(f"nothing was freed; `python -m automation gc --stack {options.stack} --yes` frees {total:.2f} GB")
        return Exit.DONE
    _free(nodes, unused, sys.stdout)
    return Exit.DONE


def used_by_state(state: Mapping[str, Any]) -> tuple[set[str], set[str]]:
    """Revisions and images that a state's resources use now, or used when they last served."""
    revisions, images = set(), set()
    for resource in (state.get("deployment") or {}).get("resources") or []:
        outputs = resource.get("outputs") or {}
        kind = str(resource.get("type", "")).rpartition(":")[2]
        if kind in ("WeightsCopy", "GoodSettings"):
            for record in (outputs, *(outputs.get("before") or [])):
                revisions |= {str(record[key]) for key in ("revision", "commit") if record.get(key)}
                images |= {str(record[key]) for key in ("image", "image_id") if record.get(key)}
    return revisions, images


def table(items: Sequence[Item]) -> str:
    """The items for a person; those that could be freed first."""
    lines = []
    for item in sorted(items, key=lambda item: (bool(item.used_by), item.node, -item.size)):
        name = item.name.removeprefix("sha256:")[:40]
        used = f"used by {item.used_by}" if item.used_by else "unused"
        lines.append(f"{item.node}  {item.size / 1e9:8.2f} GB  {_KINDS[item.kind]:16}  {name:40}  {used}")
    return "\n".join(lines) or "no weights and no images of ours on any node"


def _told(items: Sequence[Item]) -> list[ItemReport]:
    return [
        ItemReport(node=item.node, kind=item.kind, name=item.name, bytes=item.size, used_by=item.used_by)
        for item in items
    ]


def _free(nodes: Run, unused: Sequence[Item], said: TextIO) -> list[Item]:
    by_node: dict[str, list[Item]] = {}
    for item in unused:
        by_node.setdefault(item.node, []).append(item)
    errors: list[SparkError] = []
    freed: list[Item] = []
    for node, items in by_node.items():
        try:
            done, kept = free(nodes.transport(node), _root(nodes, node), items)
        except SparkError as error:
            errors.append(error)
            continue
        gone = [item for item in items if item.name in done]
        size = sum(item.size for item in gone) / 1e9
        told = f"{node}: freed {len(done)}, {size:.2f} GB" + (f"; kept {', '.join(kept)}, now in use" if kept else "")
        print(told, file=said)
        freed += gone
    if errors:
        raise join_errors(errors)
    return freed


def _each(nodes: Run, look: Any) -> list[Item]:
    names = [node.name for node in nodes.settings.nodes if node.name not in nodes.settings.abandoned_nodes]
    with concurrent.futures.ThreadPoolExecutor(max(1, len(names))) as pool:
        futures = [pool.submit(look, name) for name in names]
    errors = [error for future in futures if isinstance(error := future.exception(), SparkError)]
    if errors:
        raise join_errors(errors)
    return [item for future in futures for item in future.result()]


def _root(nodes: Run, node: str) -> str:
    return nodes.settings.root_of(nodes.settings.node(node))


def _agreed(question: str) -> bool:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
