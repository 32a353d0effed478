"""Whole supervisors, end to end, against stand-ins for Ray and vLLM."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from tests.moving_files import bytes_below
from tests.unit.runtime.runtime_group import ADDRESSES, KEY, Group, Supervisor, eventually, scenario

pytestmark = pytest.mark.slow


@scenario
def test_a_group_starts_in_order_serves_and_stops_in_order(group: Group) -> None:
    head = group.start(0)
    waiting = head.wait_for("waiting_for_ranks")
    assert waiting["detail"] in ("", "rank 1 has never reported")
    assert head.command("health").returncode == 0
    assert head.command("status").returncode == 1
    worker = group.start(1)  # late
    status = head.wait_for("serving")
    worker.wait_for("serving")

    assert group.events()[:4] == ["ray-head start", "ray-worker start", "vllm start", "vllm completion"]
    assert status["schema"] == 1 and status["generation"]["n"] == 1 and status["first_error"] is None
    assert status["last_canary"]["ok"] and status["last_canary"]["how"] == "completion"
    assert set(status["ranks"]) == {"0", "1"} and status["ranks"]["1"]["address"] == ADDRESSES[1]
    assert group.ask("/status")[1]["phase"] == "serving"
    shown = head.command("status")
    assert shown.returncode == 0 and json.loads(shown.stdout)["rank"] == 0
    assert head.command("health").returncode == worker.command("health").returncode == 0
    argv = json.loads((group.folder / "vllm.argv").read_text())
    assert argv[:2] == ["serve", "/models/x"] and argv[-2:] == ["--max-model-len", "512"]
    env = json.loads((group.folder / "vllm.env").read_text())
    assert env["RAY_ADDRESS"] == f"127.0.0.1:{group.ports[0]}"
    assert env["PYTHONPATH"].split(":")[-1] == str(group.mount)
    names = json.loads((Path(env["VLLM_CONFIG_ROOT"]) / "ray_non_carry_over_env_vars.json").read_text())
    assert "VLLM_HOST_IP" in names

    assert head.stop() == 0
    assert head.status()["phase"] == "stopped" and head.command("health").returncode == 1
    assert group.events()[4:] == ["vllm stop", "ray-worker stop", "ray-head stop"]
    left = worker.wait_for("waiting_for_ranks")  # a clean stop of the head is no failure of the worker
    assert left["first_error"] is None
    assert worker.stop() == 0 and worker.status()["phase"] == "stopped"
    assert group.left_over() == []
    log = (head.state_dir / "logs" / "1" / "rank0.log").read_text()
    assert "vllm | " in log and "ray | " in log and "vllm | INFO:     Application" in head.text()
    assert (worker.state_dir / "logs" / "1" / "rank1.log").exists()
    for text in (log, head.text(), worker.text(), json.dumps(argv), json.dumps(env), json.dumps(status)):
        assert KEY not in text


@scenario
def test_without_ray_the_ranks_start_side_by_side_and_end_together(group: Group) -> None:
    head = group.start(0, "--backend mp --heal restart")
    worker = group.start(1, "--backend mp")
    status = head.wait_for("serving")
    worker.wait_for("serving")
    assert group.events()[:3] == ["vllm start", "vllm-headless start", "vllm completion"]
    argv = json.loads((group.folder / "vllm-headless.argv").read_text())
    assert "--headless" in argv and "--port" not in argv and "--middleware" not in argv
    assert argv[-2:] == ["--max-model-len", "512"]
    env = json.loads((group.folder / "vllm-headless.env").read_text())
    assert "RAY_ADDRESS" not in env and "SPARK_VLLM_API_KEY_FILE" not in env
    assert status["generation"]["n"] == 1 and not any(event.startswith("ray") for event in group.events())

    worker.process.kill()
    worker.process.wait()
    for pid in group.left_over():  # a container would have taken its own with it
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"VLLM_HOST_IP=127.0.0.2" in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, 9)
    again = group.start(1, "--backend mp")
    status = head.wait_for("serving", generation=2)
    assert "rank 1" in status["healing"]["last_failure"]["line"]
    again.wait_for("serving")
    assert head.stop() == 0
    again.wait_for("waiting_for_ranks")
    assert again.stop() == 0 and again.status()["first_error"] is None
    eventually(lambda: group.left_over() == [], group.left_over)


@scenario
def test_without_ray_a_rank_that_fails_is_told_by_its_own_cause(group: Group) -> None:
    head = group.start(0, "--backend mp --lease-interval-s 1")
    worker = group.start(1, "--backend mp --lease-interval-s 1", FAKE_VLLM="headless_dies")
    error = head.wait_for("failed")["first_error"]
    assert error["source"] == "rank 1 vllm"
    assert error["line"].startswith("rank 1 (127.0.0.2): ValueError: Free memory on device cuda:0")
    assert worker.status()["first_error"]["line"].startswith("ValueError: Free memory on device")


@scenario
def test_without_ray_the_cause_on_the_head_is_not_hidden_by_a_rank_that_lost_it(group: Group) -> None:
    head = group.start(0, "--backend mp --lease-interval-s 1", FAKE_VLLM="dies_loading")
    group.start(1, "--backend mp --lease-interval-s 1")
    error = head.wait_for("failed")["first_error"]
    assert error["line"].startswith("ValueError: Free memory on device cuda:0") and error["source"] == "vllm"


@scenario
def test_a_group_stopped_on_request_stays_down_over_restarts_and_starts_when_asked(group: Group) -> None:
    head, worker = group.start(0, "--heal restart"), group.start(1)
    head.wait_for("serving")
    (head.state_dir / "desired").write_text("stopped\n")
    stopped = head.wait_for("stopped")
    assert stopped["desired"] == "stopped" and stopped["first_error"] is None
    eventually(lambda: group.left_over() == [], group.left_over)
    assert head.command("health").returncode == 1
    head.process.kill()
    head.process.wait()
    again = group.start(0, "--heal restart")  # a reboot
    again.wait_for("stopped")
    assert group.events().count("vllm start") == 1
    (head.state_dir / "desired").write_text("run\n")
    again.wait_for("serving")
    (worker.state_dir / "desired").write_text("stopped\n")
    failed = again.wait_for("failed")
    assert failed["detail"] == "rank 1 (127.0.0.2) is stopped on request"
    (worker.state_dir / "desired").unlink()
    again.wait_for("serving")
    eventually(lambda: worker.status()["group_state"].get("phase") == "serving", worker.status)
    shown = worker.status()["group_state"]
    assert shown["ranks"]["0"] == "serving" and shown["last_good_canary_at"]


@scenario
def test_a_supervisor_costs_less_than_40_mb_and_half_a_percent_of_a_core(group: Group) -> None:
    real = "--lease-interval-s 2 --lease-timeout-s 25"
    ranks = [group.start(0, real), group.start(1, real)]
    ranks[0].wait_for("serving")

    def used_s(rank: Supervisor) -> float:
        fields = Path(f"/proc/{rank.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before, start = [used_s(rank) for rank in ranks], time.monotonic()
    time.sleep(20)
    for rank, used in zip(ranks, before, strict=True):
        share = (used_s(rank) - used) / (time.monotonic() - start)
        rss = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{rank.process.pid}/status").read_text())
        assert rss is not None and int(rss.group(1)) < 40 * 1024
        assert share < 0.005, f"{share:.2%} of a core"


@scenario
def test_the_fabric_port_shows_health_and_metrics(group: Group) -> None:
    head = group.start(0, "--node-names spark-a")
    head.wait_for("waiting_for_ranks")
    assert group.ask("/health") == (503, {"serving": False, "phase": "waiting_for_ranks"})
    group.start(1)
    head.wait_for("serving")
    assert group.ask("/health")[0] == 200
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
        f"http://{ADDRESSES[0]}:{group.ports[1]}/metrics", timeout=10
    ) as answer:
        text = answer.read().decode()
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'spark_vllm_serving{group="main"} 1' in text
    assert 'spark_vllm_rank_phase{group="main",rank="0",node="spark-a",phase="serving"} 1' in text


@scenario
def test_a_worker_that_never_comes_is_named(group: Group) -> None:
    head = group.start(0, "--join-timeout-s 1")
    failed = head.wait_for("failed")
    assert failed["first_error"]["line"] == "not all ranks came within 1 s: rank 1 has never reported"
    assert head.command("health").returncode == 1
    assert group.events() == []


@scenario
def test_a_head_that_never_comes_is_named(group: Group) -> None:
    worker = group.start(1, "--join-timeout-s 1")
    failed = worker.wait_for("failed")
    assert f"no lease from the head at 127.0.0.1:{group.ports[1]} within 1 s" in failed["detail"]
    group.start(0).wait_for("serving")  # it is still calling


@scenario
def test_a_worker_of_another_deployment_is_refused_by_both(group: Group) -> None:
    head = group.start(0, "--join-timeout-s 4")
    worker = group.start(1, "--deployment d0 --join-timeout-s 1")
    text = "refused rank 1 at 127.0.0.2: it is of deployment 'd0', this head is of 'd1'"
    assert text in worker.wait_for("failed")["detail"]
    failed = head.wait_for("failed")
    assert failed["refused"] == [text] and text in failed["first_error"]["line"]
    assert group.events() == []


@scenario
def test_two_gpus_on_one_node_are_refused(group: Group) -> None:
    head = group.start(0)
    group.start(1, "--node-address 127.0.0.1")
    line = head.wait_for("failed")["first_error"]["line"]
    assert "two ranks run on one node: rank 0 (127.0.0.1), rank 1 (127.0.0.1)" in line
    assert "vllm start" not in group.events()


@scenario
def test_a_rank_missing_in_ray_is_named(group: Group) -> None:
    head = group.start(0, "--join-timeout-s 3")
    group.start(1, "--gpus-per-node 0")
    line = head.wait_for("failed")["first_error"]["line"]
    assert line == (
        "Ray was not complete within 3 s: Ray has 2 of 2 nodes, 1 of 2 GPUs;"
        " rank 1 (127.0.0.2) brings fewer than 1 GPUs"
    )


@scenario
def test_the_earliest_cause_of_a_failed_load_is_named_among_noise(group: Group) -> None:
    head, worker = group.start(0, FAKE_VLLM="dies_loading"), group.start(1)
    failed = head.wait_for("failed")
    error = failed["first_error"]
    assert error["line"].startswith("ValueError: Free memory on device cuda:0") and error["source"] == "vllm"
    assert any("Engine core initialization failed" in line for line in error["last_lines"])
    assert failed["exit_codes"]["vllm"] == 1
    eventually(lambda: "Free memory on device cuda:0" in worker.status()["detail"], worker.status)
    assert worker.status()["phase"] == "waiting_for_ranks" and worker.status()["first_error"] is None
    eventually(lambda: group.left_over() == [], group.left_over)
    end = json.loads((head.state_dir / "logs" / "1" / "rank0.end.json").read_text())
    assert end["first_error"] == error


@scenario
def test_a_death_on_the_first_completion_is_said_to_be_one(group: Group) -> None:
    head = group.start(0, FAKE_VLLM="dies_on_completion")
    group.start(1)
    assert head.wait_for("failed")["first_error"]["line"] == (
        "vllm answered /health with 200, then died on the first completion:"
        " InductorError: No working C++ compiler found"
    )


@scenario
def test_an_api_that_ignores_its_keys_never_serves(group: Group) -> None:
    head = group.start(0, nodes=1, FAKE_VLLM="ignores_keys")
    assert "the API answers without a key" in head.wait_for("failed")["first_error"]["line"]


@scenario
def test_vllm_that_hangs_on_sigterm_is_killed(group: Group) -> None:
    head = group.start(0, "--stop-grace-s 0.5", nodes=1, FAKE_VLLM="hangs_on_sigterm")
    head.wait_for("serving")
    assert head.stop() == 0
    assert head.status()["phase"] == "stopped" and head.status()["exit_codes"]["vllm"] == -9
    assert group.left_over() == []


def end_what_a_container_ends(group: Group, address: str) -> None:
    """A container takes all its processes with it; here those of a killed supervisor live on."""
    for pid in group.left_over():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if address in str(Path(f"/proc/{pid}/cmdline").read_bytes()):
                os.kill(pid, 9)


@scenario
def test_a_killed_worker_ends_the_generation_and_a_restart_begins_the_next(group: Group) -> None:
    head, worker = group.start(0), group.start(1)
    head.wait_for("serving")
    worker.process.kill()
    worker.process.wait()
    end_what_a_container_ends(group, "127.0.0.2")
    again = group.start(1)
    failed = head.wait_for("failed")
    assert failed["first_error"]["line"] == "rank 1 (127.0.0.2) was restarted while the generation ran"
    again.wait_for("waiting_for_ranks")
    assert group.events().count("ray-worker start") == 1  # it did not rejoin the old generation
    assert head.command("restart").returncode == 0
    assert head.wait_for("serving", generation=2)["first_error"] is None
    assert again.command("restart").returncode == 0  # on any rank
    head.wait_for("serving", generation=3)
    assert sorted(path.name for path in (head.state_dir / "logs").iterdir()) == ["1", "2", "3"]


@scenario
def test_a_killed_worker_that_comes_back_is_enough_for_the_group_to_serve_again(group: Group) -> None:
    names = "--node-names spark-a,spark-b"
    head, worker = group.start(0, "--heal restart", names), group.start(1, names)
    assert head.wait_for("serving")["healing"] == {
        "policy": "restart", "failures_before_serving": 0, "retry_in_s": None, "last_failure": None
    }  # fmt: skip
    worker.process.kill()
    worker.process.wait()
    end_what_a_container_ends(group, "127.0.0.2")
    group.start(1, names)
    status = head.wait_for("serving", generation=2)
    last = status["healing"]["last_failure"]
    assert last["line"] == "rank 1 on spark-b (127.0.0.2) was restarted while the generation ran"
    assert (last["generation"], last["phase"], last["source"]) == (1, "serving", "rank 1")
    assert status["first_error"] is None and status["healing"]["failures_before_serving"] == 0
    assert [line for line in group.events() if "start" in line] == [
        "ray-head start", "ray-worker start", "vllm start"
    ] * 2  # fmt: skip
    end = json.loads((head.state_dir / "logs" / "1" / "rank0.end.json").read_text())
    assert end["phase"] == "backing_off" and end["first_error"]["line"] == last["line"]


@scenario
def test_vllm_that_dies_while_serving_is_started_again(group: Group) -> None:
    head = group.start(0, "--heal restart", nodes=1)
    head.wait_for("serving")
    (group.folder / "vllm_dies_now").touch()
    head.wait_for("ending")
    (group.folder / "vllm_dies_now").unlink()
    status = head.wait_for("serving", generation=2)
    assert status["healing"]["last_failure"]["line"] == "vllm ended with exit code 3"


@scenario
def test_a_failure_that_no_second_try_can_cure_is_a_verdict_at_once(group: Group) -> None:
    head = group.start(0, "--heal restart")
    group.start(1, FAKE_RAY="dies_at_start")
    failed = head.wait_for("failed")
    assert "Version mismatch" in failed["first_error"]["line"] and failed["generation"]["n"] == 1
    assert head.command("health").returncode == 1
    assert head.command("restart").returncode == 0
    head.wait_for("failed", generation=2)


@scenario
def test_a_rank_that_was_stopped_by_hand_is_taken_in_when_it_returns(group: Group) -> None:
    head, worker = group.start(0, "--heal restart"), group.start(1)
    head.wait_for("serving")
    assert worker.stop() == 0
    failed = head.wait_for("failed")
    assert failed["first_error"]["line"] == "rank 1 (127.0.0.2) was stopped by hand or by its deployment (SIGTERM)"
    group.start(1)
    head.wait_for("serving", generation=2)


@scenario
def test_a_head_that_was_killed_in_the_middle_of_a_start_knows_of_it(group: Group) -> None:
    head = group.start(0, "--heal restart")
    group.start(1, "--gpus-per-node 0")  # Ray stays incomplete
    head.wait_for("ray_starting")
    eventually(lambda: json.loads((head.state_dir / "attempts.json").read_text())["unfinished"])
    head.process.kill()
    head.process.wait()
    for pid in group.left_over():
        os.kill(pid, 9)
    again = group.start(0, "--heal restart")
    again.wait_for("ray_starting", generation=2)
    assert again.status()["healing"]["failures_before_serving"] == 1
    assert again.stop() == 0
    assert json.loads((head.state_dir / "attempts.json").read_text()) == {"crashes": [], "unfinished": False}


@scenario
def test_a_silent_worker_ends_the_generation(group: Group) -> None:
    head, worker = group.start(0, "--lease-timeout-s 3"), group.start(1)
    head.wait_for("serving")
    worker.process.kill()
    assert "rank 1 (127.0.0.2) was not heard of for" in head.wait_for("failed")["first_error"]["line"]


@scenario
def test_a_stopped_worker_is_told_apart_from_a_dead_one(group: Group) -> None:
    head, worker = group.start(0), group.start(1)
    head.wait_for("serving")
    assert worker.stop() == 0
    line = head.wait_for("failed")["first_error"]["line"]
    assert line == "rank 1 (127.0.0.2) was stopped by hand or by its deployment (SIGTERM)"


@scenario
def test_ray_dying_on_a_worker_is_told_with_its_cause(group: Group) -> None:
    head = group.start(0)
    worker = group.start(1, FAKE_RAY="dies_at_start")
    error = head.wait_for("failed")["first_error"]
    assert error["source"] == "rank 1 ray"
    assert error["line"].startswith("rank 1 (127.0.0.2): RuntimeError: Version mismatch")
    assert worker.status()["phase"] == "failed"


@scenario
def test_a_dead_head_frees_the_worker_and_the_next_head_gets_it(group: Group) -> None:
    head = group.start(0)
    worker = group.start(1, "--lease-timeout-s 3")
    head.wait_for("serving")
    head.process.kill()
    head.process.wait()
    failed = worker.wait_for("failed")
    assert "was not heard of for" in failed["detail"]
    for pid in group.left_over():
        os.kill(pid, 9)  # a container would have taken these with it
    eventually(lambda: group.left_over() == [])
    group.start(0).wait_for("serving", generation=2)


@scenario
def test_vllm_dying_while_serving_is_explained_by_the_end_of_the_log(group: Group) -> None:
    head = group.start(0, nodes=1)
    head.wait_for("serving")
    (group.folder / "vllm_dies_now").touch()
    failed = head.wait_for("failed")
    assert failed["exit_codes"]["vllm"] == 3
    assert failed["first_error"]["line"] == "vllm ended with exit code 3"


@scenario
def test_a_server_that_stops_completing_is_found_out(group: Group) -> None:
    head = group.start(0, "--canary-interval-s 0.2 --canary-timeout-s 5", nodes=1)
    head.wait_for("serving")
    eventually(lambda: group.events().count("vllm completion") > 2)
    assert head.status()["phase"] == "serving"
    (group.folder / "completions_fail").touch()
    failed = head.wait_for("failed")
    assert failed["first_error"]["line"] == "vllm stopped serving: the completion got HTTP 500: no more"
    assert failed["last_canary"]["ok"] is False


@scenario
def test_tokens_of_real_requests_stand_in_for_the_canary(group: Group) -> None:
    head = group.start(0, "--canary-interval-s 0.2", nodes=1, FAKE_VLLM="busy")
    head.wait_for("serving")
    eventually(lambda: head.status()["last_canary"]["how"] == "traffic", head.status)
    assert head.status()["last_canary"]["ok"] and group.events().count("vllm completion") == 1


@scenario
def test_the_status_server_takes_leases_only(group: Group) -> None:
    head = group.start(0)
    head.wait_for("waiting_for_ranks")
    assert group.ask("/")[0] == 404 and group.ask("/status", b"{}")[0] == 404
    assert group.ask("/lease", b"{")[0] == 400
    assert group.ask("/lease", b"[" * 60_000)[0] == 400
    assert group.ask("/lease", b'{"group": 1}') == (400, {"error": "not a lease: group: expected a text"})
    assert group.ask("/lease", b" " * 65_537)[0] == 413
    lease = {
        "group": "main",
        "deployment": "d1",
        "rank": 1,
        "nodes": 2,
        "address": "a",
        "incarnation": "i",
        "sequence": 1,
    }
    for wrong in ({"group": "other"}, {"deployment": "d2"}, {"rank": 2}, {"rank": 0}, {"nodes": 3}):
        code, answer = group.ask("/lease", json.dumps({**lease, "phase": "starting", **wrong}).encode())
        assert code == 409 and "refused rank" in answer["error"]
    assert group.ask("/lease", json.dumps({**lease, "phase": "starting", "rank": True}).encode())[0] == 400


@scenario
def test_the_log_of_a_generation_is_bounded_and_status_always_whole(group: Group) -> None:
    head = group.start(0, "--log-limit-bytes 200000", nodes=1, FAKE_VLLM="talks")
    head.wait_for("serving")
    folder = head.state_dir / "logs" / "1"
    eventually(lambda: (folder / "rank0.tail.1.log").exists())
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        assert head.status()["phase"] == "serving"  # parsed anew each time
    assert 0 < bytes_below(folder, "*.log") <= 250_000
    assert "starting ray" in (folder / "rank0.log").read_text()


@scenario
def test_arguments_that_are_the_supervisors_own_are_refused(group: Group) -> None:
    head = group.start(0, "-- --api-key sk-x --port=1")
    assert head.process.wait(30) == 2
    assert "--api-key: it would show in the process list; use --api-key-file; --port: set by" in head.text()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
@scenario
def test_as_pid_1_it_leaves_nothing_in_its_container(group: Group) -> None:
    script = 'mount -t tmpfs shm /dev/shm && exec "$0" "$@"'
    wrapper = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "sh", "-c", script)
    if subprocess.run([*wrapper[:-1], "true"], check=False).returncode != 0:
        pytest.skip("namespaces are not permitted here")
    (group.folder / "vllm_mode").write_text("leaves_shm")
    head = group.start(0, wrapper=wrapper, nodes=1)
    assert head.wait_for("serving")["pid"] == 1
    inside = Path(f"/proc/{head.process.pid}/task/{head.process.pid}/children").read_text().split()[0]
    shm = Path(f"/proc/{inside}/root/dev/shm")
    assert (shm / "folder" / "file").exists()
    (group.folder / "vllm_dies_now").touch()
    head.wait_for("failed")
    assert list(shm.iterdir()) == []
    assert [path for path in Path(f"/proc/{inside}/root/proc").iterdir() if path.name.isdigit()] == [
        Path(f"/proc/{inside}/root/proc/1")
    ]
    os.kill(int(inside), 15)
    assert head.process.wait(30) == 0
