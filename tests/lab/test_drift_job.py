"""The drift job on a served deployment: nothing on a clean stack, and each of ten changes by hand over all layers.

It needs what test_end_to_end.py needs and about ten minutes.

To clean up after an aborted run: ``SPARK_VLLM_HOME=… python -m lab down --instance t-drift``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from automation.exit_codes import Exit
from tests.lab.deployment import FABRIC, Deployment
from tests.lab.healthy import TWIN
from tests.lab.operating import ROOT, run

pytestmark = [pytest.mark.lab, pytest.mark.campaign]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = Deployment("t-drift", tmp_path_factory.mktemp("home"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


def seeds(served: Deployment) -> dict[str, tuple[str, str, bool]]:
    """Ten changes by hand over all layers: where, what, whether as root."""
    files = f"{ROOT}/stacks/dev/files"
    return {
        "kernel parameter": ("spark-a", "sysctl -qw net.ipv4.tcp_keepalive_time=77", True),
        "supervisor's file altered": ("spark-b", f"f=$(ls {files}/*/runtime.pyz); chmod u+w $f; echo x >> $f", False),
        "supervisor's file removed": ("spark-a", f"rm -f {files}/*/runtime.pyz", False),
        "MTU of a fabric interface": ("spark-b", f"ip link set {FABRIC} mtu 8000", True),
        "address of a fabric twin": ("spark-a", f"ip address del 192.168.201.12/24 dev {TWIN}", True),
        "netplan file": ("spark-b", "echo '# by hand' >> /etc/netplan/60-spark-vllm.yaml", True),
        "weights": ("spark-b", f"f=$(ls {ROOT}/weights/*/config.json); chmod u+w $f; echo ' ' >> $f", False),
        "key file": ("spark-a", f"echo other > {ROOT}/stacks/dev/secrets/main/api_key", False),
        "container stopped": ("spark-b", "docker stop -t 1 spark-vllm-dev-main-rank1", False),
        "container removed": ("spark-b", "docker rm -f spark-vllm-dev-main-rank1", False),
    }


def test_the_drift_job_finds_each_of_ten_drifts_and_up_mends_them(served: Deployment) -> None:
    assert run(served, "up")[0]["exit_code"] == Exit.DONE
    clean = run(served, "drift")[0]
    assert (clean["exit_code"], clean["changes"]) == (Exit.DONE, []), clean
    missed = []
    for name, (host, text, root) in seeds(served).items():
        served.on(host, text, root=root)
        found, said = run(served, "drift")
        named = [change["name"] for change in found["changes"]] + [f["text"] for f in found["findings"]]
        if found["exit_code"] != Exit.DRIFT or not named:
            missed.append((name, found["exit_code"], said[-500:]))
        mended, said = run(served, "up")
        assert mended["exit_code"] == Exit.DONE, (name, said[-3000:])
    assert missed == []
    assert run(served, "drift")[0]["exit_code"] == Exit.DONE
