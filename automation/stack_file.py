"""A stack's file, ``Pulumi.<stack>.yaml``: its settings, and host keys written into it with every other byte kept."""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from spark_core.errors import SparkError
from spark_core.settings import Settings, read_settings

PROJECT = Path(__file__).resolve().parent.parent
CONFIG_FILE_VARIABLE = "PULUMI_OPTION_CONFIG_FILE"
"""Names the stack's file where it is another one; ``pulumi --config-file`` does the same."""

_PLACE = ("management_address", "name")
"""Keys of a node behind which its host key is written; the first that it has."""


def add_stack_argument(parser: argparse.ArgumentParser) -> None:
    """The argument that every command about a stack has."""
    parser.add_argument("--stack", required=True, help="name of the stack, such as spark")


@dataclass(frozen=True)
class StackFile:
    """The file of a stack as it lies on the disk.

    Attributes:
        stack: Name of the stack.
        path: The file.
        project: Name of the project, which every setting's key begins with.
        text: Its content.
    """

    stack: str
    path: Path
    project: str
    text: str

    def raw(self) -> dict[str, Any]:
        """The project's keys and their values as they are written; secrets are still encrypted."""
        config = _mapping(self.text, self.path).get("config")
        raw = {str(key): value for key, value in config.items()} if isinstance(config, dict) else {}
        prefix = f"{self.project}:"
        return {key.removeprefix(prefix): _plain(raw[key]) for key in raw if key.startswith(prefix)}

    def settings(self) -> Settings:
        """The settings; raises ``SettingsError`` with every violation."""
        return read_settings(self.raw())

    def with_host_keys(self, keys: Mapping[str, str]) -> str:
        """The content with the host keys of these nodes; every other byte stays.

        Raises:
            SparkError: the nodes are written in a way that cannot be changed in place.
        """
        text = self.text
        edits = [self._edit(node, keys[name]) for name, node in self._nodes().items() if name in keys]
        for start, end, new in sorted(edits, reverse=True):
            text = text[:start] + new + text[end:]
        wanted = copy.deepcopy(_mapping(self.text, self.path))
        nodes = wanted["config"][f"{self.project}:nodes"]
        for node in nodes if isinstance(nodes, list) else []:
            if node["name"] in keys:
                node["host_key"] = keys[node["name"]]
        try:
            right = len(edits) == len(keys) and _mapping(text, self.path) == wanted
        except SparkError:
            right = False
        if not right:
            raise SparkError(
                "expected nodes written out one by one, found them written in a way that cannot be changed in place",
                where=str(self.path),
                do="put in by hand: " + "; ".join(f"{name}: host_key: {key}" for name, key in keys.items()),
            )
        return text

    def write(self, text: str) -> None:
        """Replace the file by one rename; its mode stays, and a link to it stays one."""
        target = self.path.resolve()
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode())
            Path(name).chmod(target.stat().st_mode & 0o7777)
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _nodes(self) -> dict[str, yaml.MappingNode]:
        """The mapping of each node, by name."""
        found: dict[str, yaml.MappingNode] = {}
        root = yaml.compose(self.text, Loader=yaml.SafeLoader)
        nodes = _value(_value(root, "config"), f"{self.project}:nodes")
        for node in nodes.value if isinstance(nodes, yaml.SequenceNode) else []:
            name = _value(node, "name")
            if isinstance(node, yaml.MappingNode) and isinstance(name, yaml.ScalarNode):
                found[name.value] = node
        return found

    def _edit(self, node: yaml.MappingNode, key: str) -> tuple[int, int, str]:
        """(start, end, new text) that gives a node its host key."""
        items = {name.value: (name, value) for name, value in node.value if isinstance(name, yaml.ScalarNode)}
        if "host_key" in items:
            value = items["host_key"][1]
            quote = value.style if value.style in ("'", '"') else ""
            return value.start_mark.index, value.end_mark.index, f"{quote}{key}{quote}"
        name, value = next(items[place] for place in _PLACE if place in items)
        quote = name.style or ""
        line = f"{quote}host_key{quote}: {quote}{key}{quote}"
        end = value.end_mark.index
        if node.flow_style:
            return end, end, f", {line}"
        # A comment behind the value belongs to its line.
        newline = self.text.find("\n", end)
        indent = " " * name.start_mark.column
        if newline < 0:
            return len(self.text), len(self.text), f"\n{indent}{line}"
        ending = "\r\n" if self.text[newline - 1] == "\r" else "\n"
        return newline + 1, newline + 1, f"{indent}{line}{ending}"


def place_of_stack_file(stack: str) -> Path:
    """Where the file of a stack is, or would be."""
    # A stack may be named with its organisation and project in front.
    chosen = os.environ.get(CONFIG_FILE_VARIABLE)
    return Path(chosen) if chosen else PROJECT / f"Pulumi.{stack.rsplit('/', 1)[-1]}.yaml"


def project_name() -> str:
    """The name of the project, which every setting's key begins with."""
    return str(_mapping((PROJECT / "Pulumi.yaml").read_text(), PROJECT / "Pulumi.yaml")["name"])


def open_stack_file(stack: str) -> StackFile:
    """The file of a stack.

    Raises:
        SparkError: there is none, or it is no YAML.
    """
    project, path = project_name(), place_of_stack_file(stack)
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise SparkError(
            f"expected the file of the stack {stack}, found: {reason}",
            where=str(path),
            do=f"name another stack, or the file in {CONFIG_FILE_VARIABLE}",
        ) from None
    _mapping(text, path)
    return StackFile(stack, path, project, text)


def _mapping(text: str, path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        found = getattr(error, "problem", None) or "something else"
        raise SparkError(f"expected YAML, found: {found}{line}", where=str(path)) from None
    if not isinstance(value, dict):
        raise SparkError(f"expected a mapping with `config`, found {type(value).__name__}", where=str(path))
    return value


def _plain(value: Any) -> Any:
    """A value that was set as JSON text, as its structure."""
    return yaml.safe_load(value) if isinstance(value, str) and value[:1] in ("[", "{") else value


def _value(node: yaml.Node | None, key: str) -> yaml.Node | None:
    for name, value in node.value if isinstance(node, yaml.MappingNode) else []:
        if isinstance(name, yaml.ScalarNode) and name.value == key:
            found: yaml.Node = value
            return found
    return None
