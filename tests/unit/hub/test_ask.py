"""The hub is asked by a node; what it refuses is told apart."""

from __future__ import annotations

import pytest

from lab.hub import Rule
from spark_core.errors import HubError, ObservationError
from spark_core.hub import node_ask
from spark_core.hub.ask import ask_hub
from spark_core.hub.errors import HubFault, hub_error
from spark_core.settings import HubSettings, ModelSettings
from spark_core.transport.base import Result
from tests.scripted_transport import ScriptedTransport
from tests.unit.hub.conftest import SHARDS, TOKEN, HubSite


def test_a_branch_is_resolved_to_a_commit_with_a_hash_of_every_file(site: HubSite) -> None:
    answer = ask_hub(site.nodes["spark-a"], site.model, site.settings, TOKEN)
    assert answer.listing.commit == site.hub.commit("org/model")
    assert answer.config == '{"model_type": "tiny"}'
    lengths = {name: len(digest) for name, (_, digest) in answer.listing.files.items()}
    assert lengths == {
        "config.json": 40,
        "model.safetensors.index.json": 40,
        "tokenizer/vocab.json": 40,
        **dict.fromkeys(SHARDS, 64),
    }
    again = site.model.model_copy(update={"source": f"hf://org/model@{answer.listing.commit}"})
    (site.folder / "config.json").write_text("another one")
    assert ask_hub(site.nodes["spark-a"], again, site.settings, TOKEN).listing == answer.listing


@pytest.mark.parametrize(
    ("mode", "code", "do"),
    [
        ("401", "hub-unauthorized", "the hub does not take the token"),
        ("403", "hub-gated", "ask for access at"),
        ("404", "hub-missing", "correct groups.<name>.model.source"),
        ("429", "hub-limited", "wait 210 s, then run up again"),
        ("503", "hub-unreachable", "wait until the hub has mended that"),
    ],
)
def test_a_refusal_is_told_with_what_to_do(site: HubSite, mode: str, code: str, do: str) -> None:
    site.hub.rules.append(Rule(mode))
    with pytest.raises(HubError) as failed:
        ask_hub(site.nodes["spark-a"], site.model, site.settings, TOKEN)
    assert failed.value.code == code
    assert failed.value.line.startswith("spark-a (model.source): expected org/model@main from http://127.0.0.1:")
    assert f"found: HTTP status {mode}" in failed.value.line
    assert failed.value.do.startswith(do)
    assert TOKEN not in failed.value.render()


def test_without_a_token_a_login_is_asked_for(site: HubSite) -> None:
    with pytest.raises(HubError) as failed:
        ask_hub(site.nodes["spark-a"], site.model, site.settings, None)
    assert failed.value.code == "hub-unauthorized"
    assert "set the secret hf_token (or hub.token_file) if it is private" in failed.value.do


def test_a_revision_that_does_not_exist_is_told(site: HubSite) -> None:
    gone = site.model.model_copy(update={"source": "hf://org/model@v9"})
    with pytest.raises(HubError) as failed:
        ask_hub(site.nodes["spark-a"], gone, site.settings, TOKEN)
    assert failed.value.code == "hub-missing"
    assert "found: HTTP status 404 (Invalid rev id: v9)" in failed.value.line


def test_one_bad_answer_is_asked_for_again(site: HubSite) -> None:
    site.hub.rules.append(Rule("503", times=1))
    assert ask_hub(site.nodes["spark-a"], site.model, site.settings, TOKEN).config


def test_a_hub_that_is_not_there_is_told(site: HubSite) -> None:
    with pytest.raises(HubError, match="Connection refused") as failed:
        ask_hub(site.nodes["spark-a"], site.model, HubSettings(endpoint="http://127.0.0.1:9"), None)
    assert failed.value.code == "hub-unreachable"
    assert "see whether spark-a reaches http://127.0.0.1:9" in failed.value.do


def test_what_is_no_hub_is_told(site: HubSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_ask, "get", lambda _url, _token: b"<html>")
    orders = {"endpoint": "http://x", "repository": "org/model", "revision": "main", "token": ""}
    with pytest.raises(node_ask.Asked) as failed:
        node_ask.ask(orders)
    assert failed.value.kind == "garbled"
    told = hub_error(HubFault("garbled", failed.value.found), site.model, site.settings, "spark-a", with_token=False)
    assert told.do == "correct hub.endpoint: what answers there is no hub"


@pytest.mark.parametrize("kind", ["offline", "silent", "cut", "broken", "garbled", "new one"])
def test_every_fault_has_something_to_do(kind: str) -> None:
    model = ModelSettings(source="hf://org/model", served_name="m")
    for with_token in (True, False):
        error = hub_error(HubFault(kind, "x"), model, HubSettings(), "spark-a", with_token=with_token)
        assert error.code == "hub-unreachable"
        assert error.do


def test_an_answer_that_is_not_understood_is_no_listing() -> None:
    model = ModelSettings(source="hf://org/model", served_name="m")
    node = ScriptedTransport("spark-a", lambda _: Result(0, "[]", ""))
    with pytest.raises(ObservationError, match="found an answer that is not understood"):
        ask_hub(node, model, HubSettings(), None)
