"""A preview as Markdown, for a pull request: what changes, what restarts, how long, and what was found."""

from __future__ import annotations

from automation.progress import duration
from automation.reports import RunReport


def markdown(report: RunReport) -> str:
    """The summary of a preview."""
    lines = [f"### Preview of `{report.stack}`: {_verdict(report)}", ""]
    if report.error is not None:
        told = [report.error.what, *([f"do: {report.error.do}"] if report.error.do else []), *report.error.evidence]
        lines += ["```", *(line.replace("```", "'" * 3) for line in told), "```", ""]
    if report.restarts:
        time = f"about {duration(report.downtime_s)}, as last time" if report.downtime_s else "not measured yet"
        lines += [f"**Serving restarts** ({_listed(report.restarts)}). Expected time without serving: {time}.", ""]
    elif report.result == "succeeded" and report.changes:
        lines += ["Nothing that serves restarts.", ""]
    if report.changes:
        lines += ["| action | resource | differs in | restarts |", "| --- | --- | --- | --- |"]
        for change in report.changes:
            differs = _listed(change.properties) or "-"
            lines.append(f"| {change.action} | `{change.name}` | {differs} | {'yes' if change.restarts else ''} |")
        lines.append("")
    for severity, title in (("fail", "Would fail"), ("warn", "Warnings"), ("unknown", "Not yet known")):
        found = [finding for finding in report.findings if finding.severity == severity]
        if found:
            lines += [f"**{title}**", ""]
            for finding in found:
                first, *rest = finding.text.splitlines()
                lines.append(f"- {_escaped(first)}")
                lines += [f"  {_escaped(line.strip())}" for line in rest]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _verdict(report: RunReport) -> str:
    if report.result != "succeeded":
        return report.result
    return f"{len(report.changes)} changes" if report.changes else "no changes"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _escaped(text: str) -> str:
    for mark in ("\\", "`", "*", "_", "<", ">", "|", "@"):
        text = text.replace(mark, f"\\{mark}")
    return text
