"""What the stack's own state remembers of models of the hub, so that a floating revision is resolved once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pulumi

from providers.hub_revision import TYPE
from spark_core.errors import SparkError
from spark_core.hub.listing import Listing, from_compact
from spark_core.settings import Settings

_TRIES = 7
_FIRST_PAUSE_S = 0.1


def recorded_revisions(settings: Settings, stack: str) -> dict[str, tuple[str, Listing]]:
    """For each group, the source and the listing that the state has of its model; asks the engine, and no node.

    Only for stacks with a model of the hub: others cost nothing.
    """
    if not any(group.model.kind == "hub" for group in settings.groups.values()):
        return {}
    name = f"{pulumi.get_organization()}/{pulumi.get_project()}/{stack}"
    answer = _read_state(name)
    return records_of(answer.get("outputs") if isinstance(answer, dict) else None)


def _read_state(name: str) -> object:
    """All resources of a stack as the engine has them; asked again while it is writing them itself."""
    left, pause_s = _TRIES, _FIRST_PAUSE_S
    while True:
        try:
            return pulumi.runtime.invoke("pulumi:pulumi:readStackResourceOutputs", {"stackName": name}).value
        except Exception as error:  # the engine gives its errors no class of their own
            # An update has begun, and a checkpoint is for a moment a file without content (seen, engine 3.276).
            if "failed to load checkpoint" not in str(error):
                raise
            left -= 1
            if not left:
                raise SparkError(
                    f"expected the state of the stack {name}, found that the engine cannot read it: {error}",
                    where="groups.*.model.source",
                    do="`pulumi stack export` tells more",
                ) from None
            time.sleep(pause_s)
            pause_s *= 2


def records_of(resources: object) -> dict[str, tuple[str, Listing]]:
    """The records among all resources of a state, by their group."""
    found = {}
    for resource in resources.values() if isinstance(resources, Mapping) else ():
        outputs: Any = resource.get("outputs") if isinstance(resource, Mapping) else None
        if isinstance(outputs, Mapping) and resource.get("type") == TYPE:
            listing = from_compact(str(outputs["commit"]), outputs["files"])
            found[str(outputs["group"])] = (str(outputs["source"]), listing)
    return found
