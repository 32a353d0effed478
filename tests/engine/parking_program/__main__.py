"""A program without nodes: as many resources as it is told, each of which takes time and can be parked."""

import os

import pulumi

from tests.engine.parking_resource import Parking

before: list[pulumi.Resource] = []
for place in range(int(os.environ.get("PARKING_COUNT", "1"))):
    made = Parking(f"step-{place}", folder=os.environ["PARKING_FOLDER"], opts=pulumi.ResourceOptions(depends_on=before))
    before = [made]
pulumi.export("model", "none")
