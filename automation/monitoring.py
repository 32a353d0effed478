"""``monitoring``: the files with which an owner's own Prometheus and Grafana watch a stack."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pydantic import Field

from automation import session as frame
from automation.engine import pulumi_json
from automation.exit_codes import Exit
from automation.fabric_view import interfaces_of
from automation.reports import Document, Report
from automation.session import chosen_stack
from automation.stack_file import StackFile, open_stack_file
from spark_core.errors import SparkError
from spark_core.monitoring import monitoring_files
from spark_core.settings import FabricInterface, NodeSettings, Settings


class RenderedFile(Document):
    """One file."""

    path: str = Field(description="below the folder: prometheus/ for Prometheus, grafana/ for /etc/grafana")
    text: str


class MonitoringReport(Report):
    """The files; none holds a secret."""

    files: list[RenderedFile]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "monitoring",
        help="print Prometheus' configuration and rules and Grafana's dashboard, for your own",
        description="Renders what a Prometheus on the head, and a Grafana beside it, need to watch the stack: scrape "
        "configuration, rules, data source, dashboard. Changes nothing. The setting `monitoring` runs both for you.",
    )
    frame.add_arguments(parser, runs=False)
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="write the files there instead")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Render and print."""
    file = open_stack_file(chosen_stack(options))
    settings = with_fabric(file, file.settings())
    rendered = monitoring_files(settings, next(iter(settings.groups)), file.stack.rsplit("/", 1)[-1])
    files = [
        *(RenderedFile(path=f"prometheus/{path}", text=text) for path, text in rendered.prometheus.items()),
        *(RenderedFile(path=f"grafana/{path}", text=text) for path, text in rendered.grafana.items()),
    ]
    report = MonitoringReport(command="monitoring", stack=file.stack, exit_code=Exit.DONE, files=files)
    if options.output:
        write(options.output, files)
    if options.json:
        print(report.model_dump_json(indent=2))
    else:
        for one in files:
            print(options.output / one.path if options.output else f"# {one.path}\n{one.text}")
    return report.exit_code


def write(folder: Path, files: list[RenderedFile]) -> None:
    """Write the files below a folder.

    Raises:
        SparkError: they cannot be written there.
    """
    try:
        for one in files:
            (folder / one.path).parent.mkdir(parents=True, exist_ok=True)
            (folder / one.path).write_text(one.text)
    except OSError as error:
        raise SparkError(f"expected to write the files, found: {error.strerror}", where=str(folder)) from None


def with_fabric(file: StackFile, settings: Settings) -> Settings:
    """The settings with fabric interfaces that only the state knows, since preview discovered them.

    Raises:
        SparkError: nobody knows at which address a node's supervisor listens.
    """
    if all(node.rank_address for node in settings.nodes) or len(settings.nodes) == 1:
        return settings
    state = pulumi_json("stack", "export", "-s", file.stack)
    resources: list[dict[str, Any]] = (state.get("deployment") or {}).get("resources") or []

    def filled(node: NodeSettings) -> NodeSettings:
        if node.rank_address:
            return node
        found = [FabricInterface(netdev=one.netdev, address=one.address) for one in interfaces_of(node, resources)]
        if not found:
            raise SparkError(
                "expected to know the fabric address, found none declared and none in the state",
                where=f"{node.name} (nodes[].fabric)",
                do="run `up` first, or declare it",
            )
        return node.model_copy(update={"fabric": tuple(found)})

    return settings.model_copy(update={"nodes": tuple(filled(node) for node in settings.nodes)})
