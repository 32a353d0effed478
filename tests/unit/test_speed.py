"""The benchmark of what is served: how it is run on the head, what its figures are, and when they have fallen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spark_core import speed
from spark_core.errors import CommandError, GateError
from spark_core.gate import Rank
from spark_core.settings import Settings, read_settings
from spark_core.speed import Load, Speed, arguments_of, compare, load_for, measure, parse_speed, speed_of
from spark_core.transport.base import Command
from tests.config_cases import load_base
from tests.local_node import LocalNode
from tests.scripted_transport import ScriptedTransport

PROJECT = Path(__file__).resolve().parents[2]
OPTIONS = set((PROJECT / "tests/fixtures/vllm/bench-serve-options-0.32.0.txt").read_text().split())
PROGRAM = PROJECT / "spark_runtime" / "image" / "bench_serve.py"
KEY = "sk-a-key-that-nobody-may-see"
RESULT = {
    "completed": 8,
    "failed": 0,
    "output_throughput": 26.914,
    "median_ttft_ms": 411.5,
    "p99_ttft_ms": 730.1,
    "median_tpot_ms": 36.4,
    "ttfts": [1, 2],
}
LOAD = Load(1, 8, 512, 128)


def settings(**serving: Any) -> Settings:
    raw = load_base()
    raw["groups"]["main"]["serving"] |= serving
    return read_settings(raw)


def at(rate: float, first: float, concurrency: int = 1) -> Speed:
    return Speed(concurrency, 8, 512, 128, rate, first, first * 2, 30.0, 1000.0)


def test_every_flag_is_one_that_vllm_s_benchmark_has() -> None:
    words = arguments_of(settings(trust_remote_code=True), "main", LOAD, 7)
    flags = {word for word in words if word.startswith("--")}
    assert len(flags) > 15
    assert flags - OPTIONS == set()
    assert words[words.index("--model") + 1] == "qwen"
    assert words[words.index("--tokenizer") + 1] == "/models/qwen"
    assert words[words.index("--base-url") + 1] == "http://10.1.230.180:30000"


def test_a_small_context_gets_a_small_load() -> None:
    assert load_for(settings(), "main", 8) == Load(8, 32, 512, 128)
    assert load_for(settings(max_model_len=32768), "main", 1) == LOAD
    small = load_for(settings(max_model_len=512), "main", 1)
    assert small == Load(1, 8, 128, 32)


def test_the_key_is_in_no_word_and_the_container_gets_what_rank_0_has() -> None:
    head = ScriptedTransport("spark-a", lambda _: f"{{noise\n{json.dumps(RESULT)}\nINFO leaving\n")
    found = measure(
        Rank(head, 0, "rank0", "/state"), settings(environment={"A": "b c"}), "main", "s", LOAD, now=5.0, timeout_s=100
    )
    assert found == Speed(1, 8, 512, 128, 26.91, 411.5, 730.1, 36.4, 5.0)
    [asked] = head.asked
    orders = json.loads(asked.stdin)
    assert orders["key_file"] == "/run/secrets/spark-vllm/api_key"
    assert orders["warm_up"] != orders["measure"]
    assert "A=b c" in asked.argv and "VLLM_USE_RUST_BENCH=0" in asked.argv
    assert "rank0" in asked.argv and "--gpus" not in asked.argv


def test_an_open_api_is_asked_without_a_key() -> None:
    head = ScriptedTransport("spark-a", lambda _: json.dumps(RESULT))
    measure(Rank(head, 0, "rank0", "/s"), settings(api_key="off"), "main", "s", LOAD, now=5.0, timeout_s=100)
    assert json.loads(head.asked[0].stdin)["key_file"] == ""


@pytest.fixture
def node(tmp_path: Path) -> tuple[LocalNode, Path]:
    """This machine with a docker that notes what it was asked, and answers as one that runs the benchmark."""
    calls = tmp_path / "calls"
    programs = tmp_path / "programs"
    programs.mkdir()
    docker = programs / "docker"
    docker.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" | head -n 1 >> {calls}\n'
        f'case $1 in inspect) echo sha256:abc ;; ps) [ "$2" = -aq ] && echo old ;; '
        f"run) cat > {tmp_path}/stdin; cat {tmp_path}/answer ;; esac\n"
    )
    docker.chmod(0o755)
    (tmp_path / "answer").write_text(json.dumps(RESULT) + "\n")
    calls.touch()
    return LocalNode(programs=programs), tmp_path


def test_the_script_runs_the_image_of_rank_0_and_leaves_no_container(
    node: tuple[LocalNode, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, folder = node
    monkeypatch.setattr(speed, "NEEDS_MIB", 1)
    rank = Rank(transport, 0, "rank0", "/s")
    assert measure(rank, settings(), "main", "s", LOAD, now=5.0, timeout_s=60).output_tokens_per_s == 26.91
    calls = (folder / "calls").read_text().splitlines()
    [run] = [call for call in calls if call.startswith("run ")]
    assert "--name spark-vllm-s-main-bench --label spark-vllm.probe=bench --volumes-from rank0:ro" in run
    assert "--entrypoint python3 sha256:abc -c" in run
    assert [call for call in calls if call.startswith("rm -f old")] == ["rm -f old", "rm -f old"]
    assert json.loads((folder / "stdin").read_text())["measure"]


def test_nothing_is_started_where_memory_is_short(
    node: tuple[LocalNode, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, folder = node
    monkeypatch.setattr(speed, "NEEDS_MIB", 1 << 40)
    with pytest.raises(CommandError, match="expected 1099511627776 MiB of available memory for the benchmark, found"):
        measure(Rank(transport, 0, "rank0", "/s"), settings(), "main", "s", LOAD, now=5.0, timeout_s=60)
    assert (folder / "calls").read_text() == ""


def test_a_benchmark_that_is_refused_says_what_vllm_said(
    node: tuple[LocalNode, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, folder = node
    monkeypatch.setattr(speed, "NEEDS_MIB", 1)
    docker = transport.programs / "docker" if transport.programs else folder
    docker.write_text(
        docker.read_text().replace(f"cat {folder}/answer", "echo 'unrecognized arguments: --x' >&2; exit 2")
    )
    with pytest.raises(CommandError, match=r"vllm bench serve` to measure with 1 at a time.*unrecognized arguments"):
        measure(Rank(transport, 0, "rank0", "/s"), settings(), "main", "s", LOAD, now=5.0, timeout_s=60)


@pytest.mark.parametrize(
    "text", ["", "no json", "[]", "{}", '{"completed": 8}', json.dumps(RESULT | {"completed": "x"})]
)
def test_what_is_no_result_is_told_as_none(text: str) -> None:
    with pytest.raises(CommandError, match="expected the figures of `vllm bench serve`, found none that can be read"):
        parse_speed("spark-a", text, LOAD, 1.0)


@pytest.mark.parametrize("change", [{"completed": 7}, {"output_throughput": 0}, {"median_ttft_ms": float("nan")}])
def test_figures_of_requests_that_failed_do_not_count(change: dict[str, Any]) -> None:
    with pytest.raises(GateError, match="expected 8 answers, found"):
        parse_speed("spark-a", json.dumps(RESULT | change), LOAD, 1.0)


def test_a_fall_is_more_than_a_tenth_in_either_figure() -> None:
    [rate, first] = compare([at(100, 200)], [at(90.1, 219.9)])
    assert (rate.fell, first.fell) == (False, False)
    [rate, first] = compare([at(100, 200)], [at(89.8, 221)])
    assert (rate.slower_by, first.slower_by) == (0.102, 0.105)
    assert (rate.fell, first.fell) == (True, True)
    [rate, first] = compare([at(100, 200)], [at(150, 100)])
    assert (rate.slower_by, first.slower_by) == (-0.5, -0.5)
    assert not rate.fell


def test_figures_of_another_load_are_not_compared() -> None:
    assert compare([at(100, 200, concurrency=8)], [at(1, 1)]) == []
    assert compare([], [at(1, 1)]) == []
    assert len(compare([at(0, 0)], [at(1, 1)])) == 2


def test_figures_come_back_as_they_were_kept_and_others_do_not() -> None:
    assert speed_of(json.loads(json.dumps(at(1, 2).as_json()))) == at(1, 2)
    assert speed_of({"concurrency": 1, "energy": 3}) is None


FAKE_VLLM = """
import json, os, pathlib, subprocess, sys
print("loading")
def main():
    print("a table")
    words = sys.argv
    child = subprocess.run(["env"], capture_output=True, text=True).stdout
    copied = subprocess.run(["env"], env=os.environ.copy(), capture_output=True, text=True).stdout
    seen = {
        "argv": " ".join(words), "key": os.environ.get("OPENAI_API_KEY", ""), "child": child + copied,
        "own": pathlib.Path("/proc/self/environ").read_text(), "listed": str(dict(os.environ)),
        "in": "OPENAI_API_KEY" in os.environ, "path": os.environ["PATH"],
    }
    os.environ["VLLM_SET"] = "1"
    del os.environ["VLLM_SET"]
    if "--bad" in words:
        sys.exit(2)
    folder = words[words.index("--result-dir") + 1]
    name = words[words.index("--result-filename") + 1]
    pathlib.Path(folder, name).write_text(json.dumps({**seen, "completed": 8, "errors": ["x"]}))
"""


def run_program(tmp_path: Path, orders: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """The program as the container runs it, beside an installed ``vllm`` of the test's."""
    info = tmp_path / "site" / "vllm_fake-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-fake\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[console_scripts]\nvllm = fake_vllm_command:main\n")
    (tmp_path / "site" / "fake_vllm_command.py").write_text(FAKE_VLLM)
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.read_text()],
        input=json.dumps(orders) + "\n",
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_key_reaches_vllm_and_no_argument_environment_or_child(tmp_path: Path) -> None:
    key_file = tmp_path / "api_key"
    key_file.write_text(f"{KEY}\nsk-second\n")
    orders = {"key_file": str(key_file), "warm_up": ["--num-prompts", "1"], "measure": ["--num-prompts", "8"]}
    done = run_program(tmp_path, orders)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["key"] == KEY
    assert seen["in"] == 1
    for place in ("argv", "child", "own", "listed"):
        assert KEY not in seen[place]
    assert "PATH=/usr/bin:/bin" in seen["child"]
    assert "vllm bench serve --num-prompts 8 --save-result" in seen["argv"]
    assert "errors" not in seen
    assert "a table" in done.stderr and "loading" in done.stderr
    assert KEY not in done.stderr


def test_without_a_key_file_none_is_asked_for_and_an_empty_one_ends_it(tmp_path: Path) -> None:
    orders: dict[str, Any] = {"key_file": "", "warm_up": [], "measure": []}
    assert json.loads(run_program(tmp_path, orders).stdout)["key"] == ""
    (tmp_path / "empty").write_text("\n")
    failed = run_program(tmp_path, orders | {"key_file": str(tmp_path / "empty")})
    assert failed.returncode != 0
    assert "no key in" in failed.stderr


def test_arguments_that_vllm_refuses_end_it_with_vllm_s_own_status(tmp_path: Path) -> None:
    failed = run_program(tmp_path, {"key_file": "", "warm_up": ["--bad"], "measure": []})
    assert failed.returncode == 2
    assert failed.stdout == ""


def test_a_running_benchmark_is_ended_by_name_and_label() -> None:
    asked: list[Command] = []

    def answer(cmd: Command) -> str:
        asked.append(cmd)
        return ""

    head = ScriptedTransport("spark-a", answer)
    speed.remove_benchmark(Rank(head, 0, "rank0", "/s"), "s", "main")
    assert {"spark-vllm-s-main-bench", "spark-vllm.probe=bench"} <= set(asked[0].argv)
