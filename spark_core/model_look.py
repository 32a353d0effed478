"""A look at the model's own metadata before anything is copied or loaded: ``config.json`` and the sizes of its shards.

A directory of the controller is read here; one that the nodes already have is read on the head, in the same round trip
as its other facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spark_core.errors import ObservationError
from spark_core.findings import Finding
from spark_core.fit import load_findings, memory_findings, parallel_findings
from spark_core.model_facts import ModelFacts, parse_config, weights_bytes
from spark_core.settings import ModelSettings, NodeSettings, Settings
from spark_core.transport.base import Fragment

_SCRIPT = """
echo '=== model-config'; head -c 1000000 "$1/config.json" 2>/dev/null || true
echo; echo '=== model-shards'
for f in "$1"/*.safetensors "$1"/*.bin "$1"/*.gguf; do [ ! -e "$f" ] || stat -L -c '%s %n' "$f"; done
"""


@dataclass(frozen=True)
class ModelLook:
    """What was read of a model: its configuration's text and its shards, both empty if there was nothing to read."""

    config: str
    shards: Mapping[str, int]


def model_fragment(settings: Settings, node: NodeSettings) -> Fragment | None:
    """What to ask a node for: the metadata of a model that lies there, of the groups whose head it is."""
    for group in settings.groups.values():
        if group.nodes[0] == node.name and group.model.kind == "node":
            return Fragment(_SCRIPT, (group.model.directory,))
    return None


def parse_model(sections: Mapping[str, str]) -> ModelLook:
    """What a node answered."""
    shards = {}
    for line in sections.get("model-shards", "").splitlines():
        size, _, name = line.strip().partition(" ")
        if size.isdigit() and name:
            shards[name] = int(size)
    return ModelLook(sections.get("model-config", "").strip(), shards)


def look_locally(model: ModelSettings) -> ModelLook:
    """The metadata of a model that lies on the controller."""
    root = Path(model.directory).expanduser()
    try:
        config = (root / "config.json").read_text()
        shards = {path.name: path.stat().st_size for path in sorted(root.iterdir()) if path.is_file()}
    except (OSError, UnicodeDecodeError):
        return ModelLook("", {})
    return ModelLook(config, shards)


def model_findings(settings: Settings, looks: Mapping[str, ModelLook], totals: Mapping[str, int]) -> list[Finding]:
    """Whether the model of each group can be divided and fits.

    Args:
        looks: What was read of each group's model.
        totals: MemTotal in bytes of each node that was seen.
    """
    findings = []
    for name, group in settings.groups.items():
        look = looks.get(name, ModelLook("", {}))
        where = f"groups.{name}.model.source"
        if not look.config:
            what = f"expected a config.json in {group.model.source}, found none that can be read yet"
            findings.append(Finding("memory-unknown", where, what, "its heads and its memory are not checked"))
            continue
        try:
            model: ModelFacts = parse_config(look.config)
        except ObservationError as error:
            findings.append(Finding("memory-unknown", where, error.what))
            continue
        members = {node: total for node, total in totals.items() if node in group.nodes}
        findings += parallel_findings(name, group, model)
        weights = weights_bytes(None, look.shards)
        findings += memory_findings(settings, name, model, weights, members)
        if weights is not None:
            findings += load_findings(settings, name, weights, max(look.shards.values()), members)
    return findings
