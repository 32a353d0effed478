"""What the stack's own state remembers of models of the hub, so that a floating revision is resolved once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pulumi

from providers.hub_revision import TYPE
from spark_core.hub.listing import Listing, from_compact
from spark_core.settings import Settings


def recorded_revisions(settings: Settings, stack: str) -> dict[str, tuple[str, Listing]]:
    """For each group, the source and the listing that the state has of its model; asks the engine, and no node.

    Only for stacks with a model of the hub: others cost nothing.
    """
    if not any(group.model.kind == "hub" for group in settings.groups.values()):
        return {}
    name = f"{pulumi.get_organization()}/{pulumi.get_project()}/{stack}"
    answer = pulumi.runtime.invoke("pulumi:pulumi:readStackResourceOutputs", {"stackName": name}).value
    return records_of(answer.get("outputs") if isinstance(answer, dict) else None)


def records_of(resources: object) -> dict[str, tuple[str, Listing]]:
    """The records among all resources of a state, by their group."""
    found = {}
    for resource in resources.values() if isinstance(resources, Mapping) else ():
        outputs: Any = resource.get("outputs") if isinstance(resource, Mapping) else None
        if isinstance(outputs, Mapping) and resource.get("type") == TYPE:
            listing = from_compact(str(outputs["commit"]), outputs["files"])
            found[str(outputs["group"])] = (str(outputs["source"]), listing)
    return found
