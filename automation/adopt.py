"""``adopt``: take running containers of ours into a state that does not know them, without a restart.

A stack whose state is lost finds its containers running. Pulumi's own import cannot take them: the Docker provider does
not read back environment, labels and limits, and would replace what differs (docs/adr/0009-adopt-by-writing-state.md).
What a container should be is known exactly, though: the plan of the program. If the container on the node carries the
same deployment id, which is a hash of all of it, then the plan's inputs are the container's. So its record is written
from the plan, with the id that Docker gave it, and the next ``up`` finds nothing to change.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from automation.engine import pulumi, pulumi_json
from automation.events import CONTAINER, GROUP
from automation.exit_codes import Exit
from automation.reports import AdoptReport
from automation.stack_file import add_stack_argument, open_stack_file
from providers.connections import Run
from spark_core.errors import CommandError, SparkError
from spark_core.group import LABEL
from spark_core.transport.base import Transport, command

_PROVIDER = "pulumi:providers:docker"
_SCHEMA = json.dumps({"schema_version": "2"})
"""Version of the Docker provider's schema of a container; the provider reads older ones too."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "adopt",
        help="take running containers of a stack into a state that was lost",
        description="For a stack whose state is lost while its containers run: writes their records into the state, "
        "from the program's own plan. Nothing on a node is changed, nothing restarts. Run `pulumi up` afterwards.",
    )
    add_stack_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON (docs/schemas/)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plan, look at the containers, write the state."""
    file = open_stack_file(options.stack)
    nodes = Run(file.raw())
    state = pulumi_json("stack", "export", "-s", options.stack)
    plan = pulumi_json("preview", "-s", options.stack, "--json", "--refresh=false")
    ids: dict[str, str] = {}
    for planned in planned_containers(plan):
        found = running_id(nodes.transport(planned.node), planned, file.stack.rsplit("/", 1)[-1])
        told = f"container {found[:12]}" if found else "none; up makes it"
        print(f"{planned.node}: {planned.name}: {told}", file=sys.stderr if options.json else sys.stdout)
        if found is not None:
            ids[planned.urn] = found
    if not ids:
        raise SparkError(
            "expected containers of this stack that its state does not know, found none",
            where="adopt",
            do="run `pulumi up`",
        )
    with tempfile.NamedTemporaryFile("w", suffix=".json") as written:
        json.dump(with_containers(plan, state, ids), written)
        written.flush()
        pulumi("stack", "import", "-s", options.stack, "--file", written.name)
    if options.json:
        names = {planned.urn: planned.name for planned in planned_containers(plan)}
        adopted = {names[urn]: found for urn, found in ids.items()}
        report = AdoptReport(command="adopt", stack=options.stack, exit_code=Exit.DONE, adopted=adopted)
        print(report.model_dump_json(indent=2))
        return Exit.DONE
    print(
        f"{len(ids)} containers are in the state of {options.stack} now; `pulumi up` does the rest, without a restart"
    )
    return Exit.DONE


@dataclass(frozen=True)
class Planned:
    """A container of the program's plan.

    Attributes:
        urn: Its name in the state.
        node: Name of its node.
        name: Name in Docker.
        deployment: Deployment id that it would get.
    """

    urn: str
    node: str
    name: str
    deployment: str


def planned_containers(plan: Mapping[str, Any]) -> list[Planned]:
    """The containers that a plan (``pulumi preview --json``) would create.

    Raises:
        SparkError: a container's deployment is not known before something else is created.
    """
    found = []
    for new in _resources(plan, "create"):
        if new["type"] != CONTAINER or GROUP not in new["urn"]:
            continue
        inputs = new.get("inputs", {})
        labels = {item.get("label"): item.get("value") for item in inputs.get("labels") or [] if isinstance(item, dict)}
        deployment = labels.get(f"{LABEL}.deployment")
        node = str(new["provider"]).rpartition("::")[0].rpartition("::")[2].removesuffix("-docker")
        if not isinstance(deployment, str) or not deployment.isalnum():
            raise SparkError(
                f"expected the deployment of {inputs.get('name', new['urn'])} in the plan, found it not yet known",
                where="adopt",
                do="pin the image (local_id, archive, or a digest that the nodes have) and the model's revision",
            )
        found.append(Planned(str(new["urn"]), node, str(inputs["name"]), deployment))
    return found


def running_id(transport: Transport, planned: Planned, stack: str) -> str | None:
    """Docker's id of a container if it is ours and what the plan says; None if there is none of that name.

    Raises:
        SparkError: there is one, and it is another stack's, or of another deployment.
    """
    result = transport.run(command("docker", "container", "inspect", planned.name))
    if not result.ok:
        if "No such" in result.stderr:
            return None
        raise CommandError(
            f"expected an answer about the container {planned.name}, found: {result.stderr.strip()[-160:]}",
            where=f"{transport.node} (docker)",
        )
    found = json.loads(result.stdout)[0]
    labels = found["Config"].get("Labels") or {}
    for label, wanted in ((f"{LABEL}.stack", stack), (f"{LABEL}.deployment", planned.deployment)):
        if labels.get(label) != wanted:
            raise SparkError(
                f"expected the label {label}={wanted} on {planned.name}, found {labels.get(label, 'none')}",
                where=transport.node,
                do="the settings or the image differ from what runs there: set them as they were, or remove the "
                "container by hand and let up make a new one",
            )
    return str(found["Id"])


def with_containers(plan: Mapping[str, Any], state: Mapping[str, Any], ids: Mapping[str, str]) -> dict[str, Any]:
    """A state (``pulumi stack export``) that also knows the given containers.

    Args:
        ids: URN of each container to Docker's id.

    Raises:
        SparkError: the state already has one of them.
    """
    deployment = dict(state["deployment"])
    resources: list[dict[str, Any]] = [dict(resource) for resource in deployment.get("resources") or []]
    known = {str(resource["urn"]): resource for resource in resources}
    twice = sorted(set(ids) & set(known))
    if twice:
        raise SparkError(
            f"expected a state without {twice[0].rpartition('::')[2]}, found it there",
            where="adopt",
            do="run `pulumi up`; adopt is for a state that was lost",
        )
    providers = {urn: str(resource.get("id")) for urn, resource in known.items()}
    wanted = {str(new["urn"]): new for new in _resources(plan)}
    needed = {urn for container in ids for urn in _above(container, wanted)}
    for urn, new in wanted.items():  # in the plan's order: what is depended on comes first
        if urn in known or urn not in needed | set(ids):
            continue
        record: dict[str, Any] = {key: new[key] for key in ("urn", "custom", "type", "parent") if key in new}
        if new["type"].startswith(_PROVIDER):
            providers[urn] = str(uuid.uuid4())
            record |= {"id": providers[urn], "inputs": new["inputs"], "outputs": _plain(new["inputs"])}
        elif urn in ids:
            provider = str(new["provider"]).rpartition("::")[0]
            outputs = {**_plain(new["inputs"]), "id": ids[urn], "__meta": _SCHEMA}
            record |= {
                "id": ids[urn],
                "provider": f"{provider}::{providers[provider]}",
                "inputs": new["inputs"],
                "outputs": outputs,
                "replaceOnChanges": new.get("replaceOnChanges", []),
            }
        resources.append(record)
    deployment["resources"] = resources
    return {**state, "deployment": deployment}


def _resources(plan: Mapping[str, Any], *operations: str) -> list[dict[str, Any]]:
    return [
        step["newState"]
        for step in plan.get("steps", [])
        if step.get("newState") and (not operations or step.get("op") in operations)
    ]


def _above(urn: str, wanted: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """What must be in the state for a container to be: its parents, and its provider with its parents."""
    found: set[str] = set()
    left = [str(wanted[urn].get("parent", "")), str(wanted[urn].get("provider", "")).rpartition("::")[0]]
    while left:
        above = left.pop()
        if above in wanted and above not in found:
            found.add(above)
            left.append(str(wanted[above].get("parent", "")))
    return found


def _plain(value: Any) -> Any:
    """Inputs as outputs: without the engine's note of which values are defaults."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if key != "__defaults"}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value
