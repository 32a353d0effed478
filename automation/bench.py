"""``bench``: how fast what is served is, by vLLM's own benchmark, and whether that fell after a change."""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from automation import session as frame
from automation.bench_report import BenchReport, ComparisonReport, FigureReport, SpeedReport
from automation.engine import pulumi, pulumi_json
from automation.exit_codes import CommandEnd, Exit
from automation.good_settings import TYPE, Good, good_settings, record_of_file
from automation.group_nodes import GroupNodes, learn_secrets, open_nodes
from automation.progress import duration
from automation.session import Session, session
from automation.status import group_state
from spark_core.errors import SparkError
from spark_core.group import public_endpoint
from spark_core.settings.record import differing_keys, digest_of
from spark_core.speed import TOLERANCE, Speed, compare, load_for, measure, remove_benchmark, speed_of
from spark_core.transfer.distribution import at_once

CONCURRENCIES = (1, 8)
ONE_RUN_S = 3600.0


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "bench",
        help="measure how fast it serves, keep the figures, and say whether they fell after a change",
        description="Runs `vllm bench serve` of the serving image in a container on the head, against the endpoint, "
        f"with {' and '.join(map(str, CONCURRENCIES))} requests at a time. Whoever uses the model meanwhile is slowed, "
        "and slows it. The figures are kept in the state with the settings that serve, and compared with those of the "
        f"settings before. Exit status 2: a figure is worse by more than {TOLERANCE:.0%}.",
    )
    frame.add_arguments(parser)
    parser.add_argument(
        "--concurrency", type=_positive, action="append", metavar="N", help="requests at a time; repeatable"
    )
    parser.add_argument("--no-keep", action="store_true", help="do not keep the figures; the state stays as it is")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Look, measure, compare, keep."""
    with session(options) as here:
        here.require_free()
        nodes = open_nodes(here.file)
        learn_secrets(here.file)
        kept = good_settings(_state(here.stack))
        good = require_serving(here, nodes, kept)
        speeds = _measured(here, nodes, options.concurrency or CONCURRENCIES, good.image_id, options.deadline)
        comparisons = compared(kept, speeds)
        if not options.no_keep:
            here.require_free()
            keep(here.stack, good.digest, speeds)
        report = BenchReport(
            command="bench",
            stack=here.stack,
            exit_code=Exit.DRIFT if any(one.fell for c in comparisons for one in c.figures) else Exit.DONE,
            endpoint=public_endpoint(nodes.settings, nodes.name),
            model=nodes.group.model.served_name,
            node=nodes.group.nodes[0],
            settings=good.digest,
            speed=[SpeedReport(**speed.as_json()) for speed in speeds],
            comparisons=comparisons,
            kept=not options.no_keep,
        )
    print(report.model_dump_json(indent=2) if options.json else told(report), flush=True)
    return report.exit_code


def require_serving(here: Session, nodes: GroupNodes, kept: Sequence[Good]) -> Good:
    """The settings that serve now.

    Raises:
        CommandEnd: the group does not serve, or serves with other settings than the file's.
    """
    group = group_state(nodes)
    if group.state != "serving":
        raise CommandEnd(
            Exit.FAILED, f"expected a group that serves, found {group.state}", where=nodes.name, do="run `up` first"
        )
    record = record_of_file(here.file)
    if not kept or kept[0].digest != digest_of(record):
        differs = f", which differ in {', '.join(differing_keys(kept[0].record, record))}" if kept else ""
        raise CommandEnd(
            Exit.FAILED,
            f"expected the settings of the file to have served, found {kept[0].digest if kept else 'none'}{differs}",
            where=nodes.name,
            do="run `up` first, so that the figures are kept with what they are of",
        )
    return kept[0]


def compared(kept: Sequence[Good], speeds: Sequence[Speed]) -> list[ComparisonReport]:
    """The figures beside those of the newest earlier settings that have any, and beside the last of these settings."""
    newest, *earlier = kept
    found = []
    for good in [*[one for one in earlier if _speeds(one)][:1], newest]:
        before = _speeds(good)
        differences = compare(before, speeds)
        if not differences:
            continue
        changed = differing_keys(good.record, newest.record)
        changed += ["(image)"] if any(one.image not in ("", newest.image_id) for one in before) else []
        changed += ["(weights)"] if good.revision != newest.revision else []
        figures = [FigureReport(**vars(one), fell=one.fell) for one in differences]
        found.append(
            ComparisonReport(settings=good.digest, at=max(one.at for one in before), changed=changed, figures=figures)
        )
    return found


def keep(stack: str, digest: str, speeds: Sequence[Speed]) -> None:
    """Keep the figures in the state, with the settings that they are of; those of other loads stay.

    Raises:
        SparkError: meanwhile other settings serve.
    """
    state = with_speed(_state(stack), digest, speeds)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as written:  # mode 600; what is secret in it is encrypted
        json.dump(state, written)
        written.flush()
        pulumi("stack", "import", "-s", stack, "--file", written.name)


def with_speed(state: Mapping[str, Any], digest: str, speeds: Sequence[Speed]) -> dict[str, Any]:
    """An exported state with figures. Pure."""
    changed = copy.deepcopy(dict(state))
    resources = (changed.get("deployment") or {}).get("resources") or []
    kept = next((resource for resource in resources if resource["type"] == TYPE), None)
    newest = good_settings(state)
    if kept is None or not newest or newest[0].digest != digest:
        raise SparkError(
            f"expected the settings {digest} to serve still, found {newest[0].digest if newest else 'none'}",
            where="bench",
            do="run it again; the figures were not kept",
        )
    others = [one for one in _speeds(newest[0]) if one.load not in {speed.load for speed in speeds}]
    kept["outputs"]["speed"] = [speed.as_json() for speed in (*others, *speeds)]
    return changed


def told(report: BenchReport) -> str:
    """For a person."""
    lines = [f"{report.model} at {report.endpoint}, settings {report.settings}"]
    for one in report.speed:
        lines.append(
            f"  {one.concurrency} at a time: {one.output_tokens_per_s:.1f} tokens/s, first token after "
            f"{one.ttft_median_ms:.0f} ms (99 %: {one.ttft_p99_ms:.0f} ms), then {one.tpot_median_ms:.1f} ms each; "
            f"{one.prompts} prompts of {one.input_tokens} + {one.output_tokens} tokens"
        )
    for comparison in report.comparisons:
        changed = f"; changed since: {', '.join(comparison.changed)}" if comparison.changed else ""
        ago = duration(max(0.0, time.time() - comparison.at))
        lines.append(f"  beside {comparison.settings}, measured {ago} ago{changed}")
        for figure in comparison.figures:
            way = "WORSE" if figure.fell else "worse" if figure.slower_by > 0 else "better"
            lines.append(
                f"    {figure.concurrency} at a time: {figure.figure} {figure.before:g} -> {figure.now:g}, "
                f"{abs(figure.slower_by):.1%} {way}"
            )
    if not report.comparisons:
        lines.append("  there are no earlier figures of this load to compare with")
    return "\n".join(lines)


def _measured(
    here: Session, nodes: GroupNodes, concurrencies: Sequence[int], image_id: str, limit_s: float
) -> list[Speed]:
    head = nodes.rank(0)

    def turn() -> None:
        here.progress.tick()
        here.stopper.check()

    def one(concurrency: int) -> Speed:
        load = load_for(nodes.settings, nodes.name, concurrency)
        name, begun, done = f"bench, {concurrency} at a time", time.monotonic(), False

        def work() -> Speed:
            return measure(
                head, nodes.settings, nodes.name, nodes.stack, load, now=time.time(), timeout_s=min(ONE_RUN_S, limit_s)
            )

        here.progress.begun(name, f"{load.prompts} prompts of {load.input_tokens} + {load.output_tokens} tokens")
        try:
            [speed] = at_once([work], turn)
            done = True
            return replace(speed, image=image_id)
        finally:
            if not done:
                remove_benchmark(head, nodes.stack, nodes.name)
            here.progress.ended(name, "measured", time.monotonic() - begun, done)

    return [one(concurrency) for concurrency in dict.fromkeys(concurrencies)]


def _speeds(good: Good) -> list[Speed]:
    return [speed for kept in good.speed if (speed := speed_of(kept)) is not None]


def _state(stack: str) -> dict[str, Any]:
    state: dict[str, Any] = pulumi_json("stack", "export", "-s", stack)
    return state


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 1024, found {text!r}")
    return int(text)
