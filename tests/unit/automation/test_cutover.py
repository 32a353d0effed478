"""``cutover``: what comes before the stop, the one question, what is stopped, and the way back where it fails."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from automation import cutover
from automation.__main__ import main
from automation.exit_codes import CommandEnd, Exit
from automation.group_nodes import GroupNodes
from automation.reports import ErrorText, RunReport
from automation.schemas import schema_of
from automation.stack_file import StackFile, open_stack_file
from providers.connections import Run
from spark_core.errors import SparkError, UnreachableError
from spark_core.transport.base import Transport
from tests.config_cases import load_base
from tests.fake_host import FakeHost
from tests.unit.first_day.owners_things import eugr_checkout, run_launcher

NODES = ("spark-a", "spark-b")


@dataclass
class Result:
    outcome: RunReport

    def report(self, command: str, stack: str) -> RunReport:
        return self.outcome


@dataclass
class Here:
    """Stands for a session: the engine is the test's."""

    file: StackFile
    told: list[str]
    stack: str = "t"
    runs: list[str] = field(default_factory=list)
    error: str = ""

    stopped: bool = False

    @property
    def progress(self) -> Here:
        return self

    @property
    def stopper(self) -> Here:
        return self

    def check(self) -> None:
        if self.stopped:
            raise CommandEnd(Exit.INTERRUPTED, "interrupted")

    def say(self, text: str) -> None:
        self.told.append(text)

    def require_free(self) -> None:
        self.told.append("free")

    def run(self, kind: str, **more: Any) -> Result:
        self.runs.append(kind)
        failed = {"result": "failed", "exit_code": Exit.FAILED, "error": ErrorText(what=self.error)}
        good = {"result": "succeeded", "exit_code": Exit.DONE}
        values = {"command": "up", "stack": "t", "seconds": 1.0, "changes": [], "totals": {}, "findings": []}
        return Result(RunReport(**{**values, **(failed if self.error else good)}))


@dataclass
class Site:
    """Two hosts on which another launcher's cluster runs."""

    hosts: dict[str, FakeHost]
    here: Here
    events: list[str]

    def running(self) -> list[str]:
        return [
            f"{node}: {name}"
            for node, host in self.hosts.items()
            for name, found in host.read()["containers"].items()
            if found["Running"]
        ]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    eugr_checkout(tmp_path / "home")
    hosts = {name: FakeHost(tmp_path / name, name) for name in NODES}
    for host in hosts.values():
        run_launcher(host)
        host.set_container("unrelated")
    path = tmp_path / "Pulumi.t.yaml"
    monkeypatch.setenv("PULUMI_OPTION_CONFIG_FILE", str(path))
    write(path)
    events: list[str] = []
    here = Here(open_stack_file("t"), events)

    def transport(self: Run, name: str, remembered: Any = None) -> Transport:
        return hosts[name].node

    @contextlib.contextmanager
    def session(options: Any) -> Iterator[Here]:
        here.file = open_stack_file("t")
        yield here

    def bring(file: StackFile, check: Callable[[], None]) -> None:
        check()
        events.append("brought")

    monkeypatch.setattr(Run, "transport", transport)
    monkeypatch.setattr(cutover, "session", session)
    monkeypatch.setattr(cutover, "bring_all", bring)
    yield Site(hosts, here, events)


def write(path: Path, replaces: tuple[str, ...] = ("vllm_node",)) -> None:
    raw = load_base() | {"replaces": list(replaces), "node_root": f"{path.parent}/root"}
    path.write_text(yaml.safe_dump({"config": {f"spark-vllm:{key}": value for key, value in raw.items()}}))


def answer(monkeypatch: pytest.MonkeyPatch, said: bool) -> list[str]:
    asked: list[str] = []

    def ask(question: str) -> bool:
        asked.append(question)
        return said

    monkeypatch.setattr(cutover, "ask", ask)
    return asked


def test_everything_is_brought_then_one_yes_stops_by_name_and_the_stack_comes_up(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = answer(monkeypatch, True)
    before = {node: host.read() for node, host in site.hosts.items()}
    assert main(["cutover", "--stack", "t"]) == Exit.DONE
    assert len(asked) == 1
    assert site.events[0] == "free"
    assert site.events[2:3] == ["brought"]
    assert site.events[3].startswith(
        "everything is brought; to be stopped now:\nspark-a: vllm_node\nspark-b: vllm_node"
    )
    assert site.events[4:] == ["spark-a: vllm_node is stopped", "spark-b: vllm_node is stopped"]
    assert site.here.runs == ["up"]
    assert site.running() == ["spark-a: unrelated", "spark-b: unrelated"]
    for node, host in site.hosts.items():
        after = host.read()
        assert after["images"] == before[node]["images"]
        assert set(after["containers"]) == set(before[node]["containers"])
        verbs = {call[0] for call in host.calls("docker")}
        assert verbs <= {"ps", "inspect", "top", "image", "stop"}
    assert "to go back to the old cluster:" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_without_a_yes_nothing_is_stopped(
    words: list[str], site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, False)
    assert main(["cutover", "--stack", "t", *words]) == Exit.REFUSED
    assert site.here.runs == []
    assert len(site.running()) == 4
    assert "brought" in site.events
    assert "nothing was stopped: it was not agreed to" in capsys.readouterr().err


def test_where_up_fails_the_way_back_is_printed(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.here.error = "no completion came back"
    assert main(["cutover", "--stack", "t", "--yes", "--json"]) == Exit.FAILED
    report = json.loads(capsys.readouterr().out)
    jsonschema.validate(report, schema_of("cutover"))
    assert report["stopped"] == {"spark-a": ["vllm_node"], "spark-b": ["vllm_node"]}
    assert report["run"]["error"]["what"] == "no completion came back"
    back = [
        "python -m automation stop --stack t",
        "ssh aurora@10.1.230.181 'docker start vllm_node'",
        "ssh aurora@10.1.230.180 'docker start vllm_node'",
    ]
    assert report["way_back"] == back
    assert "\n".join(["the old cluster comes back with:", *(f"  {line}" for line in back)]) in site.events


def test_run_again_after_an_end_half_way_it_stops_nothing_and_still_knows_the_way_back(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.here.error = "interrupted"
    assert main(["cutover", "--stack", "t", "--yes"]) == Exit.FAILED
    site.here.error = ""
    capsys.readouterr()
    assert main(["cutover", "--stack", "t", "--yes", "--json"]) == Exit.DONE
    report = json.loads(capsys.readouterr().out)
    assert report["stopped"] == {}
    assert report["way_back"][1] == "ssh aurora@10.1.230.181 'docker start vllm_node'"
    assert "nothing that `replaces` names runs any more" in site.events


def test_a_group_that_an_earlier_way_back_stopped_is_wanted_again(site: Site) -> None:
    wish = site.here.file.path.parent / "root/stacks/t/state/main/desired"
    wish.parent.mkdir(parents=True)
    wish.write_text("stopped\n")
    assert main(["cutover", "--stack", "t"]) == Exit.REFUSED
    assert wish.exists()
    assert main(["cutover", "--stack", "t", "--yes"]) == Exit.DONE
    assert not wish.exists()


def test_a_container_that_goes_on_ends_it_before_up(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    run_launcher(site.hosts["spark-b"], Deaf=True)
    assert main(["cutover", "--stack", "t", "--yes"]) == Exit.FAILED
    said = capsys.readouterr().err
    assert "spark-b: expected the container vllm_node to stop, found it running" in said
    assert "seen: ssh aurora@10.1.230.180 'docker start vllm_node'" in said
    assert site.here.runs == []


def test_what_is_found_while_it_is_brought_ends_it_before_anything_stops(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: StackFile, check: Callable[[], None]) -> None:
        raise SparkError("expected containers of no other launcher")

    monkeypatch.setattr(cutover, "bring_all", fails)
    assert main(["cutover", "--stack", "t", "--yes"]) == Exit.FAILED
    assert len(site.running()) == 4


def test_ctrl_c_while_it_is_brought_ends_it_before_anything_stops(site: Site) -> None:
    site.here.stopped = True
    assert main(["cutover", "--stack", "t", "--yes"]) == Exit.INTERRUPTED
    assert len(site.running()) == 4
    assert (site.here.runs, "brought" in site.events) == ([], False)


def test_a_stack_that_replaces_nothing_is_told(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    write(site.here.file.path, ())
    assert main(["cutover", "--stack", "t", "--yes"]) == Exit.FAILED
    assert "(replaces): expected the names of the containers that this stack replaces, found none" in (
        capsys.readouterr().err
    )
    assert "brought" not in site.events


def test_a_node_that_does_not_answer_ends_it_before_anything(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(_: GroupNodes) -> None:
        raise UnreachableError("expected sshd, found none", node="spark-b", step="connect (TCP)")

    monkeypatch.setattr(cutover, "replaced_by", silent)
    assert main(["cutover", "--stack", "t", "--yes"]) == Exit.FAILED
    assert "brought" not in site.events
    assert len(site.running()) == 4
