"""A new stack file reads as the very settings that it was made of, whatever these hold."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from automation.stack_text import WIDTH, stack_text
from spark_core.settings import describe

SCALARS = st.one_of(
    st.booleans(),
    st.integers(-10, 10**12),
    st.floats(0, 1),
    st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\x85\u2028\u2029\ufeff"), max_size=30),
    st.sampled_from(["off", "null", "1e3", "0o7", "# no comment", "a: b", "- x", "~", "'", '"', "{", "2001-01-01"]),
)
KEYS = st.sampled_from(["name", "manage", "source", "x-y", "a1"])
MAPS = st.dictionaries(KEYS, SCALARS, min_size=1, max_size=4)
VALUES = st.one_of(
    SCALARS, MAPS, st.lists(SCALARS, max_size=3), st.lists(MAPS, min_size=1, max_size=3), st.dictionaries(KEYS, MAPS)
)


@given(st.dictionaries(st.sampled_from(["nodes", "fabric", "groups", "image", "zzz"]), VALUES, min_size=1))
def test_it_reads_as_what_it_was_made_of(values: dict[str, Any]) -> None:
    text = stack_text("p", values, {"nodes": ["a reason: with # and 'quotes'"], "fabric.manage": ["x " * 90]}, ["top"])
    assert yaml.safe_load(text) == {"config": {f"p:{key}": value for key, value in values.items()}}


def test_comments_stand_above_what_they_are_about_and_within_the_width() -> None:
    nodes = [{"name": "a", "user": "u"}, {"name": "b", "user": "u"}]
    text = stack_text("p", {"nodes": nodes}, {"nodes.user": ["because " * 30], "nodes.name": ["its own"]}, ["top line"])
    lines = text.splitlines()
    assert lines[:3] == ["# top line", "config:", "  # the machines"]
    place = lines.index("    - name: a")
    assert lines[place - 2 : place] == [f"    # {describe(('nodes', 0, 'name'))}", "    # here: its own"]
    assert text.count("its own") == 1
    assert max(map(len, lines)) <= WIDTH
    assert lines[-2:] == ["    - name: b", "      user: u"]


def test_every_setting_is_described() -> None:
    assert describe(("image", "local_id")).startswith("id (sha256:…)")
    assert describe(("fabric",)) == "The fabric as a whole."
    assert describe(("groups", "main", "serving", "port")) == "port of the API on the head"
    assert describe(("groups", "main")) == ""
    assert describe(("nonsense", "x")) == ""
