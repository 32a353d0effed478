"""``doctor``: look at everything there is, and pack it so that it can be sent; secrets stay out."""

from __future__ import annotations

import argparse
import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from automation import session as frame
from automation.engine import pulumi, pulumi_json
from automation.exit_codes import Exit
from automation.group_nodes import GroupNodes, learn_secrets, open_nodes
from automation.history import updates_of
from automation.locks import locks_of
from automation.logs import Wanted, as_text, lines_of
from automation.redaction import REPLACEMENT, redacted
from automation.reports import CheckReport, DoctorReport, FindingReport
from automation.session import chosen_stack
from automation.stack_file import StackFile, open_stack_file
from automation.status import status_of
from spark_core.errors import SparkError
from spark_core.gate import complete
from spark_core.preflight.look import look_at_nodes
from spark_core.transport.base import script
from spark_core.wanted import wanted_state

_LOG_LINES = 2000
_SIGNATURE = "4dabf18193072939515e22adb298388d"
"""Key by which the engine marks a special value in a state; with ``ciphertext`` beside it, a secret."""

_INSPECT = """
for c in $(docker ps -aq --filter "label=spark-vllm.stack=$1"); do docker inspect "$c"; done
docker version 2>&1 || true; docker system df 2>&1 || true
df -h 2>&1 || true; free -m 2>&1 || true; uptime; uname -a
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="look at everything, and pack a bundle without secrets to send",
        description="Looks at the engine, the stack, every node and every rank, and asks for a completion. Changes "
        "nothing. The bundle has reports, histories, states and logs; secrets are taken out by value and by form.",
    )
    frame.add_arguments(parser, runs=False)
    parser.add_argument("--bundle", metavar="FILE", help="write a .tar.gz with everything that was seen")
    parser.set_defaults(run=run)


class Visit:
    """What was looked at so far."""

    def __init__(self) -> None:
        self.checks: list[CheckReport] = []
        self.findings: list[FindingReport] = []
        self.files: dict[str, str] = {}

    def check(self, name: str, look: Callable[[], str]) -> bool:
        """One look; what it raises is what it found."""
        try:
            self.checks.append(CheckReport(name=name, ok=True, text=redacted(look())))
        except SparkError as error:
            self.checks.append(CheckReport(name=name, ok=False, text=redacted(error.render())))
        return self.checks[-1].ok


def run(options: argparse.Namespace) -> int:
    """Look at one thing after the other; what fails keeps none of the rest from being looked at."""
    visit = Visit()
    visit.check("engine", lambda: pulumi("version").strip())
    stack = chosen_stack(options)
    file = open_stack_file(stack)
    visit.files[f"{file.path.name}"] = file.text
    if visit.check("settings", lambda: f"{len(file.settings().nodes)} nodes"):
        nodes = open_nodes(file)
        learn_secrets(file)
        visit.check("state", lambda: _state(visit, stack))
        visit.check("lock", lambda: _lock(file))
        visit.check("history", lambda: _history(visit, stack))
        visit.check("nodes", lambda: _nodes(visit, nodes))
        serving = visit.check("group", lambda: _group(visit, file, nodes))
        if serving:
            visit.check("completion", lambda: _completion(nodes, stack))
        for place, node in enumerate(nodes.group.nodes):
            visit.check(f"logs of {node}", lambda place=place: _logs(visit, nodes, place))  # type: ignore[misc]
    ok = all(check.ok for check in visit.checks)
    report = DoctorReport(
        command="doctor",
        stack=stack,
        exit_code=Exit.DONE if ok else Exit.FAILED,
        checks=visit.checks,
        findings=visit.findings,
        bundle=options.bundle,
    )
    if options.bundle:
        visit.files["doctor.json"] = report.model_dump_json(indent=2)
        write_bundle(Path(options.bundle), visit.files)
    print(report.model_dump_json(indent=2) if options.json else told(report))
    return report.exit_code


def told(report: DoctorReport) -> str:
    """For a person."""
    lines = [f"{'ok  ' if check.ok else 'BAD '} {check.name}: {check.text}" for check in report.checks]
    lines += [f"{finding.severity}: {finding.text}" for finding in report.findings]
    return "\n".join([*lines, *([f"bundle: {report.bundle}"] if report.bundle else [])])


def write_bundle(path: Path, files: Mapping[str, str]) -> None:
    """Write a bundle that only its owner can read; everything in it is redacted once more."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as bundle:
        for name, text in sorted(files.items()):
            content = redacted(text).encode()
            info = tarfile.TarInfo(f"spark-vllm-doctor/{name}")
            info.size, info.mode, info.mtime = len(content), 0o600, int(time.time())
            bundle.addfile(info, io.BytesIO(content))


def without_secrets(value: Any) -> Any:
    """An exported state without what is encrypted in it."""
    if isinstance(value, dict):
        if _SIGNATURE in value and {"ciphertext", "plaintext"} & set(value):
            return REPLACEMENT
        return {key: without_secrets(item) for key, item in value.items() if key not in ("secrets_providers",)}
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


def _state(visit: Visit, stack: str) -> str:
    state = pulumi_json("stack", "export", "-s", stack)
    visit.files["state.json"] = json.dumps(without_secrets(state), indent=1)
    deployment = state.get("deployment") or {}
    pending = deployment.get("pending_operations") or []
    note = f", {len(pending)} operations that a killed run left; the next up takes care of them" if pending else ""
    return f"{len(deployment.get('resources') or [])} resources{note}"


def _lock(file: StackFile) -> str:
    locks = locks_of(file.project, file.stack)
    dead = [lock for lock in locks if lock.stale]
    if dead:
        raise SparkError(f"found the lock of a dead run: {dead[0].holder}", do="give the next run --clear-stale-lock")
    return f"held by {locks[0].holder}" if locks else "nobody holds the stack"


def _history(visit: Visit, stack: str) -> str:
    updates = updates_of(stack, 50)
    slim = [{key: value for key, value in update.items() if key != "environment"} for update in updates]
    visit.files["history.json"] = json.dumps(slim, indent=1)
    return f"last: {updates[0]['kind']} {updates[0]['result']}" if updates else "nothing was done yet"


def _nodes(visit: Visit, nodes: GroupNodes) -> str:
    look = look_at_nodes(nodes.settings, nodes.stack, nodes.run.open_node, sudo_password=nodes.run.has_sudo_password)
    visit.findings = [FindingReport(severity=f.severity, code=f.code, text=redacted(f.line)) for f in look.findings]
    for node in nodes.settings.nodes:
        try:
            transport = nodes.run.open_node(node)
            visit.files[f"{node.name}/inspect.txt"] = transport.run(script(_INSPECT, nodes.stack, timeout_s=60)).stdout
        except SparkError as error:
            visit.files[f"{node.name}/inspect.txt"] = error.render()
    failed = [finding for finding in look.findings if finding.severity == "fail"]
    if failed:
        raise SparkError(f"found {len(failed)} things that would fail: {', '.join(f.code for f in failed)}")
    return f"{len(nodes.settings.nodes)} answer, {len(look.findings)} findings"


def _group(visit: Visit, file: StackFile, nodes: GroupNodes) -> str:
    status = status_of(file, nodes)
    visit.files["status.json"] = status.model_dump_json(indent=1)
    if status.exit_code != Exit.DONE:
        raise SparkError(f"expected {status.wanted}, found {status.state}", where=status.group)
    return status.state


def _completion(nodes: GroupNodes, stack: str) -> str:
    outputs = pulumi_json("stack", "output", "-s", stack, "--json", "--show-secrets")
    if not outputs.get("endpoint"):
        raise SparkError("expected an endpoint, found none: the stack was never up")
    if wanted_state(nodes.rank(0)) == "stopped":
        return "not asked: the group is stopped on request"
    timeout_s = nodes.group.serving.canary_timeout_s
    done = complete(str(outputs["endpoint"]), str(outputs["model"]), outputs.get("api_key"), timeout_s=timeout_s)
    return f"{outputs['endpoint']} answered in {done.seconds:.1f} s"


def _logs(visit: Visit, nodes: GroupNodes, place: int) -> str:
    lines = lines_of(nodes.rank(place), Wanted("all", lines=_LOG_LINES))
    visit.files[f"{nodes.group.nodes[place]}/rank{place}.log.jsonl"] = as_text(lines)
    return f"{len(lines)} lines of {len({line.generation for line in lines})} generations"
