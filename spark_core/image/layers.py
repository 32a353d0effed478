"""What an image consists of, where its layers come from, and the programs that move them."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_core.errors import CommandError, ObservationError
from spark_core.image.node_docker import file_name
from spark_core.transfer.look import Place, node_program
from spark_core.transfer.manifest import Manifest
from spark_core.transport.base import Command, Result, Transport, command, run_checked, script

TAG = "spark-vllm/image"
"""Repository of the tag that a node's image gets, so that no pruning of untagged images takes it."""
GIVER_MEMORY_MIB = 256
"""What the container that gives layers may use; it reads the daemon's files and writes none."""
_TELL_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 3.0
_METADATA, _CONTENT = "/layers/metadata", "/layers/content"
_GIVE = f"""
image=$1 metadata=$2 content=$3; shift 3
python=$(readlink -f "$(command -v python3)")
exec docker run --rm -i --pull never --network host --read-only --user 0:0 \
  --cap-drop ALL --cap-add DAC_READ_SEARCH --security-opt no-new-privileges --log-driver none \
  --memory {GIVER_MEMORY_MIB}m --memory-swap {GIVER_MEMORY_MIB}m --label spark-vllm.probe=layers \
  --mount type=bind,source=/usr,target=/usr,readonly --mount type=bind,source=/lib,target=/lib,readonly \
  --mount type=bind,source=/lib64,target=/lib64,readonly \
  --mount "type=bind,source=$metadata,target={_METADATA},readonly" \
  --mount "type=bind,source=$content,target={_CONTENT},readonly" \
  --entrypoint "$python" "$image" "$@"
"""
_TAKE = 'python3 "$@" || exit $?'


@dataclass(frozen=True)
class ImageContents:
    """What an image consists of.

    Attributes:
        image_id: Digest of the configuration.
        config: Text of the configuration.
        layers: Layer ids from the lowest on.
        sizes: File name of each layer to the size of its tar.
    """

    image_id: str
    config: str
    layers: tuple[str, ...]
    sizes: Mapping[str, int]

    def above(self, have: int) -> Manifest:
        """The files of the layers above the lowest ones that are there."""
        names = dict.fromkeys(file_name(layer) for layer in self.layers[have:])
        return Manifest({name: (self.sizes[name], name.removesuffix(".tar")) for name in names})

    @property
    def architecture(self) -> str:
        return str(json.loads(self.config).get("architecture", ""))

    @property
    def orders(self) -> dict[str, Any]:
        """The image in the words of the programs on the nodes."""
        tag = f"{TAG}:{self.image_id.removeprefix('sha256:')[:12]}"
        return {"id": self.image_id, "config": self.config, "layers": list(self.layers), "tag": tag}


@dataclass(frozen=True)
class StoreState:
    """What a node's daemon has of an image.

    Attributes:
        have: Number of its layers that are there, from the lowest on.
        driver: Storage driver.
        containerd: Whether images are kept in the containerd store.
        root: Folder of the daemon, with ``free`` bytes of space on its disk.
    """

    have: int
    driver: str
    containerd: bool
    root: str
    free: int


def image_program(last: str) -> tuple[str, ...]:
    """The words that run a program of this folder on a node."""
    modules = ("node_docker", "node_layers")
    words = list(node_program("node_mover"))
    for name in modules[: modules.index(last) + 1]:
        words += [f"spark_core.image.{name}", Path(__file__).with_name(f"{name}.py").read_text()]
    return tuple(words)


def store_state(transport: Transport, layers: Iterable[str]) -> StoreState:
    """What a node's daemon has of an image with these layers, and the space that it has.

    Raises:
        CommandError: the daemon could not be asked.
    """
    return _ask(transport, {"image": {"layers": list(layers)}}, "expected to learn which layers Docker has")


def load_configuration(transport: Transport, contents: ImageContents) -> None:
    """Make the image on a node that has all of its layers."""
    _ask(transport, {"image": contents.orders, "load": True}, "expected Docker to take the image's configuration")


def _ask(transport: Transport, orders: Mapping[str, object], purpose: str) -> StoreState:
    line = json.dumps(orders).encode() + b"\n"
    text = run_checked(
        transport,
        command(*image_program("node_docker"), stdin=line, timeout_s=_TELL_TIMEOUT_S),
        purpose=purpose,
        setting="image",
    )
    try:
        found = json.loads(text)
        return StoreState(
            int(found["have"]),
            str(found["driver"]),
            bool(found["containerd"]),
            str(found["root"]),
            int(found["free"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ObservationError("expected what Docker has, found something else", where=transport.node) from error


class GivingNode:
    """A node that has an image and gives its layers out of its daemon's folders.

    To a transfer it is the carrier of a node: the program that it starts there is the one in a throw-away container.
    The container is of the image itself, since that is there; what runs in it is the node's own python, so that nothing
    of the image is. It may read the daemon's folders and nothing more.

    Args:
        transport: How the node is reached.
        image_id: The image.
        state: What the node's daemon said of itself.
    """

    def __init__(self, transport: Transport, image_id: str, state: StoreState) -> None:
        self.transport, self.image_id = transport, image_id
        self._start = (
            *(image_id, f"{state.root}/image/{state.driver}", f"{state.root}/{state.driver}"),
            *image_program("node_layers")[1:],
        )

    @property
    def node(self) -> str:
        return self.transport.node

    def contents(self) -> ImageContents:
        """What the image consists of.

        Raises:
            CommandError: the daemon keeps its layers in another way.
        """
        result = self.transport.run(
            script(
                _GIVE,
                *self._start,
                stdin=self._orders(tell=True),
                timeout_s=_TELL_TIMEOUT_S,
                purpose="expected to learn what the image consists of",
            )
        )
        try:
            found = json.loads(result.stdout) if result.ok else {}
            sizes = {str(name): int(size) for name, size in found["sizes"].items()}
            return ImageContents(self.image_id, str(found["config"]), tuple(found["layers"]), sizes)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            lines = [line for line in result.stderr.splitlines() if line.strip()]
            raise CommandError(
                f"expected to read the layers of {self.image_id[:19]} out of Docker's folder, found: "
                f"{lines[-1].strip() if lines else f'exit status {result.status}'}",
                where=f"{self.node} (image)",
                do="see that the layers are whole on that node (`docker save` of the image must succeed)",
                evidence=lines[-12:],
            ) from error

    def run(self, cmd: Command) -> Result:
        return self.transport.run(cmd)

    def stream(self, cmd: Command, chunks: Iterable[bytes]) -> Result:
        """Run the giving program in place of the one that a transfer starts."""
        ours = script(_GIVE, *self._start, timeout_s=cmd.timeout_s, purpose=cmd.purpose)
        return self.transport.stream(ours, itertools.chain([self._orders()], chunks))

    def fresh_answer(self, timeout_s: float) -> bool:
        return self.transport.fresh_answer(timeout_s)

    def log_in_again(self) -> None:
        self.transport.log_in_again()

    def _orders(self, *, tell: bool = False) -> bytes:
        orders = {"id": self.image_id, "metadata": _METADATA, "content": _CONTENT, "tell": tell}
        return json.dumps(orders).encode() + b"\n"


class TakingNode:
    """A node whose transfer also loads what arrives into its daemon.

    Args:
        transport: How the node is reached.
        contents: The image.
        have: Number of its layers that the daemon has.
        root: Our folder there.
    """

    def __init__(self, transport: Transport, contents: ImageContents, have: int, root: str) -> None:
        self.transport, self._cache = transport, f"{root}/cache"
        self._line = json.dumps(contents.orders | {"have": have}).encode() + b"\n"
        self._status: tuple[float, Result] | None = None

    @property
    def node(self) -> str:
        return self.transport.node

    def run(self, cmd: Command) -> Result:
        """Run a command; a look at how far it is, of which a transfer makes one each second, is answered from memory.

        Each look costs the node a tenth of a second of a core, which Docker needs.
        """
        if not cmd.argv[-1].startswith(f"{self._cache}/transfer-"):
            return self.transport.run(cmd)
        if self._status is not None and time.monotonic() - self._status[0] < _LOOK_EVERY_S:
            return self._status[1]
        result = self.transport.run(cmd)
        begun = result.ok and '"moved": 0,' not in result.stdout
        self._status = (time.monotonic(), result) if begun else None
        return result

    def stream(self, cmd: Command, chunks: Iterable[bytes]) -> Result:
        """Run the taking program in place of the one that a transfer starts."""
        ours = script(_TAKE, *image_program("node_layers")[1:], timeout_s=cmd.timeout_s, purpose=cmd.purpose)
        return self.transport.stream(ours, self._ordered(chunks))

    def _ordered(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        yield self._line
        yield from chunks

    def fresh_answer(self, timeout_s: float) -> bool:
        return self.transport.fresh_answer(timeout_s)

    def log_in_again(self) -> None:
        self.transport.log_in_again()


def place_of(transport: Transport, root: str, image_id: str, address: str | None) -> Place:
    """Where the layers of an image arrive on a node."""
    folder = f"{root}/images/{image_id.removeprefix('sha256:')}"
    return Place(transport, folder, root, address)
