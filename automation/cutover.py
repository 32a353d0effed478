"""``cutover``: from a cluster of another launcher to this stack, with as little time without serving as there can be.

Everything that needs no stop comes first: checks, image, weights. Then one step, on a yes, stops the containers that
the settings name (``replaces``), and the stack comes up. Nothing of the other launcher is removed, and how to bring its
cluster back is printed.
"""

from __future__ import annotations

import argparse
import concurrent.futures

from automation import session as frame
from automation.exit_codes import CommandEnd, Exit
from automation.good_settings import record_of_file, up_message
from automation.group_nodes import GroupNodes, open_nodes
from automation.reports import CutoverReport
from automation.session import Session, ask, session, told
from automation.stage import bring_all
from spark_core.errors import SparkError, join_errors
from spark_core.first_day.survey import Survey, observe_survey
from spark_core.first_day.way_back import Replaced, notes, stop_container, way_back
from spark_core.wanted import STOPPED, want_running, wanted_state


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "cutover",
        help="replace another launcher's running cluster by this stack",
        description="Checks the settings and brings image and weights while the other cluster serves. Then stops the "
        "containers that `replaces` names, on a yes, and runs up. Prints the commands that bring the old cluster back.",
    )
    frame.add_arguments(parser)
    parser.add_argument("--yes", action="store_true", help="stop the containers without asking")
    parser.set_defaults(run=cutover)


def cutover(options: argparse.Namespace) -> int:
    """Bring, ask, stop, start."""
    with session(options) as here:
        record = record_of_file(here.file)
        here.require_free()
        nodes = open_nodes(here.file, secrets=True)
        if not nodes.settings.replaces:
            raise SparkError(
                "expected the names of the containers that this stack replaces, found none",
                where=f"{here.file.path} (replaces)",
                do="name them, such as `replaces: [vllm_node]`; with nothing to replace, run `up`",
            )
        before = replaced_by(nodes)
        back = way_back(nodes.settings, nodes.stack, before)
        here.progress.say("bringing image and weights; nothing is stopped meanwhile")
        bring_all(here.file, here.stopper.check)
        here.stopper.check()
        stopped = _stop(options, here, nodes, before, back)
        ranks = nodes.ranks()
        if wanted_state(ranks[0]) == STOPPED:  # from an earlier way back
            want_running(ranks)
        result = here.run("up", message=up_message(record))
        run = result.report("up", here.stack)
        if run.result != "succeeded":
            here.progress.say("\n".join(["the old cluster comes back with:", *(f"  {line}" for line in back)]))
        report = CutoverReport(
            command="cutover", stack=here.stack, exit_code=run.exit_code, stopped=stopped, way_back=back, run=run
        )
        print(report.model_dump_json(indent=2) if options.json else _told(report), flush=True)
        return report.exit_code


def replaced_by(nodes: GroupNodes) -> list[Replaced]:
    """What every node has of the cluster that is to be replaced, the head first; changes nothing.

    Raises:
        SparkError: a node could not be asked.
    """

    def look(name: str) -> Survey | SparkError:
        try:
            return observe_survey(nodes.run.transport(name))
        except SparkError as error:
            return error

    names = nodes.group.nodes
    with concurrent.futures.ThreadPoolExecutor(max_workers=len(names)) as pool:
        found = dict(zip(names, pool.map(look, names), strict=True))
    errors = [one for one in found.values() if isinstance(one, SparkError)]
    if errors:
        raise join_errors(errors)
    return [
        Replaced(
            nodes.settings.node(name),
            tuple(one for one in survey.containers if one.name in nodes.settings.replaces),
            survey.launchers,
        )
        for name, survey in found.items()
        if isinstance(survey, Survey)
    ]


def _stop(
    options: argparse.Namespace, here: Session, nodes: GroupNodes, before: list[Replaced], back: list[str]
) -> dict[str, list[str]]:
    """Stop what runs of the old cluster, on a yes; what was stopped on each node."""
    running = {one.node.name: [container.name for container in one.running] for one in before if one.running}
    if not running:
        here.progress.say("nothing that `replaces` names runs any more")
        return {}
    lines = [f"{node}: {', '.join(names)}" for node, names in running.items()]
    lines += [*notes(before), "and later back, if it is wished:", *(f"  {line}" for line in back)]
    here.progress.say("\n".join(["everything is brought; to be stopped now:", *lines]))
    if not options.yes and (options.json or not ask("Stop them? Serving ends until this stack has come up. [y/N] ")):
        raise CommandEnd(
            Exit.REFUSED,
            "nothing was stopped: it was not agreed to",
            do="answer y on a terminal, or give --yes; what was brought stays",
        )
    errors: list[SparkError] = []
    for node, names in running.items():
        for name in names:
            try:
                stop_container(nodes.run.transport(node), name)
                here.progress.say(f"{node}: {name} is stopped")
            except SparkError as error:
                errors.append(error)
    if errors:
        first = join_errors(errors)
        raise SparkError(first.what, where=first.where, do=first.do, evidence=[*first.evidence, *back])
    return running


def _told(report: CutoverReport) -> str:
    lines = [told(report.run)]
    lines.append("the old cluster comes back with:" if report.exit_code else "to go back to the old cluster:")
    return "\n".join([*lines, *(f"  {line}" for line in report.way_back)])
