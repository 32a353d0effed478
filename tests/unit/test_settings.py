"""Settings: what a stack file may say, and what a person reads when it says something else."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from spark_core.errors import SettingsError
from spark_core.settings import (
    SECRET_KEYS,
    SETTING_KEYS,
    Settings,
    launcher_variable_notes,
    read_settings,
)
from spark_core.settings.group import INTERFACE_VARIABLES, OWN_FLAGS, ServingSettings
from spark_core.settings.launchers import LAUNCHER_VARIABLES
from tests.config_cases import FOLDER, apply_change, load_base, load_case

PROJECT = Path(__file__).resolve().parents[2]
MARKER = "sk-marker-a1b2c3d4"
BAD = sorted(FOLDER.glob("*.bad.*.yaml"))
GOOD = sorted(FOLDER.glob("*.ok.*.yaml"))


def violations_of(raw: dict[str, Any]) -> list[str]:
    with pytest.raises(SettingsError) as refused:
        read_settings(raw)
    return list(refused.value.violations)


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_settings_that_cannot_be_used_are_refused_with_these_lines(path: Path) -> None:
    raw, expected = load_case(path)
    assert violations_of(raw) == expected


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_settings_that_can_be_used_are_taken(path: Path) -> None:
    raw, _ = load_case(path)
    assert read_settings(raw).groups["main"].serving.world_size == len(raw["groups"]["main"]["nodes"])


def test_there_are_more_bad_cases_than_good_ones() -> None:
    assert len(BAD) > len(GOOD) > 0


def test_the_error_names_every_violation_and_that_no_node_was_contacted() -> None:
    raw = apply_change(load_base(), {"hardware": "gpu", "fabric": {"mtu": 9000}, "nodes[0].ssh_port": 0})
    with pytest.raises(SettingsError) as refused:
        read_settings(raw)
    text = str(refused.value)
    assert text.splitlines()[0] == "the stack file has 3 settings that cannot be used; no node was contacted"
    assert [line.split(":")[0].strip() for line in text.splitlines()[1:]] == [
        "hardware",
        "nodes[0].ssh_port",
        "fabric.mtu",
    ]


def test_cross_checks_are_told_together_too() -> None:
    raw = apply_change(
        load_base(),
        {
            "nodes[1].management_address": "10.1.230.180",
            "nodes[1].fabric[1].address": "192.168.200.99/24",
            "groups.main.serving.tensor_parallel_size": 8,
        },
    )
    assert [line.split(":")[0] for line in violations_of(raw)] == [
        "nodes[1].management_address",
        "nodes[1].fabric[1].address",
        "groups.main.serving",
    ]


PLACES = [
    *[("", name) for name in Settings.model_fields],
    *[("groups.main.serving.", name) for name in ServingSettings.model_fields],
    *[("nodes[1].", name) for name in ("name", "management_address", "user", "ssh_port", "host_key", "fabric")],
    *[("nodes[0].fabric[1].", name) for name in ("netdev", "address")],
    *[("image.", name) for name in ("registry", "build", "archive", "local_id", "python")],
    *[("groups.main.", name) for name in ("nodes", "model", "serving")],
    *[("groups.main.model.", name) for name in ("source", "served_name")],
]


@pytest.mark.parametrize(("place", "name"), PLACES, ids=lambda value: str(value) or "top")
def test_a_doubled_letter_in_any_key_is_answered_with_the_right_key(place: str, name: str) -> None:
    typo = name[:2] + name[1:]
    lines = violations_of(apply_change(load_base(), {f"{place}{typo}": "x"}))
    assert any(line.startswith(f"{place}{typo}: found an unknown key; did you mean '{name}'?") for line in lines)


@given(key=st.text(alphabet="abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=20))
def test_no_unknown_key_passes_at_the_top(key: str) -> None:
    if key in SETTING_KEYS or key in SECRET_KEYS:
        return
    lines = violations_of({**load_base(), key: 1})
    assert len(lines) == 1
    assert lines[0].startswith(f"{key}: found an unknown key")


@pytest.mark.parametrize("place", ["", "nodes[0].", "image.", "groups.main.", "groups.main.serving.", "ssh."])
def test_the_value_of_an_unknown_key_is_never_shown(place: str) -> None:
    raw = apply_change({**load_base(), "ssh": {}}, {f"{place}api_ky": MARKER})
    with pytest.raises(SettingsError) as refused:
        read_settings(raw)
    assert MARKER not in str(refused.value)
    assert MARKER not in repr(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        {"groups.main.serving.api_key": MARKER},
        {"groups.main.serving.extra_args": ["--api-key", MARKER]},
        {"groups.main.serving.extra_args": [f"--api-key={MARKER}"]},
        {"groups.main.serving.environment": {"VLLM_API_KEY": MARKER}},
        {"groups.main.serving.environment": {"HF_TOKEN": MARKER}},
        {"groups.main.serving.environment": {"NESTED": [MARKER]}},
        {"groups.main.serving.environment": {"not a name": MARKER}},
        {"groups.main.serving.environment": MARKER},
    ],
    ids=lambda change: next(iter(change)).rpartition(".")[2],
)
def test_a_secret_in_the_wrong_place_is_refused_without_showing_it(change: dict[str, Any]) -> None:
    with pytest.raises(SettingsError) as refused:
        read_settings(apply_change(load_base(), change))
    assert MARKER not in str(refused.value)
    assert refused.value.__cause__ is None


def test_secrets_are_accepted_beside_the_settings_and_never_enter_them() -> None:
    settings = read_settings({**load_base(), **dict.fromkeys(SECRET_KEYS, MARKER)})
    assert MARKER not in repr(settings)
    assert MARKER not in settings.model_dump_json()


def test_an_own_key_is_accepted_with_its_secret() -> None:
    raw = apply_change({**load_base(), "api_key": MARKER}, {"groups.main.serving.api_key": "own"})
    assert read_settings(raw).groups["main"].serving.api_key == "own"


def test_settings_cannot_be_changed_after_they_were_read() -> None:
    settings = read_settings(load_base())
    with pytest.raises(ValidationError):
        settings.nodes[0].user = "root"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        settings.hardware = "cpu"  # type: ignore[misc]


def test_a_long_wrong_value_is_cut() -> None:
    [line] = violations_of(apply_change(load_base(), {"hardware": "x" * 500}))
    assert len(line) < 150


@pytest.mark.parametrize("name", INTERFACE_VARIABLES)
def test_per_node_variables_are_refused_in_the_environment_of_all(name: str) -> None:
    [line] = violations_of(apply_change(load_base(), {"groups.main.serving.environment": {name: "x"}}))
    assert name in line
    assert "nodes[].fabric" in line


@pytest.mark.parametrize("flag", sorted(OWN_FLAGS))
@pytest.mark.parametrize("shape", ["{}", "{}=x"])
def test_flags_that_the_program_renders_are_refused_in_extra_args(flag: str, shape: str) -> None:
    [line] = violations_of(apply_change(load_base(), {"groups.main.serving.extra_args": [shape.format(flag)]}))
    assert f"{flag} is " in line


@pytest.mark.parametrize(
    "netplan_file",
    [
        "/etc/netplan/../passwd.yaml",
        "/etc/netplan/a.conf",
        "/etc/netplan/",
        "60.yaml",
        "/etc/netplan/a b.yaml",
        "/etc/netplan/sub/60.yaml",
        "/etc/netplan/60.yaml\n",
    ],
)
def test_the_file_that_is_ours_can_only_be_a_netplan_file(netplan_file: str) -> None:
    raw = apply_change(load_base(), {"fabric": {"netplan_file": netplan_file}})
    if netplan_file.endswith("\n"):  # blanks around a value are taken off
        assert read_settings(raw).fabric.netplan_file == netplan_file.strip()
        return
    assert violations_of(raw)[0].startswith("fabric.netplan_file: found ")


def test_the_root_folder_follows_the_deploy_user() -> None:
    settings = read_settings(apply_change(load_base(), {"nodes[1].user": "root"}))
    assert [settings.root_of(node) for node in settings.nodes] == [
        "/home/aurora/.spark-vllm",
        "/root/.spark-vllm",
    ]


def test_sysctl_values_become_text_with_single_blanks() -> None:
    raw, _ = load_case(FOLDER / "host.ok.sysctl-with-numbers.yaml")
    assert read_settings(raw).host.sysctls == {
        "net.ipv4.tcp_rmem": "4096 131072 6291456",
        "net.core.rmem_max": "67108864",
    }


def test_numbers_and_booleans_of_the_environment_become_what_a_shell_would_have() -> None:
    raw, _ = load_case(FOLDER / "serving.ok.numbers-and-booleans-in-environment.yaml")
    assert read_settings(raw).groups["main"].serving.environment == {"OMP_NUM_THREADS": "1", "FLAG": "true"}


def test_variables_of_other_launchers_are_noted_by_name_and_setting_only() -> None:
    notes = launcher_variable_notes({"VLLM_IMAGE": MARKER, "VLLM_API_KEY": MARKER, "PATH": "/bin", "HEAD_IP": ""})
    assert notes == [
        "VLLM_IMAGE is set in the environment and is not read; "
        "the setting is image.registry, image.archive or image.local_id",
        "VLLM_API_KEY is set in the environment and is not read; the setting is groups.<name>.serving.api_key",
    ]


@pytest.mark.parametrize("name", sorted(LAUNCHER_VARIABLES))
def test_each_launcher_variable_points_at_a_setting_that_exists(name: str) -> None:
    meaning = LAUNCHER_VARIABLES[name]
    top = {word.strip(",").split(".")[0].removesuffix("[]") for word in meaning.split() if word[0] != "."}
    assert top & set(SETTING_KEYS)


def stack_files() -> list[Path]:
    return [path for path in sorted(PROJECT.glob("Pulumi.*.yaml")) if path.name != "Pulumi.yaml"]


def committed_text(path: Path) -> str:
    """A stack file as it is committed: the engine writes a salt of its own into the one in the folder."""
    if not (PROJECT / ".git").exists():
        return path.read_text()
    done = subprocess.run(
        ["git", "show", f":{path.name}"], cwd=PROJECT, capture_output=True, text=True, check=False, timeout=20
    )
    if done.returncode != 0:
        pytest.skip(f"{path.name} is not committed")
    return done.stdout


@pytest.mark.parametrize("path", stack_files(), ids=lambda path: path.name)
def test_a_committed_stack_file_is_valid(path: Path) -> None:
    raw = yaml.safe_load(path.read_text())["config"]
    assert all(key.startswith("spark-vllm:") for key in raw)
    settings = read_settings({key.removeprefix("spark-vllm:"): value for key, value in raw.items()})
    assert len(settings.groups["main"].nodes) == 2


@pytest.mark.parametrize("path", stack_files(), ids=lambda path: path.name)
def test_a_committed_stack_file_holds_no_encrypted_value_and_no_salt(path: Path) -> None:
    lines = committed_text(path).splitlines()
    assert [line for line in lines if line.strip().startswith(("secure:", "encryptionsalt", "encryptedkey"))] == []


def test_the_lab_s_stack_file_is_there() -> None:
    assert "Pulumi.dev.yaml" in [path.name for path in stack_files()]


def test_the_project_file_declares_exactly_the_settings() -> None:
    declared = yaml.safe_load((PROJECT / "Pulumi.yaml").read_text())["config"]
    assert set(declared) == set(SETTING_KEYS)


def test_the_project_file_s_defaults_are_those_of_the_settings() -> None:
    declared = yaml.safe_load((PROJECT / "Pulumi.yaml").read_text())["config"]
    settings = read_settings(load_base())
    for key, entry in declared.items():
        if "default" in entry:
            value = getattr(settings, key)
            if value is None:
                assert getattr(read_settings(load_base() | {key: entry["default"]}), key) is None
                continue
            wanted = type(value).model_validate(entry["default"]) if isinstance(value, BaseModel) else value
            assert wanted == value and (isinstance(value, BaseModel) or type(value)(entry["default"]) == value), key


def test_rules_across_settings_are_told_together_with_a_typo() -> None:
    raw = yaml.safe_load((PROJECT / "Pulumi.dev.yaml").read_text())["config"]
    values = {key.partition(":")[2]: value for key, value in raw.items()}
    values["fabrik"] = {}
    values["groups"]["main"]["serving"]["tensor_parallel_size"] = 4
    values["nodes"][1]["management_address"] = values["nodes"][0]["management_address"]
    with pytest.raises(SettingsError) as refused:
        read_settings(values)
    told = "\n".join(refused.value.violations)
    assert "fabrik: found an unknown key; did you mean 'fabric'?" in told
    assert "expected 2, one for each node's GPU" in told
    assert "nodes[1].management_address: found '10.99.0.12', which nodes[0] already has" in told
