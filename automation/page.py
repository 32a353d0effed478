"""The page that ``report`` writes: one HTML file that asks nothing of any other place. Pure: a report in, text out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from automation.deployment_report import DeploymentReport, DriftPart, GenerationPart, LastUpPart, NodePart, Verdict
from automation.markup import Child, Markup, joined, style_sheet, tag
from automation.page_style import STYLE
from automation.progress import duration
from automation.topology import picture, short, tone_of

_TONES: dict[Verdict, str] = {
    "serving": "good",
    "drifted": "busy",
    "stopped": "quiet",
    "broken": "bad",
    "unknown": "bad",
}
_WORDS: dict[Verdict, str] = {
    "serving": "Serving",
    "drifted": "Serving, with drift",
    "stopped": "Stopped on request",
    "broken": "Not serving as wanted",
    "unknown": "Not known",
}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The browser itself then refuses whatever would be asked of elsewhere."""
SHOWN_STEPS = 14
SHOWN_CHANGED = 40


def page(report: DeploymentReport) -> str:
    """The whole file."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", f"{_WORDS[report.verdict]}: {report.stack}"),
        style_sheet(STYLE),
    )
    main = tag(
        "main",
        tag("h1", f"{report.model} on {report.stack}"),
        tag("small", f"as seen at {_clock(report.at)}"),
        _verdict(report),
        _unread(report),
        _card("Nodes and fabric", *_fabric(report), id_="fabric"),
        _card("What serves", _serving(report), id_="what"),
        _card("Drift", *_drift(report.drift), id_="drift"),
        _card("Where the time of the last up went", *_last_up(report.last_up), id_="time"),
        _card("Last generations", *_generations(report), id_="generations"),
        _card("Speed", *_speed(report), id_="speed"),
        _card("Nodes", *[_node(node) for node in report.nodes], id_="nodes"),
        _card("History", *_history(report), id_="history"),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', main), lang='en').text}\n"


def _verdict(report: DeploymentReport) -> Markup:
    first = _first_error(report)
    return tag(
        "section",
        tag("strong", _WORDS[report.verdict]),
        tag("div", report.headline),
        tag("pre", first.error) if first is not None else None,
        tag("div", f"{first.node}, {first.source}: {first.meaning}") if first is not None and first.meaning else None,
        tag("div", f"What to do: {first.do}") if first is not None and first.do else None,
        class_=f"verdict {_TONES[report.verdict]}",
        id="verdict",
        data_verdict=report.verdict,
    )


def _first_error(report: DeploymentReport) -> GenerationPart | None:
    """What the newest generation failed of; nothing where it serves."""
    if report.verdict in ("serving", "drifted", "stopped"):
        return None
    return next((part for part in report.generations if part.error), None)


def _unread(report: DeploymentReport) -> Markup | None:
    if not report.unread:
        return None
    rows = [(part.part, part.why) for part in report.unread]
    return _card("Could not be read", _table(("part", "why"), rows), id_="unread")


def _fabric(report: DeploymentReport) -> Iterable[Child]:
    yield tag("div", picture(report, tall=False), class_="wide")
    yield tag("div", picture(report, tall=True), class_="tall")
    for pair in report.measured:
        both = " and ".join(f"{value:.1f}" for value in pair.gbps)
        yield tag(
            "div",
            f"{pair.pair}: {both} Gb/s over {pair.links} link{'s' if pair.links != 1 else ''} ({pair.method}), "
            f"round trip {pair.round_trip_us:.1f} µs, when the fabric was proven",
            class_="dim",
        )
    for line in report.not_proven:
        yield tag("div", f"not proven: {line}", class_="tone-busy")


def _serving(report: DeploymentReport) -> Markup:
    image = f"{short(report.image)} from {report.image_source}" if report.image else report.image_source
    weights = f"{short(report.weights)} from {report.weights_source}" if report.weights else report.weights_source
    settings = report.settings
    if settings is None:
        served = "not known"
    elif settings.served is None:
        served = f"none has served yet; the file has {settings.file}"
    elif settings.differs:
        served = f"{settings.served} served last; the file has {settings.file} and differs in " + ", ".join(
            settings.differs
        )
    else:
        served = f"{settings.served}, as in the file"
    canary = _ago(report.at, report.last_good_canary_at)
    return _pairs(
        ("endpoint", tag("code", report.endpoint)),
        ("model", report.model),
        ("state", f"{report.state} (wanted: {report.wanted})"),
        ("last completion seen", canary or "not known"),
        ("image", image),
        ("weights", weights),
        ("settings", served),
        ("held by", report.held_by or None),
    )


def _drift(drift: DriftPart | None) -> Iterable[Child]:
    if drift is None:
        yield tag("p", "Not looked for, or not to be told.", class_="dim")
        return
    if drift.error:
        yield tag("p", drift.error, class_="tone-bad")
    if drift.changes:
        rows = [
            (
                change.name,
                change.action,
                ", ".join(change.properties),
                _badge("restarts serving", "bad") if change.restarts else "",
            )
            for change in drift.changes
        ]
        yield _table(("what", "up would", "differs in", ""), rows)
    elif not drift.error:
        yield tag("p", "Nothing: every node is as the stack's file says.", class_="tone-good")
    tones = {"fail": "bad", "warn": "busy"}
    for finding in drift.findings:
        badge = _badge(finding.severity, tones.get(finding.severity, "quiet"))
        yield tag("p", badge, " ", tag("span", finding.text, style="white-space:pre-wrap"))


def _last_up(last: LastUpPart | None) -> Iterable[Child]:
    if last is None:
        yield tag("p", "There was none yet, or it is not known.", class_="dim")
        return
    update = last.update
    tone = {"succeeded": "good", "failed": "bad"}.get(update.result, "busy")
    whole = f" in {duration(last.seconds)}" if last.seconds is not None else ""
    yield tag("p", _badge(update.result, tone), f" {update.started}{whole}: {update.message}")
    longest = sorted(last.steps, key=lambda step: -step.seconds)[:SHOWN_STEPS]
    if longest:
        yield _bars([(step.name, step.seconds) for step in longest])
        rest = len(last.steps) - len(longest)
        note = "A step counts from the end of what it waits for"
        yield tag("small", f"{note}; {rest} shorter ones are left out." if rest else f"{note}.")
    else:
        yield tag("p", "It changed nothing.", class_="dim")
    if last.phases:
        yield tag("h3", "The newest generation on the head, until it served")
        yield _bars([(phase.phase.replace("_", " "), phase.seconds) for phase in last.phases])


def _generations(report: DeploymentReport) -> Iterable[Child]:
    if not report.generations:
        yield tag("p", "None is kept, or none could be read.", class_="dim")
    rows: list[Sequence[Child]] = []
    for part in report.generations:
        lines = tag("details", tag("summary", "lines"), tag("pre", "\n".join(part.lines))) if part.lines else None
        said = [tag("code", part.error)] if part.error else [tag("span", "no error", class_="dim")]
        meaning = tag("div", f"this means: {part.meaning}") if part.meaning else None
        do = tag("div", f"do: {part.do}") if part.do else None
        tone = "bad" if part.error else tone_of(part.phase, part.rank)
        began = _clock(part.began) if part.began else "not known"
        lasted = f", {duration(part.ended - part.began)}" if part.began and part.ended else ""
        where = f"{part.node}, rank {part.rank}" + (f", {part.source}" if part.source else "")
        rows.append((part.number, began + lasted, _badge(part.phase, tone), where, joined([*said, meaning, do, lines])))
    if rows:
        yield _table(("no.", "began", "phase", "told by", "first error"), rows)


def _speed(report: DeploymentReport) -> Iterable[Child]:
    if not report.speed:
        yield tag("p", "Not measured with these settings; `python -m automation bench` does.", class_="dim")
        return
    rows = [
        (
            one.concurrency,
            f"{one.output_tokens_per_s:.1f}",
            f"{one.ttft_median_ms:.0f}",
            f"{one.ttft_p99_ms:.0f}",
            f"{one.tpot_median_ms:.1f}",
            f"{one.prompts} of {one.input_tokens} + {one.output_tokens} tokens",
            _clock(one.at),
        )
        for one in report.speed
    ]
    names = ("at a time", "tokens/s", "first token, ms", "99 % of them, ms", "each further, ms", "prompts", "measured")
    yield _table(names, rows)


def _node(node: NodePart) -> Markup:
    tone = tone_of(node.phase, node.rank)
    devices = [
        f"{one.netdev} {one.address}"
        + (f", {one.hca}" if one.hca else "")
        + (f", MTU {one.mtu_bytes}" if one.mtu_bytes else "")
        for one in node.interfaces
    ]
    memory = f"{node.memory_available_bytes / 2**30:.1f} GiB available" if node.memory_available_bytes else None
    versions = ", ".join(f"{name} {version}" for name, version in node.versions.items())
    shown = [tag("li", tag("code", line)) for line in node.changed[:SHOWN_CHANGED]]
    more = len(node.changed) - len(shown)
    changed = tag(
        "details",
        tag("summary", f"changed on it, and put back by destroy: {len(node.changed)}"),
        tag("ul", *shown, tag("li", f"and {more} more") if more > 0 else None),
    )
    return tag(
        "div",
        tag("h3", node.name, " ", _badge(node.phase, tone)),
        _pairs(
            ("reached at", f"{node.user}@{node.management_address}"),
            ("detail", node.detail or None),
            ("fabric", joined([tag("div", line) for line in devices]) if devices else None),
            ("memory", memory),
            ("runs", versions or None),
            ("weights", node.weights or None),
            ("restarts", f"{node.restarts} by Docker" if node.restarts else None),
        ),
        changed if node.changed else None,
    )


def _history(report: DeploymentReport) -> Iterable[Child]:
    if not report.history:
        yield tag("p", "Nothing was done yet, or it could not be read.", class_="dim")
        return
    rows = [
        (
            update.started,
            update.kind,
            _badge(update.result, {"succeeded": "good", "failed": "bad"}.get(update.result, "busy")),
            update.message,
        )
        for update in report.history
    ]
    yield _table(("began", "what", "result", ""), rows)


def _card(title: str, *children: Child, id_: str) -> Markup:
    return tag("section", tag("h2", title), *children, class_="card", id=id_)


def _pairs(*pairs: tuple[str, Child]) -> Markup:
    told = [(name, value) for name, value in pairs if value is not None]
    return tag("dl", *[part for name, value in told for part in (tag("dt", name), tag("dd", value))])


def _table(names: Sequence[str], rows: Sequence[Sequence[Child]]) -> Markup:
    head = tag("thead", tag("tr", *[tag("th", name) for name in names]))
    body = [
        tag("tr", *[tag("td", value, data_name=name) for name, value in zip(names, row, strict=True)]) for row in rows
    ]
    return tag("table", head, tag("tbody", *body), class_="stack")


def _bars(values: Sequence[tuple[str, float]]) -> Markup:
    most = max([seconds for _, seconds in values] + [0.1])
    parts: list[Child] = []
    for name, seconds in values:
        width = f"width:{100 * seconds / most:.1f}%"
        label = tag("div", name, class_="label", title=name)
        track = tag("div", tag("div", class_="bar", style=width), class_="track")
        parts.append(tag("div", label, track, tag("div", _seconds(seconds), class_="time"), class_="step"))
    return tag("div", *parts)


def _badge(text: str, tone: str) -> Markup:
    return tag("span", text.replace("_", " "), class_=f"badge {tone}")


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _ago(now: float, at: float | None) -> str:
    return "" if at is None else f"{duration(max(0.0, now - at))} before, at {_clock(at)}"
