"""``GoodSettings`` over gRPC: what is kept, what moves down, and what changes nothing."""

from __future__ import annotations

from providers.good_settings import KEPT, GoodSettingsProvider
from tests.providers.conftest import Deployment


def props(settings: str, state: str = "serving") -> dict[str, object]:
    return {"settings": settings, "image_id": "sha256:1", "revision": "abc", "state": state}


def test_the_newest_comes_first_and_as_many_as_said_are_kept_behind_it(deployment: Deployment) -> None:
    good = deployment.manage(GoodSettingsProvider)
    good.create(props("one"))
    assert good.outputs["before"] == []
    assert good.up(props("one")) == "same"
    for settings in ("two", "three", "four"):
        assert good.up(props(settings)) == "update"
    assert good.outputs["settings"] == "four"
    assert [record["settings"] for record in good.outputs["before"]] == ["three", "two"][:KEPT]
    assert good.outputs["before"][0]["image_id"] == "sha256:1"
    assert good.up(props("three")) == "update"
    assert [record["settings"] for record in good.outputs["before"]] == ["four", "two"]
    good.delete()


def test_settings_of_a_group_that_is_stopped_on_request_have_not_served(deployment: Deployment) -> None:
    good = deployment.manage(GoodSettingsProvider)
    good.create(props("one", "spark-a: stopped on request"))
    assert good.outputs["settings"] == ""
    assert good.up(props("one")) == "update"
    assert (good.outputs["settings"], good.outputs["before"]) == ("one", [])
    assert good.up(props("two", "spark-a: stopped on request")) == "same"
    assert good.outputs["settings"] == "one"


def test_figures_stay_with_the_settings_that_they_are_of(deployment: Deployment) -> None:
    good = deployment.manage(GoodSettingsProvider)
    good.create(props("one"))
    assert "speed" not in good.outputs
    figures = [{"concurrency": 1, "output_tokens_per_s": 27.0}]
    good.outputs["speed"] = figures  # as `bench` writes it into the state
    assert good.up(props("one")) == "same"
    assert good.up({**props("one"), "image_id": "sha256:2"}) == "update"
    assert good.outputs["speed"] == figures
    assert good.up(props("two")) == "update"
    assert "speed" not in good.outputs
    assert good.outputs["before"][0]["speed"] == figures
    assert good.up(props("three")) == "update"
    assert [record.get("speed") for record in good.outputs["before"]] == [None, figures]
    assert good.up(props("one")) == "update"
    assert good.outputs["speed"] == figures
