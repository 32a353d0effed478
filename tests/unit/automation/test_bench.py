"""``bench``: what it keeps, what it compares with, and that a fall is told by its exit status."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from automation import __main__ as cli
from automation import bench
from automation.bench_report import BenchReport
from automation.exit_codes import CommandEnd, Exit
from automation.good_settings import good_settings
from automation.progress import Progress
from automation.schemas import schema_of
from automation.stopping import Stopper
from spark_core.errors import CommandError, SparkError
from spark_core.settings import read_settings
from spark_core.settings.record import digest_of, record_of, record_text
from spark_core.speed import Load, Speed, speed_of
from tests.unit.automation.seen_deployment import IMAGE, REVISION, SPEED, SeenDeployment


class Here:
    """What a session is to the command, without an engine."""

    def __init__(self, seen: SeenDeployment) -> None:
        self.stack, self.file = "spark", seen.file
        self.progress = Progress(io.StringIO(), live=False)
        self.stopper = Stopper(None, lambda _text: None)

    def require_free(self) -> None:
        """Nobody else holds it."""


class Benched:
    """A deployment, its state as it is written back, and the figures that a benchmark would give."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen = SeenDeployment(monkeypatch)
        self.rate, self.first = 26.0, 420.0
        self.measured: list[Load] = []
        self.removed = 0
        self.fault: Exception | None = None
        self.state = copy.deepcopy(self.seen._engine("stack", "export"))
        self.imports: list[Any] = []
        monkeypatch.setattr(bench, "session", self.session)
        monkeypatch.setattr(bench, "open_nodes", lambda _file: self.seen.nodes())
        monkeypatch.setattr(bench, "pulumi_json", lambda *_: copy.deepcopy(self.state))
        monkeypatch.setattr(bench, "pulumi", self.imported)
        monkeypatch.setattr(bench, "measure", self.measure)
        monkeypatch.setattr(bench, "remove_benchmark", self.remove)

    @contextlib.contextmanager
    def session(self, _options: object) -> Iterator[Here]:
        yield Here(self.seen)

    def imported(self, *words: str) -> str:
        assert words[:2] == ("stack", "import")
        path = Path(words[words.index("--file") + 1])
        assert path.stat().st_mode & 0o777 == 0o600
        self.state = json.loads(path.read_text())
        self.imports.append(self.state)
        return ""

    def measure(self, *given: Any, now: float, timeout_s: float) -> Speed:
        load: Load = given[4]
        self.measured.append(load)
        if self.fault is not None:
            raise self.fault
        rate = self.rate * (1 if load.concurrency == 1 else 5)
        shape = (load.concurrency, load.prompts, load.input_tokens, load.output_tokens)
        return Speed(*shape, rate, self.first, self.first * 2, 36.0, now)

    def remove(self, *_: object) -> None:
        self.removed += 1

    @property
    def good(self) -> dict[str, Any]:
        """Outputs of the settings that served, in the state."""
        resources = self.state["deployment"]["resources"]
        found: dict[str, Any] = next(r["outputs"] for r in resources if str(r["type"]).endswith("GoodSettings"))
        return found

    def change_settings(self, **serving: Any) -> None:
        """Other settings serve now; the earlier ones move down."""
        before = {key: self.good[key] for key in ("settings", "image_id", "revision", "at", "speed")}
        self.seen.raw["groups"]["main"]["serving"] |= serving
        record = record_of(read_settings(self.seen.raw))
        self.good.pop("speed", None)
        self.good.update(settings=record_text(record), before=[before])

    def run(self, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
        """Exit status and report, which fits its schema."""
        code = cli.main(["bench", "--stack", "spark", "--json", *words])
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert list(Draft202012Validator(schema_of("bench")).iter_errors(report)) == []
        assert report["exit_code"] == code
        return code, report


@pytest.fixture
def benched(monkeypatch: pytest.MonkeyPatch) -> Benched:
    return Benched(monkeypatch)


def test_the_first_figures_are_kept_with_the_settings_and_nothing_is_compared(
    benched: Benched, capsys: pytest.CaptureFixture[str]
) -> None:
    benched.good.pop("speed")
    code, report = benched.run(capsys)
    assert code == Exit.DONE
    assert (report["comparisons"], report["kept"]) == ([], True)
    assert [(load.concurrency, load.prompts) for load in benched.measured] == [(1, 8), (8, 32)]
    [kept] = good_settings(benched.state)
    assert [(one["concurrency"], one["output_tokens_per_s"], one["image"]) for one in kept.speed] == [
        (1, 26.0, IMAGE),
        (8, 130.0, IMAGE),
    ]
    assert report["settings"] == kept.digest == digest_of(record_of(read_settings(benched.seen.raw)))


def test_a_fall_after_a_change_is_2_names_what_changed_and_stays_told(
    benched: Benched, capsys: pytest.CaptureFixture[str]
) -> None:
    benched.good["speed"] = []
    benched.run(capsys)
    benched.change_settings(max_num_seqs=2)
    benched.rate = 22.0
    for _ in range(2):  # a second look does not make the slower figures the measure
        code, report = benched.run(capsys)
        assert code == Exit.DRIFT
        first = report["comparisons"][0]
        assert first["changed"] == ["groups.main.serving.max_num_seqs"]
        assert [(one["figure"], one["fell"]) for one in first["figures"] if one["concurrency"] == 1] == [
            ("output tokens/s", True),
            ("median ms to first token", False),
        ]
    assert report["comparisons"][1]["changed"] == []
    told = bench.told(BenchReport.model_validate(report))
    assert "1 at a time: output tokens/s 26 -> 22, 15.4% WORSE" in told
    assert "changed since: groups.main.serving.max_num_seqs" in told


def test_another_image_under_the_same_settings_is_named_as_what_changed(
    benched: Benched, capsys: pytest.CaptureFixture[str]
) -> None:
    benched.good["speed"] = []
    benched.run(capsys)
    benched.good["image_id"] = "sha256:other"
    benched.first = 500.0
    code, report = benched.run(capsys)
    assert code == Exit.DRIFT
    assert [one["changed"] for one in report["comparisons"]] == [["(image)"]]


def test_figures_of_other_loads_stay_and_the_same_ones_are_replaced(
    benched: Benched, capsys: pytest.CaptureFixture[str]
) -> None:
    benched.good["speed"] = SPEED
    code, report = benched.run(capsys, "--concurrency", "4", "--concurrency", "4")
    assert (code, report["comparisons"]) == (Exit.DONE, [])
    assert [one["concurrency"] for one in benched.good["speed"]] == [1, 8, 4]
    benched.run(capsys, "--concurrency", "4")
    assert [one["concurrency"] for one in benched.good["speed"]] == [1, 8, 4]


def test_nothing_but_the_figures_changes_in_the_state(benched: Benched, capsys: pytest.CaptureFixture[str]) -> None:
    before = copy.deepcopy(benched.state)
    benched.run(capsys, "--no-keep")
    assert benched.imports == []
    benched.run(capsys)
    for state in (before, benched.state):
        for resource in state["deployment"]["resources"]:
            resource["outputs"].pop("speed", None)
    assert benched.state == before


@pytest.mark.parametrize(
    ("phase", "said"), [("loading", "expected a group that serves, found spark-a: loading"), ("stopped", "stopped")]
)
def test_a_group_that_does_not_serve_is_not_measured(
    benched: Benched, capsys: pytest.CaptureFixture[str], phase: str, said: str
) -> None:
    benched.seen.status["spark-a"]["phase"] = phase
    assert cli.main(["bench", "--stack", "spark"]) == Exit.FAILED
    assert said in capsys.readouterr().err
    assert benched.measured == []


def test_settings_that_have_not_served_are_not_measured(benched: Benched, capsys: pytest.CaptureFixture[str]) -> None:
    benched.seen.raw["groups"]["main"]["serving"]["max_num_seqs"] = 9
    assert cli.main(["bench", "--stack", "spark"]) == Exit.FAILED
    told = capsys.readouterr().err
    assert "which differ in groups.main.serving.max_num_seqs" in told
    assert "run `up` first" in told
    assert benched.measured == []


@pytest.mark.parametrize(
    ("fault", "code"),
    [(CommandError("expected X, found Y"), Exit.FAILED), (CommandEnd(Exit.INTERRUPTED, "interrupted"), 130)],
)
def test_a_benchmark_that_fails_or_is_interrupted_leaves_no_container_and_keeps_nothing(
    benched: Benched, capsys: pytest.CaptureFixture[str], fault: Exception, code: int
) -> None:
    benched.fault = fault
    assert cli.main(["bench", "--stack", "spark"]) == code
    assert (benched.removed, benched.imports) == (1, [])
    assert "Traceback" not in capsys.readouterr().err


def test_figures_are_not_kept_with_settings_that_meanwhile_are_others(benched: Benched) -> None:
    speeds = [Speed(1, 8, 512, 128, 1.0, 1.0, 1.0, 1.0, 1.0)]
    with pytest.raises(SparkError, match="expected the settings 0123456789ab to serve still"):
        bench.with_speed(benched.state, "0123456789ab", speeds)
    with pytest.raises(SparkError, match="found none"):
        bench.with_speed({"deployment": {"resources": []}}, "0123456789ab", speeds)


def test_figures_in_another_form_are_left_out_of_the_comparison(benched: Benched) -> None:
    benched.good["speed"] = [{"energy": 3}, *SPEED]
    kept = good_settings(benched.state)
    before = speed_of(SPEED[0])
    assert before is not None
    speeds = [replace(before, output_tokens_per_s=10.0)]
    [one] = bench.compared(kept, speeds)
    assert [figure.fell for figure in one.figures] == [True, False]
    assert kept[0].revision == REVISION


@pytest.mark.parametrize("words", [["--concurrency", "0"], ["--concurrency", "x"], ["--deadline", "soon"]])
def test_a_wrong_command_line_is_64(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "--stack", "spark", *words])
    assert end.value.code == Exit.USAGE
    assert "expected a" in capsys.readouterr().err
