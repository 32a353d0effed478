"""What preview says of the weights of a group."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.hub import Rule
from spark_core.findings import Finding
from spark_core.hub.listing import from_compact
from spark_core.preflight.weights import GroupWeights, KnownWeights, look_at_weights, model_look
from spark_core.settings import Settings, read_settings
from spark_core.transfer.manifest import Manifest
from tests.config_cases import apply_change, load_base
from tests.unit.hub.conftest import TOKEN, HubSite
from tests.unit.hub.test_bring import make_cache, picture

NODES = ("spark-a", "spark-b")


def settings_of(site: HubSite, **changes: Any) -> Settings:
    raw = apply_change(
        load_base(),
        {
            "groups.main.model.source": "hf://org/model@main",
            "hub": {"endpoint": site.hub.endpoint, "cache": None},
            "node_root": str(site.nodes["spark-a"].base / "root"),
            **changes,
        },
    )
    return read_settings(raw)


def look(site: HubSite, settings: Settings, known: KnownWeights | None = None) -> tuple[GroupWeights, list[Finding]]:
    transports = {name: site.nodes[name] for name in NODES}
    found, findings = look_at_weights(settings, transports, known or KnownWeights(token=TOKEN))
    return found["main"], findings


def codes(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings]


def recorded(site: HubSite, source: str = "hf://org/model@main") -> KnownWeights:
    listing = site.listing()
    site.hub.requests.clear()
    return KnownWeights(recorded={"main": (source, from_compact(listing.commit, listing.compact()))}, token=TOKEN)


def test_a_floating_revision_is_told_with_the_commit_that_pins_it(site: HubSite) -> None:
    weights, findings = look(site, settings_of(site))
    commit = site.hub.commit("org/model")
    assert weights.revision == commit
    assert codes(findings) == ["revision-floating"]
    [finding] = findings
    assert finding.what == f"expected a commit behind the @, found main: it is {commit}, which up will record"
    assert f"hf://org/model@{commit}" in finding.do
    assert model_look(weights).config == '{"model_type": "tiny"}'
    assert sum(model_look(weights).shards.values()) > 6_000_000
    assert weights.folder("spark-a", "/r") == f"/r/weights/{commit}"
    assert weights.in_place == {}
    assert not (site.nodes["spark-a"].base / "root").exists()


def test_a_recorded_revision_stays_though_the_branch_moved_and_only_the_config_is_asked_for(site: HubSite) -> None:
    known = recorded(site)
    (site.folder / "extra.json").write_text("{}")
    weights, findings = look(site, settings_of(site), known)
    assert weights.revision != site.hub.commit("org/model")
    assert findings[0].what.endswith(f"it is {weights.revision}, recorded")
    assert [line for line in site.hub.requests if "/revision/main" in line] == []
    assert weights.config


def test_another_source_is_resolved_anew(site: HubSite) -> None:
    weights, _ = look(site, settings_of(site), recorded(site, "hf://org/model@v1"))
    assert any("/revision/main" in line for line in site.hub.requests)
    assert weights.listing is not None


def test_a_pinned_revision_is_no_finding(site: HubSite) -> None:
    commit = site.hub.commit("org/model")
    weights, findings = look(site, settings_of(site, **{"groups.main.model.source": f"hf://org/model@{commit}"}))
    assert (weights.revision, findings) == (commit, [])


@pytest.mark.parametrize(
    ("mode", "code"),
    [
        ("401", "hub-unauthorized"),
        ("403", "hub-gated"),
        ("404", "hub-missing"),
        ("429", "hub-limited"),
        ("503", "hub-unreachable"),
    ],
)
def test_what_the_hub_refuses_is_a_finding_of_its_own(site: HubSite, mode: str, code: str) -> None:
    site.hub.rules.append(Rule(mode))
    found, findings = look_at_weights(settings_of(site), {"spark-a": site.nodes["spark-a"]}, KnownWeights(token=TOKEN))
    assert found == {}
    assert codes(findings) == [code]


@pytest.mark.parametrize(
    ("harm", "lacks"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: [path.unlink() for path in folder.glob("*.safetensors")], "weights"),
    ],
    ids=["config", "weights"],
)
def test_a_repository_that_is_no_model_is_told(site: HubSite, harm: Callable[[Path], object], lacks: str) -> None:
    harm(site.folder)
    _, findings = look(site, settings_of(site))
    told = {finding.code: finding.what for finding in findings}
    assert f"found no {lacks}" in told["model-incomplete"]


def test_a_node_without_space_is_told_before_anything_is_copied(site: HubSite) -> None:
    known = recorded(site)
    source, listing = known.recorded["main"]
    huge = from_compact(listing.commit, {**listing.compact(), "huge.safetensors": f"{10**16}:{'e' * 64}"})
    _, findings = look(site, settings_of(site), KnownWeights(recorded={"main": (source, huge)}, token=TOKEN))
    spaces = [finding for finding in findings if finding.code == "weights-space"]
    assert [finding.where for finding in spaces] == ["spark-a (node_root)", "spark-b (node_root)"]
    assert "expected 10000000.0 GB of free space for the weights, found " in spaces[0].what
    assert "python -m automation gc" in spaces[0].do


def test_space_is_looked_at_for_weights_of_the_controller_too(site: HubSite) -> None:
    settings = settings_of(site, **{"groups.main.model.source": "controller:/models/x"})
    manifest = Manifest({"model.safetensors": (10**16, "e" * 64)})
    weights, findings = look(site, settings, KnownWeights({"main": manifest}))
    assert weights.revision == manifest.revision
    assert codes(findings) == ["weights-space", "weights-space"]


def test_a_whole_cache_is_used_in_place_and_another_one_is_told_and_left(site: HubSite) -> None:
    known = recorded(site)
    listing = known.recorded["main"][1]
    snapshot = make_cache(site, "spark-a", listing)
    before = picture(snapshot.parents[3])
    settings = settings_of(site, **{"hub.cache": str(snapshot.parents[2])})
    weights, findings = look(site, settings, known)
    assert codes(findings) == ["revision-floating"]
    assert weights.folder("spark-a", "/r") == str(snapshot)
    assert weights.in_place["spark-a"].keys() == listing.files.keys()
    assert all("/store/" in path for path in weights.in_place["spark-a"].values())
    assert weights.config == '{"model_type": "tiny"}'
    assert picture(snapshot.parents[3]) == before
    # Both nodes see the same folder here: it is the finding of both.
    (snapshot / "config.json").unlink()
    weights, findings = look(site, settings, known)
    assert codes(findings) == ["revision-floating", "hub-cache-unusable", "hub-cache-unusable"]
    assert findings[1].what == "expected config.json in the hub cache, found none"
    assert weights.in_place == {}


def test_a_file_that_was_found_altered_is_remembered_and_a_cache_gives_way_to_our_folder(site: HubSite) -> None:
    known = recorded(site)
    listing = known.recorded["main"][1]
    snapshot = make_cache(site, "spark-a", listing)
    settings = settings_of(site, **{"hub.cache": str(snapshot.parents[2])})
    shard = next(name for name in listing.files if name.endswith(".safetensors"))
    status = (snapshot / shard).stat()
    mark = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    hashes = Path(settings.node_root) / "cache" / "hashes.json"
    hashes.parent.mkdir(parents=True)
    hashes.write_text(json.dumps({str(snapshot / shard): [mark, "f" * 64]}))
    weights, findings = look(site, settings, known)
    assert weights.in_place == {}
    assert findings[1].what == f"expected {shard} in the hub cache, found other content"
    Path(settings.node_root, "weights", listing.commit).mkdir(parents=True)
    _, findings = look(site, settings, known)
    assert codes(findings) == ["revision-floating"]


def without_hub(site: HubSite, **changes: Any) -> tuple[Settings, Path]:
    """Settings whose hub does not answer, and a revision in the cache of spark-b."""
    listing = site.listing()
    snapshot = make_cache(site, "spark-b", listing)
    values = {"hub.cache": str(snapshot.parents[2]), "hub.endpoint": "http://127.0.0.1:9"}
    values["groups.main.model.source"] = f"hf://org/model@{listing.commit}"
    return settings_of(site, **{**values, **changes}), snapshot


def test_a_pinned_revision_that_a_cache_has_whole_needs_no_hub(site: HubSite) -> None:
    settings, _ = without_hub(site)
    listing = site.listing()
    site.hub.requests.clear()
    weights, findings = look(site, settings)
    assert site.hub.requests == []
    assert (weights.revision, weights.listing) == (listing.commit, listing)
    assert json.loads(weights.config)
    [finding] = [finding for finding in findings if finding.code == "hub-unreachable"]
    assert finding.severity == "warn"
    assert "what the revision holds is taken from the hub cache of spark-" in finding.what


@pytest.mark.parametrize("broken", ["branch", "shard", "name", "none"])
def test_without_a_hub_only_a_commit_that_is_whole_is_known(broken: str, site: HubSite) -> None:
    changes: dict[str, dict[str, Any]] = {
        "branch": {"groups.main.model.source": "hf://org/model@main"},
        "none": {"hub.cache": None},
    }
    settings, snapshot = without_hub(site, **changes.get(broken, {}))
    shard = next(snapshot.glob("*.safetensors"))
    if broken in ("shard", "name"):
        content = shard.read_bytes()
        shard.unlink()
        if broken == "name":
            shard.write_bytes(content)
    found, findings = look_at_weights(settings, {name: site.nodes[name] for name in NODES}, KnownWeights(token=TOKEN))
    assert found == {}
    assert [(finding.code, finding.severity) for finding in findings] == [("hub-unreachable", "fail")]
