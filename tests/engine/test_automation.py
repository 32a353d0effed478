"""The command line on the real engine, with a program that reaches no node: statuses, locks, interrupts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from automation.exit_codes import Exit
from automation.stopping import session_of
from tests.engine.conftest import PROJECT, EngineStack
from tests.engine.test_plan import preflight_off

TIMEOUT_S = 120


def schema(command: str) -> Any:
    """The published schema of a command."""
    return json.loads((PROJECT / "docs" / "schemas" / f"{command}.json").read_text())


class Parked:
    """The parking program with a stack of its own."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.stack = EngineStack(home, "spark")
        self.program = folder / "program"
        self.state = folder / "state"
        self.state.mkdir()
        shutil.copytree(PROJECT / "tests" / "engine" / "parking_program", self.program)
        (self.program / ".venv").symlink_to(PROJECT / ".venv")
        self.backend = folder / "backend"
        self.backend.mkdir()
        self.configure()
        self.stack.extra = {
            "PULUMI_BACKEND_URL": f"file://{self.backend}",
            "PARKING_FOLDER": str(self.state),
            "PYTHONPATH": str(PROJECT),
        }
        made = self.stack.run('python3 toolchain/stack.py "$@"', "spark")
        assert made.returncode == 0, made.stdout

    def configure(self, **values: Any) -> None:
        """Write the stack's file, with these settings of serving."""
        self.stack.configure(serving(**values), "Pulumi.spark.yaml")

    def begin(self, command: str, *words: str) -> subprocess.Popen[str]:
        """Start a command and go on."""
        line = f'cd {PROJECT} && . ./env && exec python -m tests.engine.run_automation {self.program} "$@"'
        return subprocess.Popen(
            ["sh", "-c", line, "sh", command, "--stack", "spark", *words],
            env=self.stack.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, command: str, *words: str) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        with self.begin(command, *words) as process:
            out, err = process.communicate(timeout=TIMEOUT_S)
            return process.returncode, out, err

    def report(self, command: str, *words: str) -> Any:
        """The report of a command with ``--json``, which is all of standard output and fits its schema."""
        code, out, err = self.run(command, "--json", *words)
        value = json.loads(out)
        jsonschema.validate(value, schema(command))
        assert value["exit_code"] == code, (value, err)
        return value

    def wait_for(self, name: str) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not (self.state / name).exists():
            assert time.monotonic() < end, f"{name} was never made"
            time.sleep(0.05)

    @property
    def locks(self) -> list[Path]:
        return list(self.backend.glob(".pulumi/locks/organization/*/*/*.json"))


@pytest.fixture
def parked(engine_home: Path, tmp_path: Path) -> Iterator[Parked]:
    yield Parked(engine_home, tmp_path)


def serving(**values: Any) -> Callable[[dict[str, Any]], None]:
    """Settings without a look at nodes, and with these of serving."""

    def change(config: dict[str, Any]) -> None:
        preflight_off(config)
        config["spark-vllm:groups"]["main"]["serving"] |= values

    return change


def test_a_run_is_reported_as_its_schema_says_and_a_second_one_changes_nothing(parked: Parked) -> None:
    planned = parked.report("preview")
    assert planned["exit_code"] == Exit.DONE, planned
    assert (planned["exit_code"], [c["name"] for c in planned["changes"]]) == (
        Exit.DONE,
        ["step", "rank", "good-settings"],
    )
    assert not (parked.state / "made-step").exists()
    first = parked.report("up")
    assert (first["result"], first["totals"]["create"], first["restarts"]) == ("succeeded", 5, [])
    assert (parked.state / "made-rank").read_text() == "32768"
    assert parked.report("up")["changes"] == []
    assert parked.report("refresh")["result"] == "succeeded"
    done = parked.report("history")
    assert [(u["kind"], u["result"]) for u in done["updates"]][::-1][:2] == [("update", "succeeded")] * 2
    assert parked.report("destroy", "--yes")["totals"]["delete"] == 5
    assert not (parked.state / "made-step").exists()


def test_drift_is_2_none_is_0_and_what_cannot_be_told_is_1(parked: Parked) -> None:
    assert parked.report("up")["exit_code"] == Exit.DONE
    assert parked.report("drift")["exit_code"] == Exit.DONE
    (parked.state / "made-step").write_text("changed by hand")
    found = parked.report("drift")
    assert (found["exit_code"], found["changes"][0]["name"]) == (Exit.DRIFT, "step")
    (parked.program / "__main__.py").write_text("raise SystemExit('no program')\n")
    assert parked.report("drift")["exit_code"] == Exit.FAILED


def test_a_failure_is_1_and_its_first_error_comes_without_a_trace(parked: Parked) -> None:
    (parked.state / "fail").touch()
    failed = parked.report("up")
    assert (failed["exit_code"], failed["result"], failed["failed"]) == (Exit.FAILED, "failed", ["step"])
    assert "expected to be made, found that it cannot be" in json.dumps(failed["error"])
    assert parked.locks == []
    assert parked.report("history")["updates"][0]["result"] == "failed"
    (parked.state / "fail").unlink()
    assert parked.report("up")["exit_code"] == Exit.DONE


def test_ctrl_c_once_parks_the_step_in_hand_within_5_s_and_the_next_run_goes_on(parked: Parked) -> None:
    (parked.state / "seconds").write_text("60")
    run = parked.begin("up", "--json")
    parked.wait_for("begun")
    start = time.monotonic()
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=TIMEOUT_S)
    assert time.monotonic() - start < 5, err
    assert run.returncode == Exit.INTERRUPTED
    assert "interrupted: finishing or parking the step in hand" in err
    assert json.loads(out)["result"] == "interrupted"
    assert parked.locks == []
    (parked.state / "seconds").unlink()
    assert parked.report("up")["exit_code"] == Exit.DONE


@pytest.mark.parametrize("command", ["preview", "up"])
def test_ctrl_c_once_while_the_program_still_looks_at_nodes_ends_within_5_s(parked: Parked, command: str) -> None:
    (parked.state / "look").write_text("60")
    run = parked.begin(command, "--json")
    parked.wait_for("looking")
    start = time.monotonic()
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=TIMEOUT_S)
    assert time.monotonic() - start < 5, err
    assert (run.returncode, json.loads(out)["result"]) == (Exit.INTERRUPTED, "interrupted")
    assert parked.locks == []
    (parked.state / "look").unlink()
    assert parked.report(command)["exit_code"] == Exit.DONE


def test_ctrl_c_twice_stops_at_once_and_the_next_run_recovers(parked: Parked) -> None:
    (parked.state / "seconds").write_text("60")
    (parked.state / "deaf").touch()
    run = parked.begin("up")
    parked.wait_for("begun")
    start = time.monotonic()
    run.send_signal(signal.SIGINT)
    time.sleep(1)
    assert run.poll() is None  # the step does not listen, so a first one waits for it
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=TIMEOUT_S)
    assert time.monotonic() - start < 8
    assert run.returncode == Exit.INTERRUPTED
    (parked.state / "seconds").unlink()
    again = parked.report("up", "--clear-stale-lock")
    assert again["exit_code"] == Exit.DONE, again
    assert parked.report("up")["changes"] == []


def test_a_deadline_that_passes_is_7(parked: Parked) -> None:
    (parked.state / "seconds").write_text("60")
    late = parked.report("up", "--deadline", "8s")
    assert (late["exit_code"], late["result"]) == (Exit.OUT_OF_TIME, "out of time")
    assert parked.locks == []


def test_the_second_of_two_runs_says_who_holds_the_stack_and_since_when(parked: Parked) -> None:
    (parked.state / "seconds").write_text("30")
    first = parked.begin("up")
    parked.wait_for("begun")
    [lock] = parked.locks
    holder = json.loads(lock.read_text())
    second = parked.report("up", "--clear-stale-lock")  # a live one is never cleared
    assert second["exit_code"] == Exit.LOCKED
    assert f"process {holder['pid']}, since {holder['timestamp'][:10]} {holder['timestamp'][11:19]} UTC" in json.dumps(
        second["error"]
    )
    assert parked.locks == [lock]
    (parked.state / "seconds").write_text("0")
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=TIMEOUT_S)


def test_a_lock_of_a_dead_run_is_named_and_cleared_only_when_asked_for(parked: Parked) -> None:
    assert parked.report("up")["exit_code"] == Exit.DONE
    dead = subprocess.Popen(["true"])
    dead.wait()
    folder = parked.backend / ".pulumi" / "locks" / "organization" / "spark-vllm" / "spark"
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "11111111-2222-3333-4444-555555555555.json"
    content = {
        "pid": dead.pid,
        "username": "ci",
        "hostname": os.uname().nodename,
        "timestamp": "2026-01-02T03:04:05.6Z",
    }
    lock.write_text(json.dumps(content))
    refused = parked.report("up")
    assert refused["exit_code"] == Exit.LOCKED
    assert f"ci@{os.uname().nodename}, process {dead.pid}, since 2026-01-02 03:04:05 UTC" in refused["error"]["what"]
    assert "--clear-stale-lock" in refused["error"]["do"]
    assert lock.exists()
    assert parked.report("up", "--clear-stale-lock")["exit_code"] == Exit.DONE
    lock.write_text(json.dumps(content | {"hostname": "another-machine"}))
    elsewhere = parked.report("destroy", "--yes", "--clear-stale-lock")
    assert elsewhere["exit_code"] == Exit.LOCKED and "another-machine" in elsewhere["error"]["do"]
    assert lock.exists()


def providers_below(engine: int) -> list[int]:
    """The processes of our providers that an engine has started."""
    found = []
    for pid in session_of(engine):
        with contextlib.suppress(OSError):
            if b"pulumi.dynamic" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.parametrize("victim", ["command", "engine", "provider"])
def test_a_run_whose_process_is_killed_is_picked_up_by_the_next(parked: Parked, victim: str) -> None:
    (parked.state / "seconds").write_text("60")
    run = parked.begin("up")
    parked.wait_for("begun")
    [lock] = parked.locks
    engine = json.loads(lock.read_text())["pid"]
    plugins = providers_below(engine)
    assert plugins
    os.kill({"command": run.pid, "engine": engine, "provider": plugins[0]}[victim], signal.SIGKILL)
    run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == (-signal.SIGKILL if victim == "command" else Exit.FAILED)
    end = time.monotonic() + 10
    while providers_below(engine):
        assert time.monotonic() < end, "the provider of the killed run stays"
        time.sleep(0.1)
    (parked.state / "seconds").unlink()
    again = parked.report("up", "--clear-stale-lock", "--wait-lock", "30s")
    assert again["exit_code"] == Exit.DONE, again
    assert parked.report("up")["changes"] == []
    assert parked.report("destroy", "--yes")["exit_code"] == Exit.DONE


def test_a_wrong_command_line_is_64(parked: Parked) -> None:
    assert parked.run("drift", "--stak", "x")[0] == Exit.USAGE
    assert parked.run("up", "--deadline", "soon")[0] == Exit.USAGE


def test_destroying_needs_a_word(parked: Parked) -> None:
    refused = parked.report("destroy")
    assert (refused["exit_code"], refused["error"]["do"]) == (Exit.REFUSED, "give --yes")


def test_off_a_terminal_progress_is_plain_lines_beside_the_result(parked: Parked) -> None:
    code, out, err = parked.run("up")
    assert code == Exit.DONE
    assert "step: create\n" in err and "step: create done in" in err
    assert "\x1b" not in err + out and "\r" not in err + out
    assert out.splitlines()[-1].startswith("up of spark succeeded in")


def test_stacks_are_made_selected_and_listed_and_the_committed_file_stays(parked: Parked) -> None:
    assert parked.run("up")[0] == Exit.DONE
    before = (PROJECT / "Pulumi.spark.yaml").read_text()

    def stacks(*words: str) -> Any:
        done = parked.stack.run(
            f'exec python -m tests.engine.run_automation {parked.program} stacks --json "$@" 2>/dev/null', *words
        )
        assert done.returncode == 0, done.stdout
        value = json.loads(done.stdout)
        jsonschema.validate(value, schema("stacks"))
        return {entry["name"]: entry["current"] for entry in value["stacks"]}

    assert set(stacks("--create", "another")) == {"spark", "another"}
    assert stacks("--select", "spark")["spark"] is True
    done = parked.stack.run(f"exec python -m tests.engine.run_automation {parked.program} history --json 2>/dev/null")
    assert json.loads(done.stdout)["stack"] == "spark"
    assert (PROJECT / "Pulumi.spark.yaml").read_text() == before


# Settings that fail, and settings that serve.


def test_settings_that_fail_are_rolled_back_and_refused_until_asked_for(parked: Parked) -> None:
    parked.configure(max_model_len=1000)
    assert parked.report("up")["exit_code"] == Exit.DONE
    parked.configure(max_model_len=13)
    back = parked.report("up", "--rollback-on-failure")
    assert (back["exit_code"], back["failed"]) == (Exit.ROLLED_BACK, ["rank"])
    assert (parked.state / "made-rank").read_text() == "1000"
    newest = parked.report("history")["updates"][0]
    assert f"to {back['rolled_back_to']}: expected to be made, found that it cannot be" in newest["message"]
    refused = parked.report("up", "--rollback-on-failure")
    assert refused["exit_code"] == Exit.REFUSED and "--retry-failed" in refused["error"]["do"]
    assert (parked.state / "made-rank").read_text() == "1000"
    again = parked.report("up", "--retry-failed")
    assert again["exit_code"] == Exit.FAILED and not (parked.state / "made-rank").exists()
    parked.configure(max_model_len=2000)
    assert parked.report("up")["exit_code"] == Exit.DONE


def test_rollback_by_hand_goes_to_the_newest_others_that_served_and_leaves_the_file(parked: Parked) -> None:
    none = parked.report("rollback")
    assert none["exit_code"] == Exit.FAILED and "found none" in none["error"]["what"]
    for length in (1000, 2000):
        parked.configure(max_model_len=length)
        assert parked.report("up")["exit_code"] == Exit.DONE
    file = parked.stack.home / "Pulumi.spark.yaml"
    before = file.read_text()
    back = parked.report("rollback")
    assert back["exit_code"] == Exit.DONE and back["rolled_back_to"]
    assert (parked.state / "made-rank").read_text() == "1000"
    assert file.read_text() == before
    assert parked.report("up")["exit_code"] == Exit.REFUSED
    assert parked.report("up", "--retry-failed")["exit_code"] == Exit.DONE
    assert parked.report("up")["changes"] == []
    assert (parked.state / "made-rank").read_text() == "2000"


def test_what_would_restart_is_left_out_and_said_with_3(parked: Parked) -> None:
    parked.configure(max_model_len=1000, max_num_seqs=1)
    assert parked.report("up")["exit_code"] == Exit.DONE
    parked.configure(max_model_len=1000, max_num_seqs=2)
    assert parked.report("up", "--no-restart")["exit_code"] == Exit.DONE
    parked.configure(max_model_len=2000, max_num_seqs=3)
    part = parked.report("up", "--no-restart")
    assert (part["exit_code"], part["not_applied"]) == (Exit.MORE_NEEDED, ["rank", "good-settings"])
    assert (parked.state / "made-step").read_text() == "3"
    assert (parked.state / "made-rank").read_text() == "1000"
    assert parked.report("up")["restarts"] == ["rank"]
    assert (parked.state / "made-rank").read_text() == "2000"


def test_a_preview_is_a_summary_for_a_pull_request(parked: Parked) -> None:
    parked.configure(max_model_len=1000)
    assert parked.report("up")["exit_code"] == Exit.DONE
    parked.configure(max_model_len=2000)
    code, out, _ = parked.run("preview", "--markdown")
    assert code == Exit.DONE
    assert out.startswith("### Preview of `spark`: 2 changes\n")
    assert "**Serving restarts** (`rank`). Expected time without serving: about" in out
    assert "| replace | `rank` | `mark` | yes |" in out


def test_no_change_of_the_file_or_of_secrets_is_kept_with_the_settings(parked: Parked) -> None:
    assert parked.report("up")["exit_code"] == Exit.DONE
    text = parked.stack.pulumi("stack", "export", "-s", "spark", extra=parked.stack.extra).stdout
    state = json.loads(text[text.index("{") :])
    [kept] = [r for r in state["deployment"]["resources"] if r["type"].endswith("spark:GoodSettings")]
    record = json.loads(kept["outputs"]["settings"])
    assert set(record) == {"groups", "image", "nodes"}
