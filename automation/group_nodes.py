"""The nodes of a stack as the commands see them: connections, and the ranks of its group."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from automation.engine import pulumi_json
from automation.redaction import learn
from automation.stack_file import StackFile
from providers.connections import Run
from spark_core.errors import SparkError
from spark_core.gate import Rank
from spark_core.group import container_name
from spark_core.journal import StackFolder
from spark_core.settings import SECRET_KEYS, GroupSettings, Settings

T = TypeVar("T")


@dataclass(frozen=True)
class GroupNodes:
    """A stack's group on its nodes.

    Attributes:
        stack: Name of the stack, without its organisation.
        run: The settings and connections.
        name: Name of the group.
    """

    stack: str
    run: Run
    name: str

    @property
    def settings(self) -> Settings:
        return self.run.settings

    @property
    def group(self) -> GroupSettings:
        return self.settings.groups[self.name]

    def folder(self, node: str) -> StackFolder:
        """The stack's folder on a node."""
        return StackFolder(self.settings.root_of(self.settings.node(node)), self.stack)

    def rank(self, place: int) -> Rank:
        """One rank; opens the connection to its node."""
        node = self.group.nodes[place]
        container = container_name(self.stack, self.name, place)
        return Rank(self.run.transport(node), place, container, self.folder(node).state(self.name))

    def ranks(self) -> list[Rank]:
        """All ranks, the head first."""
        return [self.rank(place) for place in range(len(self.group.nodes))]

    def each(self, work: Callable[[Rank], T]) -> list[T | SparkError]:
        """Do the same for every rank at once; a node that cannot be asked is its error."""

        def one(place: int) -> T | SparkError:
            try:
                return work(self.rank(place))
            except SparkError as error:
                return error

        with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, len(self.group.nodes))) as pool:
            return list(pool.map(one, range(len(self.group.nodes))))


def open_nodes(file: StackFile, *, secrets: bool = False) -> GroupNodes:
    """The nodes of a stack's file.

    Args:
        secrets: Whether the secrets of the file are needed, such as the password of sudo; the engine decrypts them.
    """
    raw = file.raw()
    encrypted = [key for key in SECRET_KEYS if isinstance(raw.get(key), dict)]
    plain = _decrypted(file, encrypted) if secrets and encrypted else {}
    run = Run({**raw, **plain})
    learn(plain.values())
    learn_files(file)
    return GroupNodes(file.stack.rsplit("/", 1)[-1], run, next(iter(run.settings.groups)))


def learn_files(file: StackFile) -> None:
    """Know the secrets that lie in files which a stack names, and those that somebody left in clear in its own."""
    raw = file.raw()
    places = (("ssh", "sudo_password_file"), ("hub", "token_file"))
    named = [part.get(key) for name, key in places if isinstance(part := raw.get(name), dict)]
    learn(_read(path) for path in named if isinstance(path, str))
    learn(value for key in SECRET_KEYS if isinstance(value := raw.get(key), str))


def learn_secrets(file: StackFile) -> None:
    """Know the secrets of a stack by value, for a command that shows what nodes say.

    What cannot be decrypted here, such as without the passphrase, stays known by its form only.
    """
    encrypted = [key for key, value in file.raw().items() if key in SECRET_KEYS and isinstance(value, dict)]
    with contextlib.suppress(SparkError):
        learn(_decrypted(file, encrypted).values() if encrypted else ())
    learn_api_key(file)


def learn_api_key(file: StackFile) -> None:
    """Know the API key of a stack that was up, for a command that has decrypted the rest already."""
    with contextlib.suppress(SparkError):
        learn([pulumi_json("stack", "output", "-s", file.stack, "--json", "--show-secrets").get("api_key")])


def errors_of(found: Sequence[object]) -> list[SparkError]:
    """The errors among what :meth:`GroupNodes.each` gave."""
    return [one for one in found if isinstance(one, SparkError)]


def secrets_of_environment() -> list[str | None]:
    """Values of this process's environment that are never to be shown."""
    names = ("TOKEN", "SECRET", "PASSWORD", "PASSPHRASE", "API_KEY", "ACCESS_KEY")
    values = [value for name, value in os.environ.items() if name.endswith(names)]
    return [*values, _read(os.environ.get("PULUMI_CONFIG_PASSPHRASE_FILE"))]


def _decrypted(file: StackFile, keys: Sequence[str]) -> dict[str, str]:
    shown = pulumi_json("config", "-s", file.stack, "--config-file", str(file.path), "--show-secrets", "--json")
    return {key: str(shown[f"{file.project}:{key}"]["value"]) for key in keys if f"{file.project}:{key}" in shown}


def _read(path: str | None) -> str | None:
    try:
        return Path(path).expanduser().read_text().strip() if path else None
    except OSError:
        return None
