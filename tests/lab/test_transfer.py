"""Weights over the fabric of emulated hosts: real links, real sshd, cables that are pulled, power that is cut.

It needs root on Linux and some minutes; it uses a lab of its own, `t-transfer`. To clean up after an aborted run:
``python -m lab down --instance t-transfer``.
"""

from __future__ import annotations

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

import pytest

from lab import paths
from spark_core.errors import SparkError
from spark_core.transfer import chain, distribution
from spark_core.transfer.look import Place, look_at
from spark_core.transfer.manifest import Manifest
from spark_core.transfer.session import Outcome
from spark_core.transport.connection import ConnectionSpec, resolve
from spark_core.transport.ssh import SshTransport
from spark_core.weights import local_manifest
from tests.lab.runs import run_lab

pytestmark = pytest.mark.lab

INSTANCE = "t-transfer"
HOSTS = ("spark-a", "spark-b", "spark-c")
FABRIC = "enp1s0f1np1"
ROOT = "/home/spark/transfer"
MODEL_BYTES = 240 << 20


lab = partial(run_lab, INSTANCE)
"""Run a command of the lab as a person would."""


@dataclass
class Hosts:
    """The hosts, and a model on this machine.

    Attributes:
        told: Lines for the person of the last run.
        rounds: How each transfer of the last run ended.
    """

    model: Path
    wanted: Manifest
    told: list[str] = field(default_factory=list)
    rounds: list[dict[str, Outcome]] = field(default_factory=list)

    def on(self, host: str, text: str, *, as_root: bool = False) -> str:
        """Run shell text on a host."""
        folder = paths.instance_dir(INSTANCE)
        line = f"sudo -S -p '' sh -c {shlex.quote(text)}" if as_root else text
        done = subprocess.run(
            ["ssh", "-F", str(folder / "ssh_config"), "-o", "BatchMode=yes", host, line],
            input=(folder / "sudo_password").read_text() if as_root else "",
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"{host}: {text}: {done.stderr}"
        return done.stdout

    def address(self, host: str) -> str:
        return f"192.168.200.{12 + HOSTS.index(host)}"

    def configure(self, host: str) -> None:
        """Give a host its address, and a link slow enough to do something meanwhile."""
        self.on(
            host,
            f"ip address replace {self.address(host)}/24 dev {FABRIC}; ip link set {FABRIC} mtu 9000 up; "
            f"tc qdisc replace dev {FABRIC} root tbf rate 200mbit burst 1mb latency 50ms",
            as_root=True,
        )

    def place(self, host: str) -> Place:
        spec = ConnectionSpec(host, host, "spark", ssh_config=str(paths.instance_dir(INSTANCE) / "ssh_config"))
        return Place(SshTransport(resolve(spec)), f"{ROOT}/weights/model", ROOT, self.address(host))

    def up(self, hosts: tuple[str, ...] = HOSTS) -> None:
        self.told.clear()
        self.rounds.clear()
        places = [self.place(host) for host in hosts]
        distribution.distribute(str(self.model), places, self.wanted, self.told.append)

    def broken(self, harm: Callable[[], object], *, some: int) -> SparkError:
        """The error of a run to which harm is done once so many bytes are on spark-c."""
        failed: list[BaseException] = []

        def up() -> None:
            try:
                self.up()
            except BaseException as error:
                failed.append(error)

        run = threading.Thread(target=up)
        run.start()
        end = time.monotonic() + 60
        while time.monotonic() < end and look_at(self.place("spark-c")).moved < some:
            time.sleep(0.2)
        harm()
        run.join()
        assert failed, (self.told, self.rounds)
        assert isinstance(failed[0], SparkError), failed
        return failed[0]

    def received(self, host: str) -> int:
        return sum(outcomes[host].received for outcomes in self.rounds if host in outcomes)

    def whole(self) -> bool:
        return all(look_at(self.place(host)).is_whole(self.wanted) for host in HOSTS)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A lab of three hosts, removed at the end; the model."""
    if sys.platform != "linux" or os.geteuid() != 0:
        if os.environ.get("CI") == "true":
            pytest.fail("CI must be able to run the lab, which needs Linux and root")
        pytest.skip("the lab needs Linux and root")
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text("{}")
    for number in range(6):
        (model / f"{number}.safetensors").write_bytes(os.urandom(MODEL_BYTES // 6))
    lab("down")
    lab("up", "--hosts-only", "--hosts", "3")
    yield model
    lab("down")


@pytest.fixture
def hosts(started: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """The hosts, with the model on spark-a only."""
    found = Hosts(started, local_manifest(str(started)))

    def kept(*args: object) -> dict[str, Outcome]:
        found.rounds.append(chain.carry(*args))  # type: ignore[arg-type]
        return found.rounds[-1]

    monkeypatch.setattr(distribution, "carry", kept)
    for host in HOSTS:
        found.on(host, f"rm -rf {ROOT}")
        found.configure(host)
    found.up(("spark-a",))
    yield found
    lab("power-on", "spark-b")
    lab("cable-plug", "spark-b")


def test_the_source_s_link_carries_the_weights_about_once(hosts: Hosts) -> None:
    counter = f"cat /sys/class/net/{FABRIC}/statistics/tx_bytes"
    before = int(hosts.on("spark-a", counter))
    hosts.up()
    assert hosts.whole()
    assert int(hosts.on("spark-a", counter)) - before < 1.05 * hosts.wanted.total_bytes
    assert hosts.told[0] == "weights: 0.25 GB from spark-a over the fabric to spark-b, spark-c"


def test_a_pulled_cable_is_named_and_the_next_run_goes_on(hosts: Hosts) -> None:
    start = time.monotonic()
    error = hosts.broken(lambda: lab("cable-pull", "spark-b"), some=MODEL_BYTES // 4)
    assert time.monotonic() - start < 60
    assert error.where == "spark-b"
    assert "safetensors whole from spark-a, found the connection cut after 0.0" in error.what
    assert error.evidence == ()
    lab("cable-plug", "spark-b")
    hosts.up()
    assert hosts.whole()
    assert hosts.received("spark-b") < 0.8 * hosts.wanted.total_bytes
    assert hosts.received("spark-c") < 0.8 * hosts.wanted.total_bytes


def test_a_node_that_loses_its_power_is_named_and_goes_on_after_its_start(hosts: Hosts) -> None:
    error = hosts.broken(lambda: lab("power-cut", "spark-b"), some=MODEL_BYTES // 4)
    assert "spark-b" in error.line
    assert "safetensors" in error.line
    assert "does not answer any more" in error.line
    lab("power-on", "spark-b")
    hosts.configure("spark-b")
    hosts.up()
    assert hosts.whole()
    assert hosts.received("spark-c") < 0.8 * hosts.wanted.total_bytes


def test_a_node_without_its_cable_gets_them_from_the_controller(hosts: Hosts) -> None:
    lab("cable-pull", "spark-b")
    hosts.up()
    lab("cable-plug", "spark-b")
    assert hosts.whole()
    told = " ".join(hosts.told)
    assert "from the controller to spark-b, not over the fabric, since spark-b cannot be reached over it" in told
    assert "from spark-a over the fabric to spark-c" in told
