"""The CI jobs: the workflow is what it says, and its own lines run, as far as a machine without nodes can."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from automation.exit_codes import Exit
from tests.engine.conftest import PROJECT, EngineStack

WORKFLOW = PROJECT / ".github" / "workflows" / "spark-vllm.yml"
TIMEOUT_S = 240


def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return found


def line_of(job: str) -> str:
    """The line that a job runs."""
    [line] = [step["run"] for step in jobs()[job]["steps"] if "run" in step]
    return str(line)


def run(stack: EngineStack, line: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a line as the runner does, with the passphrase that the job has, or with none."""
    kept = {k: v for k, v in stack.environment.items() if not k.startswith("PULUMI_CONFIG_PASSPHRASE")}
    return subprocess.run(
        ["bash", "-e", "-c", line],
        cwd=PROJECT,
        env=kept | {"STACK": "spark", **extra},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_code_of_anybody_gets_no_secret_no_node_and_no_runner_of_ours() -> None:
    text = json.dumps(jobs()["offline"])
    assert "secrets." not in text and "environment" not in text
    assert jobs()["offline"]["runs-on"] == "ubuntu-latest"
    assert "ci/stack.sh offline" in line_of("offline")
    assert yaml.safe_load(WORKFLOW.read_text())["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in WORKFLOW.read_text()


@pytest.mark.parametrize("job", ["preview", "up", "drift"])
def test_what_reaches_nodes_needs_a_runner_of_one_s_own_and_an_environment_that_approves(job: str) -> None:
    found = jobs()[job]
    assert "self-hosted" in found["runs-on"] and found["environment"].startswith("spark")
    assert f"ci/stack.sh {job} " in line_of(job)
    if job == "preview":
        assert "github.event.pull_request.head.repo.full_name == github.repository" in found["if"]


def test_actions_are_pinned_and_every_job_ends() -> None:
    for name, job in jobs().items():
        assert job["timeout-minutes"] > 0, name
        for step in job["steps"]:
            assert "run" in step or re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"]), step
            assert "${{" not in step.get("run", ""), "a value pasted into a shell line"


def test_the_offline_job_s_own_line_plans_the_reference_without_passphrase_or_nodes(
    spark: EngineStack, tmp_path: Path
) -> None:
    def with_secrets(config: dict[str, Any]) -> None:
        config["spark-vllm:sudo_password"] = {"secure": "v1:bm90LWEta2V5:bm90LWEtc2VjcmV0"}
        config["spark-vllm:api_key"] = {"secure": "v1:bm90LWEta2V5:bm90LWEtc2VjcmV0"}
        config["spark-vllm:groups"]["main"]["serving"]["api_key"] = "own"

    spark.configure(with_secrets, "Pulumi.spark.yaml")
    summary = tmp_path / "summary.md"
    before = (PROJECT / "Pulumi.spark.yaml").read_text()
    done = run(spark, line_of("offline"), GITHUB_STEP_SUMMARY=str(summary))
    assert done.returncode == Exit.DONE, done.stderr[-3000:]
    text = summary.read_text()
    assert text.startswith("### Preview of `spark`: ")
    assert "| create | `main-spark-a` |" in text and "preflight is off" in text
    assert (PROJECT / "Pulumi.spark.yaml").read_text() == before
    assert "bm90LWEtc2VjcmV0" not in text + done.stdout + done.stderr


def test_the_other_jobs_lines_say_in_json_that_no_node_answers(spark: EngineStack) -> None:
    def nobody(config: dict[str, Any]) -> None:
        for place, node in enumerate(config["spark-vllm:nodes"]):
            node["management_address"] = f"127.0.0.{place + 77}"
            node["ssh_port"] = 9
            node["host_key"] = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBu5d9Z8eZ5o0d3l6a0m1i7c2l9o4bq3s8y6k5x1v2wn"
        config["spark-vllm:ssh"] = {"boot_wait_s": 1}

    spark.configure(nobody, "Pulumi.spark.yaml")
    passphrase = (spark.home / "passphrase").read_text().strip()
    for job in ("up", "drift"):
        done = run(spark, line_of(job), PULUMI_CONFIG_PASSPHRASE=passphrase)
        assert done.returncode == Exit.FAILED, done.stderr[-3000:]
        report = json.loads(done.stdout)
        assert "expected sshd at 127.0.0.77 port 9, found: connection refused" in json.dumps(report)
        assert {finding["code"] for finding in report["findings"] if finding["severity"] == "fail"} == {
            "connect-failed"
        }
    shown = run(spark, line_of("preview"), PULUMI_CONFIG_PASSPHRASE=passphrase)
    assert shown.returncode == Exit.FAILED and "### Preview of `spark`: failed" in shown.stdout


def test_a_job_that_there_is_not_is_64(spark: EngineStack) -> None:
    assert run(spark, "ci/stack.sh deploy spark").returncode == Exit.USAGE
    assert run(spark, "ci/stack.sh up").returncode == Exit.USAGE
