"""``ImageCheck``: what is in the serving image, looked at on every node before anything starts.

It owns nothing on the nodes but a remembered answer. It is made again only when the image or the question has changed:
arguments, environment, mounts, model; a run without such a change costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, ReadResult, Resource, UpdateResult

from providers._adapter import SparkProvider, inputs_of, say, told
from providers.cancel import check_cancel
from providers.fabric_proof import with_interfaces
from spark_core.errors import SparkError
from spark_core.group import GroupFiles
from spark_core.image.inside import look_inside

INPUTS = ("stack", "group", "image_id", "question", "architectures", "interfaces", "roots", "runtime", "patches")


class ImageCheckProvider(SparkProvider):
    """Life cycle of a look into the image: made on create and on a change, kept by read, forgotten by delete."""

    compared = ("image_id", "question")
    replaced_by = ("stack", "group")

    @told
    def create(self, props: Mapping[str, Any]) -> CreateResult:
        return CreateResult(f"{props['stack']}/{props['group']}/image-check", self._looked(props))

    @told
    def update(self, _id: str, _olds: Mapping[str, Any], news: Mapping[str, Any]) -> UpdateResult:
        return UpdateResult(self._looked(news))

    @told
    def read(self, id_: str, props: Mapping[str, Any]) -> ReadResult:
        """An image never changes its content; whether the nodes have it is for others to see."""
        return ReadResult(id_, dict(props), inputs_of(props, INPUTS))

    @told
    def delete(self, _id: str, _props: Mapping[str, Any]) -> None:
        """What is remembered goes with the stack's folder."""

    def _looked(self, props: Mapping[str, Any]) -> dict[str, Any]:
        settings = with_interfaces(self.run.settings, props["interfaces"])
        name, image_id = str(props["group"]), str(props["image_id"])
        members = settings.groups[name].nodes
        say(f"image: looking into {image_id[:19]} on {', '.join(members)}")
        inside = look_inside(
            settings,
            str(props["stack"]),
            name,
            image_id,
            list(props["architectures"]),
            GroupFiles(str(props["runtime"]), tuple(props["patches"]), dict.fromkeys(members, "/")),
            {node: self.run.transport(node) for node in members},
            {node: str(props["roots"][node]) for node in members},
            lambda: check_cancel("what the image says is kept once it has answered"),
        )
        failures = [finding for finding in inside.findings if finding.severity == "fail"]
        for finding in inside.findings:
            if finding.severity != "fail":
                say(finding.line)
        if failures:
            first, *others = failures
            raise SparkError(
                f"{first.what} [{first.code}]",
                where=first.where,
                do=first.do,
                evidence=[other.line.splitlines()[0] for other in others],
            )
        versions = inside.reports[0].versions if inside.reports else {}
        warnings = [finding.line.splitlines()[0] for finding in inside.findings]
        return {**props, "versions": versions, "warnings": warnings}


class ImageCheck(Resource, module="spark", name="ImageCheck"):
    """What is in the serving image of a group.

    Args:
        stack: Name of the stack.
        group: Name of the group.
        image_id: Local id of the image.
        question: Hash of everything that is asked.
        architectures: The model's architectures; empty where its configuration is not there yet.
        interfaces: For each node of the group its fabric, as in ``FabricProof``.
        roots: For each node of the group, our folder, which keeps the answer.
        runtime: Path of the rank supervisor below the stack's folder of files.
        patches: Paths of the patches there.
    """

    versions: pulumi.Output[dict[str, Any]]
    """Versions of python, vllm, ray, transformers, torch and nccl, the same on every node."""
    warnings: pulumi.Output[list[Any]]
    """What was found and does not fail."""

    def __init__(
        self,
        resource_name: str,
        *,
        stack: str,
        group: str,
        image_id: pulumi.Input[str],
        question: str,
        architectures: list[str],
        interfaces: dict[str, Any],
        roots: dict[str, str],
        runtime: str,
        patches: list[str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        props: dict[str, Any] = {
            "stack": stack,
            "group": group,
            "image_id": image_id,
            "question": question,
            "architectures": architectures,
            "interfaces": interfaces,
            "roots": roots,
            "runtime": runtime,
            "patches": patches,
            "versions": None,
            "warnings": None,
        }
        super().__init__(ImageCheckProvider(), resource_name, props, opts)
