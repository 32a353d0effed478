"""A program without nodes: a step, a rank that restarts when its setting changes, and the settings that are kept.

It looks around first, as long as the file ``look`` says. What is in the file ``leak`` is told by it and its resources.
"""

import os
import time
from pathlib import Path

import pulumi
from pulumi.runtime.config import CONFIG

from components.good_settings import keep_good_settings
from providers.connections import raw_configuration
from spark_core.settings import read_settings
from tests.engine.parking_resource import Parking, Restarting

prefix = f"{pulumi.get_project()}:"
values = {key.removeprefix(prefix): value for key, value in CONFIG.get().items()}
settings = read_settings(raw_configuration(values.get))
serving = settings.groups["main"].serving
folder = os.environ["PARKING_FOLDER"]
leak = Path(folder, "leak")
if leak.is_file():
    pulumi.log.warn(leak.read_text())
look = Path(folder, "look")
if look.is_file():
    Path(folder, "looking").touch()
    time.sleep(float(look.read_text()))
step = Parking("step", folder=folder, mark=str(serving.max_num_seqs))
group = pulumi.ComponentResource("spark:cluster:VllmRayCluster", "main")  # what is in it restarts serving
rank = Restarting(
    "rank", folder=folder, mark=str(serving.max_model_len), opts=pulumi.ResourceOptions(parent=group, depends_on=step)
)
keep_good_settings("good-settings", settings, "sha256:1", "abc", "serving", pulumi.ResourceOptions(depends_on=rank))
pulumi.export("model", "none")
if "api_key" in values:
    pulumi.export("endpoint", "http://127.0.0.1:9/v1")
    pulumi.export("api_key", pulumi.Output.secret(values["api_key"]))
