"""Operating a deployment: drift, rollback, stop over reboots, status and logs, a bundle, and what runs without Pulumi.

Only this shows that a rollback really serves again, that the drift job sees every layer, and that stopped stays
stopped. It needs what test_end_to_end.py needs and about ten minutes. The tests build on each other and run in order.

To clean up after an aborted run: ``SPARK_VLLM_HOME=… python -m lab down --instance t-auto``.
"""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from automation.exit_codes import Exit
from tests.lab.deployment import Deployment, chat, copy_checkout
from tests.lab.in_order import in_order as in_order
from tests.lab.operating import HOSTS, PROJECT, ROOT, assert_serves, run
from tests.lab.runs import BackgroundRun

pytestmark = [pytest.mark.lab, pytest.mark.campaign]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment("t-auto", tmp_path_factory.mktemp("home"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


def test_up_serves_and_a_second_one_and_drift_find_nothing(served: Deployment) -> None:
    first, said = run(served, "up")
    assert first["exit_code"] == Exit.DONE, said[-4000:]
    assert "loading" in said
    assert_serves(served)
    assert run(served, "up")[0]["changes"] == []
    clean, said = run(served, "drift")
    assert (clean["exit_code"], clean["changes"]) == (Exit.DONE, []), clean
    assert "a completion came back" in said


def test_status_and_logs_say_what_runs(served: Deployment) -> None:
    status, _ = run(served, "status")
    assert (status["exit_code"], status["state"], status["wanted"]) == (Exit.DONE, "serving", "running")
    assert next(rank["phase"] for rank in status["ranks"]) == "serving"
    assert status["settings"]["served"] == status["settings"]["file"]
    everything, _ = run(served, "logs", "--generation", "all")
    assert {line["rank"] for line in everything["lines"]} == {0, 1}
    assert {line["source"] for line in everything["lines"]} >= {"supervisor", "vllm"}
    assert [line["at"] for line in everything["lines"]] == sorted(line["at"] for line in everything["lines"])
    of_one, _ = run(served, "logs", "--rank", "1", "--since", "60m", "--lines", "5")
    assert len(of_one["lines"]) == 5 and {line["rank"] for line in of_one["lines"]} == {1}
    assert run(served, "logs", "--until", "60m")[0]["lines"] == []


def test_another_controller_on_the_same_backend_changes_nothing(served: Deployment, tmp_path: Path) -> None:
    """Another checkout, folder and home of the engine, as on a CI runner."""
    checkout = copy_checkout(tmp_path / "checkout")
    text = (
        'exec 2>/dev/null; export PULUMI_HOME="$0" HOME="$0"; python3 toolchain/bootstrap.py >&2; . ./env && '
        "exec python -m automation up --stack dev --json"
    )
    (tmp_path / "elsewhere").mkdir()
    done = served._run(["sh", "-c", text, str(tmp_path / "elsewhere")], checkout, 900)
    report = json.loads(done.text)
    assert (report["exit_code"], report["changes"]) == (Exit.DONE, []), report
    state = json.dumps(served.exported())
    assert str(checkout) not in state and str(tmp_path) not in state


def test_a_rollback_after_a_bad_flag_serves_the_old_settings_and_says_so(served: Deployment) -> None:
    good = run(served, "status")[0]["settings"]["file"]
    served.configure({"extra_args": ["--no-such-flag"], "heal": "report"})
    back, said = run(served, "up", "--rollback-on-failure")
    assert (back["exit_code"], back["rolled_back_to"]) == (Exit.ROLLED_BACK, good), said[-3000:]
    assert "no-such-flag" in json.dumps(back["error"])
    assert f"rolled back: the settings {good} serve again" in said
    assert_serves(served)
    status, _ = run(served, "status")
    assert (status["state"], status["settings"]["served"]) == ("serving", good)
    assert set(status["settings"]["differs"]) == {"groups.main.serving.extra_args", "groups.main.serving.heal"}
    assert run(served, "up")[0]["exit_code"] == Exit.REFUSED
    served.configure({})
    assert run(served, "up")[0]["changes"] == []


def memory_of(served: Deployment, host: str) -> int:
    """Bytes that a host's rank holds."""
    text = served.on(host, "docker exec $(docker ps -qf name=spark-vllm-dev-main) sh -c 'cat /proc/[0-9]*/statm'")
    return sum(int(line.split()[1]) for line in text.splitlines()) * 4096


def wait(what: Callable[[], bool], timeout_s: float = 180) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end
        time.sleep(1)


def test_stopped_means_stopped_over_reboots_drift_and_up_until_started(served: Deployment) -> None:
    serving = {host: memory_of(served, host) for host in HOSTS}
    stopped, said = run(served, "stop")
    assert (stopped["exit_code"], stopped["state"]) == (Exit.DONE, "stopped"), said
    assert all(memory_of(served, host) < min(64 * 2**20, serving[host] // 4) for host in HOSTS), serving
    clean, _ = run(served, "drift")
    assert clean["exit_code"] == Exit.DONE, clean
    assert run(served, "up")[0]["changes"] == []
    for host in HOSTS:
        served.lab("reboot", host)
    wait(lambda: all(served.status(host)["phase"] in ("stopped", "waiting_for_ranks") for host in HOSTS))
    status, _ = run(served, "status")
    assert (status["exit_code"], status["state"], status["wanted"]) == (
        Exit.DONE,
        "spark-a: stopped on request",
        "stopped",
    )
    # What a reboot of these hosts takes from their own settings is mended; the group stays as it is wanted.
    mended, said = run(served, "up")
    assert (mended["exit_code"], mended["restarts"]) == (Exit.DONE, []), said
    assert run(served, "status")[0]["state"] == "spark-a: stopped on request"
    clean, _ = run(served, "drift")
    assert clean["exit_code"] == Exit.DONE, clean
    started, said = run(served, "start")
    assert (started["exit_code"], started["state"]) == (Exit.DONE, "serving"), said
    assert_serves(served)
    assert run(served, "drift")[0]["exit_code"] == Exit.DONE


def test_maintenance_upgrades_reboots_checks_and_starts(served: Deployment) -> None:
    done, said = run(served, "maintenance", "spark-b", "--upgrade", "echo upgraded > ~/upgraded", "--reboot")
    assert (done["exit_code"], done["state"]) == (Exit.DONE, "serving"), said
    assert served.on("spark-b", "cat ~/upgraded; rm ~/upgraded") == "upgraded\n"
    assert [step for step in done["steps"] if "booted" in step]
    assert_serves(served)


def test_the_doctor_s_bundle_has_what_is_needed_and_no_secret(served: Deployment, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.tar.gz"
    report, said = run(served, "doctor", "--bundle", str(bundle))
    assert report["exit_code"] == Exit.DONE, (report, said)
    assert bundle.stat().st_mode & 0o777 == 0o600
    with tarfile.open(bundle) as opened:
        members = {m.name: opened.extractfile(m) for m in opened.getmembers()}
        texts = {name.partition("/")[2]: file.read().decode() for name, file in members.items() if file}
    assert {"doctor.json", "state.json", "history.json", "status.json", "spark-a/rank0.log.jsonl"} <= set(texts)
    for secret in secrets_of(served):
        assert not [name for name, text in texts.items() if secret in text]


def secrets_of(served: Deployment) -> list[str]:
    key = served.outputs()["api_key"]
    passphrase = (served.home / "passphrase").read_text().strip()
    return [key, passphrase, (served.folder / "sudo_password").read_text().strip()]


def test_ctrl_c_while_a_model_loads_parks_within_5_s_and_the_next_run_attaches(served: Deployment) -> None:
    served.configure({"max_num_seqs": 3})
    words = ["sh", "-c", ". ./env && exec python -m automation up --stack dev"]
    begun = BackgroundRun(words, PROJECT, served.environment)
    begun.wait_for("main-gate: update", 300)
    time.sleep(3)
    start = time.monotonic()
    begun.interrupt()
    assert begun.wait(60) == Exit.INTERRUPTED
    assert time.monotonic() - start < 5, begun.text[-2000:]
    before = [line for host in HOSTS for line in served.containers(host)]
    again, said = run(served, "up")
    assert again["exit_code"] == Exit.DONE, said[-3000:]
    assert [line for host in HOSTS for line in served.containers(host)] == before
    assert_serves(served)


def test_what_render_prints_starts_serving_on_two_hosts_from_that_text_alone(served: Deployment) -> None:
    rendered, _ = run(served, "render")
    scripts = {entry["node"]: entry["script"] for entry in rendered["nodes"]}
    outputs = served.outputs()
    assert outputs["api_key"] not in json.dumps(scripts)
    gone, said = run(served, "destroy", "--yes")
    assert gone["exit_code"] == Exit.DONE, said[-3000:]
    for host in HOSTS:
        served.on(host, f"cat > /tmp/rank.sh <<'END_OF_SCRIPT'\n{scripts[host]}END_OF_SCRIPT")
        served.on(host, "sh /tmp/rank.sh", root=True)
    wait(lambda: served.status("spark-a").get("phase") == "serving", 400)
    key = served.on("spark-a", f"cat {ROOT}/stacks/dev/secrets/main/api_key", root=True).strip()
    assert chat(outputs, key).status == 200
    for host in HOSTS:
        served.on(host, "docker rm -f $(docker ps -aq)")


def test_no_secret_was_printed(served: Deployment) -> None:
    passphrase = (served.home / "passphrase").read_text().strip()
    sudo = (served.folder / "sudo_password").read_text().strip()
    assert not [text for text in served.printed if passphrase in text or sudo in text]
