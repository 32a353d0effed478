"""``report``: a deployment as it is, healthy and broken, on one page that asks nothing of any other place."""

from __future__ import annotations

import contextlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from automation import __main__ as cli
from automation import report as command
from automation.deployment_report import DeploymentReport, DriftPart
from automation.exit_codes import Exit
from automation.page import page
from automation.reports import FindingReport, RunReport
from automation.schemas import schema_of
from spark_core.errors import SparkError
from tests.unit.automation.seen_deployment import IMAGE, KEY, REVISION, SeenDeployment, clean, drifted

ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "main", "section", "h1", "h2", "h3", "p", "div", "span"),
    *("small", "strong", "pre", "code", "dl", "dt", "dd", "ul", "li", "table", "thead", "tbody", "tr", "th", "td"),
    *("details", "summary", "svg", "desc", "g", "rect", "path", "circle", "text"),
}
HOSTILE = "</pre></style><script src=//evil.example/x.js></script><img src=x onerror=alert(1)>\"'&\x1b[31m\u202e"


class Reader(HTMLParser):
    """The elements and attributes of a page, and its text without the style sheet."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.text += data


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> SeenDeployment:
    return SeenDeployment(monkeypatch)


def read(report: DeploymentReport) -> Reader:
    return Reader(page(report))


def assert_closed(read: Reader) -> None:
    """Nothing but our own elements, no script, and nothing that would be asked of another place."""
    assert read.elements <= ELEMENTS
    assert read.open == []
    for name, value in read.attributes:
        assert name not in ("src", "href", "srcset", "action", "data", "xlink:href", "background"), (name, value)
        assert not name.startswith("on"), (name, value)
        assert not (name == "style" and "url" in value), value


def test_a_healthy_deployment_is_told_with_everything_that_serves_it(seen: SeenDeployment) -> None:
    report = seen.report(clean())
    assert (report.verdict, report.headline, report.unread) == ("serving", "main serves", [])
    assert (report.image, report.weights, report.state) == (IMAGE, REVISION, "serving")
    assert [(node.name, node.rank, node.phase) for node in report.nodes] == [
        ("spark-a", 0, "serving"),
        ("spark-b", 1, "ray_ready"),
    ]
    assert [subnet.network for subnet in report.subnets] == ["192.168.200.0/24", "192.168.201.0/24"]
    assert report.subnets[0].interfaces == {"spark-a": "enp1s0f1np1", "spark-b": "enp1s0f1np1"}
    assert report.measured[0].gbps == [196.21, 195.9]
    assert [one.concurrency for one in report.speed] == [1, 8]
    assert report.settings is not None
    assert report.settings.differs == []
    shown = read(report)
    assert_closed(shown)
    for text in ("Serving", "main serves", "192.168.200.0/24", "4f1d4f1d4f1d", "c0ffeec0ffee", "196.2 and 195.9 Gb/s"):
        assert text in shown.text
    assert ("data-verdict", "serving") in shown.attributes
    assert "expected" not in shown.text.partition("Drift")[0]


def test_where_the_time_of_the_last_up_went_is_told_by_step_and_by_phase(seen: SeenDeployment) -> None:
    last = seen.report(clean()).last_up
    assert last is not None
    assert last.seconds == 540
    took = {step.name: step.seconds for step in last.steps}
    assert took["main-gate"] == 415  # from the containers' end to its own
    assert took["image-copy"] == 50  # it waits for both links
    assert took["spark-a-journal"] == 7
    assert "spark-vllm-spark" not in took
    assert {phase.phase: phase.seconds for phase in last.phases} == {
        "waiting_for_ranks": 4,
        "ray_starting": 7,
        "loading": 391,
        "canary": 7,
    }


def test_a_broken_deployment_says_what_failed_first_and_what_to_do(seen: SeenDeployment) -> None:
    seen.break_head("torch.OutOfMemoryError: CUDA out of memory.", ["worker died", "CUDA out of memory."])
    report = seen.report(drifted())
    assert report.verdict == "broken"
    assert report.headline == "main is wanted running and is not as wanted: spark-a: failed"
    assert [(part.number, part.phase, part.error) for part in report.generations] == [
        (7, "loading", "torch.OutOfMemoryError: CUDA out of memory."),
        (6, "loading", "torch.OutOfMemoryError: CUDA out of memory."),
    ]
    assert report.last_up is not None
    assert report.last_up.update.result == "failed"
    shown = read(report)
    assert_closed(shown)
    top = shown.text.partition("Nodes and fabric")[0]
    assert "Not serving as wanted" in top
    assert "torch.OutOfMemoryError: CUDA out of memory." in top
    assert "What to do: lower gpu_memory_utilization" in top
    assert ("data-verdict", "broken") in shown.attributes
    assert "worker died" in shown.text


def test_drift_beside_a_group_that_serves_is_told_as_such(seen: SeenDeployment) -> None:
    report = seen.report(drifted())
    assert report.verdict == "drifted"
    text = read(report).text
    assert "Serving, with drift" in text
    assert "MTU of enp1s0f1np1 is 1500, expected 9000" in text


def test_a_group_that_is_stopped_on_request_is_no_fault(seen: SeenDeployment) -> None:
    monkey = seen.status["spark-a"]
    monkey["phase"], monkey["desired"] = "stopped", "stopped"
    seen.status["spark-b"]["phase"] = "waiting_for_ranks"
    seen.wanted = "stopped\n"
    report = seen.report(clean())
    assert (report.verdict, report.wanted) == ("stopped", "stopped")


def test_a_node_that_is_down_is_named_and_the_rest_is_told(seen: SeenDeployment) -> None:
    seen.silent.add("spark-b")
    report = seen.report()
    assert report.verdict == "unknown"
    assert "spark-b cannot be reached" in report.headline
    assert [(part.part, part.why) for part in report.unread] == [
        ("node spark-b", "spark-b, connect (TCP): expected sshd, found no answer in 10 s")
    ]
    assert [node.phase for node in report.nodes] == ["serving", "unreachable"]
    assert report.generations
    shown = read(report)
    assert_closed(shown)
    assert "Could not be read" in shown.text
    assert "Traceback" not in shown.text


def test_without_state_and_without_any_node_there_is_still_a_page(seen: SeenDeployment) -> None:
    seen.lost = True
    seen.silent = {"spark-a", "spark-b"}

    def no_drift() -> DriftPart:
        raise SparkError("expected pulumi on the PATH, found none")

    report = seen.report(look=no_drift)
    assert report.verdict == "unknown"
    assert {part.part for part in report.unread} == {
        *("outputs", "state", "history", "drift"),
        *("node spark-a", "node spark-b"),
    }
    assert (report.endpoint, report.model) == ("http://10.1.230.180:30000/v1", "qwen")
    assert_closed(read(report))


@pytest.mark.parametrize("damage", ["state", "status", "generations"])
def test_what_has_another_form_than_expected_is_named_and_nothing_else_is_lost(
    seen: SeenDeployment, damage: str
) -> None:
    if damage == "state":
        seen.resources_more = [{"type": "pulumi-python:dynamic/spark:FabricProof", "outputs": {"bandwidth": [7]}}]
    elif damage == "status":
        seen.status["spark-a"] |= {"first_error": "text", "versions": ["x"], "memory_available_bytes": "much"}
        seen.status["spark-a"] |= {"healing": 3, "since": "now", "generation": {"n": "seven"}}
    else:
        seen.kept["spark-a"] = '=== end 9\n{"first_error": [1], "healing": []}\n=== said 9\nno line\n=== said x\n'
    report = seen.report(clean())
    assert [node.name for node in report.nodes] == ["spark-a", "spark-b"]
    assert_closed(read(report))
    assert ("measured fabric" in [part.part for part in report.unread]) == (damage == "state")


def test_no_name_and_no_line_of_a_log_becomes_markup(seen: SeenDeployment) -> None:
    name = "<script>alert(1)</script>\"'&"
    seen.raw["groups"]["main"]["model"]["served_name"] = name
    seen.model = name
    seen.message = HOSTILE
    seen.break_head(HOSTILE, [HOSTILE])
    seen.journal = [HOSTILE]
    drift = DriftPart(
        result="failed",
        changes=[change.model_copy(update={"name": HOSTILE, "properties": [HOSTILE]}) for change in drifted().changes],
        findings=[FindingReport(severity="fail", text=HOSTILE)],
        error=HOSTILE,
    )
    seen.status["spark-b"]["detail"] = HOSTILE
    shown = read(seen.report(drift))
    assert_closed(shown)
    assert shown.text.count("<script src=//evil.example/x.js></script>") >= 6
    assert "\x1b" not in shown.text
    assert "\u202e" not in shown.text
    assert name in shown.text


def test_no_secret_is_on_the_page_whoever_said_it(seen: SeenDeployment) -> None:
    token = "hf_" + "AbCdEfGh" * 4
    seen.break_head(f"401 for Bearer {KEY}", [f"HF_TOKEN={token}", f"url http://user:{token}@hub.example/x"])
    report = seen.report(drifted())
    for text in (page(report), report.model_dump_json()):
        assert KEY not in text
        assert token not in text
        assert "[redacted]" in text


def test_the_json_is_what_its_schema_says(seen: SeenDeployment) -> None:
    for report in (seen.report(clean()), seen.report(drifted())):
        validator = Draft202012Validator(schema_of("report"))
        assert list(validator.iter_errors(json.loads(report.model_dump_json()))) == []


def test_four_nodes_and_one_without_a_rank_fit_into_the_picture(seen: SeenDeployment) -> None:
    for place, name in enumerate(("spark-c", "spark-d")):
        node = json.loads(json.dumps(seen.raw["nodes"][1]).replace("spark-b", name).replace(".13/", f".{20 + place}/"))
        seen.raw["nodes"].append(node | {"management_address": f"10.1.230.19{place}"})
    report = seen.report(clean())
    text = page(report)
    for view in re.findall(r'<svg viewBox="0 0 ([\d.]+) ([\d.]+)".*?</svg>', text, re.DOTALL):
        assert float(view[0]) > 300
    pictures = re.findall(r"<svg .*?</svg>", text, re.DOTALL)
    assert len(pictures) == 2
    for picture in pictures:
        width = float(re.findall(r'viewBox="0 0 ([\d.]+)', picture)[0])
        assert picture.count(">spark-") >= 4
        assert max(float(x) for x in re.findall(r' x="([\d.]+)"', picture)) <= width


def test_an_interrupted_look_ends_the_command_and_one_out_of_time_does_not(
    seen: SeenDeployment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = "interrupted"

    class Run:
        def report(self, *_: object) -> RunReport:
            nothing: dict[str, Any] = {"changes": [], "totals": {}, "findings": []}
            return RunReport(
                command="drift",
                stack="spark",
                exit_code=1,
                result=result,
                seconds=1,
                **nothing,
            )

    class Here:
        stack = "spark"

        def run(self, _kind: str) -> Run:
            return Run()

    monkeypatch.setattr(command, "session", lambda _options: contextlib.nullcontext(Here()))
    monkeypatch.setattr(command, "open_stack_file", lambda _stack: seen.file)
    monkeypatch.setattr(command, "open_nodes", lambda _file: seen.nodes())
    target = tmp_path / "seen.html"
    assert cli.main(["report", "--stack", "spark", "--output", str(target)]) == Exit.INTERRUPTED
    assert not target.exists()
    assert "Traceback" not in capsys.readouterr().err
    result = "out of time"
    assert cli.main(["report", "--stack", "spark", "--output", str(target), "--json"]) == Exit.DONE
    drift = json.loads(capsys.readouterr().out)["drift"]
    assert (drift["result"], drift["error"]) == ("out of time", "the look ended early: out of time")
    assert "every node is as the stack's file says" not in target.read_text()


def test_the_command_writes_a_page_for_its_owner_only_and_tells_where(
    seen: SeenDeployment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "open_stack_file", lambda _stack: seen.file)
    monkeypatch.setattr(command, "open_nodes", lambda _file: seen.nodes())
    target = tmp_path / "seen.html"
    code = cli.main(["report", "--stack", "spark", "--no-drift", "--output", str(target), "--json"])
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == told["exit_code"] == Exit.DONE
    assert target.read_text().startswith("<!doctype html>")
    assert target.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["seen.html"]
    refused = cli.main(["report", "--stack", "spark", "--no-drift", "--output", str(tmp_path / "none" / "seen.html")])
    assert refused == Exit.FAILED
    assert "expected to write the page, found: No such file or directory" in capsys.readouterr().err
