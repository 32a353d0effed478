"""What `stage` brings and refuses; its run from end to end is in tests/lab/test_hub.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from automation.stack_file import open_stack_file
from automation.stage import bring_weights, other_settings, refuse_failures
from spark_core.errors import SparkError
from spark_core.findings import Finding
from spark_core.preflight.weights import KnownWeights, look_at_weights
from spark_core.settings import Settings
from spark_core.weights import local_manifest
from tests.unit.hub.conftest import IMAGE, TOKEN, HubSite, contents, site
from tests.unit.hub.test_look import settings_of

__all__ = ["site"]
NODES = ("spark-a", "spark-b")


def brought(site: HubSite, settings: Settings, known: KnownWeights) -> str:
    transports = {name: site.nodes[name] for name in NODES}
    weights, findings = look_at_weights(settings, transports, known)
    refuse_failures(findings)
    return bring_weights(settings, "dev", "main", transports, IMAGE, weights.get("main"), known)


@pytest.mark.slow
def test_weights_of_the_hub_are_brought_into_folders_of_their_own(site: HubSite) -> None:
    settings = settings_of(site)
    revision = brought(site, settings, KnownWeights(token=TOKEN))
    assert revision == site.hub.commit("org/model")
    wanted = {name: content for name, content in contents(site.folder).items() if name != "README.md"}
    assert contents(Path(settings.node_root) / "weights" / revision) == wanted
    site.hub.requests.clear()
    known = KnownWeights(recorded={"main": ("hf://org/model@main", site.listing())}, token=TOKEN)
    site.hub.requests.clear()
    assert brought(site, settings, known) == revision
    assert site.hub.requests == []


@pytest.mark.slow
def test_weights_of_the_controller_are_brought_too(site: HubSite) -> None:
    settings = settings_of(site, **{"groups.main.model.source": f"controller:{site.folder}"})
    manifest = local_manifest(str(site.folder))
    revision = brought(site, settings, KnownWeights({"main": manifest}))
    assert revision == manifest.revision
    assert contents(Path(settings.node_root) / "weights" / revision) == contents(site.folder)


def test_weights_that_the_nodes_have_are_only_verified(site: HubSite) -> None:
    settings = settings_of(site, **{"groups.main.model.source": f"node:{site.folder}"})
    assert brought(site, settings, KnownWeights()) == ""
    (site.folder / "config.json").unlink()
    with pytest.raises(SparkError, match=r"expected config\.json in "):
        brought(site, settings, KnownWeights())


@pytest.mark.slow
def test_what_is_being_brought_stops_when_it_must(site: HubSite) -> None:
    settings = settings_of(site, **{"groups.main.model.source": f"controller:{site.folder}"})
    known = KnownWeights({"main": local_manifest(str(site.folder))})
    transports = {name: site.nodes[name] for name in NODES}
    weights, _ = look_at_weights(settings, transports, known)

    def stop() -> None:
        raise SparkError("interrupted")

    with pytest.raises(SparkError, match="interrupted"):
        bring_weights(settings, "dev", "main", transports, IMAGE, weights.get("main"), known, stop)


def test_a_failure_ends_it_before_anything_is_brought(capsys: pytest.CaptureFixture[str]) -> None:
    warn = Finding("revision-floating", "here", "a warning")
    first = Finding("weights-space", "spark-a (node_root)", "too little", "free some")
    second = Finding("memory-fit", "spark-b", "too large")
    with pytest.raises(SparkError) as failed:
        refuse_failures([warn, first, second])
    assert failed.value.line == "spark-a (node_root): too little [weights-space]"
    assert failed.value.do == "free some"
    assert failed.value.evidence == ("spark-b: too large [memory-fit]",)
    assert capsys.readouterr().err == "here: a warning [revision-floating]\n"
    refuse_failures([warn])


def test_a_file_of_settings_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(SparkError, match="expected a stack file, found: No such file or directory"):
        other_settings(open_stack_file("spark"), tmp_path / "none.yaml")
    other = tmp_path / "other.yaml"
    other.write_text("config: {}\n")
    file = other_settings(open_stack_file("spark"), other)
    assert (file.stack, file.path, file.raw()) == ("spark", other, {})
