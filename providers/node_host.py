"""``NodeHost``: facts of a host, its declared tuning, and the content of the files that lie on it for us.

It owns the kernel parameters, units and configuration that the settings declare, and the owner's own files. The files
below the stack's folder are copied by the command provider, which cannot see when one is altered: this resource sees
it, and its output ``repair`` makes that provider copy again.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

import pulumi
from pulumi.dynamic import CreateResult, ReadResult, Resource, UpdateResult

from providers._adapter import SparkProvider, folder_of, inputs_of, say, told
from spark_core.errors import CommandError
from spark_core.facts import FactsSpec, facts_fragment, known, parse_facts
from spark_core.facts.docker import Docker
from spark_core.journal import read_journal, record_setup, undo
from spark_core.node_files import hashes_fragment, observe_files, parse_hashes, prune_files
from spark_core.transport.base import Transport, compose, parse_sections, run_checked, script
from spark_core.tuning import (
    ManagedFile,
    Place,
    Tuning,
    apply_tuning,
    owner_file,
    parse_tuning,
    tuning_fragments,
    values_of,
)

INPUTS = ("node", "connection", "stack", "root", "sysctls", "tuning", "placed", "files", "setup")


class NodeHostProvider(SparkProvider):
    """Life cycle of a host's tuning, and the watch over the files that lie on it."""

    compared = ("connection", "sysctls", "tuning", "placed", "files", "setup")
    replaced_by = ("node", "stack", "root")

    @told
    def create(self, props: Mapping[str, Any]) -> CreateResult:
        return CreateResult(str(props["node"]), self._converge(props) | {"repair": "none"})

    @told
    def update(self, _id: str, olds: Mapping[str, Any], news: Mapping[str, Any]) -> UpdateResult:
        outs = self._converge(news)
        transport = self.run.transport(news["node"], news["connection"])
        altered = {
            path
            for path, digest in observe_files(transport, list(news["files"])).items()
            if digest not in ("absent", news["files"][path])
        }
        known_before = set(olds.get("files") or {})
        gone = {
            path for path, digest in (olds.get("files") or {}).items() if digest == "absent" and path in news["files"]
        }
        prune_files(transport, folder_of(news), list(news["files"]))
        repair = secrets.token_hex(4) if (altered & known_before) or gone else olds.get("repair", "none")
        return UpdateResult(outs | {"repair": repair})

    @told
    def read(self, id_: str, props: Mapping[str, Any]) -> ReadResult:
        if self.abandoned(str(props["node"])):
            return ReadResult(id_, dict(props), inputs_of(props, INPUTS))
        transport = self.run.transport(props["node"], props["connection"])
        live = self._live(transport, props)
        return ReadResult(id_, {**props, **live}, {**inputs_of(props, INPUTS), **live})

    @told
    def delete(self, _id: str, props: Mapping[str, Any]) -> None:
        node = str(props["node"])
        if self.abandoned(node):
            left = [*props["sysctls"], *(props.get("tuning") or {}), *(props.get("placed") or {})]
            say(f"{node} is given up; what was tuned on it stays: {', '.join(left) or 'nothing'}")
            return
        self.run.require_all_nodes()
        transport, folder = self.run.transport(node, props["connection"]), folder_of(props)
        ours = [entry.key for entry in read_journal(transport, folder) if entry.part == "host"]
        for text in undo(transport, folder, ours, disturb_others=self.run.settings.host.disturb_others):
            say(f"{node}: {text}")

    def _live(self, transport: Transport, props: Mapping[str, Any]) -> dict[str, Any]:
        """The compared inputs as they are on the node, in one round trip."""
        place, tuning, paths = _place(props), self._declared(props), sorted(props["files"])
        text = run_checked(
            transport,
            compose(*tuning_fragments(place, tuning), hashes_fragment(paths), timeout_s=60),
            purpose="expected to look at the host",
        )
        sections = parse_sections(text)
        facts = parse_tuning(transport, place, tuning, sections)
        placed = {}
        for target, file in (props.get("placed") or {}).items():
            state = facts.files[target]
            strange = file["sudo"] and state.there and state.owner != "0:0"
            content = f"{state.digest}, owner {state.owner}" if strange else state.digest
            placed[target] = {**file, "content": content, "mode": state.mode or file["mode"]}
        return {
            "sysctls": {name: "absent" if value is None else value for name, value in facts.sysctls.items()},
            "tuning": values_of(place, list(tuning.items), facts),
            "placed": placed,
            "files": parse_hashes(transport.node, sections, paths),
        }

    def _declared(self, props: Mapping[str, Any]) -> Tuning:
        """The tuning of a resource, without the content of the owner's files."""
        settings = self.run.settings
        files = [
            ManagedFile(target, b"", file["mode"], file["sudo"]) for target, file in (props.get("placed") or {}).items()
        ]
        items = props.get("tuning") or {}
        return Tuning(props["sysctls"], items, files, settings.host.disturb_others, settings.hardware == "spark")

    def _converge(self, news: Mapping[str, Any]) -> dict[str, Any]:
        transport = self.run.transport(news["node"], news["connection"])
        declared = self._declared(news)
        record_setup(transport, folder_of(news), news["setup"])
        files = [_with_content(target, file) for target, file in news["placed"].items()]
        tuning = Tuning(declared.sysctls, declared.items, files, declared.disturb_others, declared.gpu)
        apply_tuning(transport, _place(news), tuning)
        folders = sorted({path.rpartition("/")[0] for path in news["files"]})
        if folders:
            run_checked(
                transport, script('umask 022; mkdir -p -- "$@"', *folders), purpose="expected to create folders"
            )
        return {**news, **self._facts(transport, str(news["root"]))}

    def _facts(self, transport: Transport, root: str) -> dict[str, str]:
        """What the outputs tell of the host; what cannot be read is "unknown"."""
        spec = FactsSpec(paths=(root,), gpu=self.run.settings.hardware == "spark")
        text = run_checked(
            transport, compose(facts_fragment(spec), timeout_s=40), purpose="expected the facts of the host"
        )
        facts = parse_facts(spec, parse_sections(text))
        gpus = facts.gpus if isinstance(facts.gpus, tuple) else ()
        return {
            "architecture": known(facts.architecture) or "unknown",
            "kernel": known(facts.kernel) or "unknown",
            "os": known(facts.os) or "unknown",
            "docker": facts.docker.version if isinstance(facts.docker, Docker) else "unknown",
            "gpu": ", ".join(f"{gpu.name}, {gpu.driver}" for gpu in gpus) or "none",
        }


def _place(props: Mapping[str, Any]) -> Place:
    return Place(folder_of(props), str(props["connection"]["user"]))


def _with_content(target: str, file: Mapping[str, Any]) -> ManagedFile:
    """A file of the owner with its content, which must be the one that was looked at."""
    found = owner_file(file["source"], target, file["mode"], file["sudo"])
    if hashlib.sha256(found.content).hexdigest() != file["content"]:
        raise CommandError(
            f"expected {file['source']} as it was when this run began, found another content",
            where="host.files",
            do="run up again",
        )
    return found


class NodeHost(Resource, module="spark", name="NodeHost"):
    """The host of a node.

    Args:
        node: Name of the node.
        connection: How the node is reached, for the day the settings no longer name it.
        stack: Name of the stack.
        root: Our folder on the node.
        sysctls: Kernel parameters and their values.
        tuning: Declared tuning beside them, setting to value.
        placed: Absolute path of each file of the owner to its ``source`` in the project folder, the SHA-256 of its
            ``content``, its ``mode``, and whether it is root's (``sudo``).
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
        tuning: dict[str, str],
        placed: dict[str, dict[str, Any]],
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
            "tuning": tuning,
            "placed": placed,
            "files": files,
            "setup": setup,
        }
        outputs = dict.fromkeys(("architecture", "kernel", "os", "docker", "gpu", "repair"))
        super().__init__(NodeHostProvider(), resource_name, props | outputs, opts)
