"""What a node's owner has there already: containers of others, images, models, and what launchers wrote down."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark_core.errors import ObservationError
from spark_core.facts.containers import launcher_of
from spark_core.first_day.node_survey import clusters, launcher_folders
from spark_core.transport.base import Command, Transport, command, run_checked

SURVEY_TIMEOUT_S = 120
STANDARD_CACHE = "~/.cache/huggingface/hub"


@dataclass(frozen=True)
class Server:
    """A vLLM server in a container.

    Attributes:
        model: What it was told to serve.
        flags: Its arguments, as far as they are settings of ours; a flag without a value has the empty text.
        others: Names of its other flags.
    """

    model: str
    flags: Mapping[str, str]
    others: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """Its command line, as far as it is known."""
        given = [word for name, value in self.flags.items() for word in ([name, value] if value else [name])]
        return ["vllm", "serve", self.model, *given]


@dataclass(frozen=True)
class FoundContainer:
    """A container that none of our stacks made.

    Attributes:
        name: Its name.
        image: Its image as it was named.
        image_id: Its image's id.
        running: Whether it runs.
        removed_when_stopped: Whether Docker removes it when it stops (``--rm``).
        restart: Its restart policy.
        servers: The vLLM servers in it.
        launcher: The launcher that gives containers such names or labels.
    """

    name: str
    image: str
    image_id: str
    running: bool
    removed_when_stopped: bool = False
    restart: str = "no"
    servers: tuple[Server, ...] = ()
    launcher: str | None = None


@dataclass(frozen=True)
class FoundModel:
    """A model on a node.

    Attributes:
        path: Its folder.
        bytes: Size of its files.
        positions: Longest context it was made for, in tokens.
        fault: Why it cannot be used; empty if it is whole.
        repository: ``ORG/NAME`` of a model in a hub cache; empty for one in a plain folder.
        commit: Its revision there.
        cache: The hub cache.
    """

    path: str
    bytes: int
    positions: int | None = None
    fault: str = ""
    repository: str = ""
    commit: str = ""
    cache: str = ""


@dataclass(frozen=True)
class LauncherFolder:
    """A checkout of eugr/spark-vllm-docker: its folder, and what its .env says of nodes and interfaces."""

    folder: str
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def addresses(self) -> list[str]:
        """The nodes, as it writes them down, the head first."""
        return [word.strip() for word in self.values.get("CLUSTER_NODES", "").split(",") if word.strip()]


@dataclass(frozen=True)
class WrittenCluster:
    """A cluster that sparkrun has written down."""

    file: str
    hosts: tuple[str, ...]
    name: str = ""
    user: str = ""
    chosen: bool = False


@dataclass(frozen=True)
class Survey:
    """What is on a node, or was written down there.

    Attributes:
        name: The node's own name.
        images: Id of each image to its names, the newest first.
        neighbours: What ``ip -j neigh show`` says after every neighbour was called.
    """

    name: str
    containers: tuple[FoundContainer, ...] = ()
    images: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    models: tuple[FoundModel, ...] = ()
    launchers: tuple[LauncherFolder, ...] = ()
    clusters: tuple[WrittenCluster, ...] = ()
    neighbours: str = ""


def survey_command(caches: Sequence[str] = (STANDARD_CACHE,), wake: Sequence[str] = ()) -> Command:
    """The question.

    Args:
        caches: Hub caches to look at, beside those that are found.
        wake: Own addresses with prefix length, whose neighbours are called.
    """
    text = Path(__file__).with_name("node_survey.py").read_text()
    orders = {"caches": list(caches), "wake": list(wake)}
    return command(
        *("python3", "-IS", "-X", "utf8", "-c", text),
        stdin=json.dumps(orders).encode() + b"\n",
        timeout_s=SURVEY_TIMEOUT_S,
    )


def observe_survey(transport: Transport, wake: Sequence[str] = ()) -> Survey:
    """Ask a node; nothing is written there.

    Raises:
        SparkError: it could not be asked, or its answer is not understood.
    """
    text = run_checked(
        transport, survey_command(wake=wake), purpose="expected to learn what the node's owner has there"
    )
    return parse_survey(text, transport.node)


def written_here() -> Survey:
    """What launchers have written down on this machine, which may be the one that they are run from."""
    return Survey(
        name="",
        launchers=tuple(LauncherFolder(str(one["folder"]), dict(one["env"])) for one in launcher_folders()),
        clusters=tuple(_cluster(one) for one in clusters()),
    )


def parse_survey(text: str, node: str) -> Survey:
    """The answer of a node.

    Raises:
        ObservationError: it is not understood.
    """
    try:
        value = json.loads(text)
        return Survey(
            name=str(value["name"]),
            containers=tuple(_container(one) for one in value["containers"]),
            images={str(one["id"]): tuple(map(str, one["names"])) for one in value["images"]},
            models=tuple(_model(one) for one in (*value["cached"], *value["models"])),
            launchers=tuple(LauncherFolder(str(one["folder"]), dict(one["env"])) for one in value["launchers"]),
            clusters=tuple(_cluster(one) for one in value["clusters"]),
            neighbours=str(value["neighbours"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ObservationError("expected to learn what is on the node, found something else", where=node) from error


def _container(value: Mapping[str, Any]) -> FoundContainer:
    return FoundContainer(
        name=str(value["name"]),
        image=str(value["image"]),
        image_id=str(value["image_id"]),
        running=bool(value["running"]),
        removed_when_stopped=bool(value["removed_when_stopped"]),
        restart=str(value["restart"]),
        servers=tuple(
            Server(str(one["model"]), {str(k): str(v) for k, v in one["flags"].items()}, tuple(one["others"]))
            for one in value["serving"]
        ),
        # Of labels only the names are told; for two launchers these are what counts.
        launcher=launcher_of(str(value["name"]), ",".join(f"{label}=" for label in value["labels"])),
    )


def _model(value: Mapping[str, Any]) -> FoundModel:
    positions = value.get("positions")
    return FoundModel(
        path=str(value["path"]),
        bytes=int(value["bytes"]),
        positions=int(positions) if positions else None,
        fault=str(value["fault"]),
        repository=str(value.get("repository", "")),
        commit=str(value.get("commit", "")),
        cache=str(value.get("cache", "")),
    )


def _cluster(value: Mapping[str, Any]) -> WrittenCluster:
    return WrittenCluster(
        file=str(value["file"]),
        hosts=tuple(map(str, value["hosts"])),
        name=str(value.get("name", "")),
        user=str(value.get("user", "")),
        chosen=bool(value.get("chosen")),
    )
