"""What preview must know of the weights of each group: which revision, where it lies, whether there is space for it.

Asks each node once more, after its other facts, and the hub only for what neither state nor node knows. It changes
nothing.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from spark_core.errors import HubError, ObservationError, SparkError
from spark_core.findings import Finding
from spark_core.hub.ask import ask_hub
from spark_core.hub.cached import ask_caches
from spark_core.hub.listing import Listing
from spark_core.model_look import ModelLook
from spark_core.preflight.reach import finding_of
from spark_core.settings import ModelSettings, NodeSettings, Settings
from spark_core.transfer.look import node_program
from spark_core.transfer.manifest import Manifest
from spark_core.transport.base import Transport, command, run_checked

SPARE_SPACE = 1.02
LOOK_TIMEOUT_S = 60
Opener = Callable[[NodeSettings], Transport]


@dataclass(frozen=True)
class CacheLook:
    """What a node's hub cache has of a revision.

    Attributes:
        folder: Folder of the revision in it.
        fault: Empty if it is whole as far as sizes and remembered hashes tell, else ``absent``, ``missing``,
            ``altered`` or ``unreadable``.
        file: The file that this is about.
        paths: For each file of a whole one, where its content lies, links resolved.
    """

    folder: str
    fault: str
    file: str
    paths: Mapping[str, str]


@dataclass(frozen=True)
class NodeWeights:
    """Where a model lies on a node.

    Attributes:
        there: Whether our folder for the revision is there.
        missing: Bytes that are still to arrive in it.
        free: Bytes of free space on its disk.
        cache: What the node's hub cache has, or None if none is looked at.
        config: Text of the model's ``config.json``, if it is there.
    """

    there: bool
    missing: int
    free: int
    cache: CacheLook | None
    config: str

    @property
    def in_place(self) -> CacheLook | None:
        """The hub cache, if the model is used where it lies there."""
        return self.cache if self.cache is not None and not self.cache.fault and not self.there else None


@dataclass(frozen=True)
class GroupWeights:
    """The weights of a group, as far as they are known before anything is copied.

    Attributes:
        revision: The hub's commit, or the hash of a directory's content.
        listing: What the hub says of it; None for a directory, and where the hub was not asked.
        config: Text of ``config.json``; empty if it is not known.
        nodes: What was seen on each node.
    """

    revision: str
    listing: Listing | None = None
    config: str = ""
    nodes: Mapping[str, NodeWeights] = field(default_factory=dict)

    def folder(self, node: str, root: str) -> str:
        """Where the weights lie, or will, on a node whose folder of ours is ``root``."""
        found = self.nodes.get(node)
        cache = found.in_place if found is not None else None
        return cache.folder if cache is not None else f"{root}/weights/{self.revision}"

    @property
    def in_place(self) -> dict[str, dict[str, str]]:
        """For each node that uses its hub cache, its files: name to where the content lies."""
        found = {node: weights.in_place for node, weights in self.nodes.items()}
        return {node: dict(cache.paths) for node, cache in found.items() if cache is not None}


@dataclass(frozen=True)
class KnownWeights:
    """What is known of weights before any node is asked.

    Attributes:
        manifests: For each group whose model lies on the controller, what is in its directory.
        recorded: For each group, the source and the listing that the state remembers.
        token: The hub's token.
    """

    manifests: Mapping[str, Manifest] = field(default_factory=dict)
    recorded: Mapping[str, tuple[str, Listing]] = field(default_factory=dict)
    token: str | None = field(default=None, repr=False)

    def listing(self, group: str, model: ModelSettings) -> Listing | None:
        """What is recorded of the very source that the settings name."""
        source, listing = self.recorded.get(group, ("", None))
        return listing if source == model.source else None


def look_at_weights(
    settings: Settings, transports: Mapping[str, Transport], known: KnownWeights
) -> tuple[dict[str, GroupWeights], list[Finding]]:
    """Look at the weights of every group that are copied or come from the hub.

    Args:
        transports: The nodes that answer.
    """
    found: dict[str, GroupWeights] = {}
    findings: list[Finding] = []
    for name, group in settings.groups.items():
        nodes = [transports[node] for node in group.nodes if node in transports]
        manifest = known.manifests.get(name)
        if group.model.kind == "hub" and nodes:
            weights, said = _look_at_hub(settings, name, nodes, known)
        elif group.model.kind == "controller" and manifest is not None:
            weights, said = GroupWeights(manifest.revision), []
        else:
            continue
        findings += said
        if weights is None:
            continue
        files = weights.listing.files if weights.listing is not None else manifest.files if manifest is not None else {}
        seen, said = _look_at_nodes(settings, group.model, weights.revision, files, nodes)
        findings += said
        config = next((one.config for one in seen.values() if one.config), weights.config)
        if not config and group.model.kind == "hub":
            pinned = _pinned(group.model, weights.revision)
            with contextlib.suppress(SparkError):  # the fit is then not known yet, and said to be
                config = ask_hub(nodes[0], pinned, settings.hub, known.token).config
        found[name] = replace(weights, config=config, nodes=seen)
    return found, findings


def model_look(weights: GroupWeights) -> ModelLook:
    """A model of the hub as the check of its fit takes it."""
    files = weights.listing.files if weights.listing is not None else {}
    return ModelLook(weights.config, {name: size for name, (size, _) in files.items()})


def _look_at_hub(
    settings: Settings, group: str, nodes: list[Transport], known: KnownWeights
) -> tuple[GroupWeights | None, list[Finding]]:
    model = settings.groups[group].model
    listing, config, recorded = known.listing(group, model), "", "recorded"
    findings = []
    if listing is None:
        try:
            answer = ask_hub(nodes[0], model, settings.hub, known.token)
        except HubError as error:
            cached = ask_caches(settings, model, nodes) if error.code == "hub-unreachable" else None
            if cached is None:
                return None, [Finding(error.code, error.where, error.what, error.do)]
            answer, holder = cached
            what = f"{error.what}; what the revision holds is taken from the hub cache of {holder}"
            findings.append(Finding(error.code, error.where, what, error.do, told_as="warn"))
        except SparkError as error:
            return None, [finding_of(error, nodes[0].node)]
        listing, config, recorded = answer.listing, answer.config, "which up will record"
    where = f"groups.{group}.model.source"
    if not model.is_pinned:
        what = f"expected a commit behind the @, found {model.hub_revision}: it is {listing.commit}, {recorded}"
        pin = f"write hf://{model.repository}@{listing.commit} to pin it; a later commit of that name is not followed"
        findings.append(Finding("revision-floating", where, what, pin))
    lacks = [] if "config.json" in listing.files else ["config.json"]
    lacks += (
        []
        if any(name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf")) for name in listing.files)
        else ["weights"]
    )
    if lacks:
        what = f"expected config.json and weights in {model.repository}@{listing.commit[:12]}, found no {lacks[0]}"
        findings.append(Finding("model-incomplete", where, what, "name the repository of the model itself"))
    return GroupWeights(listing.commit, listing, config), findings


def _look_at_nodes(
    settings: Settings,
    model: ModelSettings,
    revision: str,
    files: Mapping[str, tuple[int, str]],
    nodes: list[Transport],
) -> tuple[dict[str, NodeWeights], list[Finding]]:
    def look(transport: Transport) -> NodeWeights | SparkError:
        try:
            return look_at_node(settings, model, revision, files, transport)
        except SparkError as error:
            return error

    with ThreadPoolExecutor(max(1, len(nodes))) as pool:
        answers = dict(zip([node.node for node in nodes], pool.map(look, nodes), strict=True))
    findings: list[Finding] = []
    for node, answer in answers.items():
        if isinstance(answer, SparkError):
            findings.append(finding_of(answer, node))
        else:
            findings += _findings_of(node, answer, settings.root_of(settings.node(node)))
    return {node: answer for node, answer in answers.items() if isinstance(answer, NodeWeights)}, findings


def _findings_of(node: str, weights: NodeWeights, root: str) -> list[Finding]:
    findings = []
    cache = weights.cache
    if cache is not None and cache.fault not in ("", "absent") and not weights.there:
        told = {"missing": "none", "altered": "other content", "unreadable": "that the deploy user may not read it"}
        what = f"expected {cache.file} in the hub cache, found {told.get(cache.fault, cache.fault)}"
        do = f"it is left alone and the model comes to {root}/weights; to use it, download it anew or make it readable"
        findings.append(Finding("hub-cache-unusable", f"{node} (hub.cache)", what, do))
    if weights.in_place is None and weights.free < weights.missing * SPARE_SPACE:
        what = (
            f"expected {weights.missing / 1e9:.1f} GB of free space for the weights, found {weights.free / 1e9:.1f} GB"
        )
        do = "`python -m automation gc --stack STACK` lists what could be freed of older revisions; or free some space"
        findings.append(Finding("weights-space", f"{node} (node_root)", what, do))
    return findings


def look_at_node(
    settings: Settings, model: ModelSettings, revision: str, files: Mapping[str, tuple[int, str]], transport: Transport
) -> NodeWeights:
    """Where a model lies on one node.

    Raises:
        SparkError: the node could not be asked, or its answer is not understood.
    """
    root = settings.root_of(settings.node(transport.node))
    from_hub = model.kind == "hub"
    orders = {
        "folder": f"{root}/weights/{revision}",
        "files": files,
        "hashes": f"{root}/cache/hashes.json",
        "cache": settings.hub.cache if from_hub else None,
        "repository": model.repository if from_hub else "",
        "commit": revision,
    }
    text = run_checked(
        transport,
        command(*node_program("node_place"), stdin=json.dumps(orders).encode() + b"\n", timeout_s=LOOK_TIMEOUT_S),
        purpose="expected to learn where the weights lie",
        setting="node_root",
    )
    try:
        answer = json.loads(text)
        cache = answer["cache"]
        return NodeWeights(
            bool(answer["there"]),
            int(answer["missing"]),
            int(answer["free"]),
            None if cache is None else CacheLook(cache["folder"], cache["fault"], cache["file"], cache["paths"]),
            str(answer["config"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ObservationError(
            "expected to learn where the weights lie, found something else", where=transport.node
        ) from error


def _pinned(model: ModelSettings, commit: str) -> ModelSettings:
    return model.model_copy(update={"source": f"hf://{model.repository}@{commit}"})
