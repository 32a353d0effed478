"""Images between the real Docker daemons of emulated hosts, and what is inside the real serving image.

It needs root on Linux and some ten minutes; it uses a lab of its own, `t-image`. To clean up after an aborted run:
``python -m lab down --instance t-image``.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lab import paths
from spark_core.errors import SparkError
from spark_core.findings import Finding
from spark_core.group import GroupFiles, plan_group
from spark_core.image import Bringing, ImageFacts, ImageNode, archive_image_id, bring_image, spread
from spark_core.image.check import CheckReport, check_findings, check_spec, check_words, run_check
from spark_core.image.look import ImageQuestion, look_at_image
from spark_core.settings import ImageSettings, Settings, read_settings
from spark_core.transfer import chain
from spark_core.transfer.session import Outcome
from spark_core.transport.connection import ConnectionSpec, resolve
from spark_core.transport.ssh import SshTransport
from tests.config_cases import apply_change, load_base
from tests.lab.registry import Registry
from tests.lab.runs import run_lab
from tests.unit.image.conftest import MIB, layer_tar, write_archive

pytestmark = pytest.mark.lab

INSTANCE = "t-image"
HOSTS = ("spark-a", "spark-b", "spark-c")
FABRIC = "enp1s0f1np1"
ROOT = "/home/spark/image-test"
NAME = "registry.example/test:latest"

lab = partial(run_lab, INSTANCE)
"""Run a command of the lab as a person would."""


@dataclass
class Hosts:
    """The hosts, and what the last run did.

    Attributes:
        work: A folder for archives on this machine.
        told: Lines for the person.
        rounds: How each transfer ended.
    """

    work: Path
    told: list[str] = field(default_factory=list)
    rounds: list[dict[str, Outcome]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return paths.instance_dir(INSTANCE)

    def on(self, host: str, text: str, *, as_root: bool = False, stdin: bytes = b"") -> str:
        """Run shell text on a host."""
        line = f"sudo -S -p '' sh -c {shlex.quote(text)}" if as_root else text
        done = subprocess.run(
            ["ssh", "-F", str(self.folder / "ssh_config"), "-o", "BatchMode=yes", host, line],
            input=(self.folder / "sudo_password").read_bytes() if as_root else stdin,
            capture_output=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{host}: {text}: {done.stderr.decode()}"
        return done.stdout.decode()

    def transport(self, host: str) -> SshTransport:
        return SshTransport(resolve(ConnectionSpec(host, host, "spark", ssh_config=str(self.folder / "ssh_config"))))

    def bring(self, image: str, hosts: tuple[str, ...] = HOSTS, **source: Any) -> ImageFacts:
        self.told.clear()
        self.rounds.clear()
        nodes = [ImageNode(self.transport(host), ROOT, f"192.168.200.{12 + HOSTS.index(host)}", None) for host in hosts]
        settings = ImageSettings.model_validate(source or {"local_id": image})
        return bring_image(Bringing(settings, nodes, self.work, image, "", self.told.append, lambda: None))

    def archive(self, layers: list[bytes], **more: Any) -> tuple[Path, str]:
        path = self.work / f"{time.monotonic_ns()}.tar"
        return path, write_archive(path, layers, **more)

    def load(self, host: str, archive: Path, tag: str = "") -> None:
        said = self.on(host, "docker load", stdin=archive.read_bytes())
        if tag:
            self.on(host, f"docker tag {said.split(':', 1)[1].strip()} {tag}")

    def received(self, host: str) -> int:
        return sum(found[host].received for found in self.rounds if host in found)

    def layers(self, host: str, image: str) -> list[str]:
        told = self.on(host, f"docker image inspect --format '{{{{json .RootFS.Layers}}}}' {image}")
        found: list[str] = json.loads(told)
        return found

    def is_clean(self, host: str) -> bool:
        """Whether nothing of a transfer is left: no files, no container, no image that only kept layers."""
        left = self.on(host, f"ls {ROOT}/images 2>/dev/null; docker ps -aq; docker images -q --filter dangling=true")
        return left.strip() == ""

    def broken(self, image: str, harm: Callable[[], object], some: int) -> SparkError:
        """The error of a run to which harm is done once so many bytes are on spark-b."""
        failed: list[BaseException] = []

        def up() -> None:
            try:
                self.bring(image)
            except BaseException as error:
                failed.append(error)

        run = threading.Thread(target=up)
        run.start()
        end = time.monotonic() + 90
        count = f"find {ROOT}/images -name '*.tar' -printf '%s\\n' 2>/dev/null | awk '{{s+=$1}} END {{print s+0}}'"
        while time.monotonic() < end and int(self.on("spark-b", count)) < some:
            time.sleep(0.1)
        harm()
        run.join()
        assert failed, (self.told, self.rounds)
        assert isinstance(failed[0], SparkError), failed
        return failed[0]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A lab of three hosts with the serving image in its folder, removed at the end."""
    if sys.platform != "linux" or os.geteuid() != 0:
        if os.environ.get("CI") == "true":
            pytest.fail("CI must be able to run the lab, which needs Linux and root")
        pytest.skip("the lab needs Linux and root")
    lab("down")
    lab("up", "--hosts", "3")
    yield tmp_path_factory.mktemp("archives")
    lab("down")


@pytest.fixture
def hosts(started: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """The hosts, without any image of a test, on links slow enough to do something meanwhile."""
    found = Hosts(started)

    def kept(*args: object) -> dict[str, Outcome]:
        found.rounds.append(chain.carry(*args))  # type: ignore[arg-type]
        return found.rounds[-1]

    monkeypatch.setattr(spread, "carry", kept)
    for number, host in enumerate(HOSTS):
        found.on(host, f"rm -rf {ROOT}; docker image prune -af >/dev/null")
        found.on(
            host,
            f"ip address replace 192.168.200.{12 + number}/24 dev {FABRIC}; ip link set {FABRIC} mtu 9000 up; "
            f"tc qdisc replace dev {FABRIC} root tbf rate 400mbit burst 1mb latency 50ms",
            as_root=True,
        )
    yield found


def image_of(hosts: Hosts, *tops: str) -> tuple[Path, str, list[bytes]]:
    layers = [layer_tar("base", 8 * MIB), layer_tar("middle", 60 * MIB), *(layer_tar(top, 5 * MIB) for top in tops)]
    path, image = hosts.archive(layers)
    return path, image, layers


def test_an_image_comes_to_all_nodes_at_once_and_only_what_is_missing(hosts: Hosts) -> None:
    archive, image, layers = image_of(hosts, "top")
    hosts.load("spark-a", archive)
    before = int(hosts.on("spark-a", f"cat /sys/class/net/{FABRIC}/statistics/tx_bytes"))
    assert hosts.bring(image).image_id == image
    total = sum(map(len, layers))
    assert int(hosts.on("spark-a", f"cat /sys/class/net/{FABRIC}/statistics/tx_bytes")) - before < 1.05 * total
    assert hosts.layers("spark-a", image) == hosts.layers("spark-b", image) == hosts.layers("spark-c", image)
    changed, newer, newer_layers = image_of(hosts, "other top")
    hosts.load("spark-b", changed)
    hosts.bring(newer)
    assert hosts.received("spark-a") == hosts.received("spark-c") == len(newer_layers[2])
    assert all(hosts.is_clean(host) for host in HOSTS)
    assert all(outcome.memory < 300 * MIB for found in hosts.rounds for outcome in found.values())


def test_a_killed_transfer_is_named_and_the_next_run_goes_on(hosts: Hosts) -> None:
    archive, image, layers = image_of(hosts, "top")
    hosts.load("spark-a", archive)
    error = hosts.broken(image, lambda: hosts.on("spark-b", "pkill -9 -f spark_core.image.node_layers"), 30 * MIB)
    assert "spark-b" in error.line
    assert "was killed" in error.render()
    hosts.bring(image)
    assert hosts.received("spark-b") < sum(map(len, layers)) - 25 * MIB
    assert hosts.layers("spark-b", image) == hosts.layers("spark-c", image)
    assert all(hosts.is_clean(host) for host in HOSTS)


def test_a_node_that_loses_its_power_goes_on_after_its_start(hosts: Hosts) -> None:
    archive, image, layers = image_of(hosts, "top")
    hosts.load("spark-a", archive)
    error = hosts.broken(image, lambda: lab("power-cut", "spark-b"), 30 * MIB)
    assert "spark-b" in error.line
    lab("power-on", "spark-b")
    hosts.on("spark-b", f"ip address replace 192.168.200.13/24 dev {FABRIC}; ip link set {FABRIC} up", as_root=True)
    hosts.bring(image)
    assert hosts.received("spark-b") < sum(map(len, layers))
    assert hosts.layers("spark-b", image) == hosts.layers("spark-a", image)


def test_a_full_disk_of_docker_is_told_and_the_next_run_sends_nothing_again(hosts: Hosts) -> None:
    archive, image, _ = image_of(hosts, "top")
    hosts.load("spark-a", archive)
    on_small = (
        "mkdir -p /var/lib/docker/tmp; mount -t tmpfs -o size=4m tmpfs /var/lib/docker/tmp"  # what loads are copied to
    )
    hosts.on("spark-b", on_small, as_root=True)
    try:
        with pytest.raises(SparkError) as failed:
            hosts.bring(image, ("spark-a", "spark-b"))
    finally:
        hosts.on("spark-b", "umount /var/lib/docker/tmp", as_root=True)
    assert failed.value.where == "spark-b (docker)"
    assert "no space left on device" in failed.value.what
    hosts.bring(image, ("spark-a", "spark-b"))
    assert hosts.received("spark-b") < 10 * MIB
    assert hosts.is_clean("spark-b")


def test_another_image_under_the_same_tag_is_refused_and_both_ids_told(hosts: Hosts) -> None:
    archive, image, _ = image_of(hosts, "top")
    other, other_image, _ = image_of(hosts, "other top")
    hosts.load("spark-a", archive, NAME)
    hosts.load("spark-b", other, NAME)
    with pytest.raises(SparkError) as failed:
        hosts.bring("", ("spark-a", "spark-b"), registry=NAME)
    assert image[:19] in failed.value.line
    assert other_image[:19] in failed.value.line
    assert hosts.rounds == []
    [found] = look_at_image(question(hosts, image={"registry": NAME}))
    assert found.code == "image-differs"
    assert image in found.what
    assert other_image in found.what


def test_an_image_for_another_architecture_is_refused_before_anything_is_sent(hosts: Hosts) -> None:
    path, image = hosts.archive([layer_tar("foreign", MIB)], architecture="arm64")
    hosts.load("spark-a", path)
    with pytest.raises(SparkError) as failed:
        hosts.bring(image, ("spark-a", "spark-b"))
    assert "expected an image for amd64, found one for arm64" in failed.value.line
    assert hosts.rounds == []
    found = look_at_image(question(hosts, image={"local_id": image}))
    assert {one.code for one in found} == {"image-architecture"}


def test_one_daemon_pulls_from_a_registry_with_its_own_credentials_and_the_others_get_it_over_the_fabric(
    hosts: Hosts,
) -> None:
    archive, image, layers = image_of(hosts, "top")
    registry = Registry(hosts.on, "spark-a")
    try:
        registry.login()
        hosts.load("spark-a", archive)
        by_digest = registry.push(image, "test:latest")
        tag = by_digest.partition("@")[0] + ":latest"
        hosts.on("spark-a", "docker image prune -af >/dev/null")
        registry.logout()
        with pytest.raises(SparkError) as failed:
            hosts.bring("", registry=by_digest)
        assert failed.value.where == "spark-a (image.registry)"
        assert "docker login" in failed.value.do
        assert hosts.rounds == []
        registry.login()
        given = registry.pulls()
        assert hosts.bring("", registry=by_digest).image_id == image
        assert registry.pulls() == given + 1
        assert [line for line in hosts.told if "pulls" in line] == [f"image: spark-a pulls {by_digest}"]
        assert hosts.received("spark-b") == hosts.received("spark-c") == sum(map(len, layers))
        # What is there by its digest is asked of nobody; a tag that no node knows is resolved once more.
        assert hosts.bring("", registry=by_digest).image_id == image
        assert registry.pulls() == given + 1
        hosts.on("spark-a", f"docker tag {image} {tag}")
        assert hosts.bring("", registry=tag).image_id == image
        assert registry.pulls() == given + 1
    finally:
        registry.close()


def test_one_node_builds_it_and_the_others_get_exactly_that(hosts: Hosts) -> None:
    context = hosts.work / "context"
    context.mkdir(exist_ok=True)
    (context / "Dockerfile").write_text("FROM scratch\nARG WORD\nLABEL word=$WORD\nCOPY file /file\n")
    (context / "file").write_bytes(os.urandom(MIB))
    built = {"context": "context", "arguments": {"WORD": "first"}}
    first = hosts.bring("", build=built)
    assert [line for line in hosts.told if "builds" in line] == ["image: spark-a builds context"]
    assert hosts.layers("spark-a", first.image_id) == hosts.layers("spark-c", first.image_id)
    word = "docker image inspect --format '{{.Config.Labels.word}}' "
    assert hosts.on("spark-c", word + first.image_id).strip() == "first"
    assert hosts.bring("", build=built) == first
    assert not any("builds" in line for line in hosts.told)
    (context / "Dockerfile").write_text("FROM scratch\nCOPY fiel /file\n")
    with pytest.raises(SparkError) as failed:
        hosts.bring("", build=built)
    assert failed.value.where == "spark-a (image.build)"
    assert "context/Dockerfile" in failed.value.what


def settings_of(hosts: Hosts, **changes: Any) -> Settings:
    """The base settings for two of the hosts."""
    facts = json.loads((hosts.folder / "image.json").read_text())
    mount = {"source": facts["cuda_libs_host_path"], "target": facts["cuda_libs_container_path"]}
    fixed = {"hardware": "cpu", "node_root": ROOT, "groups.main.serving.mounts": [mount]}
    no_hca = {f"nodes[{n}].fabric[{i}].hca": None for n in (0, 1) for i in (0, 1)}
    return read_settings(apply_change(load_base(), {**fixed, **no_hca, **changes}))


def question(hosts: Hosts, **changes: Any) -> ImageQuestion:
    settings = settings_of(hosts, **changes)
    transports = {host: hosts.transport(host) for host in HOSTS[:2]}
    image = settings.image
    return ImageQuestion(settings, "dev", image.local_id or "", image.registry or "", {}, transports, may_run=False)


def look_inside(hosts: Hosts, image: str, **changes: Any) -> list[Finding]:
    """What the image says on two hosts at once."""
    settings = settings_of(hosts, image={"local_id": image}, **changes)
    spec = check_spec(settings, "main", image, ["Qwen3_5MoeForConditionalGeneration"])
    files = GroupFiles("", (), dict.fromkeys(HOSTS[:2], "/"))
    reports: dict[str, CheckReport | None] = {}

    def ask(host: str, container: Any) -> None:
        words = check_words(settings, "main", container, image)
        reports[host] = run_check(hosts.transport(host), ROOT, spec, container, words, "yes")

    containers = plan_group(settings, "main", "dev", image, files).containers
    threads = [threading.Thread(target=ask, args=(one.node, one)) for one in containers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return check_findings("main", spec, [report for report in reports.values() if report is not None])


def test_the_real_serving_image_comes_from_the_controller_and_is_looked_into(hosts: Hosts) -> None:
    archive = str(hosts.folder / "serving-image.tar")
    image = archive_image_id(archive)
    hosts.bring(image, HOSTS[:2], archive=archive)
    assert hosts.layers("spark-a", image) == hosts.layers("spark-b", image)
    assert look_inside(hosts, image) == []
    start = time.monotonic()
    assert look_inside(hosts, image) == []
    assert time.monotonic() - start < 5  # the answer is remembered
    serving = "groups.main.serving"
    wrong = {f"{serving}.extra_args": ["--enable-prompt-tokens-detailz"], f"{serving}.backend": "ray"}
    [flag] = look_inside(hosts, image, **wrong)
    assert flag.code == "flag-refused"
    assert "--enable-prompt-tokens-detailz" in flag.what
    assert flag.where.endswith("(groups.main.serving)") and all(host in flag.where for host in HOSTS[:2])
    [parser] = look_inside(hosts, image, **{f"{serving}.reasoning_parser": "qwen99"})
    assert parser.code == "parser-unknown"
    assert all(hosts.is_clean(host) for host in HOSTS[:2])
