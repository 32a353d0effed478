"""Models of the hub on emulated hosts: the hub's real client, in the real image, asks a small hub of the lab.

It needs root on Linux, the lab's image in the cache, and about seven minutes. The tests build on each other and run in
order. To clean up after an aborted run: ``SPARK_VLLM_HOME=… python -m lab down --instance t-hub``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from lab.hub import Hub, Rule
from spark_core.errors import HubError, SparkError
from spark_core.hub.ask import ask_hub
from spark_core.hub.bring import bring_hub_model
from spark_core.hub.download import HubOrigin
from spark_core.hub.listing import Listing
from spark_core.preflight.weights import look_at_node
from spark_core.settings import HubSettings, ModelSettings, read_settings
from spark_core.transfer import distribution
from spark_core.transfer.look import Place, look_at
from spark_core.transfer.manifest import Manifest
from spark_core.transport.connection import ConnectionSpec, resolve
from spark_core.transport.ssh import SshTransport
from tests.lab.deployment import Deployment, SecretWatch, chat

pytestmark = [pytest.mark.lab, pytest.mark.campaign]

HOSTS = ("spark-a", "spark-b")
TOKEN = "hf_marker_of_this_test"
SHARDS = 3
SHARD_BYTES = 40 << 20
ROOT = "/home/spark/hub-test"
SERVED = "/home/spark/.spark-vllm/weights"
FABRIC = "enp1s0f1np1"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A lab with an image, and a stack whose model is on the hub."""
    if sys.platform != "linux" or os.geteuid() != 0:
        if os.environ.get("CI") == "true":
            pytest.fail("CI must be able to run the lab, which needs Linux and root")
        pytest.skip("the lab needs Linux and root")
    made = Deployment("t-hub", tmp_path_factory.mktemp("home"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def hub(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """A hub on this machine, at the address that the hosts reach it by."""
    folder = tmp_path_factory.mktemp("hub")
    shutil.copytree(deployment.folder / "model", folder / "lab" / "tiny" / "main")
    (folder / "lab" / "tiny" / "main" / "README.md").write_text("not needed for serving\n")
    big = folder / "lab" / "big" / "main"
    big.mkdir(parents=True)
    (big / "config.json").write_text("{}")
    names = [f"model-{number}.safetensors" for number in range(SHARDS)]
    for name in names:
        (big / name).write_bytes(os.urandom(SHARD_BYTES))
    index = {"weight_map": {f"w{number}": name for number, name in enumerate(names)}}
    (big / "model.safetensors.index.json").write_text(json.dumps(index))
    subnet = next(iter(deployment.addresses.values())).rsplit(".", 1)[0]
    token_file = deployment.home / "hub-token"
    token_file.touch(0o600)
    token_file.write_text(TOKEN + "\n")

    with Hub(folder, f"{subnet}.1", token=TOKEN) as found:

        def use_hub(config: dict[str, Any]) -> None:
            config["groups"]["main"]["model"]["source"] = "hf://lab/tiny"
            config["hub"] = {"endpoint": found.endpoint, "token_file": str(token_file)}

        deployment.configure({}, edit=use_hub)
        yield found


@pytest.fixture
def watch() -> Iterator[SecretWatch]:
    watching = SecretWatch([TOKEN])
    watching.start()
    yield watching
    watching.finish()


def test_preview_tells_the_commit_and_leaves_nothing_on_the_nodes(deployment: Deployment, hub: Hub) -> None:
    before = {host: deployment.snapshot(host) for host in HOSTS}
    outcome = deployment.preview()
    assert outcome.code == 0, outcome.text[-4000:]
    commit = hub.commit("lab/tiny")
    assert f"expected a commit behind the @, found main: it is {commit}, which up will record" in outcome.text
    assert [line for line in hub.requests if "safetensors" in line] == []
    assert {host: deployment.snapshot(host) for host in HOSTS} == before


def test_one_node_downloads_once_and_the_model_is_served(deployment: Deployment, hub: Hub, watch: SecretWatch) -> None:
    commit = hub.commit("lab/tiny")
    outcome = deployment.up()
    assert outcome.code == 0, outcome.text[-6000:]
    assert "from the hub to spark-a" in outcome.text
    assert "from spark-a over the fabric to spark-b" in outcome.text
    outputs = deployment.outputs()
    assert outputs["model_revision"] == commit
    answer = chat(outputs, outputs["api_key"])
    assert answer.status == 200, answer
    shard = next(name for name in hub.files("lab/tiny", str(commit)) if name.endswith(".safetensors"))
    assert hub.sent[shard] == hub.files("lab/tiny", str(commit))[shard].size
    assert "README.md" not in hub.sent
    for host in HOSTS:
        assert deployment.on(host, f"ls {SERVED}").split() == [commit]
        assert deployment.on(host, "docker ps -a --filter label=spark-vllm.fetch -q") == ""
    # The token reached the hub, and neither the address of the large files, nor any process list, log or state.
    assert any(line.endswith("+token") for line in hub.requests)
    assert [line for line in hub.requests if "/cdn/" in line and "+token" in line] == []
    assert watch.finish() == []
    assert len(watch.looked_at) > 50
    assert TOKEN not in outcome.text
    assert TOKEN not in json.dumps(deployment.exported())


def test_a_floating_revision_stays_what_it_was_and_a_second_up_asks_no_hub(deployment: Deployment, hub: Hub) -> None:
    commit = hub.commit("lab/tiny")
    started = {host: deployment.containers(host) for host in HOSTS}
    (hub.folder / "lab" / "tiny" / "main" / "extra.json").write_text('{"another": "commit"}')
    assert hub.commit("lab/tiny") != commit
    hub.requests.clear()
    outcome = deployment.up()
    assert outcome.code == 0, outcome.text[-4000:]
    assert outcome.count("unchanged") > 20, outcome.text[-2000:]
    assert f"it is {commit}, recorded" in outcome.text
    assert hub.requests == []
    assert {host: deployment.containers(host) for host in HOSTS} == started


def test_a_truncated_shard_is_drift_and_comes_from_the_other_node_while_the_model_serves(
    deployment: Deployment, hub: Hub
) -> None:
    started = {host: deployment.containers(host) for host in HOSTS}
    [commit] = deployment.on("spark-b", f"ls {SERVED}").split()
    [shard] = deployment.on("spark-b", f"cd {SERVED}/{commit} && ls *.safetensors").split()
    before = deployment.on("spark-a", f"sha256sum < {SERVED}/{commit}/{shard}")
    deployment.on("spark-b", f"truncate -s 1000 {SERVED}/{commit}/{shard}")
    hub.requests.clear()
    preview = deployment.preview()
    assert "main-weights-copy" in preview.text
    assert "update" in preview.text
    outcome = deployment.up()
    assert outcome.code == 0, outcome.text[-4000:]
    assert "from spark-a over the fabric to spark-b" in outcome.text
    assert deployment.on("spark-b", f"sha256sum < {SERVED}/{commit}/{shard}") == before
    assert hub.requests == []
    assert {host: deployment.containers(host) for host in HOSTS} == started


def automation(deployment: Deployment, *words: str) -> str:
    done = deployment.inside(sys.executable, "-m", "automation", *words)
    assert done.code == 0, done.text[-4000:]
    return done.text


def test_another_revision_is_staged_while_the_model_serves(deployment: Deployment, hub: Hub) -> None:
    started = {host: deployment.containers(host) for host in HOSTS}
    commit = hub.commit("lab/tiny")
    other = deployment.home / "other.yaml"
    other.write_text(deployment.config_file.read_text().replace("hf://lab/tiny", f"hf://lab/tiny@{commit}"))
    hub.sent.clear()
    said = automation(deployment, "stage", "--stack", deployment.stack, str(other))
    assert f"weights {str(commit)[:12]} on spark-a, spark-b" in said
    shards = [name for name in hub.sent if name.endswith(".safetensors")]
    assert [hub.sent[name] for name in shards] == [hub.files("lab/tiny", str(commit))[name].size for name in shards]
    for host in HOSTS:
        assert len(deployment.on(host, f"ls {SERVED}").split()) == 2
    assert {host: deployment.containers(host) for host in HOSTS} == started
    outputs = deployment.outputs()
    assert chat(outputs, outputs["api_key"]).status == 200


def mounted(deployment: Deployment, host: str) -> str:
    """The revision that the rank's container of a host has mounted; empty if there is none."""
    text = deployment.on(
        host,
        "for c in $(docker ps -q --filter label=spark-vllm.rank); do "
        "docker inspect -f '{{range .Mounts}}{{.Source}} {{end}}' $c; done 2>/dev/null || true",
    )
    return next((word.rpartition("/")[2] for word in text.split() if word.startswith(f"{SERVED}/")), "")


def test_a_group_that_heals_during_the_switch_never_mixes_two_revisions_and_fetches_nothing(
    deployment: Deployment, hub: Hub
) -> None:
    old, commit = deployment.outputs()["model_revision"], str(hub.commit("lab/tiny"))
    other = deployment.home / "other.yaml"
    deployment.config_file.write_text(other.read_text())
    hub.requests.clear()
    run = deployment.begin("up", "-s", deployment.stack, "--yes", "--skip-preview")
    seen, killed, end = set(), False, time.monotonic() + 400
    while run.is_running and time.monotonic() < end:
        here = {host: mounted(deployment, host) for host in HOSTS}
        phase = ""
        with contextlib.suppress(AssertionError, ValueError, KeyError):
            phase = str(deployment.status("spark-a").get("phase", ""))
        seen.add((here["spark-a"], here["spark-b"], phase))
        if not killed and here["spark-b"] == commit:
            # A rank that dies while the other one is still to be replaced, or loads: it heals by itself.
            deployment.on("spark-b", "pkill -KILL -f runtime.pyz || true", root=True)
            killed = True
        time.sleep(0.5)
    assert run.wait(300) == 0, run.text[-6000:]
    assert killed
    both = {(one, two) for one, two, phase in seen if phase == "serving" and one and two}
    assert both <= {(old, old), (commit, commit)}, seen
    # The run names the commit and reads what is in it; neither it nor the rank that heals fetches weights again.
    assert not [request for request in hub.requests if "safetensors" in request], hub.requests
    outputs = deployment.outputs()
    assert outputs["model_revision"] == commit
    assert chat(outputs, outputs["api_key"]).status == 200
    assert {host: mounted(deployment, host) for host in HOSTS} == dict.fromkeys(HOSTS, commit)


def test_gc_lists_what_nobody_uses_and_frees_it_only_on_a_yes(deployment: Deployment) -> None:
    commit = deployment.outputs()["model_revision"]
    [old] = [name for name in deployment.on("spark-a", f"ls {SERVED}").split() if name != commit]
    forgotten = "f" * 40
    deployment.on("spark-b", f"mkdir {SERVED}/{forgotten} && head -c 3M /dev/zero > {SERVED}/{forgotten}/x.safetensors")
    before = {host: deployment.on(host, f"ls {SERVED}") for host in HOSTS}
    said = automation(deployment, "gc", "--stack", deployment.stack)
    lines = {tuple(line.split()[:1] + line.split()[4:5]): line for line in said.splitlines() if " GB " in line}
    assert "unused" in lines["spark-b", forgotten]
    assert "used by the settings of dev/main" in lines["spark-a", commit]
    assert "used by the last good settings" in lines["spark-a", old]
    assert "nothing was freed" in said
    assert {host: deployment.on(host, f"ls {SERVED}") for host in HOSTS} == before
    said = automation(deployment, "gc", "--stack", deployment.stack, "--yes")
    assert "spark-b: freed 1, " in said
    assert deployment.on("spark-b", f"ls {SERVED}").split() == deployment.on("spark-a", f"ls {SERVED}").split()
    assert deployment.up().count("unchanged") > 20


# From here on without pulumi: the same code, its faults, a larger model.


@dataclass
class Site:
    """The hosts, and a model of some size on the hub.

    Attributes:
        listing: What the hub says of it.
        told: Lines for the person of the last run.
    """

    deployment: Deployment
    hub: Hub
    model: ModelSettings
    listing: Listing
    image: str
    told: list[str] = field(default_factory=list)

    def transport(self, host: str) -> SshTransport:
        spec = ConnectionSpec(host, host, "spark", ssh_config=str(self.deployment.folder / "ssh_config"))
        return SshTransport(resolve(spec))

    @property
    def settings(self) -> HubSettings:
        return HubSettings(endpoint=self.hub.endpoint)

    def place(self, host: str) -> Place:
        address = f"192.168.200.{12 + HOSTS.index(host)}"
        return Place(self.transport(host), f"{ROOT}/weights/{self.listing.commit}", ROOT, address)

    def bring(self, *places: Place, check: Callable[[], None] = lambda: None, **changes: Any) -> Manifest:
        self.told.clear()
        origin = HubOrigin(
            self.model, self.settings, self.listing.commit, self.image, "/opt/vllm/bin/python3", "dev", TOKEN, **changes
        )
        return bring_hub_model(origin, self.listing, places, self.told.append, check)

    def arrived(self, host: str) -> int:
        return look_at(self.place(host)).moved

    def broken(self, harm: Callable[[], object], *, some: int) -> SparkError:
        """The error of a run to which harm is done once so many bytes are on spark-a."""
        failed: list[BaseException] = []

        def run() -> None:
            try:
                self.bring(self.place("spark-a"))
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        end = time.monotonic() + 60
        while time.monotonic() < end and self.arrived("spark-a") < some:
            time.sleep(0.2)
        harm()
        thread.join()
        assert failed, self.told
        assert isinstance(failed[0], SparkError), failed
        return failed[0]


@pytest.fixture
def site(deployment: Deployment, hub: Hub) -> Iterator[Site]:
    """Hosts without the large model."""
    model = ModelSettings(source="hf://lab/big@main", served_name="big")
    hub.rules.clear()
    hub.sent.clear()
    image = json.loads((deployment.folder / "image.json").read_text())["image_id"]
    for host in HOSTS:
        deployment.on(host, f"rm -rf {ROOT} ~/.cache/huggingface", root=True)
    found = Site(deployment, hub, model, Listing("0" * 40, {}), image)
    found.listing = ask_hub(found.transport("spark-a"), model, found.settings, TOKEN).listing
    yield found
    hub.rules.clear()


def total(site: Site) -> int:
    return sum(site.hub.sent.get(f"model-{number}.safetensors", 0) for number in range(SHARDS))


@pytest.mark.parametrize(
    ("rule", "code", "words"),
    [
        (Rule("401"), "hub-unauthorized", "HTTP status 401"),
        (Rule("403"), "hub-gated", "ask for access at"),
        (Rule("404", "resolve"), "hub-missing", "HTTP status 404"),
        (Rule("429", "resolve"), "hub-limited", "wait 210 s, then run up again"),
        (Rule("503"), "hub-unreachable", "HTTP status 503"),
        (Rule("cut", "cdn", 0), "hub-unreachable", "run up again; what has arrived is not sent again"),
    ],
    ids=lambda value: value.mode if isinstance(value, Rule) else None,
)
def test_what_the_hub_refuses_is_told_apart(site: Site, rule: Rule, code: str, words: str) -> None:
    site.hub.rules.append(rule)
    with pytest.raises(HubError) as failed:
        site.bring(site.place("spark-a"))
    assert failed.value.code == code
    assert failed.value.where == "spark-a (model.source)"
    assert words in failed.value.render()
    assert TOKEN not in failed.value.render()


def test_a_hub_that_is_not_there_is_told(site: Site) -> None:
    nowhere = HubSettings(endpoint=f"http://{site.hub.address}:9")
    with pytest.raises(HubError) as failed:
        ask_hub(site.transport("spark-a"), site.model, nowhere, None)
    assert failed.value.code == "hub-unreachable"
    assert "Connection refused" in failed.value.what


def test_a_download_that_breaks_off_goes_on_by_itself(site: Site) -> None:
    site.hub.rules.append(Rule("cut", "model-1", at=25 << 20, times=1))
    site.bring(site.place("spark-a"))
    assert look_at(site.place("spark-a")).staged == Manifest({})
    assert site.hub.sent["model-1.safetensors"] < 1.5 * SHARD_BYTES


def test_wrong_bytes_are_named_and_only_that_file_is_sent_again(site: Site) -> None:
    site.hub.rules.append(Rule("corrupt", "model-2", at=30 << 20, times=1))
    with pytest.raises(SparkError, match=r"expected model-2\.safetensors with the SHA-256 .* came from the hub"):
        site.bring(site.place("spark-a"))
    assert look_at(site.place("spark-a")).files is None
    sent = dict(site.hub.sent)
    site.bring(site.place("spark-a"))
    assert site.hub.sent["model-0.safetensors"] == sent["model-0.safetensors"]
    assert site.hub.sent["model-1.safetensors"] == sent["model-1.safetensors"]
    assert site.hub.sent["model-2.safetensors"] == 2 * SHARD_BYTES


def test_a_killed_download_is_named_and_goes_on_inside_its_files(site: Site) -> None:
    site.hub.rules.append(Rule("slow", "cdn", at=12 << 20))
    kill = "docker kill $(docker ps -q --filter label=spark-vllm.fetch)"
    error = site.broken(lambda: site.deployment.on("spark-a", kill), some=60 << 20)
    assert "the hub's client in the serving image to end by itself, found exit status 137" in error.what
    arrived = site.arrived("spark-a")
    assert arrived > 30 << 20
    site.hub.rules.clear()
    before = total(site)
    site.bring(site.place("spark-a"))
    assert total(site) - before < SHARDS * SHARD_BYTES - 0.8 * arrived


def test_ctrl_c_ends_it_within_five_seconds_on_the_node_too(site: Site) -> None:
    site.hub.rules.append(Rule("slow", "cdn", at=1 << 20))
    asked = threading.Event()

    def check() -> None:
        if asked.is_set():
            raise KeyboardInterrupt

    threading.Timer(8, asked.set).start()
    with pytest.raises(KeyboardInterrupt):
        site.bring(site.place("spark-a"), check=check)
    stopped = time.monotonic()
    running = "docker ps -q --filter label=spark-vllm.fetch"
    while site.deployment.on("spark-a", running) and time.monotonic() - stopped < 20:
        time.sleep(0.2)
    assert time.monotonic() - stopped < 5
    site.hub.rules.clear()
    site.bring(site.place("spark-a"))
    assert total(site) < 1.5 * SHARDS * SHARD_BYTES


def test_a_node_that_loses_its_power_goes_on_after_its_start(site: Site) -> None:
    site.hub.rules.append(Rule("slow", "cdn", at=12 << 20))
    error = site.broken(lambda: site.deployment.lab("power-cut", "spark-a"), some=60 << 20)
    assert "spark-a" in error.line
    site.deployment.lab("power-on", "spark-a")
    site.hub.rules.clear()
    before = total(site)
    site.bring(site.place("spark-a"))
    assert total(site) - before < SHARDS * SHARD_BYTES


def test_a_disk_that_fills_up_is_named_with_the_file(site: Site) -> None:
    site.deployment.on("spark-a", f"mkdir -p {ROOT} && mount -t tmpfs -o size=140m,uid=1000 hub {ROOT}", root=True)
    try:
        site.hub.rules.append(Rule("slow", "cdn", at=12 << 20))
        fill = f"head -c 200M /dev/zero > {ROOT}/filler || true"
        error = site.broken(lambda: site.deployment.on("spark-a", fill), some=30 << 20)
        assert error.where == "spark-a (node_root)"
        assert "No space left on device" in error.what
        assert "model-" in error.what
        site.hub.rules.clear()
        site.deployment.on("spark-a", f"rm {ROOT}/filler")
        site.bring(site.place("spark-a"))
        assert look_at(site.place("spark-a")).files is not None
        with pytest.raises(SparkError, match="of free space for the weights"):
            distribution.require_space(
                [site.place("spark-a")], {"spark-a": look_at(site.place("spark-a"))}, Manifest({"x": (10**9, "")})
            )
    finally:
        site.deployment.on("spark-a", f"umount -l {ROOT}", root=True)


STORE = "/home/spark/.cache/huggingface/store"
CACHE = "/home/spark/.cache/huggingface/hub"


def make_cache(site: Site, host: str) -> str:
    """A hub cache of root, whose shards are links into a sibling store; the folder of the revision in it."""
    repository = f"{CACHE}/models--lab--big"
    snapshot = f"{repository}/snapshots/{site.listing.commit}"
    site.deployment.on(host, f"mkdir -p {STORE} {repository}/blobs {snapshot}", root=True)
    commit = site.listing.commit
    for name, (_, digest) in sorted(site.listing.files.items()):
        inside = f"{site.hub.endpoint}/lab/big/resolve/{commit}/{name}"
        site.deployment.on(
            host,
            f"curl -sfL -H 'Authorization: Bearer {TOKEN}' -o {STORE}/{digest} {inside}; "
            f"ln -s ../../../store/{digest} {repository}/blobs/{digest}; ln -s ../../blobs/{digest} {snapshot}/{name}",
            root=True,
        )
    return snapshot


def picture(site: Site, host: str) -> str:
    return site.deployment.on(
        host,
        "cd /home/spark/.cache/huggingface && find . -printf '%p %y %u %m %s %T@ %C@ %l\n' | sort; "
        "find . -type f | sort | xargs sha256sum",
        root=True,
    )


def test_a_revision_in_a_hub_cache_of_root_is_used_in_place_and_its_content_reaches_the_other_node(site: Site) -> None:
    snapshot = make_cache(site, "spark-b")
    before = picture(site, "spark-b")
    site.hub.sent.clear()
    settings = read_settings(_raw_settings(site))
    seen = look_at_node(settings, site.model, site.listing.commit, site.listing.files, site.transport("spark-b"))
    assert seen.in_place is not None
    assert seen.in_place.folder == snapshot
    assert all(path.startswith(STORE) for path in seen.in_place.paths.values())
    in_place = Place(site.transport("spark-b"), snapshot, ROOT, "192.168.200.13", tuple(sorted(site.listing.files)))
    manifest = site.bring(site.place("spark-a"), in_place)
    assert site.hub.sent == {}
    assert "from spark-b over the fabric to spark-a" in " ".join(site.told)
    found = look_at(site.place("spark-a")).files
    assert found == manifest
    links = site.deployment.on("spark-a", f"find {ROOT}/weights -type l")
    assert links == ""
    assert picture(site, "spark-b") == before
    # Altered later: named, never mended by us, and then left alone.
    site.deployment.on("spark-b", f"printf x | dd of={STORE}/$(ls {STORE} | head -1) conv=notrunc bs=1 2>&1", root=True)
    altered = picture(site, "spark-b")
    with pytest.raises(SparkError, match="in the hub cache as the hub has it, found: content differs"):
        site.bring(site.place("spark-a"), in_place)
    seen = look_at_node(settings, site.model, site.listing.commit, site.listing.files, site.transport("spark-b"))
    assert seen.in_place is None
    assert seen.cache is not None
    assert seen.cache.fault == "altered"
    assert picture(site, "spark-b") == altered


def _raw_settings(site: Site) -> dict[str, Any]:
    stack = yaml.safe_load(site.deployment.config_file.read_text())
    config = {key.removeprefix("spark-vllm:"): value for key, value in stack["config"].items()}
    return {**config, "node_root": ROOT}


def test_what_a_cache_has_of_a_revision_is_copied_and_only_the_rest_downloaded(site: Site) -> None:
    snapshot = make_cache(site, "spark-a")
    site.deployment.on("spark-a", f"rm {snapshot}/model-2.safetensors", root=True)
    site.hub.sent.clear()
    site.bring(site.place("spark-a"), snapshots={"spark-a": snapshot})
    assert sorted(site.hub.sent) == ["model-2.safetensors"]
    assert look_at(site.place("spark-a")).files is not None


def test_files_too_large_for_plain_http_come_too(site: Site) -> None:
    site.bring(site.place("spark-a"), plain_limit=1 << 20)
    assert look_at(site.place("spark-a")).files is not None
