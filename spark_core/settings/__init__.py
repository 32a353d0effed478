"""The settings: frozen pydantic models of what a stack file may say, and the one reader of them."""

from spark_core.settings.fabric import FabricInterface, FabricSettings
from spark_core.settings.group import (
    GroupSettings,
    ModelSettings,
    MountSettings,
    NotifySettings,
    PatchSettings,
    ServingSettings,
)
from spark_core.settings.host import HostSettings, SetupCommand
from spark_core.settings.hub import HubSettings
from spark_core.settings.image import ImageSettings
from spark_core.settings.launchers import launcher_variable_notes
from spark_core.settings.node import NodeSettings, SshSettings
from spark_core.settings.reader import SECRET_KEYS, SETTING_KEYS, describe, read_settings
from spark_core.settings.root import Settings

__all__ = [
    "SECRET_KEYS",
    "SETTING_KEYS",
    "FabricInterface",
    "FabricSettings",
    "GroupSettings",
    "HostSettings",
    "HubSettings",
    "ImageSettings",
    "ModelSettings",
    "MountSettings",
    "NodeSettings",
    "NotifySettings",
    "PatchSettings",
    "ServingSettings",
    "Settings",
    "SetupCommand",
    "SshSettings",
    "describe",
    "launcher_variable_notes",
    "read_settings",
]
