"""``pin-hosts``: show the host keys of all nodes of a stack, and write them into its file as pins.

Nothing is trusted by itself: the keys are asked for without logging in, a person compares the fingerprints, and a pin
that differs is replaced only for a node that is named.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from automation.reports import PinHostsReport, PinnedNode
from automation.stack_file import StackFile, add_stack_argument, open_stack_file
from spark_core.errors import SparkError, UnreachableError
from spark_core.settings import NodeSettings, Settings
from spark_core.transport.connection import UNPINNED, Connection, ConnectionSpec, resolve
from spark_core.transport.first_contact import OfferedKey, comparable_key
from spark_core.transport.keys import fingerprint

PINNED, SILENT, DIFFERS, DECLINED = 0, 1, 3, 4
_EPILOG = f"""exit status:
  {PINNED}  every node is pinned to the key that it shows
  {SILENT}  a node did not show a key, or the stack's file cannot be used
  {DIFFERS}  a node shows another key than the pinned one, and --replace does not name it
  {DECLINED}  pins are missing, and writing them was not agreed to
  64 the command line is wrong
Keys of other nodes are written all the same. Of several, the first of 3, 1 and 4 is given.
"""

State = Literal["pinned", "unpinned", "different", "silent"]


@dataclass(frozen=True)
class Shown:
    """What a node showed, beside what is pinned.

    Attributes:
        node: Its settings.
        key: The key that it shows, or None.
        state: How that compares with its pin; an entry of known_hosts that differs counts as a pin that does.
        remark: What else a person should know, or why there is no key.
    """

    node: NodeSettings
    key: OfferedKey | None
    state: State
    remark: str = ""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "pin-hosts",
        help="show the host keys of a stack's nodes and pin them in its file",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_stack_argument(parser)
    parser.add_argument("--yes", action="store_true", help="write without asking; the keys are still shown")
    parser.add_argument("--json", action="store_true", help="show as JSON; never asks, writes only with --yes")
    parser.add_argument(
        "--replace",
        metavar="NODE",
        action="append",
        default=[],
        help="replace this node's differing pin; repeatable",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show, ask, write."""
    file = open_stack_file(options.stack)
    settings = file.settings()
    unknown = sorted(set(options.replace) - {node.name for node in settings.nodes})
    if unknown:
        raise SparkError(f"expected names of nodes, found {', '.join(unknown)}", where="--replace")
    shown = look(settings, options.replace)
    wanted = {
        one.node.name: one.key.line
        for one in shown
        if one.key and (one.state == "unpinned" or (one.state == "different" and one.node.name in options.replace))
    }
    if not options.json:
        print("\n".join(table(shown)))
    agreed = bool(wanted) and _agreed(options, file, len(wanted))
    if agreed:
        file.write(file.with_host_keys(wanted))
    written = list(wanted) if agreed else []
    if any(one.state == "different" and one.node.name not in written for one in shown):
        code = DIFFERS
    elif any(one.state == "silent" for one in shown):
        code = SILENT
    else:
        code = DECLINED if wanted and not agreed else PINNED
    if options.json:
        print(_report(file, shown, written, code).model_dump_json(indent=2))
    elif agreed:
        print(f"pinned {', '.join(written)} in {file.path}")
    return code


def look(settings: Settings, replaced: Sequence[str] = ()) -> list[Shown]:
    """Ask all nodes for their host keys at the same time; those behind another node after that one.

    Args:
        replaced: Nodes whose pins are to be replaced: the way through one of them is the key that it shows.
    """
    specs = {node.name: settings.connection_of(node) for node in settings.nodes}
    direct = [node for node in settings.nodes if not node.via]
    behind = [node for node in settings.nodes if node.via]
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(4, min(16, len(specs)))) as pool:
        found = {one.node.name: one for one in pool.map(lambda node: _ask(node, specs[node.name]), direct)}
        heads = {name: one for name, one in found.items() if one.state != "different" or name in replaced}
        found |= {
            one.node.name: one for one in pool.map(lambda node: _ask_behind(node, specs[node.name], heads), behind)
        }
    return [found[node.name] for node in settings.nodes]


def _ask(node: NodeSettings, spec: ConnectionSpec) -> Shown:
    try:
        connection = _unpinned_too(spec)
        key = comparable_key(connection)
    except UnreachableError as error:
        return Shown(node, None, "silent", f"{error.step}: {error.what}")
    if connection.pin == key.line:
        if node.host_key:
            return Shown(node, key, "pinned")
        return Shown(node, key, "unpinned", f"the same is in {connection.pin_file}")
    if connection.pin == UNPINNED:
        return Shown(node, key, "unpinned")
    where = connection.pin_file or "the stack's file"
    kind = connection.pin.split(" ", 1)[0]
    return Shown(node, key, "different", f"{where} has {kind} {fingerprint(connection.pin)}")


def _ask_behind(node: NodeSettings, spec: ConnectionSpec, heads: Mapping[str, Shown]) -> Shown:
    """Ask a node that is reached through another one, whose key must be the one that it showed just now."""
    head = heads.get(node.via or "")
    if head is None or head.key is None or spec.via is None:
        return Shown(node, None, "silent", f"{node.via}, which it is reached through, does not show its pinned key")
    return _ask(node, replace(spec, via=replace(spec.via, host_key=head.key.line)))


def _unpinned_too(spec: ConnectionSpec) -> Connection:
    try:
        return resolve(spec)
    except UnreachableError as error:
        if error.code != "host-key-unpinned":
            raise
        return resolve(spec, render_only=True)


def table(shown: Sequence[Shown]) -> list[str]:
    """What a person compares, one line for each node."""
    rows = [
        (
            one.node.name,
            one.node.management_address,
            one.key.kind if one.key else "-",
            one.key.fingerprint if one.key else "-",
            one.state + (f" ({one.remark})" if one.remark else ""),
        )
        for one in shown
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]) for row in rows]


def _agreed(options: argparse.Namespace, file: StackFile, count: int) -> bool:
    if options.yes:
        return True
    if options.json or not sys.stdin.isatty():
        print("nothing was written: --yes writes without asking", file=sys.stderr)
        return False
    print("Compare each with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the node's own console.")
    return input(f"Pin {count} host key{'s' if count > 1 else ''} in {file.path}? [y/N] ").strip().lower() in (
        "y",
        "yes",
    )


def _report(file: StackFile, shown: Sequence[Shown], written: Sequence[str], code: int) -> PinHostsReport:
    nodes = [
        PinnedNode(
            name=one.node.name,
            address=one.node.management_address,
            state=one.state,
            type=one.key.kind if one.key else None,
            fingerprint=one.key.fingerprint if one.key else None,
            host_key=one.key.line if one.key else None,
            remark=one.remark,
        )
        for one in shown
    ]
    return PinHostsReport(
        command="pin-hosts", stack=file.stack, exit_code=code, file=str(file.path), nodes=nodes, written=list(written)
    )
