"""Where the time of an update went, from the times that the engine keeps in the state. Pure.

The state says when each resource was made or changed last (``created`` and ``modified``, set when the provider has
answered; pulumi/pulumi, pkg/resource/deploy/step.go), not when that began. A step begins once what it depends on is
there, so it counts from the latest end among those: an upper bound where steps wait for a free place of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from automation.deployment_report import StepPart

_OURS_NOT = ("pulumi:pulumi:Stack", "pulumi:providers:")


def step_times(resources: Sequence[Mapping[str, Any]], started: str, ended: str | None) -> list[StepPart]:
    """The steps of an update in the order in which they ended.

    Args:
        resources: Those of an exported state.
        started: When the update began, as the history has it.
        ended: When it ended; None while it goes on.
    """
    begin, end = seconds_of(started), seconds_of(ended)
    if begin is None:
        return []
    done = {str(resource.get("urn")): at for resource in resources if (at := _changed(resource)) is not None}
    # The history has whole seconds.
    inside = {urn: at for urn, at in done.items() if begin - 1 <= at <= (end or at) + 1}
    known = {str(resource.get("urn")): resource for resource in resources}
    steps = []
    for urn, at in sorted(inside.items(), key=lambda item: item[1]):
        if str(known[urn].get("type", "")).startswith(_OURS_NOT):
            continue
        before = [inside[other] for other in _needs(known, urn) if other in inside and inside[other] <= at]
        since = max([begin, *before])
        steps.append(
            StepPart(
                name=urn.rpartition("::")[2],
                begun_s=round(max(0.0, since - begin), 1),
                seconds=round(max(0.0, at - since), 1),
            )
        )
    return steps


def seconds_of(text: str | None) -> float | None:
    """A time of the engine as seconds since the epoch; None where there is none that can be read."""
    try:
        return datetime.fromisoformat((text or "").replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def _changed(resource: Mapping[str, Any]) -> float | None:
    return seconds_of(resource.get("modified")) or seconds_of(resource.get("created"))


def _needs(known: Mapping[str, Mapping[str, Any]], urn: str) -> set[str]:
    """Everything that a resource waits for, over components, which are there at once, too."""
    found: set[str] = set()
    left = [urn]
    while left:
        resource = known.get(left.pop(), {})
        provider = str(resource.get("provider") or "").rpartition("::")[0]
        for other in (*(resource.get("dependencies") or []), resource.get("parent"), provider):
            if other and other not in found:
                found.add(other)
                left.append(other)
    return found - {urn}
