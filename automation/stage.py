"""``stage``: image and weights of other settings are brought and verified while the present model serves.

Nothing that serves is touched and no state is written: what is brought lies in folders of its own, claimed for the
stack so that nobody frees it. Switching to the settings then costs one start.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from automation.exit_codes import Exit
from automation.group_nodes import open_nodes
from automation.recipe_edit import told, with_recipe
from automation.reports import StageReport
from automation.stack_file import PROJECT, StackFile, add_stack_argument, open_stack_file
from automation.use import add_drop_overrides
from spark_core.errors import SparkError
from spark_core.findings import Finding
from spark_core.garbage.claims import claim
from spark_core.group import GroupFiles
from spark_core.hub.bring import bring_hub_model
from spark_core.hub.download import HubOrigin
from spark_core.image import Bringing, ImageFacts, ImageNode, archive_image_id, bring_image
from spark_core.image.check import architectures_of
from spark_core.image.inside import look_inside
from spark_core.preflight.look import look_at_nodes
from spark_core.preflight.weights import GroupWeights, KnownWeights
from spark_core.settings import Settings
from spark_core.settings.recipe import recipe_files
from spark_core.transfer.distribution import distribute
from spark_core.transfer.look import Place
from spark_core.transport.base import Transport
from spark_core.weights import local_manifest, verify_in_place


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "stage",
        help="bring image and weights of other settings while the present model serves",
        description="Checks other settings of a stack against its nodes, brings their image and weights and verifies "
        "them, while the present model serves. Changes nothing else. With these settings in the stack's file, `up` "
        "then only starts the containers; after a recipe was staged, `use` does both.",
    )
    add_stack_argument(parser)
    parser.add_argument(
        "settings", metavar="FILE_OR_RECIPE", help="a stack file with the other settings, or the name of a recipe"
    )
    add_drop_overrides(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON (docs/schemas/)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check, bring, claim."""
    present = open_stack_file(options.stack)
    by_recipe = options.settings in recipe_files() and not Path(options.settings).exists()
    if by_recipe:
        changed = with_recipe(present, options.settings, drop_overrides=options.drop_overrides)
        file = changed.file
        for line in told(changed, options.settings):
            _say(line)
    else:
        file = other_settings(present, Path(options.settings))
    report = bring_all(file)
    if options.json:
        print(report.model_dump_json(indent=2))
        return Exit.DONE
    pinned = report.source
    print(f"staged: {_brought(report)} on {', '.join(report.nodes)}")
    if pinned != next(iter(file.settings().groups.values())).model.source:
        print(f"pin it before the switch: source: {pinned}")
    if by_recipe:
        print(f"to switch: use {options.settings}{' --drop-overrides' if options.drop_overrides else ''}")
    else:
        print(f"to switch: put {options.settings} in place of {present.path}, then up")
    return Exit.DONE


def bring_all(file: StackFile, check: Callable[[], None] = lambda: None) -> StageReport:
    """Check the settings of a file against the nodes, bring their image and weights, verify and claim them.

    Args:
        check: Called often; what it raises ends it within seconds.

    Raises:
        SparkError: something would fail with these settings, or could not be brought.
    """
    stack = file.stack.rsplit("/", 1)[-1]
    nodes = open_nodes(file, secrets=True).run
    settings = nodes.settings
    [(group_name, group)] = settings.groups.items()
    manifests = {group_name: local_manifest(group.model.directory)} if group.model.kind == "controller" else {}
    known = KnownWeights(manifests, {}, nodes.hub_token())
    seen = look_at_nodes(settings, stack, nodes.open_node, sudo_password=nodes.has_sudo_password, known=known)
    refuse_failures(seen.findings)
    transports = {node: nodes.transport(node) for node in group.nodes}
    check()
    image = image_of(seen.settings, transports, check)
    check()
    check_image(seen.settings, stack, group_name, image.image_id, seen.configs.get(group_name, ""), transports)
    weights = seen.weights.get(group_name)
    revision = bring_weights(seen.settings, stack, group_name, transports, image.image_id, weights, known, check)
    for node, transport in transports.items():
        root = settings.root_of(settings.node(node))
        staged = {"staged": revision, "staged_image": image.image_id}
        claim(transport, root, stack, group_name, staged, [image.image_id])
    return StageReport(
        command="stage",
        stack=file.stack,
        exit_code=Exit.DONE,
        settings=str(file.path),
        image_id=image.image_id,
        revision=revision,
        source=f"hf://{group.model.repository}@{revision}" if group.model.kind == "hub" else group.model.source,
        nodes=list(group.nodes),
    )


def _brought(report: StageReport) -> str:
    return f"image {report.image_id[:19]} and weights {report.revision[:12] or report.source}"


def other_settings(file: StackFile, path: Path) -> StackFile:
    """A stack's file with the content of another one.

    Raises:
        SparkError: it cannot be read.
    """
    try:
        return replace(file, path=path, text=path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise SparkError(f"expected a stack file, found: {reason}", where=str(path)) from None


def refuse_failures(findings: Sequence[Finding]) -> None:
    """Tell what was found; a failure ends it before anything is brought.

    Raises:
        SparkError: something would fail with these settings.
    """
    for finding in findings:
        if finding.severity != "fail":
            print(finding.line, file=sys.stderr)
    failures = [finding for finding in findings if finding.severity == "fail"]
    if failures:
        first, *rest = failures
        evidence = [line for finding in rest for line in finding.line.splitlines()]
        raise SparkError(f"{first.what} [{first.code}]", where=first.where, do=first.do, evidence=evidence)


def image_of(
    settings: Settings, transports: Mapping[str, Transport], check: Callable[[], None] = lambda: None
) -> ImageFacts:
    """The image of the settings on every node, one and the same."""
    image = settings.image
    wanted = archive_image_id(image.archive) if image.archive is not None else image.local_id or ""
    nodes = []
    for name, transport in transports.items():
        node = settings.node(name)
        nodes.append(ImageNode(transport, settings.root_of(node), node.fabric_address, node.management_address))
    return bring_image(Bringing(image, nodes, PROJECT, wanted, "", _say, check))


def check_image(
    settings: Settings, stack: str, group_name: str, image_id: str, config: str, transports: Mapping[str, Transport]
) -> None:
    """Look into the image, as `up` would; what it says is kept on the nodes, so that the switch asks nothing again.

    Raises:
        SparkError: the image would not serve with these settings.
    """
    if settings.groups[group_name].serving.patches:
        _say("image: what is in it is checked in up: its patches come onto the nodes then")
        return
    roots = {node: settings.root_of(settings.node(node)) for node in transports}
    files = GroupFiles("", (), dict.fromkeys(transports, "/"))
    architectures = architectures_of(config)
    inside = look_inside(settings, stack, group_name, image_id, architectures, files, transports, roots)
    refuse_failures(inside.findings)


def bring_weights(
    settings: Settings,
    stack: str,
    group_name: str,
    transports: Mapping[str, Transport],
    image_id: str,
    weights: GroupWeights | None,
    known: KnownWeights,
    check: Callable[[], None] = lambda: None,
) -> str:
    """The weights of the settings on every node, verified; their revision, empty for a directory of the nodes."""
    model = settings.groups[group_name].model
    roots = {node: settings.root_of(settings.node(node)) for node in transports}
    if model.kind == "node":
        verify_in_place(transports, model.directory, roots)
        return ""
    if weights is None:
        raise SparkError("expected to know the revision of the weights, found that nobody could be asked")
    in_place, listing = weights.in_place, weights.listing
    places = [
        Place(
            transport,
            weights.folder(node, roots[node]),
            roots[node],
            settings.node(node).fabric_address,
            tuple(sorted(in_place[node])) if node in in_place else None,
        )
        for node, transport in transports.items()
    ]
    if listing is None:
        distribute(model.directory, places, known.manifests[group_name], _say, check)
    else:
        python = settings.image.python
        origin = HubOrigin(model, settings.hub, weights.revision, image_id, python, stack, known.token)
        bring_hub_model(origin, listing, places, _say, check)
    return weights.revision


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
