"""``init``: the first day. From addresses to a stack file that fits what is there, changing nothing without a yes."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from automation.exit_codes import CommandEnd, Exit
from automation.first_contact import FirstContact, parse_target
from automation.first_look import Seen, look_at, with_peers
from automation.questions import Questions, add_arguments
from automation.redaction import redacted
from automation.reports import FindingReport, FoundNode, InitReport
from automation.stack_file import PROJECT, place_of_stack_file, project_name
from automation.stack_text import stack_text
from providers.connections import Run
from spark_core.errors import SparkError
from spark_core.findings import Finding, judge
from spark_core.first_day.draft import Draft, Wishes, draft_settings
from spark_core.first_day.told import told_of
from spark_core.image.look import ImageQuestion, look_at_image
from spark_core.journal.entry import require_stack_name
from spark_core.preflight.look import look_at_nodes
from spark_core.preflight.reach import finding_of

DEFAULT_STACK = "sparks"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "init",
        help="look at Sparks for the first time, and write the stack file that fits them",
        description="Shows the host keys of the nodes and pins them, installs this user's key where it is not taken "
        "yet, finds their peers, cables, netplan files, caches, images and running clusters, and writes a stack file "
        "that fits. Changes nothing on a node without a yes; can be run again.",
    )
    parser.add_argument("hosts", metavar="HOST", nargs="+", help="[USER@]HOST[:PORT] of each node, the head first")
    parser.add_argument("--stack", default=DEFAULT_STACK, help=f"name of the stack; by default {DEFAULT_STACK}")
    parser.add_argument("--model", default="", metavar="SOURCE", help="model.source, instead of what is found")
    parser.add_argument("--image", default="", metavar="IMAGE", help="image of a registry, or local id (sha256:…)")
    parser.add_argument("--hub-endpoint", default="", metavar="URL", help="a mirror of the hub (hub.endpoint)")
    parser.add_argument("--ssh-config", metavar="FILE", help="ssh configuration to use instead of ~/.ssh/config")
    parser.add_argument("--json", action="store_true", help="print the result as JSON (docs/schemas/); never asks")
    add_arguments(parser)
    parser.set_defaults(run=init)


def init(options: argparse.Namespace) -> int:
    """Reach, look, draft, write."""
    questions = Questions(options)

    def say(text: str) -> None:
        print(redacted(text), file=sys.stderr if options.json else sys.stdout, flush=True)

    require_stack_name(options.stack.rsplit("/", 1)[-1])
    path = place_of_stack_file(options.stack)
    if path.exists() and not questions.yes("overwrite", f"{path} is there already. Write it anew?"):
        raise CommandEnd(
            Exit.REFUSED, f"nothing was changed: {path} is there already", do="name another stack with --stack"
        )
    config, password_file = _whole_path(options.ssh_config), _whole_path(options.password_file)
    if config and not Path(config).expanduser().is_file():
        raise SparkError(f"expected an ssh configuration file, found none at {config}", where="--ssh-config")
    specs = [parse_target(text, config or None) for text in options.hosts]
    twice = sorted({spec.address for spec in specs if sum(spec.address == other.address for other in specs) > 1})
    if twice:
        raise SparkError(f"expected every host once, found {', '.join(twice)} twice", where="HOST")
    contact = FirstContact(questions, say)
    seen = [look_at(node, questions, say) for node in contact.reach(specs)]
    seen = with_peers(seen, contact, questions, say)
    wishes = Wishes(
        options.image,
        options.model,
        config,
        password_file,
        options.hub_endpoint,
    )
    draft = draft_settings([one.look for one in seen], wishes)
    for one in seen:
        say("\n  ".join([f"{draft.names[one.look.address]} ({one.look.address})", *told_of(one.look)]))
    findings = preview_of(draft.values, options.stack.rsplit("/", 1)[-1])
    write_new(path, stack_text(project_name(), draft.values, draft.reasons, _header(options)))
    report = _report(options, path, draft, seen, questions, findings)
    print(report.model_dump_json(indent=2) if options.json else _told(report), flush=True)
    return report.exit_code


def _whole_path(given: str | None) -> str:
    """A path as a stack file may have it: from any folder it means the same."""
    if not given or given.startswith("~"):
        return given or ""
    return str(Path(given).absolute())


def preview_of(values: Mapping[str, Any], stack: str) -> list[Finding]:
    """What the preflight finds with these settings; nothing is started or changed on a node."""
    run = Run(values)
    seen = look_at_nodes(run.settings, stack, run.open_node, sudo_password=run.has_sudo_password)
    findings = list(seen.findings)
    if not any(finding.severity == "fail" for finding in findings):
        image = run.settings.image
        question = ImageQuestion(
            settings=seen.settings,
            stack=stack,
            image_id=image.local_id or "",
            reference=image.registry or "",
            configs=seen.configs,
            transports={node.name: run.open_node(node) for node in run.settings.nodes},
            may_run=False,
        )
        try:
            findings += judge(look_at_image(question), run.settings.severities)
        except SparkError as error:
            findings.append(finding_of(error, "image"))
    return findings


def write_new(path: Path, text: str) -> None:
    """Write a file by one rename, so that it is there whole or not at all."""
    target = path.resolve()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".spark-vllm-") as folder:
        beside = Path(folder, target.name)
        beside.write_text(text)
        beside.replace(target)


def _header(options: argparse.Namespace) -> list[str]:
    return [
        f"Written by `python -m automation init` from what it found on {', '.join(options.hosts)}. It is yours to "
        "change: docs/settings.md has every key."
    ]


def _report(
    options: argparse.Namespace,
    path: Path,
    draft: Draft,
    seen: Sequence[Seen],
    questions: Questions,
    findings: Sequence[Finding],
) -> InitReport:
    stack = options.stack
    inside = "" if path.parent == PROJECT else f" --config-file {path}"
    steps = [f"python3 toolchain/stack.py {stack}", f"pulumi preview -s {stack}{inside}"]
    steps.append(
        f"python -m automation cutover --stack {stack}"
        if "replaces" in draft.values
        else f"python -m automation up --stack {stack}"
    )
    failed = any(finding.severity == "fail" for finding in findings)
    return InitReport(
        command="init",
        stack=stack,
        exit_code=Exit.FAILED if failed else Exit.DONE,
        file=str(path),
        written=True,
        nodes=[
            FoundNode(
                name=draft.names[one.look.address],
                address=one.look.address,
                user=one.look.user,
                host_key=one.look.host_key,
                via=one.look.via,
                found=[redacted(line) for line in told_of(one.look)],
            )
            for one in seen
        ],
        questions=questions.answered,
        findings=[FindingReport(severity=f.severity, code=f.code, text=redacted(f.line)) for f in findings],
        next=steps,
    )


def _told(report: InitReport) -> str:
    lines = [f"{finding.severity}: {finding.text}" for finding in report.findings]
    lines.append(f"wrote {report.file}")
    if report.exit_code:
        lines.append("preview fails with it until what is told above is mended")
    return "\n".join([*lines, "next:", *(f"  {step}" for step in report.next)])
