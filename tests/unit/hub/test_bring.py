"""A model of the hub comes to one node by the hub's client, and from there over the fabric; real processes."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from lab.hub import Rule
from spark_core.errors import HubError, SparkError
from spark_core.hub.listing import Listing
from spark_core.transfer.look import Place, look_at
from tests.unit.hub.conftest import SHARD_BYTES, SHARDS, TOKEN, HubSite, contents

pytestmark = pytest.mark.slow


def wanted(site: HubSite) -> dict[str, bytes]:
    return {name: content for name, content in contents(site.folder).items() if name != "README.md"}


def places(site: HubSite, listing: Listing, names: str = "abc") -> list[Place]:
    return [site.place(f"spark-{letter}", listing) for letter in names]


def test_one_node_downloads_once_and_passes_it_on(site: HubSite) -> None:
    listing = site.listing()
    site.hub.sent.clear()
    manifest = site.bring(listing, *places(site, listing))
    assert site.told == [
        "weights: 0.01 GB from the hub to spark-a",
        "weights: 0.01 GB from spark-a over the fabric to spark-b, spark-c",
    ]
    for place in places(site, listing):
        assert contents(place.folder) == wanted(site)
        assert [path.name for path in Path(place.folder).parent.iterdir()] == [listing.commit]
    assert site.hub.sent == {name: size for name, (size, _) in listing.files.items()}
    assert manifest.total_bytes == listing.total_bytes
    assert [line for line in site.hub.requests if "/cdn/" in line and "+token" in line] == []


def test_the_token_is_in_no_argument_of_a_container(site: HubSite) -> None:
    listing = site.listing()
    site.bring(listing, *places(site, listing, "a"))
    log = (site.nodes["spark-a"].base / "docker.log").read_text()
    assert "--memory 2048m" in log
    assert "--network host" in log
    assert TOKEN not in log
    assert all(TOKEN not in word for command in site.nodes["spark-a"].asked for word in command.argv)


def test_what_is_there_asks_no_hub(site: HubSite) -> None:
    listing = site.listing()
    site.bring(listing, *places(site, listing))
    site.hub.requests.clear()
    start = time.monotonic()
    site.bring(listing, *places(site, listing))
    assert time.monotonic() - start < 3
    assert site.hub.requests == []
    assert site.told == []


def test_a_missing_or_altered_file_comes_from_another_node(site: HubSite) -> None:
    listing = site.listing()
    site.bring(listing, *places(site, listing))
    folders = [Path(place.folder) for place in places(site, listing)]
    (folders[0] / "config.json").write_text("{}")
    (folders[1] / SHARDS[0]).unlink()
    (folders[2] / SHARDS[1]).write_bytes(bytes(SHARD_BYTES))
    site.hub.sent.clear()
    site.bring(listing, *places(site, listing, "ab"), places(site, listing, "c")[0])
    assert [contents(folder) for folder in folders] == [wanted(site)] * 3
    # Every node lacked something, so one of them asked the hub for what it lacked, and for nothing else.
    assert sum(site.hub.sent.values()) <= SHARD_BYTES + 100


def test_wrong_bytes_are_named_and_only_that_file_is_sent_again(site: HubSite) -> None:
    listing = site.listing()
    site.hub.rules.append(Rule("corrupt", SHARDS[1], at=100_000, times=1))
    with pytest.raises(SparkError) as failed:
        site.bring(listing, *places(site, listing, "a"))
    assert failed.value.line == (
        f"spark-a: expected {SHARDS[1]} with the SHA-256 of its manifest, found other content in what came from the hub"
    )
    assert not Path(places(site, listing)[0].folder).exists()
    site.hub.sent.clear()
    site.bring(listing, *places(site, listing, "a"))
    assert site.hub.sent == {SHARDS[1]: SHARD_BYTES}


def test_wrong_bytes_of_a_small_file_are_found_by_git_s_object_id(site: HubSite) -> None:
    listing = site.listing()
    site.hub.rules.append(Rule("corrupt", "vocab.json", at=0, times=1))
    with pytest.raises(SparkError, match=r"expected tokenizer/vocab\.json with the SHA-256"):
        site.bring(listing, *places(site, listing, "a"))
    site.bring(listing, *places(site, listing, "a"))
    assert contents(places(site, listing)[0].folder) == wanted(site)


def test_what_broke_off_goes_on_where_it_was(site: HubSite) -> None:
    listing = site.listing()
    site.hub.rules.append(Rule("cut", f"cdn/org/model/{listing.commit}/{SHARDS[0]}", at=2_000_000, times=1))
    site.hub.sent.clear()
    site.bring(listing, *places(site, listing, "a"))
    assert contents(places(site, listing)[0].folder) == wanted(site)
    assert site.hub.sent[SHARDS[0]] == SHARD_BYTES
    assert any("bytes=2000000-" in line for line in site.hub.requests)


@pytest.mark.parametrize(
    ("rule", "code"),
    [
        (Rule("401", "resolve"), "hub-unauthorized"),
        (Rule("403", "resolve"), "hub-gated"),
        (Rule("404", "resolve"), "hub-missing"),
        (Rule("429", "resolve"), "hub-limited"),
        (Rule("cut", "cdn", 0), "hub-unreachable"),
    ],
    ids=lambda value: value.mode if isinstance(value, Rule) else None,
)
def test_what_the_client_meets_is_told_apart(site: HubSite, rule: Rule, code: str) -> None:
    listing = site.listing()
    site.hub.rules.append(rule)
    with pytest.raises(HubError) as failed:
        site.bring(listing, *places(site, listing, "a"))
    assert failed.value.code == code
    assert TOKEN not in failed.value.render()


def test_an_index_that_names_more_than_the_hub_has_keeps_the_folder_hidden(site: HubSite) -> None:
    index = {"weight_map": {"w": SHARDS[0], "x": "model-00003-of-00003.safetensors"}}
    (site.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    listing = site.listing()
    with pytest.raises(SparkError, match=r"names model-00003-of-00003\.safetensors and the hub has none"):
        site.bring(listing, *places(site, listing, "a"))
    assert not Path(places(site, listing)[0].folder).exists()


def test_a_client_that_is_killed_is_told_and_what_arrived_is_kept(site: HubSite) -> None:
    listing = site.listing()
    node = site.nodes["spark-a"]
    kind = (node.base / "programs" / "docker").read_text()
    node.install("docker", kind.replace("exec ", "exec timeout -s KILL 2 "))
    site.hub.rules.append(Rule("slow", "cdn", at=800_000))
    with pytest.raises(SparkError, match="hub's client in the serving image to end by itself, found exit status"):
        site.bring(listing, *places(site, listing, "a"))
    arrived = look_at(places(site, listing)[0]).moved
    assert arrived > 500_000
    node.install("docker", kind)
    site.hub.rules.clear()
    site.hub.sent.clear()
    site.bring(listing, *places(site, listing, "a"))
    # What the hub had just put onto the connections of the killed client counts as sent, and never arrived.
    assert sum(site.hub.sent.values()) <= listing.total_bytes - arrived + (1 << 18)


def test_an_image_without_the_client_is_told(site: HubSite) -> None:
    listing = site.listing()
    node = site.nodes["spark-a"]
    kind = (node.base / "programs" / "docker").read_text()
    node.install("docker", kind.replace("container.py' '", "container.py' '/nowhere"))
    with pytest.raises(SparkError, match="expected huggingface_hub in the serving image, found none"):
        site.bring(listing, *places(site, listing, "a"))


def test_ctrl_c_ends_it_within_five_seconds(site: HubSite) -> None:
    listing = site.listing()
    site.hub.rules.append(Rule("slow", "cdn", at=300_000))
    asked = threading.Event()

    def check() -> None:
        if asked.is_set():
            raise KeyboardInterrupt

    threading.Timer(2, asked.set).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        site.bring(listing, *places(site, listing, "a"), check=check)
    assert time.monotonic() - start < 7
    site.hub.rules.clear()
    site.bring(listing, *places(site, listing, "a"))
    assert contents(places(site, listing)[0].folder) == wanted(site)


def test_files_too_large_for_plain_http_come_by_the_client_s_own_way(site: HubSite) -> None:
    listing = site.listing()
    site.bring(listing, *places(site, listing, "a"), plain_limit=1 << 20)
    assert contents(places(site, listing)[0].folder) == wanted(site)


def make_cache(site: HubSite, node: str, listing: Listing) -> Path:
    """A hub cache whose blobs are links into a sibling store."""
    base = site.nodes[node].base / "hf"
    snapshot = base / "hub" / "models--org--model" / "snapshots" / listing.commit
    for name, (_, digest) in listing.files.items():
        blob = base / "hub" / "models--org--model" / "blobs" / digest
        store = base / "store" / digest
        for folder in (blob.parent, store.parent, (snapshot / name).parent):
            folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(site.folder / name, store)
        blob.symlink_to(Path("../../../store") / digest)
        (snapshot / name).symlink_to("../" * (2 + name.count("/")) + f"blobs/{digest}")
    (snapshot / "README.md").write_text("of the cache")
    return snapshot


def picture(folder: Path) -> list[tuple[str, int, int, int, int]]:
    found = []
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found.append((str(path), status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return found


def test_a_cache_is_the_source_and_stays_as_it_is(site: HubSite) -> None:
    listing = site.listing()
    snapshot = make_cache(site, "spark-b", listing)
    before = picture(snapshot.parents[3])
    node = site.nodes["spark-b"]
    in_place = Place(node, str(snapshot), str(node.base / "root"), node.address, tuple(sorted(listing.files)))
    site.hub.sent.clear()
    site.bring(listing, site.place("spark-a", listing), in_place)
    assert site.hub.sent == {}
    assert site.told == ["weights: 0.01 GB from spark-b over the fabric to spark-a"]
    folder = Path(site.place("spark-a", listing).folder)
    assert contents(folder) == wanted(site)
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert picture(snapshot.parents[3]) == before
    (snapshot / SHARDS[0]).resolve().write_bytes(bytes(SHARD_BYTES))
    altered = picture(snapshot.parents[3])
    with pytest.raises(SparkError) as failed:
        site.bring(listing, site.place("spark-a", listing), in_place)
    assert failed.value.line == (
        f"spark-b (hub.cache): expected {SHARDS[0]} in the hub cache as the hub has it, found: content differs"
    )
    assert picture(snapshot.parents[3]) == altered


def test_what_a_cache_has_is_copied_and_only_the_rest_downloaded(site: HubSite) -> None:
    listing = site.listing()
    snapshot = make_cache(site, "spark-a", listing)
    (snapshot / "config.json").unlink()
    (snapshot / SHARDS[1]).resolve().write_bytes(bytes(SHARD_BYTES))
    before = picture(snapshot.parents[3])
    site.hub.sent.clear()
    site.bring(listing, site.place("spark-a", listing), snapshots={"spark-a": str(snapshot)})
    assert sorted(site.hub.sent) == sorted(["config.json", SHARDS[1]])
    assert contents(site.place("spark-a", listing).folder) == wanted(site)
    assert picture(snapshot.parents[3]) == before


def test_too_little_space_is_told_before_the_first_byte(site: HubSite, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = site.listing()
    huge = Listing(listing.commit, {**listing.files, "huge.safetensors": (10**16, "e" * 64)})
    site.hub.sent.clear()
    with pytest.raises(SparkError, match="of free space for the weights"):
        site.bring(huge, *places(site, huge, "a"))
    assert site.hub.sent == {}
