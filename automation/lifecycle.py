"""``stop``, ``start`` and ``maintenance``: a group's memory is freed and comes back, on request.

The wish is recorded on the nodes, where the rank supervisors read it: it outlives reboots, and neither drift nor up
takes a stopped group for a broken one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from automation import session as frame
from automation.exit_codes import CommandEnd, Exit
from automation.group_nodes import GroupNodes, errors_of, learn_api_key, learn_secrets, open_nodes
from automation.redaction import redacted
from automation.reports import FindingReport, LifecycleReport
from automation.session import Session, session
from spark_core.errors import CommandError, SparkError, UnreachableError, join_errors
from spark_core.findings import Finding
from spark_core.gate import Rank, drift_of, observe_rank, wait_until_serving
from spark_core.preflight.look import look_at_nodes
from spark_core.transport.base import Transport, command, run_checked, script
from spark_core.wanted import STOPPED, want_running, want_stopped

PARKING_S = 240.0
BOOT_S = 900.0
_IDLE = ("stopped", "container stopped", "no container")
# Of an emulated host the kernel goes on, but its first process is another one.
_BOOT = 'echo "$(cat /proc/sys/kernel/random/boot_id) $(cut -d " " -f 22 /proc/1/stat)"'
# A connection that is lost is opened again, and what was asked is asked again: not a second reboot.
_REBOOT = f'[ "$({_BOOT})" = "$1" ] || exit 0; exec systemctl reboot'


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add them to the command line."""
    for name, do, text in (
        ("stop", stop, "stop serving and free the nodes' memory; it stays so over reboots, drift and up"),
        ("start", start, "serve again after a stop; ends when the group serves"),
    ):
        parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        frame.add_arguments(parser)
        parser.set_defaults(run=do)
    parser = commands.add_parser(
        "maintenance",
        help="stop the group, upgrade and reboot one node, check it against the others, start again",
        description="Stops the group, runs the owner's upgrade on a node, reboots it, and starts the group again if "
        "the nodes still fit together. Without --upgrade and --reboot a person does both, and is waited for.",
    )
    frame.add_arguments(parser)
    parser.add_argument("node", metavar="NODE", help="name of the node")
    parser.add_argument("--upgrade", metavar="COMMAND", help="run this on the node, by bash, as the deploy user")
    parser.add_argument("--sudo", action="store_true", help="run the upgrade as root")
    parser.add_argument("--reboot", action="store_true", help="reboot the node after the upgrade; needs root")
    parser.set_defaults(run=maintenance)


class Steps:
    """What was done, for the report, and said when it was."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.done: list[str] = []

    def __call__(self, text: str) -> None:
        self.done.append(redacted(text))
        self._say(self.done[-1])


def stop(options: argparse.Namespace) -> int:
    """Record the wish, and let go of the memory."""
    with session(options) as here:
        here.require_free()
        nodes, steps, begun = open_nodes(here.file), Steps(here.progress.say), time.monotonic()
        learn_secrets(here.file)
        stop_group(here, nodes, steps)
        return _finish(options, here, nodes, steps, begun, STOPPED)


def start(options: argparse.Namespace) -> int:
    """Take the wish back, and wait until the group serves."""
    with session(options) as here:
        here.require_free()
        nodes, steps, begun = open_nodes(here.file), Steps(here.progress.say), time.monotonic()
        learn_secrets(here.file)
        state = start_group(here, nodes, steps)
        return _finish(options, here, nodes, steps, begun, state)


def maintenance(options: argparse.Namespace) -> int:
    """Stop, upgrade, reboot, check, start."""
    with session(options) as here:
        here.require_free()
        nodes, steps, begun = open_nodes(here.file, secrets=True), Steps(here.progress.say), time.monotonic()
        learn_api_key(here.file)
        known = [node.name for node in nodes.settings.nodes]
        if options.node not in known:
            raise SparkError(f"expected one of {', '.join(known)}, found {options.node!r}", where="NODE")
        by_hand = not (options.upgrade or options.reboot)
        if by_hand and not sys.stdin.isatty():
            raise SparkError(
                "expected a person at the terminal, or what is to be done, found neither",
                where="maintenance",
                do="give --upgrade, --reboot or both",
            )
        stop_group(here, nodes, steps)
        transport = nodes.run.transport(options.node)
        if by_hand:
            steps(f"the group is stopped: upgrade and reboot {options.node} now")
            input("Press Enter when it is up again. ")
        if options.upgrade:
            _upgrade(transport, options, steps)
        if options.reboot:
            _reboot(transport, here, steps)
        findings = parity(nodes)
        for finding in findings:
            steps(finding.line)
        if any(finding.severity == "fail" for finding in findings):
            raise CommandEnd(
                Exit.FAILED,
                f"expected nodes that fit together, found {len(findings)} findings; the group stays stopped",
                where=options.node,
                do="mend them, then run `python -m automation start`",
                evidence=[finding.line for finding in findings],
            )
        steps("the nodes fit together")
        state = start_group(here, nodes, steps)
        told = [FindingReport(severity=f.severity, code=f.code, text=redacted(f.line)) for f in findings]
        return _finish(options, here, nodes, steps, begun, state, told)


def stop_group(here: Session, nodes: GroupNodes, steps: Steps) -> None:
    """Stop a group; every node must answer, so that none is left running alone."""
    ranks = _all_ranks(nodes)
    want_stopped(ranks[0])
    steps(f"{nodes.name}: recorded as stopped on {ranks[0].transport.node}")
    end = time.monotonic() + PARKING_S
    while True:
        states = [observe_rank(rank) for rank in ranks]
        if states[0].phase in _IDLE and all(state.phase in (*_IDLE, "waiting_for_ranks") for state in states[1:]):
            break
        if time.monotonic() > end:
            found = ", ".join(f"{state.node}: {state.phase}" for state in states)
            raise CommandError(
                f"expected every rank to let go in {PARKING_S:.0f} s, found {found}",
                do="a container of an earlier release does not know how: run `up` first",
            )
        here.stopper.wait(1)
    steps(f"{nodes.name}: every rank has let go")


def start_group(here: Session, nodes: GroupNodes, steps: Steps) -> str:
    """Start a stopped group; the state that it is in then."""
    ranks = _all_ranks(nodes)
    want_running(ranks)
    steps(f"{nodes.name}: recorded as running on {', '.join(rank.transport.node for rank in ranks)}")
    states = wait_until_serving(
        ranks,
        stall_s=nodes.group.serving.start_timeout_s,
        progress=lambda line: here.progress.said("", line),
        sleep=here.stopper.wait,
    )
    steps(f"{nodes.name}: {drift_of(states)}")
    return drift_of(states)


def parity(nodes: GroupNodes) -> list[Finding]:
    """What the preflight has to say about the nodes; most of all whether they still fit together."""
    looked = look_at_nodes(nodes.settings, nodes.stack, nodes.run.open_node, sudo_password=nodes.run.has_sudo_password)
    return [finding for finding in looked.findings if finding.severity in ("fail", "warn")]


def _all_ranks(nodes: GroupNodes) -> list[Rank]:
    found = nodes.each(lambda rank: observe_rank(rank))
    errors = errors_of(found)
    if errors:
        raise join_errors(errors)
    return nodes.ranks()


def _upgrade(transport: Transport, options: argparse.Namespace, steps: Steps) -> None:
    steps(f"{transport.node}: upgrading")
    run_checked(
        transport,
        script('exec bash -c "$1"', options.upgrade, sudo=options.sudo, timeout_s=min(options.deadline, 3600)),
        purpose="expected the upgrade to succeed",
    )
    steps(f"{transport.node}: upgraded")


def _reboot(transport: Transport, here: Session, steps: Steps) -> None:
    """Reboot a node and wait until it has booted; how it looks afterwards is what counts."""
    before = run_checked(transport, script(_BOOT), purpose="expected to learn when the node booted").strip()
    try:
        asked = transport.run(script(_REBOOT, before, sudo=True, timeout_s=30))
        if not asked.ok and "closed" not in asked.stderr:
            raise CommandError(
                f"expected to reboot, found: {asked.stderr.strip()[-160:]}",
                where=transport.node,
                do="reboot it yourself and run `python -m automation start`, or allow it in sudoers",
            )
    except UnreachableError:
        pass  # the connection went with the node
    steps(f"{transport.node}: rebooting")
    end = time.monotonic() + BOOT_S
    while time.monotonic() < end:
        here.stopper.wait(2)
        try:
            now = transport.run(script(_BOOT, timeout_s=10))
            docker = transport.run(command("docker", "version", timeout_s=10)) if now.ok else now
        except SparkError:
            continue
        if now.ok and now.stdout.strip() != before and docker.ok:
            steps(f"{transport.node}: booted")
            return
    raise CommandError(
        f"expected the node back in {BOOT_S:.0f} s, found it silent", where=transport.node, do="look at its console"
    )


def _finish(
    options: argparse.Namespace,
    here: Session,
    nodes: GroupNodes,
    steps: Steps,
    begun: float,
    state: str,
    findings: Sequence[FindingReport] = (),
) -> int:
    report = LifecycleReport(
        command=options.command,
        stack=here.stack,
        exit_code=Exit.DONE,
        group=nodes.name,
        state=state,
        seconds=round(time.monotonic() - begun, 1),
        steps=steps.done,
        findings=list(findings),
    )
    print(report.model_dump_json(indent=2) if options.json else f"{nodes.name} of {here.stack}: {state}", flush=True)
    return report.exit_code
