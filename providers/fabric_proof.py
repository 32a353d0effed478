"""``FabricProof``: the fabric of a group proven once, before weights are copied and before the group starts.

It owns nothing on the nodes. The proof is made again only when what it proves has changed: interfaces, image, the
variables that decide how ranks talk, or what is asked of the fabric; a run without such a change costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, ReadResult, Resource, UpdateResult

from providers._adapter import SparkProvider, inputs_of, say, told
from providers.cancel import CANCELLED, check_cancel
from spark_core.group import GroupFiles
from spark_core.proof import FabricReport, ProofRun, prove_fabric
from spark_core.settings import FabricInterface, NodeSettings, Settings

INPUTS = ("stack", "group", "image_id", "interfaces", "environment", "demands", "runtime", "patches")
MEASURED = ("bandwidth", "transports", "not_proven")


class FabricProofProvider(SparkProvider):
    """Life cycle of a proof: made on create and on a change, kept as it was by read, forgotten by delete."""

    compared = ("image_id", "interfaces", "environment", "demands")
    replaced_by = ("stack", "group")

    @told
    def create(self, props: Mapping[str, Any]) -> CreateResult:
        return CreateResult(f"{props['stack']}/{props['group']}/fabric-proof", self._prove(props))

    @told
    def update(self, _id: str, _olds: Mapping[str, Any], news: Mapping[str, Any]) -> UpdateResult:
        return UpdateResult(self._prove(news))

    @told
    def read(self, id_: str, props: Mapping[str, Any]) -> ReadResult:
        """What was measured is history; whether the fabric is still as declared is for others to see."""
        return ReadResult(id_, dict(props), inputs_of(props, INPUTS))

    @told
    def delete(self, _id: str, _props: Mapping[str, Any]) -> None:
        """The proof left nothing on the nodes."""

    def _prove(self, props: Mapping[str, Any]) -> dict[str, Any]:
        settings = with_interfaces(self.run.settings, props["interfaces"])
        names = settings.groups[str(props["group"])].nodes
        report = prove_fabric(
            ProofRun(
                settings=settings,
                stack=str(props["stack"]),
                group=str(props["group"]),
                image_id=str(props["image_id"]),
                # The container of a proof gets no weights: any path will do in the plan that it is taken from.
                files=GroupFiles(str(props["runtime"]), tuple(props["patches"]), dict.fromkeys(names, "/")),
                transports={name: self.run.transport(name) for name in names},
                say=say,
                pause=_pause,
            )
        )
        report.raise_failure()
        return {**props, **_measured(report)}


def with_interfaces(settings: Settings, interfaces: Mapping[str, Any]) -> Settings:
    """The settings with the interfaces that the program used: discovery fills in what the stack file leaves open."""

    def filled(node: NodeSettings) -> NodeSettings:
        found = interfaces.get(node.name)
        if found is None:
            return node
        fabric = tuple(FabricInterface(**interface) for interface in found["fabric"])
        control = {key: found.get(key) or None for key in ("control_address", "control_netdev")}
        return node.model_copy(update={"fabric": fabric, **control})

    return settings.model_copy(update={"nodes": tuple(filled(node) for node in settings.nodes)})


def _measured(report: FabricReport) -> dict[str, Any]:
    return {
        "bandwidth": [
            {
                "pair": f"{pair.first} - {pair.second}",
                "method": pair.method,
                "links": pair.links,
                "gbps": [round(pair.forward_gbps, 2), round(pair.backward_gbps, 2)],
                "round_trip_us": round(pair.round_trip_us, 1),
            }
            for pair in report.pairs
        ],
        "transports": dict(report.transports),
        "not_proven": [found.line.splitlines()[0] for found in report.findings if found.severity != "ignore"],
    }


def _pause(seconds: float) -> None:
    check_cancel("nothing of the proof is left running")
    CANCELLED.wait(seconds)
    check_cancel("nothing of the proof is left running")


class FabricProof(Resource, module="spark", name="FabricProof"):
    """The proof of a group's fabric.

    Args:
        stack: Name of the stack.
        group: Name of the group.
        image_id: Local id of the serving image.
        interfaces: For each node of the group ``fabric`` (``netdev``, ``address`` and ``hca`` of each interface) and,
            where ranks meet elsewhere, ``control_address`` and ``control_netdev``.
        environment: Hash of what decides how ranks talk.
        demands: What is asked of the fabric: hardware, MTU, RDMA policy, when to prove, floor.
        runtime: Path of the rank supervisor below the stack's folder of files.
        patches: Paths of the patches there.
    """

    bandwidth: pulumi.Output[list[Any]]
    """What each pair of nodes moved: method, Gb/s in both directions, round trip in µs."""
    transports: pulumi.Output[dict[str, Any]]
    """For each node, what its rank talked over in the collective."""
    not_proven: pulumi.Output[list[Any]]
    """Warnings, and what could not be checked since a node was busy."""

    def __init__(
        self,
        resource_name: str,
        *,
        stack: str,
        group: str,
        image_id: pulumi.Input[str],
        interfaces: dict[str, Any],
        environment: str,
        demands: dict[str, Any],
        runtime: str,
        patches: list[str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        props: dict[str, Any] = {
            "stack": stack,
            "group": group,
            "image_id": image_id,
            "interfaces": interfaces,
            "environment": environment,
            "demands": demands,
            "runtime": runtime,
            "patches": patches,
            **dict.fromkeys(MEASURED),
        }
        super().__init__(FabricProofProvider(), resource_name, props, opts)
