"""The lab's small hub is one: what its answers say is what the protocol wants."""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

import pytest

from lab.hub import Rule, parse_rule
from spark_core.hub.listing import git_id
from tests.unit.hub.conftest import SHARD_BYTES, SHARDS, TOKEN, HubSite


@dataclass(frozen=True)
class Answer:
    """What the hub answered."""

    status: int
    headers: Any
    content: bytes


class Stays(urllib.request.HTTPRedirectHandler):
    """Shows a redirect instead of following it."""

    def redirect_request(self, *_: Any) -> None:
        return None


def ask(site: HubSite, path: str, method: str = "GET", **headers: str) -> Answer:
    shown = {"Authorization": f"Bearer {TOKEN}"} | {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"{site.hub.endpoint}{path}", headers=shown, method=method)  # noqa: S310
    try:
        with urllib.request.build_opener(Stays).open(request, timeout=10) as found:
            return Answer(found.status, found.headers, found.read())
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.headers, b"")


def test_a_model_is_described_with_sizes_and_both_kinds_of_hashes(site: HubSite) -> None:
    told = json.loads(ask(site, "/api/models/org/model/revision/main?blobs=true").content)
    files = {one["rfilename"]: one for one in told["siblings"]}
    assert told["sha"] == site.hub.commit("org/model")
    assert files[SHARDS[0]]["lfs"]["sha256"] == hashlib.sha256((site.folder / SHARDS[0]).read_bytes()).hexdigest()
    assert files["config.json"]["blobId"] == git_id((site.folder / "config.json").read_bytes())
    assert "lfs" not in files["config.json"]


def test_a_large_file_is_given_elsewhere_and_a_small_one_at_once(site: HubSite) -> None:
    commit = site.hub.commit("org/model")
    large = ask(site, f"/org/model/resolve/{commit}/{SHARDS[0]}", "HEAD")
    assert large.status == 302
    assert large.headers["X-Linked-Size"] == str(SHARD_BYTES)
    assert large.headers["X-Repo-Commit"] == commit
    assert f":{site.hub.store_port}/" in large.headers["Location"]
    assert f":{site.hub.port}/" not in large.headers["Location"]
    small = ask(site, f"/org/model/resolve/{commit}/config.json")
    assert small.status == 200
    assert small.headers["ETag"].strip('"') == git_id(small.content)


def test_a_range_is_the_rest_of_a_file(site: HubSite) -> None:
    commit = site.hub.commit("org/model")
    where = ask(site, f"/org/model/resolve/{commit}/{SHARDS[0]}").headers["Location"]
    path = where.partition(f":{site.hub.store_port}")[2]
    rest = ask(site, path, Range=f"bytes={SHARD_BYTES - 100}-")
    assert rest.status == 206
    assert rest.content == (site.folder / SHARDS[0]).read_bytes()[-100:]
    assert ask(site, path, Range=f"bytes={SHARD_BYTES}-").status == 416


def test_a_rule_counts_and_is_written_as_on_the_command_line(site: HubSite) -> None:
    site.hub.rules.append(parse_rule("429:config.json::1"))
    commit = site.hub.commit("org/model")
    assert [ask(site, f"/org/model/resolve/{commit}/config.json").status for _ in range(2)] == [429, 200]
    assert parse_rule("slow::5000000") == Rule("slow", "", 5_000_000, None)
    with pytest.raises(ValueError, match="mode 'quick': one of slow, cut"):
        parse_rule("quick")


def test_who_shows_no_token_gets_nothing(site: HubSite) -> None:
    assert ask(site, "/api/models/org/model/revision/main", Authorization="Bearer x").status == 401
    assert ask(site, "/api/models/org/none/revision/main").status == 401
    assert ask(site, "/api/models/org/model/revision/none").headers["X-Error-Code"] == "RevisionNotFound"
