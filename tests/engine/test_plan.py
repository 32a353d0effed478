"""Plans that the real engine makes where no node can be reached, and runs that must end before any is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.engine.conftest import PROJECT, EngineStack

UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
"""How the engine writes a value that is not known yet."""
GOLDEN = Path(__file__).parent / "rendered_spark.json"
SHOWN = (
    "name",
    "entrypoints",
    "command",
    "envs",
    "mounts",
    "devices",
    "gpus",
    "capabilities",
    "ulimits",
    "labels",
    "networkMode",
    "ipcMode",
    "shmSize",
    "restart",
    "healthcheck",
    "stopTimeout",
)


def plan_of(text: str) -> list[dict[str, Any]]:
    """The planned resources in the JSON output of a preview."""
    steps: list[dict[str, Any]] = json.loads(text[text.index("{") :])["steps"]
    return [step["newState"] for step in steps if step.get("newState")]


def without_hashes(value: Any) -> Any:
    """A rendered value with what changes with every edit of the supervisor taken out."""
    if isinstance(value, str):
        known = re.sub(r"\b[0-9a-f]{12}\b", "<deployment>", re.sub(r"[0-9a-f]{64}", "<sha256>", value))
        return known.replace(UNKNOWN, "<deployment>")
    if isinstance(value, list):
        return [without_hashes(item) for item in value]
    if isinstance(value, dict):
        return {key: without_hashes(item) for key, item in value.items()}
    return value


def preflight_off(config: dict[str, Any]) -> None:
    config["spark-vllm:preflight"] = "off"


def test_stack_spark_renders_its_whole_plan_where_no_node_can_be_reached(spark: EngineStack) -> None:
    spark.configure(preflight_off, "Pulumi.spark.yaml")
    done = spark.pulumi("preview", "-s", "spark", "--json")
    assert done.returncode == 0, done.stdout[-3000:]
    containers = [r for r in plan_of(done.stdout) if r["type"] == "docker:index/container:Container"]
    rendered = {c["urn"].rpartition("::")[2]: {k: c["inputs"].get(k) for k in SHOWN} for c in containers}
    assert sorted(rendered) == ["main-spark-a", "main-spark-b"]
    assert without_hashes(rendered) == json.loads(GOLDEN.read_text())
    # The image's id is known once it has been pulled, and the deployment's with it; all else is in the plan already.
    assert {c["inputs"]["command"][2] for c in containers} == {UNKNOWN}


def test_the_plan_of_stack_spark_says_what_the_reference_deployment_is(spark: EngineStack) -> None:
    rendered = json.loads(GOLDEN.read_text())
    head, worker = rendered["main-spark-a"], rendered["main-spark-b"]
    command = " ".join(head["command"])
    for words in (
        "--tensor-parallel-size 2",
        "--max-model-len 32768",
        "--gpu-memory-utilization 0.9",
        "--trust-remote-code",
        "--serve-host 0.0.0.0",
        "--serve-port 30000",
        "--reasoning-parser qwen3",
        "--tool-call-parser qwen3_coder",
        "--enable-auto-tool-choice",
        "--head-address 192.168.200.12",
        "--backend ray",
    ):
        assert words in command
    differing = set(head["envs"]) ^ set(worker["envs"])
    assert {value.split("=")[0] for value in differing} == {"VLLM_HOST_IP"}
    assert "NCCL_IB_HCA==rocep1s0f1,roceP2p1s0f1" in head["envs"]
    assert head["devices"][0]["hostPath"] == "/dev/infiniband" and head["gpus"] == "all"
    assert spark.name == "spark"


def test_a_typo_ends_in_one_error_with_every_violation_and_reaches_no_node(dev: EngineStack, tmp_path: Path) -> None:
    def spoil(config: dict[str, Any]) -> None:
        config["spark-vllm:fabrik"] = {}
        serving = config["spark-vllm:groups"]["main"]["serving"]
        serving["max_modl_len"] = serving.pop("max_model_len")
        serving["port"] = 99999

    dev.configure(spoil, "Pulumi.dev.yaml")
    called = tmp_path / "called"
    fake = tmp_path / "ssh"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {called}\nexit 255\n')
    fake.chmod(0o755)
    done = dev.run(f'PATH="{tmp_path}:$PATH" exec pulumi "$@"', "preview", "-s", "dev")
    assert done.returncode != 0
    assert "error: the stack file has 3 settings that cannot be used; no node was contacted" in done.stdout
    assert "fabrik: found an unknown key; did you mean 'fabric'?" in done.stdout
    assert "max_modl_len: found an unknown key; did you mean 'max_model_len'?" in done.stdout
    assert "serving.port: found 99999" in done.stdout
    assert "Traceback" not in done.stdout
    assert not called.exists()


def test_nodes_that_refuse_are_all_named_with_the_step_in_one_block(spark: EngineStack) -> None:
    def nobody(config: dict[str, Any]) -> None:
        for place, node in enumerate(config["spark-vllm:nodes"]):
            node["management_address"] = f"127.0.0.{place + 77}"
            node["ssh_port"] = 9
            node["host_key"] = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIBu5d9Z8eZ5o0d3l6a0m1i7c2l9o4bq3s8y6k5x1v2wn"

    spark.configure(nobody, "Pulumi.spark.yaml")
    done = spark.pulumi("preview", "-s", "spark")
    assert done.returncode != 0
    first = next(line for line in done.stdout.splitlines() if "error:" in line)
    assert "spark-a, connect (TCP): expected sshd at 127.0.0.77 port 9, found: connection refused" in first
    assert "spark-b, connect (TCP): expected sshd at 127.0.0.78 port 9, found: connection refused" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_well_known_launcher_variable_is_named_with_the_setting_that_means_it(spark: EngineStack) -> None:
    spark.configure(preflight_off, "Pulumi.spark.yaml")
    extra = {"IMAGE_NAME": "my/private:image", "VLLM_SPARK_EXTRA_DOCKER_ARGS": "-v /x:/x"}
    done = spark.pulumi("preview", "-s", "spark", extra=extra)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "IMAGE_NAME is set in the environment and is not read; the setting is image.registry" in done.stdout
    assert "VLLM_SPARK_EXTRA_DOCKER_ARGS is set in the environment and is not read" in done.stdout
    assert "my/private:image" not in done.stdout


# Whose packages are imported.


@pytest.fixture
def strangers(tmp_path: Path) -> Path:
    """Installed packages called like ours."""
    for name in ("components", "providers", "spark_core"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('a stranger was imported')\n")
    return tmp_path


def test_an_installed_package_called_like_ours_is_not_imported(spark: EngineStack, strangers: Path) -> None:
    spark.configure(preflight_off, "Pulumi.spark.yaml")
    done = spark.pulumi("preview", "-s", "spark", extra={"PYTHONPATH": str(strangers)})
    refused = "another package of that name was imported first" in done.stdout
    assert done.returncode == 0 or refused, done.stdout[-3000:]
    assert "a stranger was imported" not in done.stdout


def test_another_working_directory_works(spark: EngineStack, tmp_path: Path) -> None:
    spark.configure(preflight_off, "Pulumi.spark.yaml")
    done = spark.pulumi("-C", str(PROJECT), "preview", "-s", "spark", cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]


def test_pythonsafepath_is_refused_in_one_line(spark: EngineStack) -> None:
    spark.configure(preflight_off, "Pulumi.spark.yaml")
    done = spark.pulumi("preview", "-s", "spark", extra={"PYTHONSAFEPATH": "1"})
    assert done.returncode != 0
    assert "error: expected PYTHONSAFEPATH to be unset, found it set" in done.stdout
    assert "Traceback" not in done.stdout


INLINE = """
import runpy, sys
from pulumi import automation

project, work_dir = sys.argv[1:]
stack = automation.create_or_select_stack(
    "spark", "spark-vllm", lambda: runpy.run_path(project + "/__main__.py", run_name="__main__"),
    opts=automation.LocalWorkspaceOptions(work_dir=work_dir),
)
print(stack.preview(color="never").change_summary)
"""

LOCAL = """
import sys
from pulumi import automation

stack = automation.create_or_select_stack("spark", work_dir=sys.argv[1])
print(stack.preview(color="never", config_file=sys.argv[2]).change_summary)
"""


def test_an_inline_automation_program_is_refused_in_one_line(spark: EngineStack, tmp_path: Path) -> None:
    script = tmp_path / "inline.py"
    script.write_text(INLINE)
    work_dir = tmp_path / "work"
    work_dir.mkdir()
    done = spark.run(
        'unset PULUMI_OPTION_CONFIG_FILE; exec python "$@"', str(script), str(PROJECT), str(work_dir), cwd=tmp_path
    )
    assert done.returncode != 0
    assert f"error: expected a local program (work_dir={PROJECT}), found an inline one" in done.stdout, done.stdout[
        -3000:
    ]


def test_a_local_automation_program_from_another_folder_works(spark: EngineStack, tmp_path: Path) -> None:
    spark.configure(preflight_off, "Pulumi.spark.yaml")
    script = tmp_path / "local.py"
    script.write_text(LOCAL)
    config = str(spark.home / "Pulumi.spark.yaml")
    before = (PROJECT / "Pulumi.spark.yaml").read_text()
    done = spark.run(
        'unset PULUMI_OPTION_CONFIG_FILE; exec python "$@"', str(script), str(PROJECT), config, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "create" in done.stdout
    assert (PROJECT / "Pulumi.spark.yaml").read_text() == before
