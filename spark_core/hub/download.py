"""A hub as the origin of files: orders for a node to download them with the client in the serving image."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spark_core.errors import SparkError
from spark_core.group import LABEL
from spark_core.hub.errors import AGAIN, HubFault, hub_error
from spark_core.settings import HubSettings, ModelSettings
from spark_core.transfer.chain import Lane
from spark_core.transfer.look import Look, Place
from spark_core.transfer.manifest import Manifest
from spark_core.transfer.session import Fault, Outcome

STREAMS = 4
MEMORY_MIB = 2048
"""What the client's container may use of the node's memory, its page cache included."""
PLAIN_LIMIT_BYTES = 50_000_000_000
"""The hub gives no larger file over plain HTTP (huggingface_hub, constants.MAX_HTTP_DOWNLOAD_SIZE)."""
TARGET = "/download"
_ENVIRONMENT = {
    "HOME": "/tmp",  # noqa: S108  (of the container)
    "HF_HOME": "/tmp/hf",  # noqa: S108
    "HF_HUB_OFFLINE": "0",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DOWNLOAD_TIMEOUT": "20",
    # A token of the image's own must not be shown to the hub.
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
}


@dataclass(frozen=True)
class HubOrigin:
    """A revision of the hub, downloaded by the node that needs it.

    Args:
        model: The model.
        hub: The hub.
        commit: The commit.
        image: Local id of the serving image.
        python: Python of the image.
        stack: Name of the stack, which the container is labelled with.
        token: The hub's token, or None.
        snapshots: For each node whose hub cache has a part of the revision, the folder of it there.
    """

    model: ModelSettings
    hub: HubSettings
    commit: str
    image: str
    python: str
    stack: str
    token: str | None = field(default=None, repr=False)
    snapshots: Mapping[str, str] = field(default_factory=dict)
    name: str = "the hub"
    plain_limit: int = PLAIN_LIMIT_BYTES

    def lane(self, places: Sequence[Place], _looks: Mapping[str, Look], _wanted: Manifest) -> Lane:
        """The first of these places downloads; from there the others get it in the next round."""
        return Lane(places[:1], hub=self.orders(places[0]))

    def orders(self, place: Place) -> dict[str, object]:
        """What a node's program needs to download: the container, and what its client is told."""
        digest = hashlib.sha256(place.folder.encode()).hexdigest()
        container = f"{LABEL}-fetch-{self.commit[:12]}-{digest[:8]}"
        words = ["--rm", "-i", "--pull", "never", "--restart", "no", "--name", container, "--network", "host"]
        words += ["--label", f"{LABEL}.stack={self.stack}", "--label", f"{LABEL}.fetch={self.commit}"]
        words += ["--memory", f"{MEMORY_MIB}m", "--memory-swap", f"{MEMORY_MIB}m", "--log-driver", "none"]
        words += ["--stop-signal", "KILL", "--entrypoint", self.python, "-v", f"{{incoming}}:{TARGET}"]
        for name, value in {**_ENVIRONMENT, "HF_ENDPOINT": self.hub.endpoint}.items():
            words += ["-e", f"{name}={value}"]
        program = Path(__file__).with_name("image_fetch.py").read_text()
        return {
            "container": container,
            "run": [*words, self.image, "-u", "-c", program],
            "snapshot": self.snapshots.get(place.node),
            "orders": {
                "endpoint": self.hub.endpoint.rstrip("/"),
                "repository": self.model.repository,
                "commit": self.commit,
                "token": self.token or "",
                "folder": TARGET,
                "streams": STREAMS,
                "plain_limit": self.plain_limit,
            },
        }

    def errors(self, node: str, outcome: Outcome) -> list[SparkError]:
        """What went wrong with the hub or its client."""
        found = (self._error(node, fault) for fault in outcome.faults if fault.kind.startswith("hub:"))
        return [error for error in found if error is not None][:1]

    def _error(self, node: str, fault: Fault) -> SparkError | None:
        kind = fault.kind.removeprefix("hub:")
        where = f"{node} (model.source)"
        if kind == "client":
            return SparkError(
                f"expected huggingface_hub in the serving image, found none ({fault.found})",
                where=f"{node} (image)",
                do="use an image that has it (every vLLM image does), or bring the model by controller:DIR",
            )
        if kind == "died":
            return SparkError(
                f"expected the hub's client in the serving image to end by itself, found {fault.found}",
                where=where,
                do=AGAIN,
            )
        if kind == "index":
            return SparkError(
                f"expected every shard of the index of {self.model.repository}, found {fault.found}",
                where=where,
                do="the model on the hub is not whole: choose another revision behind the @",
            )
        told = HubFault(kind, fault.found, fault.file, fault.wait_s)
        return hub_error(told, self.model, self.hub, node, with_token=bool(self.token))
