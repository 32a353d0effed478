"""Report, benchmark and monitoring on a served deployment, healthy and broken, in a real browser and a real Prometheus.

The first tests need no lab: the page of a made-up deployment in the browser, and every query of the dashboard against a
Prometheus of this machine. The others build on each other. Chromium, Prometheus and node exporter are Debian's,
unpacked into the cache (``toolchain/seeing.sh``); Grafana is not among Debian's packages and is not run.

To clean up after an aborted run: ``SPARK_VLLM_HOME=… python -m lab down --instance t-see``.
"""

from __future__ import annotations

import html
import http.server
import shlex
import shutil
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from automation.exit_codes import Exit
from automation.page import page
from spark_core.monitoring import monitoring_files
from spark_core.monitoring.metrics import METRICS, RDMA_SENT
from spark_core.monitoring.panels import SECTIONS
from spark_core.settings import read_settings
from spark_runtime.status_server import StatusServer
from tests.config_cases import load_base
from tests.lab.deployment import Deployment
from tests.lab.in_order import in_order as in_order
from tests.lab.operating import HOSTS, assert_serves, run
from tests.lab.seeing import Look, ask_prometheus, free_port, look, of_grafana, program, running, series_of
from tests.lab.test_end_to_end import dying_at_its_first_completion
from tests.unit.automation.seen_deployment import KEY, SeenDeployment, clean, drifted
from tests.unit.runtime.test_metrics import DOCUMENT

pytestmark = [pytest.mark.lab, pytest.mark.campaign]

HEAD, WORKER = HOSTS
LEAST_CONTRAST = 4.5
"""What WCAG 2 (AA) asks of text."""
QUERIES = [query.expression for section in SECTIONS for panel in section.panels for query in panel.queries]
ASKING = """
import json, sys, urllib.error, urllib.parse, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1] + urllib.parse.urlencode({"query": sys.argv[2]})).read().decode())
except urllib.error.URLError as error:
    if getattr(error, "code", 503) != 503:
        raise
    print(json.dumps({"status": "success", "data": {"result": []}}))  # it is still starting
"""
MAY_BE_EMPTY = (RDMA_SENT.name, "ALERTS", "Swap")
"""Nothing is there on these hosts, or nothing is wrong."""
ROOT, DOCKER_DISK = 'mountpoint="/"', 'mountpoint="/var/lib/docker"'
"""Of an emulated host's disks: its root is an overlay, which node exporter leaves out; the other is one of its own."""


def assert_readable(seen: Look, *, dark: bool) -> None:
    """It fits its window, asks for nothing, and every text stands out from what is behind it."""
    assert seen.seen["wide"] <= seen.seen["window"], seen.seen
    assert seen.seen["asked"] == []
    assert seen.seen["worst"]["ratio"] >= LEAST_CONTRAST, seen.seen["worst"]
    assert (max(seen.seen["background"][:3]) < 80) == dark
    assert len(seen.seen["pictures"]) == 1
    assert seen.seen["pictures"][0][0] > 250 and seen.seen["small"] >= 9, seen.seen


@pytest.mark.parametrize("width", [1100, 390], ids=["desk", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("state", ["serving", "drifted", "broken", "unknown"])
def test_the_page_is_readable_in_a_browser(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str, dark: bool, width: int
) -> None:
    made = SeenDeployment(monkeypatch)
    if state == "broken":
        made.break_head("torch.OutOfMemoryError: CUDA out of memory. " + "x" * 300, ["a line", "y" * 300])
    elif state == "unknown":
        made.silent.add("spark-b")
    file = tmp_path / "report.html"
    file.write_text(page(made.report(clean() if state == "serving" else drifted())))
    seen = look(file, tmp_path, "report", width=width, dark=dark)
    assert_readable(seen, dark=dark)
    assert f'data-verdict="{state}"' in seen.dom
    assert KEY not in seen.dom


def test_hostile_text_is_only_text_in_a_browser(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = SeenDeployment(monkeypatch)
    attack = "</pre></style><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    made.break_head(attack, [attack])
    made.message = attack
    file = tmp_path / "report.html"
    file.write_text(page(made.report(drifted())))
    seen = look(file, tmp_path, "hostile")
    assert "<title>Not serving as wanted: spark</title>" in seen.dom
    assert "<img" not in seen.dom and "<script" not in seen.dom


def vllm_metrics() -> str:
    """Samples by the names and labels of vLLM's own, which grow from one look to the next."""
    now = time.time() % 10_000
    label = 'model_name="qwen",engine="0"'
    lines = []
    for metric in METRICS:
        if metric.source != "vllm":
            continue
        more = ',finished_reason="stop"' if "success" in metric.name else ""
        if metric.name.endswith("_bucket"):
            lines += [f'{metric}{{{label},le="{le}"}} {now * share}' for le, share in (("0.1", 1), ("+Inf", 2))]
        else:
            lines.append(f"{metric}{{{label}{more}}} {now if metric.name.endswith('_total') else 0.5}")
    return "\n".join(lines) + "\n"


class Vllm(http.server.BaseHTTPRequestHandler):
    """Answers as vLLM's /metrics does."""

    def do_GET(self) -> None:
        body = vllm_metrics().encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_prometheus_takes_the_files_and_every_query_of_the_dashboard_has_an_answer(tmp_path: Path) -> None:
    raw = load_base()
    ports = [free_port() for _ in range(4)]
    raw["groups"]["main"]["serving"] |= {"host": "127.0.0.1", "port": ports[0], "status_port": ports[1]}
    raw["groups"]["main"]["serving"] |= {"tensor_parallel_size": 1}
    raw["groups"]["main"]["nodes"] = ["spark-a"]
    raw["nodes"] = [{**raw["nodes"][0], "fabric": []}]
    digest = f"sha256:{'0' * 64}"
    raw["monitoring"] = {"prometheus": digest, "prometheus_port": ports[2], "node_exporter_port": ports[3]}
    files = monitoring_files(read_settings(raw), "main", "spark")
    for path, text in files.prometheus.items():
        (tmp_path / path).write_text(text.replace('"15s"', '"1s"'))
    for words in (["config", "prometheus.yml"], ["rules", "rules.yml"]):
        done = subprocess.run([program("promtool"), "check", *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "SUCCESS" in done.stdout
    supervisor = StatusServer("127.0.0.1", ports[1], lambda: DOCUMENT, lambda _lease: pytest.fail("no lease is asked"))
    vllm = http.server.ThreadingHTTPServer(("127.0.0.1", ports[0]), Vllm)
    threading.Thread(target=vllm.serve_forever, daemon=True).start()
    exporter = [program("prometheus-node-exporter"), f"--web.listen-address=127.0.0.1:{ports[3]}"]
    prometheus = [program("prometheus"), f"--config.file={tmp_path}/prometheus.yml"]
    prometheus += [f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{ports[2]}"]
    try:
        with (
            running(exporter, tmp_path / "exporter.log", ports[3]),
            running(prometheus, tmp_path / "prometheus.log", ports[2]),
        ):
            base = f"http://127.0.0.1:{ports[2]}"
            wait(lambda: len(ask_prometheus(base, "up == 1")) == 3, 60)
            wait(lambda: unanswered(lambda query: ask_prometheus(base, query)) == [], 60)
            assert ask_prometheus(base, "min(spark_vllm_serving)")[0]["value"][1] == "1"
    finally:
        supervisor.close()
        vllm.shutdown()
        vllm.server_close()


def unanswered(ask: Callable[[str], list[dict[str, Any]]]) -> list[str]:
    """Queries of the dashboard that give nothing, though something is there."""
    return [query for query in QUERIES if not any(word in query for word in MAY_BE_EMPTY) and not ask(query)]


def wait(what: Callable[[], bool], timeout_s: float = 180) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end
        time.sleep(1)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment("t-see", tmp_path_factory.mktemp("home"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


def reported(served: Deployment, *words: str) -> tuple[dict[str, Any], Path]:
    """What ``report`` tells, and its page."""
    file = served.home / "report.html"
    file.unlink(missing_ok=True)
    report, said = run(served, "report", "--output", str(file), *words)
    assert report["exit_code"] == Exit.DONE, said[-3000:]
    served.printed.append(file.read_text())
    return report, file


def test_a_served_deployment_is_healthy_on_the_page(served: Deployment) -> None:
    up, said = run(served, "up")
    assert up["exit_code"] == Exit.DONE, said[-4000:]
    report, file = reported(served)
    assert (report["verdict"], report["unread"]) == ("serving", []), report
    assert next(node["phase"] for node in report["nodes"]) == "serving"
    assert {subnet["network"] for subnet in report["subnets"]} == {"192.168.200.0/24", "192.168.201.0/24"}
    assert report["drift"]["changes"] == []
    took = {step["name"]: step["seconds"] for step in report["last_up"]["steps"]}
    assert took["main-gate"] > 5 and took["image-copy"] > 0
    assert {"loading", "canary"} <= {phase["phase"] for phase in report["last_up"]["phases"]}
    assert report["generations"][0]["error"] == ""
    assert all(node["changed"] for node in report["nodes"])
    for dark in (False, True):
        seen = look(file, served.home, f"healthy-{'dark' if dark else 'light'}", width=390 if dark else 1100, dark=dark)
        assert_readable(seen, dark=dark)
        assert 'data-verdict="serving"' in seen.dom


def test_the_benchmark_of_the_image_measures_and_its_figures_are_kept(served: Deployment) -> None:
    outputs = served.outputs()
    bench, said = run(served, "bench")
    assert bench["exit_code"] == Exit.DONE, said[-3000:]
    assert [one["concurrency"] for one in bench["speed"]] == [1, 8]
    assert all(one["output_tokens_per_s"] > 0 and one["ttft_median_ms"] > 0 for one in bench["speed"])
    assert (bench["comparisons"], bench["kept"]) == ([], True)
    assert outputs["api_key"] not in said
    for host in HOSTS:
        assert "bench" not in served.on(host, "docker ps -a --format '{{.Names}}'")
    again, said = run(served, "up")
    assert (again["exit_code"], again["changes"]) == (Exit.DONE, []), said[-3000:]
    assert run(served, "drift")[0]["exit_code"] == Exit.DONE
    report, _ = reported(served, "--no-drift")
    assert report["speed"] == bench["speed"]


def test_a_fall_after_a_change_of_settings_is_told_with_what_changed(served: Deployment) -> None:
    served.configure({"max_num_seqs": 1})  # eight at a time then wait for each other
    up, said = run(served, "up")
    assert up["exit_code"] == Exit.DONE, said[-4000:]
    bench, said = run(served, "bench", "--concurrency", "8")
    assert bench["exit_code"] == Exit.DRIFT, (bench, said[-3000:])
    [beside] = bench["comparisons"]
    assert beside["changed"] == ["groups.main.serving.max_num_seqs"]
    assert any(figure["fell"] for figure in beside["figures"])
    served.configure({})
    assert run(served, "up")[0]["exit_code"] == Exit.DONE


def of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A member of an image, which belongs to root."""
    member.uid, member.gid, member.uname, member.gname = 0, 0, "root", "root"
    return member


def image_of(served: Deployment, folder: Path) -> str:
    """An image with Debian's Prometheus and node exporter, laid out as the official ones, on both hosts; its id."""
    root = folder / "root"
    for name, target in (("prometheus", "bin/prometheus"), ("prometheus-node-exporter", "bin/node_exporter")):
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(program(name)).resolve(), root / target)
    for library in ("/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"):
        (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(library).resolve(), root / library[1:])
    for name in ("prometheus", "etc/prometheus", "tmp"):
        (root / name).mkdir(parents=True)
    archive = folder / "image.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(root, arcname=".", filter=of_root)
    ssh = ["ssh", "-F", str(served.folder / "ssh_config"), "-o", "BatchMode=yes"]
    with archive.open("rb") as content:
        done = subprocess.run(
            [*ssh, HEAD, "docker import -"], stdin=content, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stderr
    found = done.stdout.strip()
    with (folder / "saved.tar").open("wb") as saved:
        subprocess.run([*ssh, HEAD, f"docker save {found}"], stdout=saved, check=True, timeout=300)
    with (folder / "saved.tar").open("rb") as content:
        subprocess.run([*ssh, WORKER, "docker load"], stdin=content, check=True, capture_output=True, timeout=300)
    return found


def watch(served: Deployment, query: str) -> list[dict[str, Any]]:
    """What the stack's own Prometheus answers, asked on the head."""
    words = ("python3", "-c", ASKING, "http://127.0.0.1:9090/api/v1/query?", of_grafana(query))
    return series_of(served.on(HEAD, shlex.join(words)), query)


def is_serving(served: Deployment) -> str:
    """What Prometheus has last heard of it."""
    found = watch(served, "min(spark_vllm_serving)")
    return str(found[0]["value"][1]) if found else ""


def test_monitoring_comes_without_a_restart_and_answers_every_query(
    served: Deployment, tmp_path_factory: pytest.TempPathFactory
) -> None:
    image = image_of(served, tmp_path_factory.mktemp("image"))
    before = [line for host in HOSTS for line in served.containers(host)]

    def watched(config: dict[str, Any]) -> None:
        config["monitoring"] = {"prometheus": image, "node_exporter": image}

    served.configure({}, edit=watched)
    up, said = run(served, "up")
    assert (up["exit_code"], up["restarts"]) == (Exit.DONE, []), said[-4000:]
    after = [line for host in HOSTS for line in served.containers(host)]
    assert set(before) <= set(after) and len(after) == len(before) + 3
    assert run(served, "up")[0]["changes"] == []
    assert run(served, "drift")[0]["exit_code"] == Exit.DONE
    wait(lambda: len(watch(served, "up == 1")) == 4)
    assert_serves(served)
    wait(lambda: is_serving(served) == "1")
    end = time.monotonic() + 240
    while lacking := unanswered(lambda query: watch(served, query.replace(ROOT, DOCKER_DISK))):
        assert time.monotonic() < end, lacking
        assert_serves(served)  # rates need requests
        time.sleep(5)
    listening = served.on(HEAD, "ss -Hltn 'sport = :9090'")
    assert "127.0.0.1:9090" in listening and "0.0.0.0" not in listening.split()[3]


def test_a_rank_stopped_by_hand_is_broken_on_the_page_and_in_prometheus(served: Deployment) -> None:
    served.on(WORKER, "docker stop -t 60 spark-vllm-dev-main-rank1", timeout_s=180)
    report, file = reported(served)
    assert report["verdict"] == "broken", report["headline"]
    assert "spark-b: container stopped" in report["headline"]
    assert report["drift"]["changes"]
    seen = look(file, served.home, "stopped")
    assert_readable(seen, dark=False)
    assert 'data-verdict="broken"' in seen.dom
    wait(lambda: is_serving(served) == "0")
    wait(lambda: bool(watch(served, 'ALERTS{alertname="NotServing"}')), 120)
    up, said = run(served, "up")
    assert up["exit_code"] == Exit.DONE, said[-3000:]
    assert reported(served, "--no-drift")[0]["verdict"] == "serving"


def test_a_start_that_fails_is_on_the_page_with_its_first_error(served: Deployment) -> None:
    # A flag that the image does not know would be refused before anything stops. This fails once it serves.
    served.configure(dying_at_its_first_completion())
    up, _ = run(served, "up")
    assert up["exit_code"] == Exit.FAILED
    report, file = reported(served, "--no-drift")
    assert report["verdict"] == "broken", report["headline"]
    error = report["generations"][0]["error"]
    assert "first completion" in error or "compiler" in error.lower(), error
    assert report["last_up"]["update"]["result"] == "failed"
    seen = look(file, served.home, "failed", width=390)
    assert_readable(seen, dark=False)
    assert error[:30] in html.unescape(seen.dom.partition('id="fabric"')[0])
    served.configure({})
    up, said = run(served, "up")
    assert up["exit_code"] == Exit.DONE, said[-3000:]


def test_a_host_without_power_is_named_and_the_rest_is_told(served: Deployment) -> None:
    served.lab("power-cut", WORKER)
    try:
        report, file = reported(served)
        assert report["verdict"] == "unknown"
        assert "spark-b cannot be reached" in report["headline"]
        assert "node spark-b" in [part["part"] for part in report["unread"]]
        assert report["generations"] and report["history"]
        seen = look(file, served.home, "dark-host", dark=True)
        assert_readable(seen, dark=True)
        assert "Traceback" not in seen.dom
    finally:
        served.lab("power-on", WORKER)
    up, said = run(served, "up")
    assert up["exit_code"] == Exit.DONE, said[-3000:]


def test_destroy_takes_all_of_it_away_and_no_secret_was_shown(served: Deployment) -> None:
    key = served.outputs()["api_key"]
    passphrase = (served.home / "passphrase").read_text().strip()
    sudo = (served.folder / "sudo_password").read_text().strip()
    for secret in (key, passphrase, sudo):
        assert not [text for text in served.printed if secret in text]
    gone, said = run(served, "destroy", "--yes")
    assert gone["exit_code"] == Exit.DONE, said[-3000:]
    for host in HOSTS:
        left = served.on(host, "docker ps -aq; docker volume ls -q")
        assert left.strip() == "", (host, left)
