"""Every property that the Python package sends must be one that this machine's Docker plugin knows.

Our stand-in for the released plugin names properties by rule, with a few exceptions by hand; one that it
names wrongly could not be deployed. The plugin's own Check tells: it refuses a key that it does not know, at
any depth.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

# What reads the names of an input class is private to the SDK, but nothing public tells them.
from pulumi._types import input_type_py_to_pulumi_names
from pulumi_docker import _inputs, container, provider, remote_image, volume

from tests.toolchain.resource_plugin import Plugin

UNKNOWN = "Invalid or unknown key"
ANY = "1"
"""Reads as text, number and truth value, so that no type stands in the way of the name."""
CONTAINER = "docker:index/container:Container"
NESTED = {
    "capabilities": _inputs.ContainerCapabilitiesArgs,
    "devices": _inputs.ContainerDeviceArgs,
    "healthcheck": _inputs.ContainerHealthcheckArgs,
    "hosts": _inputs.ContainerHostArgs,
    "labels": _inputs.ContainerLabelArgs,
    "mounts": _inputs.ContainerMountArgs,
    "networksAdvanced": _inputs.ContainerNetworksAdvancedArgs,
    "ports": _inputs.ContainerPortArgs,
    "ulimits": _inputs.ContainerUlimitArgs,
    "uploads": _inputs.ContainerUploadArgs,
    "volumes": _inputs.ContainerVolumeArgs,
}
SINGLE = {"capabilities", "healthcheck"}
REQUIRED: dict[str, dict[str, Any]] = {
    "devices": {"hostPath": "/dev/x"},
    "healthcheck": {"tests": ["NONE"]},
    "hosts": {"host": "a", "ip": "192.0.2.1"},
    "labels": {"label": "a", "value": "b"},
    "mounts": {"target": "/t", "type": "bind"},
    "networksAdvanced": {"name": "n"},
    "ports": {"internal": 1},
    "ulimits": {"name": "memlock", "soft": 1, "hard": 1},
    "uploads": {"file": "/f"},
}
"""What else a block needs; where it is missing, Check says that instead."""
MOUNT_OPTIONS = {
    "bindOptions": _inputs.ContainerMountBindOptionsArgs,
    "tmpfsOptions": _inputs.ContainerMountTmpfsOptionsArgs,
    "volumeOptions": _inputs.ContainerMountVolumeOptionsArgs,
}


def wire_names(*arguments: type) -> list[str]:
    """The names under which input classes send their properties."""
    return sorted({name for each in arguments for name in input_type_py_to_pulumi_names(each).values()})


def unknown_keys(plugin: Plugin, token: str, inputs: dict[str, Any]) -> str:
    """What Check says about keys that it does not know."""
    required = {"name": "box", **({"image": "image"} if token == CONTAINER else {})}
    failures = plugin.check(token, {**required, **inputs}).failures
    return "\n".join(reason for reason in failures.values() if UNKNOWN in reason)


def block(outer: str, inner: str) -> Any:
    """A container property with one property inside."""
    inside = {inner: ANY, **REQUIRED.get(outer, {})}
    return inside if outer in SINGLE else [inside]


@pytest.mark.parametrize("name", wire_names(container.ContainerArgs))
def test_container_property_is_known(docker_plugin: Plugin, name: str) -> None:
    assert unknown_keys(docker_plugin, CONTAINER, {name: ANY}) == ""


@pytest.mark.parametrize(
    ("outer", "inner"), [(outer, inner) for outer, each in NESTED.items() for inner in wire_names(each)]
)
def test_property_inside_a_container_property_is_known(docker_plugin: Plugin, outer: str, inner: str) -> None:
    assert unknown_keys(docker_plugin, CONTAINER, {outer: block(outer, inner)}) == ""


@pytest.mark.parametrize("outer", NESTED)
def test_a_misspelt_property_inside_a_container_property_is_noticed(docker_plugin: Plugin, outer: str) -> None:
    """Without this the test above could be blind."""
    assert unknown_keys(docker_plugin, CONTAINER, {outer: block(outer, "misspelt")})


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(outer, inner) for outer, each in MOUNT_OPTIONS.items() for inner in wire_names(each)],
)
def test_mount_option_is_known(docker_plugin: Plugin, outer: str, inner: str) -> None:
    mounts = [{**REQUIRED["mounts"], outer: {inner: ANY}}]
    assert unknown_keys(docker_plugin, CONTAINER, {"mounts": mounts}) == ""


@pytest.mark.parametrize("name", wire_names(volume.VolumeArgs))
def test_volume_property_is_known(docker_plugin: Plugin, name: str) -> None:
    assert unknown_keys(docker_plugin, "docker:index/volume:Volume", {name: ANY}) == ""


@pytest.mark.parametrize("name", wire_names(remote_image.RemoteImageArgs))
def test_image_property_is_known(docker_plugin: Plugin, name: str) -> None:
    assert unknown_keys(docker_plugin, "docker:index/remoteImage:RemoteImage", {name: ANY}) == ""


@pytest.mark.parametrize("name", wire_names(provider.ProviderArgs))
def test_provider_property_is_known(docker_plugin: Plugin, name: str) -> None:
    found = docker_plugin.check_config({"host": "unix:///none", name: json.dumps(ANY)}).failures.values()
    assert not [reason for reason in found if UNKNOWN in reason]


def test_a_misspelt_property_is_noticed(docker_plugin: Plugin) -> None:
    """Without this the tests above could all be blind."""
    assert unknown_keys(docker_plugin, CONTAINER, {"networkAdvanced": ANY})
    mounts = [{**REQUIRED["mounts"], "bindOptions": {"propagations": ANY}}]
    assert unknown_keys(docker_plugin, CONTAINER, {"mounts": mounts})
    assert any("nonsense" in reason for reason in docker_plugin.check_config({"nonsense": "x"}).failures.values())


def test_a_complete_container_is_accepted(docker_plugin: Plugin) -> None:
    """One container as this project makes them, with every value of its right type."""
    inputs: dict[str, Any] = {
        "name": "rank-0",
        "image": "sha256:" + "0" * 64,
        "entrypoints": ["python3"],
        "command": ["-m", "rank"],
        "envs": ["A=b"],
        "networkMode": "host",
        "ipcMode": "private",
        "shmSize": 64,
        "gpus": "all",
        "restart": "always",
        "mustRun": True,
        "destroyGraceSeconds": 60,
        "removeVolumes": False,
        "devices": [{"hostPath": "/dev/infiniband", "containerPath": "/dev/infiniband", "permissions": "rwm"}],
        "ulimits": [{"name": "memlock", "soft": -1, "hard": -1}],
        "labels": [{"label": "a", "value": "b"}],
        "mounts": [{"target": "/m", "source": "/s", "type": "bind", "readOnly": True}],
        "logDriver": "json-file",
        "logOpts": {"max-size": "10m"},
        "capabilities": {"drops": ["ALL"], "adds": ["IPC_LOCK"]},
    }
    assert docker_plugin.check(CONTAINER, inputs).failures == {}
