"""Docker's cgroup driver in a daemon.json that others write too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_core.docker_config import cgroup_driver_of, restored, with_cgroup_driver
from spark_core.errors import CommandError

NVIDIA = b'{"runtimes": {"nvidia": {"args": [], "path": "nvidia-container-runtime"}}}'


@pytest.mark.parametrize("content", [None, b"", b"  \n", b"{}", NVIDIA])
def test_a_driver_is_put_in_beside_what_is_there(content: bytes | None) -> None:
    assert cgroup_driver_of(content) is None
    new = with_cgroup_driver(content, "cgroupfs")
    assert cgroup_driver_of(new) == "cgroupfs"
    values = json.loads(new)
    assert values.pop("exec-opts") == ["native.cgroupdriver=cgroupfs"]
    assert values == (json.loads(content) if content and content.strip() else {})


def test_other_options_and_the_order_of_keys_stay() -> None:
    content = b'{"b": 1, "exec-opts": ["x=y", "native.cgroupdriver=systemd"], "a": 2}'
    values = json.loads(with_cgroup_driver(content, "cgroupfs"))
    assert values["exec-opts"] == ["x=y", "native.cgroupdriver=cgroupfs"]
    assert [key for key in values if key != "exec-opts"] == ["b", "a"]


@pytest.mark.parametrize("content", [b"{", b"[]", b'"text"', b'{"exec-opts": "native.cgroupdriver=systemd"}', b"\xff"])
def test_what_is_no_object_of_json_is_refused(content: bytes) -> None:
    with pytest.raises(CommandError) as refused:
        with_cgroup_driver(content, "systemd")
    assert refused.value.line == "expected an object of JSON in /etc/docker/daemon.json, found something else"


def test_a_file_that_became_unreadable_goes_back_to_what_it_was() -> None:
    assert restored(b"{", NVIDIA) == NVIDIA


OBJECTS = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers() | st.text(max_size=3), max_size=3)
DRIVERS = st.sampled_from([None, "systemd", "cgroupfs"])


@given(values=OBJECTS, before=DRIVERS, ours=st.sampled_from(["systemd", "cgroupfs"]), indent=st.none() | st.just(3))
def test_untouched_it_comes_back_byte_for_byte(
    values: dict[str, Any], before: str | None, ours: str, indent: int | None
) -> None:
    if before is not None:
        values = values | {"exec-opts": [f"native.cgroupdriver={before}"]}
    old = json.dumps(values, indent=indent).encode()
    assert restored(with_cgroup_driver(old, ours), old) == old
    assert restored(with_cgroup_driver(None, ours), None) is None


@given(values=OBJECTS, before=DRIVERS, ours=st.sampled_from(["systemd", "cgroupfs"]))
def test_what_others_added_stays_and_the_driver_is_the_earlier_one(
    values: dict[str, Any], before: str | None, ours: str
) -> None:
    old = with_cgroup_driver(json.dumps(values).encode(), before)
    now = json.loads(with_cgroup_driver(old, ours)) | {"new": 1}
    back = restored(json.dumps(now).encode(), old)
    assert back is not None
    assert json.loads(back)["new"] == 1
    assert cgroup_driver_of(back) == before
