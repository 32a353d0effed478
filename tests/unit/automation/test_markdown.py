"""The summary for a pull request: what changes, what restarts, for how long, and what the preflight found."""

from __future__ import annotations

from typing import Any

import pytest

from automation.exit_codes import Exit
from automation.markdown import markdown
from automation.reports import ChangeReport, ErrorText, FindingReport, RunReport


def report(**more: Any) -> RunReport:
    values: dict[str, Any] = {"result": "succeeded", "seconds": 1.0, "changes": [], "totals": {}, "findings": []}
    return RunReport(command="preview", stack="spark", exit_code=Exit.DONE, **(values | more))


def change(name: str, *properties: str, restarts: bool = False) -> ChangeReport:
    action = "replace" if restarts else "update"
    return ChangeReport(name=name, type="t", action=action, properties=list(properties), restarts=restarts)


def test_no_change_is_one_line() -> None:
    assert markdown(report()) == "### Preview of `spark`: no changes\n"


def test_changes_restarts_and_the_time_without_serving() -> None:
    told = markdown(
        report(
            changes=[change("host", "sysctls"), change("main-spark-a", "command", restarts=True)],
            restarts=["main-spark-a"],
            downtime_s=432.0,
        )
    )
    assert told.startswith("### Preview of `spark`: 2 changes\n")
    assert "**Serving restarts** (`main-spark-a`). Expected time without serving: about 7 min" in told
    assert "| update | `host` | `sysctls` |  |" in told
    assert "| replace | `main-spark-a` | `command` | yes |" in told
    unmeasured = markdown(report(changes=[change("r", restarts=True)], restarts=["r"]))
    assert "Expected time without serving: not measured yet." in unmeasured
    assert "Nothing that serves restarts." in markdown(report(changes=[change("host")]))


def test_findings_are_in_the_order_of_their_weight_with_what_to_do() -> None:
    found = [
        FindingReport(severity="warn", code="clock", text="spark-b: the clock is 3 s ahead [clock]\n  do: set it"),
        FindingReport(severity="fail", code="port-held", text="spark-a: port 30000 is held [port-held]"),
        FindingReport(severity="unknown", code="memory-fit", text="spark-a: not yet [memory-fit]"),
    ]
    told = markdown(report(findings=found))
    places = [
        told.index(words) for words in ("**Would fail**", "port 30000", "**Warnings**", "do: set it", "**Not yet")
    ]
    assert places == sorted(places)


@pytest.mark.parametrize("result", ["failed", "interrupted", "out of time"])
def test_a_preview_that_failed_says_why_first(result: str) -> None:
    error = ErrorText(what="expected sshd, found none", do="look at spark-b", evidence=["Connection refused"])
    told = markdown(report(result=result, error=error))
    assert told.startswith(
        f"### Preview of `spark`: {result}\n\n```\n"
        "expected sshd, found none\ndo: look at spark-b\nConnection refused\n```\n"
    )
    assert "Nothing that serves" not in told


def test_what_nodes_say_becomes_no_markup() -> None:
    hostile = "```\n@everyone <img src=x> [a](b) `x` | y"
    error = ErrorText(what=hostile.splitlines()[0], evidence=hostile.splitlines())
    told = markdown(report(result="failed", error=error, findings=[FindingReport(severity="warn", text=hostile)]))
    assert told.count("```") == 2
    line = next(line for line in told.splitlines() if "everyone" in line and line.startswith("  "))
    assert "\\@everyone \\<img src=x\\>" in line and "\\`x\\` \\| y" in line
