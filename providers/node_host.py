"""``NodeHost``: facts of a host, declared kernel parameters, and the content of the files that lie on it for us.

It owns the kernel parameters that the settings declare. The files themselves are copied by the command provider, which
cannot see when one is altered: this resource sees it, and its output ``repair`` makes that provider copy again.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, ReadResult, Resource, UpdateResult

from providers._adapter import SparkProvider, folder_of, told
from spark_core.host import apply_sysctls, observe_files, observe_host, observe_sysctls, prune_files
from spark_core.journal import record_setup, undo
from spark_core.transport.base import run_checked, script

INPUTS = ("node", "connection", "stack", "root", "sysctls", "files", "setup")


class NodeHostProvider(SparkProvider):
    """Life cycle of a host's kernel parameters, and the watch over the files that lie on it."""

    compared = ("connection", "sysctls", "files", "setup")
    replaced_by = ("node", "stack", "root")

    @told
    def create(self, props: Mapping[str, Any]) -> CreateResult:
        return CreateResult(str(props["node"]), self._converge({}, props) | {"repair": "none"})

    @told
    def update(self, _id: str, olds: Mapping[str, Any], news: Mapping[str, Any]) -> UpdateResult:
        outs = self._converge(olds, news)
        transport = self.run.transport(news["node"], news["connection"])
        altered = {
            path
            for path, digest in observe_files(transport, list(news["files"])).items()
            if digest not in ("absent", news["files"][path])
        }
        known = set(olds.get("files") or {})
        gone = {
            path for path, digest in (olds.get("files") or {}).items() if digest == "absent" and path in news["files"]
        }
        prune_files(transport, folder_of(news), list(news["files"]))
        repair = secrets.token_hex(4) if (altered & known) or gone else olds.get("repair", "none")
        return UpdateResult(outs | {"repair": repair})

    @told
    def read(self, id_: str, props: Mapping[str, Any]) -> ReadResult:
        transport = self.run.transport(props["node"], props["connection"])
        values = observe_sysctls(transport, sorted(props["sysctls"]))
        live = {
            "sysctls": {name: value if value is not None else "absent" for name, value in values.items()},
            "files": observe_files(transport, sorted(props["files"])),
        }
        return ReadResult(id_, {**props, **live}, {**{key: props[key] for key in INPUTS}, **live})

    @told
    def delete(self, _id: str, props: Mapping[str, Any]) -> None:
        self.run.require_all_nodes()
        transport = self.run.transport(props["node"], props["connection"])
        undo(transport, folder_of(props), [("sysctl", name) for name in props["sysctls"]])

    def _converge(self, olds: Mapping[str, Any], news: Mapping[str, Any]) -> dict[str, Any]:
        transport = self.run.transport(news["node"], news["connection"])
        record_setup(transport, folder_of(news), news["setup"])
        no_longer = sorted(set(olds.get("sysctls") or {}) - set(news["sysctls"]))
        apply_sysctls(transport, folder_of(news), news["sysctls"], no_longer)
        folders = sorted({path.rpartition("/")[0] for path in news["files"]})
        if folders:
            run_checked(
                transport, script('umask 022; mkdir -p -- "$@"', *folders), purpose="expected to create folders"
            )
        facts = observe_host(transport, str(news["root"]))
        return {
            **news,
            "architecture": facts.architecture,
            "kernel": facts.kernel,
            "os": facts.os,
            "docker": facts.docker or "unknown",
            "gpu": facts.gpu or "none",
        }


class NodeHost(Resource, module="spark", name="NodeHost"):
    """The host of a node.

    Args:
        node: Name of the node.
        connection: How the node is reached, for the day the settings no longer name it.
        stack: Name of the stack.
        root: Our folder on the node.
        sysctls: Kernel parameters and their values.
        files: Absolute path of each file of ours to its SHA-256.
        setup: Name of each setup command of the owner to the text that takes it back.
    """

    architecture: pulumi.Output[str]
    """Docker's word for the machine's architecture."""
    kernel: pulumi.Output[str]
    """Kernel release."""
    os: pulumi.Output[str]
    """Name of the distribution."""
    docker: pulumi.Output[str]
    """Version of the Docker daemon."""
    gpu: pulumi.Output[str]
    """GPU and driver, or ``none``."""
    repair: pulumi.Output[str]
    """Changes whenever a file was found altered, so that it is copied again."""

    def __init__(
        self,
        resource_name: str,
        *,
        node: str,
        connection: dict[str, Any],
        stack: str,
        root: str,
        sysctls: dict[str, str],
        files: dict[str, str],
        setup: dict[str, str],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        props: dict[str, Any] = {
            "node": node,
            "connection": connection,
            "stack": stack,
            "root": root,
            "sysctls": sysctls,
            "files": files,
            "setup": setup,
        }
        outputs = dict.fromkeys(("architecture", "kernel", "os", "docker", "gpu", "repair"))
        super().__init__(NodeHostProvider(), resource_name, props | outputs, opts)
