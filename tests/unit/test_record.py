"""Settings as they are kept: everything that was said comes back, and nothing of the controller or of secrets is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_core.settings import read_settings
from spark_core.settings.record import NOT_RECORDED, differing_keys, digest_of, record_of, record_text
from tests.config_cases import FOLDER, load_base, load_case

CASES = sorted(FOLDER.glob("*.ok.*.yaml"))


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.name.removesuffix(".yaml"))
def test_a_record_is_read_as_the_settings_that_it_was_made_of(case: Path) -> None:
    raw, _ = load_case(case)
    settings = read_settings({**raw, "api_key": "sk-marker", "sudo_password": "marker"})
    record = record_of(settings)
    kept = {key: raw[key] for key in NOT_RECORDED if key in raw}
    # A recipe's values are recorded, its name is not: it may say other things tomorrow.
    groups = {name: group.model_copy(update={"recipe": None}) for name, group in settings.groups.items()}
    assert read_settings({**record, **kept, "api_key": "x"}) == settings.model_copy(update={"groups": groups})
    assert record_of(read_settings({**record, **kept, "api_key": "x"})) == record
    assert "marker" not in record_text(record)
    assert not set(record) & NOT_RECORDED


def test_another_controller_has_the_same_record_and_another_value_another_digest() -> None:
    base = load_base()
    here = record_of(read_settings(base))
    there = record_of(read_settings({**base, "ssh": {"config_file": "~/ci/ssh_config"}, "preflight": "off"}))
    assert digest_of(here) == digest_of(there)
    [group] = base["groups"]
    base["groups"][group]["serving"]["max_model_len"] = 77
    other = record_of(read_settings(base))
    assert digest_of(here) != digest_of(other)
    assert differing_keys(here, other) == [f"groups.{group}.serving.max_model_len"]
