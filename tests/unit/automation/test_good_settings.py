"""Which settings a rollback goes to, which are refused, and the file that it makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from automation.disruption import disrupting, expected_downtime_s
from automation.events import CONTAINER, GROUP, Change
from automation.good_settings import (
    TYPE,
    choose,
    good_settings,
    rollback_message,
    rolled_back,
    up_message,
    with_settings,
)
from automation.stack_file import StackFile
from spark_core.errors import SettingsError, SparkError
from spark_core.settings import read_settings
from spark_core.settings.record import digest_of, record_of
from tests.config_cases import load_base

OLD, NEW, OTHER = ({"hardware": "cpu"}, {"hardware": "spark"}, {"node_root": "/x/y"})


def state(*records: dict[str, Any]) -> dict[str, Any]:
    """A state that keeps settings, newest first."""
    kept = [{"settings": json.dumps(r), "image_id": "sha256:1", "revision": "abc", "at": 5.0} for r in records]
    resource = {"type": TYPE, "outputs": {**kept[0], "before": kept[1:]}} if kept else {"type": "x"}
    return {"deployment": {"resources": [{"type": "pulumi:pulumi:Stack"}, resource]}}


def test_what_served_is_read_newest_first() -> None:
    found = good_settings(state(NEW, OLD))
    assert [good.record for good in found] == [NEW, OLD]
    assert (found[0].image_id, found[0].revision, found[0].digest) == ("sha256:1", "abc", digest_of(NEW))
    assert good_settings(state()) == [] and good_settings({"deployment": None}) == []


def test_a_rollback_goes_to_the_newest_others() -> None:
    kept = good_settings(state(NEW, OLD))
    assert choose(kept, digest_of(OTHER)).record == NEW
    assert choose(kept, digest_of(NEW)).record == OLD
    with pytest.raises(SparkError, match="expected earlier settings whose gate has passed, found none"):
        choose(good_settings(state(NEW)), digest_of(NEW))


def test_settings_are_refused_after_their_rollback_until_they_have_served() -> None:
    failed = digest_of(NEW)
    back = {"message": rollback_message(failed, digest_of(OLD), "no such flag"), "result": "succeeded"}
    served = {"message": up_message(NEW), "result": "succeeded"}
    again = {"message": up_message(NEW), "result": "failed"}
    assert "no such flag" in rolled_back([back, again], failed)
    assert rolled_back([again, back], failed)
    assert rolled_back([served, back], failed) == ""
    assert rolled_back([back, served], failed)
    assert rolled_back([{"message": "a commit"}], failed) == ""
    assert rolled_back([back], digest_of(OTHER)) == ""


def file_of(config: dict[str, Any], **more: Any) -> StackFile:
    text = yaml.safe_dump({"config": {f"p:{key}": value for key, value in config.items()}, **more})
    return StackFile("dev", Path("Pulumi.dev.yaml"), "p", text)


def test_the_file_of_a_rollback_has_the_old_settings_and_this_controller_s_own() -> None:
    old = load_base()
    [group] = old["groups"]
    record = record_of(read_settings(old))
    new = load_base()
    new["groups"][group]["serving"]["max_model_len"] = 77
    new["ssh"] = {"config_file": "~/ci/ssh_config"}
    new["api_key"] = {"secure": "v1:abc:def"}
    made = yaml.safe_load(with_settings(file_of(new, encryptionsalt="v1:salt"), record))
    config = {key.removeprefix("p:"): value for key, value in made["config"].items()}
    assert record_of(read_settings(config)) == record
    assert config["ssh"] == {"config_file": "~/ci/ssh_config"}
    assert config["api_key"] == {"secure": "v1:abc:def"}
    assert made["encryptionsalt"] == "v1:salt"


def test_settings_that_this_release_does_not_know_are_refused() -> None:
    with pytest.raises(SettingsError, match="found an unknown key"):
        with_settings(file_of(load_base()), {**record_of(read_settings(load_base())), "fabric": {"gone": 1}})


@pytest.mark.parametrize(
    ("kind", "action", "properties", "ends"),
    [
        (CONTAINER, "replace", (), True),
        (CONTAINER, "create", (), True),
        (CONTAINER, "update", ("memory",), False),
        ("pulumi-python:dynamic/spark:FabricLink", "update", ("interfaces",), True),
        ("pulumi-python:dynamic/spark:NodeHost", "update", ("sysctls",), False),
        ("pulumi-python:dynamic/spark:NodeHost", "update", ("tuning",), True),
        ("pulumi-python:dynamic/spark:WeightsCopy", "update", ("revisions",), False),
        ("pulumi:providers:docker", "replace", (), True),
        ("pulumi:providers:docker", "update", (), False),
    ],
)
def test_what_ends_serving(kind: str, action: str, properties: tuple[str, ...], ends: bool) -> None:
    change = Change(f"urn::{GROUP}{kind}::x", kind, action, properties)
    assert bool(disrupting([change], fresh=False)) is ends
    assert disrupting([change], fresh=True) == []


def test_the_time_without_serving_is_that_of_the_last_update_that_started_containers() -> None:
    def update(minutes: int, **more: Any) -> dict[str, Any]:
        times = {"startTime": "2026-11-30T10:00:00.000Z", "endTime": f"2026-11-30T10:{minutes:02d}:00.000Z"}
        return {"kind": "update", "result": "succeeded", "resourceChanges": {"replace": 2}, **times, **more}

    assert expected_downtime_s([update(1, resourceChanges={"same": 9}), update(2, result="failed"), update(15)]) == 900
    assert expected_downtime_s([]) is None
