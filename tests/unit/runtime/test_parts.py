"""The smaller parts: logs, progress, status, processes, Ray's count, vLLM's command, the canary."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spark_runtime import health, logs, ray_node, sockets, status, vllm_server
from spark_runtime.canary import Canary, Counters, Server, Verdict
from spark_runtime.healing import Attempts, Crash, kind_of
from spark_runtime.memory import Memory
from spark_runtime.processes import empty_folder, has_own_shm
from spark_runtime.progress import read_progress
from tests.unit.runtime.runtime_group import eventually


@pytest.mark.parametrize("count", [10, 400, 5000])
def test_a_log_keeps_its_beginning_and_its_end_within_its_limit(tmp_path: Path, count: int) -> None:
    log = logs.GenerationLog(tmp_path / "1", 0, 20_000)
    for number in range(count):
        log.write("vllm", f"line {number:06}")
    log.close()
    log.write("vllm", "after the end")
    kept = [line.text for line in log.lines()]
    assert sum(path.stat().st_size for path in (tmp_path / "1").iterdir()) <= 20_000
    assert kept[0] == "line 000000" and kept[-1] == f"line {count - 1:06}"
    assert kept == sorted(kept)


def test_a_log_is_continued_and_reads_what_it_wrote(tmp_path: Path) -> None:
    for text in ("one | with a bar", "two"):
        log = logs.GenerationLog(tmp_path, 1, 1000)
        log.write("ray", text)
        log.close()
    assert [(line.source, line.text) for line in log.lines()] == [("ray", "one | with a bar"), ("ray", "two")]


def test_a_log_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "1").write_text("in the way")
    log = logs.GenerationLog(tmp_path / "1", 0, 1000)
    log.write("vllm", "text")
    assert list(log.lines()) == []


def test_only_the_newest_generations_are_kept(tmp_path: Path) -> None:
    for name in ("1", "2", "9", "10", "11", "notes"):
        (tmp_path / name).mkdir()
    logs.keep_newest(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "11", "9", "notes"]
    logs.keep_newest(tmp_path / "none", 3)


def test_rays_own_logs_are_kept_in_part(tmp_path: Path) -> None:
    folder = tmp_path / "ray" / "session_latest" / "logs"
    folder.mkdir(parents=True)
    (folder / "raylet.err").write_text("x" * 300_000 + "end")
    (folder / "empty.out").touch()
    logs.keep_ray_logs(tmp_path / "ray", tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["raylet.err"]
    assert (tmp_path / "kept" / "raylet.err").read_text().endswith("xend")
    logs.keep_ray_logs(tmp_path / "none", tmp_path / "kept")


@pytest.mark.parametrize(
    ("line", "step"),
    [
        (
            "Loading safetensors checkpoint shards:  97% Completed | 64/66 [00:09<00:00,  6.67it/s]",
            "shards 64/66 loaded",
        ),
        (
            "Loading safetensors using Fastsafetensor loader:   5% Completed | 2/42 [00:00<00:02]",
            "shards 2/42 loaded",
        ),
        (
            "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  10%|# | 5/51 [00:01<]",
            "CUDA graphs 5/51 captured",
        ),
        (
            "(Worker pid=1) INFO 01-28 06:35:57 [a.py:1] Starting to load model openai/gpt-oss...",
            "loading the model",
        ),
        ("INFO 06-18 05:12:19 [default_loader.py:397] Loading weights took 12.25 seconds", "weights loaded"),
        ("INFO 04-29 12:01:07 [gpu_worker.py:440] Available KV cache memory: 52.66 GiB", "KV cache sized"),
        ("INFO:     Application startup complete.", "server started"),
        (
            "Waiting for creating a placement group of specs for 150 seconds.",
            "waiting for Ray's placement group",
        ),
        (
            "Waiting for creating a placement group of specs for 310 seconds.",
            "waiting for Ray's placement group",
        ),
        ("anything else", None),
    ],
)
def test_progress_is_read_from_the_log(line: str, step: str | None) -> None:
    assert read_progress(line) == step


def test_the_generation_goes_on_counting(tmp_path: Path) -> None:
    assert status.last_generation_number(tmp_path) == 0
    status.keep_generation_number(tmp_path, 3)
    assert status.last_generation_number(tmp_path) == 3
    (tmp_path / "generation.json").write_text("{")
    (tmp_path / "logs" / "7").mkdir(parents=True)
    assert status.last_generation_number(tmp_path) == 7
    status.keep_generation_number(tmp_path / "none", 9)  # no place to write is no fault


def test_failures_before_serving_outlive_the_head(tmp_path: Path) -> None:
    assert status.read_attempts(tmp_path, 50.0) == Attempts()
    attempts = Attempts([Crash(40.0, kind_of("no room 1"), "no room 1", outside=False)], unfinished=True)
    status.keep_attempts(tmp_path, attempts, 50.0)
    [crash] = (again := status.read_attempts(tmp_path, 7.0)).crashes  # another boot: its clock began anew
    assert again.unfinished and (crash.kind, crash.line, crash.outside) == ("no room #", "no room 1", False)
    assert -4.0 < crash.at < -2.0
    for rubbish in ("{", '{"crashes": 1}', '{"crashes": [1, {}, {"at": "x", "line": 1, "outside": true}]}'):
        (tmp_path / "attempts.json").write_text(rubbish)
        assert status.read_attempts(tmp_path, 7.0) == Attempts()


GIB_IN_KB = 1024 * 1024


class Host:
    """Its memory, as the kernel tells it."""

    def __init__(self, folder: Path) -> None:
        self.meminfo, self.boot_id, self.kept = folder / "meminfo", folder / "boot_id", folder / "memory.json"
        self.boot_id.write_text("one")
        self.has(100)

    def has(self, gib: int) -> None:
        kb = {"MemTotal": 128 * GIB_IN_KB, "MemFree": 1, "MemAvailable": gib * GIB_IN_KB}
        self.meminfo.write_text("".join(f"{name}:{value:>15} kB\n" for name, value in kb.items()))

    def memory(self) -> Memory:
        return Memory(self.kept, self.meminfo, self.boot_id)


def test_memory_that_a_generation_took_is_missed_until_it_is_back_also_by_the_next_container(tmp_path: Path) -> None:
    host = Host(tmp_path)
    memory = host.memory()
    assert memory.lacking() == 0
    memory.starts()
    host.has(20)
    memory.look()
    for known in (memory, host.memory()):
        assert known.lacking() // 1024**3 == 67 and not known.has_room()  # 100, less a tenth of 128, less 20
    host.has(82)
    assert memory.lacking() > 0 and memory.has_room()  # somebody else has the rest
    memory.settle()
    assert memory.lacking() == host.memory().lacking() == 0
    host.has(70)
    memory.starts()
    assert memory.before == 82 * 1024**3  # a slow leak is not taken for the new measure
    host.boot_id.write_text("two")
    assert host.memory().lacking() == 0


def test_memory_is_no_reason_to_stay_down_where_it_cannot_be_read_or_somebody_says_go_on(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.memory().starts()
    host.has(5)
    memory = host.memory()
    assert memory.lacking() > 0
    memory.accept()
    assert memory.lacking() == 0
    host.kept.write_text('{"before": "x", "used": -1, "boot_id": "one"}')
    host.meminfo.unlink()
    host.boot_id.unlink()
    assert host.memory().lacking() == 0 and host.memory().has_room()


@pytest.mark.parametrize(
    ("document", "healthy"),
    [
        (None, False),
        ({"phase": "serving", "updated": 1000.0}, True),
        ({"phase": "loading", "updated": 990.0, "progress": "shards 1/2 loaded"}, True),
        ({"phase": "loading", "updated": 900.0}, False),
        ({"phase": "failed", "updated": 1000.0}, False),
        ({"phase": "stopped", "updated": 1000.0}, False),
        ({"phase": "serving"}, False),
    ],
)
def test_health_is_progress_or_serving(document: dict[str, object] | None, healthy: bool) -> None:
    assert health.is_healthy(document, 1000.0)[0] == healthy


def test_the_health_check_is_told_without_the_rest_of_the_supervisor(mount: Path, tmp_path: Path) -> None:
    asked = [sys.executable, "-X", "importtime", str(mount), "health"]
    by_docker = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (by_docker.returncode, by_docker.stdout) == (1, "no status has been written yet\n")
    assert "spark_runtime.health" in by_docker.stderr
    assert "spark_runtime.status" not in by_docker.stderr
    (tmp_path / "status.json").write_text(json.dumps({"phase": "serving", "updated": time.time()}))
    by_hand = subprocess.run([*asked, "--state-dir", str(tmp_path)], capture_output=True, text=True, check=False)
    assert (by_hand.returncode, by_hand.stdout) == (0, "serving\n")


SWEEP = """
import os, sys, time
from spark_runtime.processes import Processes, descendants
deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(99)"
parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deaf!r}], start_new_session=True)"
said = []
processes = Processes()
child = processes.spawn("x", [sys.executable, "-c", parent], os.environ, lambda name, line: said.append(line))
while child.running or not said:
    time.sleep(0.01)
    processes.reap()
assert len(descendants(os.getpid())) == 1, "the orphan is ours now"
while processes.kill():
    time.sleep(0.01)
assert processes.left() == []
processes.drain()
print(descendants(os.getpid()), said, child.exit_code)
"""


def test_everything_below_us_is_ended_also_orphans_in_sessions_of_their_own() -> None:
    # In a process of its own: it adopts and reaps whatever it finds below itself.
    root = Path(status.__file__).parent.parent
    argv = [sys.executable, "-W", "error", "-c", SWEEP]
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[] ['deaf'] 0\n", "")


def test_a_folder_is_emptied_and_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kept").touch()
    folder = tmp_path / "folder"
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "file").touch()
    (folder / "link").symlink_to(tmp_path / "other")
    (folder / "dangling").symlink_to("nowhere")
    empty_folder(folder)
    assert list(folder.iterdir()) == [] and (tmp_path / "other" / "kept").exists()


def test_only_a_containers_own_shared_memory_is_emptied() -> None:
    row = "629 625 0:57 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs {} rw,size=65536k"
    assert has_own_shm(row.format("shm"))
    assert not has_own_shm(row.format("tmpfs"))
    assert not has_own_shm("1 2 0:57 / /dev rw - tmpfs shm rw")


RANKS = {0: "10.0.0.1", 1: "10.0.0.2"}


@pytest.mark.parametrize(
    ("found", "complete", "hopeless", "said"),
    [
        ([("10.0.0.1", 1), ("10.0.0.2", 1)], True, False, "Ray has 2 of 2 nodes, 2 of 2 GPUs"),
        ([("10.0.0.1", 1)], False, False, "1 of 2 GPUs; rank 1 (10.0.0.2) is not in Ray"),
        ([("10.0.0.1", 1), ("10.0.0.2", 0)], False, False, "rank 1 (10.0.0.2) brings fewer than 1 GPUs"),
        (
            [("10.0.0.1", 1), ("10.0.0.1", 1)],
            False,
            True,
            "2 Ray nodes with 2 GPUs on 10.0.0.1, expected 1 with 1",
        ),
        ([("10.0.0.1", 2)], False, True, "1 Ray nodes with 2 GPUs on 10.0.0.1"),
        (
            [("10.0.0.1", 1), ("10.0.0.2", 1), ("10.0.0.9", 1)],
            False,
            True,
            "10.0.0.9, which is the address of no",
        ),
        ([], False, False, "Ray has 0 of 2 nodes, 0 of 2 GPUs"),
    ],
)
def test_nodes_and_gpus_are_counted_where_they_are(
    found: list[tuple[str, float]], complete: bool, hopeless: bool, said: str
) -> None:
    count = ray_node.count_nodes(found, RANKS, 1)
    assert (count.complete, count.hopeless) == (complete, hopeless) and said in count.text


def test_ranks_that_share_an_address_are_never_complete() -> None:
    for found in ([("10.0.0.1", 1.0)], [("10.0.0.1", 1.0)] * 2, [("10.0.0.1", 2.0)]):
        count = ray_node.count_nodes(found, {0: "10.0.0.1", 1: "10.0.0.1"}, 1)
        assert count.hopeless and not count.complete


def test_lines_of_the_probe_are_told_from_noise() -> None:
    assert ray_node.read_probe('spark-vllm-nodes:[["10.0.0.1", 1.0]]') == [("10.0.0.1", 1.0)]
    for noise in ("INFO connected", "spark-vllm-nodes:[[", "spark-vllm-nodes:[1]"):
        assert ray_node.read_probe(noise) is None
    compile(ray_node.probe_argv("a")[2], "probe", "exec")


def test_ray_is_started_with_its_address_and_our_arguments_last() -> None:
    common = {"head_address": "10.0.0.1", "port": 6379, "gpus": 1, "folder": Path("/tmp/ray")}
    more = {"object_store_bytes": 5, "extra": ["--min-worker-port=1"]}
    head = ray_node.start_argv(head=True, node_address="10.0.0.1", **common, **more)  # type: ignore[arg-type]
    worker = ray_node.start_argv(head=False, node_address="10.0.0.2", **common, **more)  # type: ignore[arg-type]
    assert " ".join(head).startswith("ray start --block --head --port 6379 --include-dashboard=false --temp-dir")
    assert " ".join(worker).startswith("ray start --block --address 10.0.0.1:6379 --node-ip-address 10.0.0.2")
    assert head[-1] == worker[-1] == "--min-worker-port=1"
    assert "--port" not in worker and "--include-dashboard=false" not in worker  # Ray refuses both there
    assert ray_node.start_env({"RAY_ADDRESS": "x", "A": "b"}) == {
        "A": "b",
        "AUTOSCALER_METRIC_PORT": "6406",
        "DASHBOARD_METRIC_PORT": "6407",
    }
    for argv in (head, worker):
        ports = [int(argv[at + 1]) for at, word in enumerate(argv) if word.endswith("-port") and word != "--port"]
        assert len(ports) == len(set(ports)) and "--node-manager-port" in argv
        assert all(ray_node.PORTS_FROM <= port <= ray_node.PORTS_TO for port in ports)


def test_a_token_lies_in_a_file_of_mode_600_and_only_its_path_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    assert ray_node.token_env("", file) == {} and not file.exists()
    for token in ("first", "second"):
        env = ray_node.token_env(token, file)
        assert env == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}
        assert file.read_text() == token and file.stat().st_mode & 0o777 == 0o600


def test_a_ray_that_knows_tokens_is_known_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not ray_node.knows_tokens()
    (tmp_path / "ray" / "_private" / "authentication").mkdir(parents=True)
    assert ray_node.knows_tokens()


def test_vllm_gets_the_path_of_the_keys_and_no_key(tmp_path: Path) -> None:
    environ = {"VLLM_API_KEY": "sk-x", "PYTHONPATH": "/image"}
    root, file = Path("/opt/spark-vllm"), Path("/run/secrets/key")
    env = vllm_server.serve_env(environ, ray_address="a:1", package_root=root, api_key_file=file)
    assert env == {
        "RAY_ADDRESS": "a:1",
        "PYTHONPATH": "/image:/opt/spark-vllm",
        "SPARK_VLLM_API_KEY_FILE": "/run/secrets/key",
    }
    env = vllm_server.serve_env({}, ray_address="a:1", package_root=root, api_key_file=None)
    assert env == {"RAY_ADDRESS": "a:1"}
    argv = vllm_server.serve_argv(model="/m", served_model_name="n", listen=("0.0.0.0", 1), keyed=False, extra=["--x"])
    assert argv == ["vllm", "serve", "/m", "--served-model-name", "n", "--host", "0.0.0.0", "--port", "1", "--x"]
    assert vllm_server.serve_env({"RAY_ADDRESS": "b"}, ray_address=None, package_root=root, api_key_file=None) == {}


def test_without_ray_each_rank_knows_its_place_and_only_the_head_listens() -> None:
    place = {"nodes": 3, "master_address": "10.0.0.1", "master_port": 29501}
    ray = vllm_server.backend_args("ray", rank=0, **place)  # type: ignore[arg-type]
    head, last = (vllm_server.backend_args("mp", rank=rank, **place) for rank in (0, 2))  # type: ignore[arg-type]
    assert ray == ["--distributed-executor-backend", "ray"]
    meeting = "--distributed-executor-backend mp --nnodes 3 --node-rank {} --master-addr 10.0.0.1 --master-port 29501"
    assert " ".join(head) == meeting.format(0)
    assert " ".join(last) == meeting.format(2) + " --headless"
    alone = vllm_server.backend_args("mp", rank=0, nodes=1, master_address="10.0.0.1", master_port=29501)
    assert alone == ["--distributed-executor-backend", "uni"]
    argv = vllm_server.serve_argv(model="/m", served_model_name="n", listen=None, keyed=False, extra=last)
    assert "--host" not in argv and "--port" not in argv


def test_the_names_that_vllm_must_not_copy_are_added_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "config" / "ray_non_carry_over_env_vars.json"
    vllm_server.write_per_node_variables(path.parent)
    path.write_text('["MY_OWN"]')
    vllm_server.write_per_node_variables(path.parent)
    assert {"MY_OWN", "VLLM_HOST_IP", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME"} <= set(json.loads(path.read_text()))
    path.write_text("{")
    vllm_server.write_per_node_variables(path.parent)
    assert "MY_OWN" not in json.loads(path.read_text())


def test_arguments_of_the_supervisor_are_refused_in_every_spelling() -> None:
    given = ["--host", "x", "--api_key=sk-1", "--max-model-len", "1", "--served-model-name=x"]
    texts = vllm_server.refused_arguments(given)
    assert [text.split(":")[0] for text in texts] == ["--host", "--api-key", "--served-model-name"]
    assert "sk-1" not in str(texts)


@contextmanager
def answering(*answers: tuple[int, bytes], delay_s: float = 0.0) -> Iterator[int]:
    """A server that gives these answers in turn, the last one from then on."""
    left = list(answers)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            time.sleep(delay_s)
            code, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server.server_port
        server.shutdown()


def chat(**message: object) -> bytes:
    """A chat completion."""
    return json.dumps({"choices": [{"message": message}]}).encode()


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([(200, chat(content="OK"))], ""),
        ([(200, chat(content=None, reasoning="hm"))], ""),
        ([(200, chat(content=None, reasoning_content="hm"))], ""),
        ([(400, b'{"error": "no chat template"}'), (200, b'{"choices": [{"text": "OK"}]}')], ""),
        (
            [(200, chat(content="", reasoning=None))],
            "the completion came back empty: neither content nor reasoning",
        ),
        ([(200, b'{"choices": []}')], "the completion came back empty: neither content nor reasoning"),
        ([(500, b"boom")], "the completion got HTTP 500: boom"),
        ([(200, b"not json")], "the completion got no answer: JSONDecodeError"),
    ],
)
def test_a_completion_counts_when_something_comes_back(answers: list[tuple[int, bytes]], text: str) -> None:
    with answering(*answers) as port:
        verdict = Server("0.0.0.0", port, "m", None).complete(10)
    assert verdict.ok == (not text) and verdict.text.startswith(text)


def test_a_completion_is_bounded() -> None:
    with answering((200, chat(content="late")), delay_s=3) as port:
        verdict = Server("127.0.0.1", port, "m", None).complete(0.3)
        canary = Canary(Server("127.0.0.1", port, "m", None), 0.3)
        assert canary.result() is None
        late = eventually(canary.result)
    assert verdict.text == late.text == "the completion did not come back within 0 s"
    assert not verdict.ok and 200 < verdict.ms < 2900


def test_a_key_that_cannot_be_sent_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "key"
    for content in ("", "sk-\x01secret\n", "sk-s\u00e9cret\n"):
        path.write_text(content)
        verdict = Server("127.0.0.1", 9, "m", path).complete(1)
        assert not verdict.ok and "cret" not in verdict.text and "no usable key" in verdict.text


BUSY = Counters(running=64, tokens=100, kv_cache=0.5)
IDLE = Counters(running=0, tokens=100, kv_cache=0.0)


class Slow:
    """A server whose completions never come back in time, and whose counters are given."""

    def __init__(self, *counters: Counters | None) -> None:
        self._left = list(counters)

    def counters(self) -> Counters | None:
        return self._left.pop(0) if len(self._left) > 1 else self._left[0]

    def complete(self, timeout_s: float) -> Verdict:
        return Verdict(False, 1, "the completion did not come back within 0 s", stalled=True)


@pytest.mark.parametrize(
    ("before", "counters", "ok", "stalled"),
    [
        (BUSY, [BUSY, replace(BUSY, tokens=101)], True, True),  # full, and it generates
        (BUSY, [BUSY, replace(BUSY, kv_cache=0.6)], True, True),  # full of one long prompt
        (BUSY, [BUSY, BUSY], False, True),  # 64 requests that stand still
        (IDLE, [IDLE, IDLE], False, True),
        (IDLE, [IDLE, None], False, False),  # too busy to say, or its API is frozen: another look decides
        (None, [IDLE, IDLE], False, False),  # the first completion may compile for long
    ],
)
def test_a_full_server_is_alive_and_one_that_stands_still_is_not(
    before: Counters | None, counters: list[Counters | None], ok: bool, stalled: bool
) -> None:
    slow: Any = Slow(*counters)
    verdict = eventually(Canary(slow, 5.0, before).result)
    assert verdict.ok is ok
    assert ok or verdict.stalled is stalled


def test_counters_are_summed_over_engines() -> None:
    body = (
        b"# HELP vllm:generation_tokens_total x\n"
        b'vllm:generation_tokens_total{engine="0",model_name="m"} 5.0\n'
        b'vllm:generation_tokens_total{engine="1"} 1e+02\n'
        b'vllm:num_requests_running{engine="0"} 2.0\n'
        b'vllm:generation_tokens_total_created{engine="0"} 1.7e+09\n'
        b'vllm:prompt_tokens_total{engine="0"} 20.0\n'
    )
    with answering((200, body)) as port:
        server = Server("127.0.0.1", port, "m", None)
        counters = server.counters()
        assert counters is not None and (counters.tokens, counters.running) == (125.0, 2.0)
        assert server.is_healthy() and server.answers_without_key()
    assert not server.is_healthy() and server.counters() is None


@contextmanager
def listening(speaks: bytes | None) -> Iterator[int]:
    """A port that accepts and says something, or accepts and stays silent."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    kept.append(connection)
                    if speaks is not None:
                        connection.sendall(speaks)

        kept: list[socket.socket] = []
        threading.Thread(target=serve, daemon=True).start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)  # or the thread that accepts would keep it open
        for connection in kept:
            connection.close()


def test_a_node_whose_kernel_accepts_and_whose_sshd_never_speaks_is_wedged() -> None:
    with listening(b"SSH-2.0-x") as speaking, listening(None) as mute:
        assert ray_node.look_at_node("127.0.0.1", mute, speaking) == "answers"
        assert ray_node.look_at_node("127.0.0.1", mute, mute) == "wedged"
        closed = mute
    assert ray_node.look_at_node("127.0.0.1", closed, closed) == "answers"  # refused: its kernel answers at once


def test_own_sockets_are_told_by_address_and_process() -> None:
    with listening(None) as port:
        found = [each for each in sockets.own_sockets() if each.port == port and each.state == "listening"]
        assert [(each.address, each.peer) for each in found] == [("127.0.0.1", "")]
        assert f"({os.getpid()})" in found[0].process
        assert sockets.off_fabric(found, set()) == []
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
        "   0: 00000000:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4242 1 0\n"
        "   1: 0CC8A8C0:8AE6 0DC8A8C0:734D 02 00000000:00000000 00:00000000 00000000     0        0 4243 1 0\n"
        "   2: 0CC8A8C0:8AE6 0DC8A8C0:734D 06 00000000:00000000 00:00000000 00000000     0        0 0 1 0\n"
    )
    assert list(sockets.parse_table(table)) == [
        ("listening", ("0.0.0.0", 30000), ("0.0.0.0", 0), "4242"),
        ("connecting", ("192.168.200.12", 35558), ("192.168.200.13", 29517), "4243"),
    ]
    everywhere = sockets.Socket("listening", "0.0.0.0", 30000, "", "vllm (1)")
    assert sockets.off_fabric([everywhere], {"192.168.200.12"}) == [everywhere]


def test_the_kernel_s_kills_for_memory_are_counted_for_one_generation(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 1\noom_kill 3\n")
    memory = Memory(tmp_path / "memory.json", vmstat=vmstat)
    memory.starts()
    assert memory.kills() == 0
    vmstat.write_text("oom_kill 5\n")
    assert memory.kills() == 2
    vmstat.unlink()
    assert memory.kills() == 0
