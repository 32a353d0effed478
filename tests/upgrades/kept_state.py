"""The state of a release, as its own ``up`` records it for tests/upgrades/reference.yaml, made without any node.

``python -m tests.upgrades.kept_state VERSION [CHECKOUT]`` writes tests/upgrades/VERSION/state.json, once for each
release; CHECKOUT is one of that release, with its toolchain set up. It is made from the release's own plan: inputs are
the plan's, and what only ``up`` would know is filled in. So it shows types, names, inputs and the providers' import
paths as they were; outputs that a node tells are made up.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.engine import conftest
from tests.engine.conftest import EngineStack

FOLDER = Path(__file__).parent
REFERENCE = str(FOLDER / "reference.yaml")
_UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
_OUTPUTS: dict[str, dict[str, Any]] = {
    "spark:ImageCopy": {"found_id": "sha256:" + "1" * 64},
    "spark:WeightsCopy": {"revision": "0" * 40},
    "spark:ApiKey": {"api_key": "sk-not-a-secret-of-anybody"},
    "spark:NodeHost": {
        "architecture": "arm64",
        "kernel": "6.14",
        "os": "Ubuntu",
        "docker": "29.2.1",
        "gpu": "GB10",
        "repair": "none",
    },
    "docker:index/container:Container": {
        **dict.fromkeys(("attach", "logs", "readOnly", "rm", "stdinOpen", "tty", "wait"), False),
        "memoryReservation": 0,
        "networkDatas": [],
        "securityOpts": [],
    },
    "spark:GoodSettings": {"at": 1.0, "before": []},
}
"""What only ``up`` knows, by the end of the resource's type."""


def plan(stack: EngineStack) -> list[dict[str, Any]]:
    """The plan's resources, as the engine would register them."""
    done = stack.pulumi("preview", "-s", stack.name, "--json", "--refresh=false", cwd=conftest.PROJECT)
    assert done.returncode == 0, done.stdout[-3000:]
    steps = json.loads(done.stdout[done.stdout.index("{") :])["steps"]
    return [step["newState"] for step in steps if step.get("newState")]


def state_of(resources: list[dict[str, Any]], empty: Mapping[str, Any], providers: Mapping[str, str]) -> dict[str, Any]:
    """A state in which all of a plan has been made.

    Args:
        providers: For each type of ours, its provider as the SDK serializes it.
        empty: The exported state of a stack without resources, for its manifest and its secrets provider.
    """
    ids = {str(new["urn"]): _id(new) for new in resources if new.get("custom")}
    defaults: dict[str, dict[str, Any]] = {}
    records = []
    for new in resources:
        keys = ("urn", "custom", "type", "parent", "dependencies", "propertyDependencies", "deletedWith")
        record = {key: new[key] for key in keys if key in new}
        inputs = _made(new.get("inputs") or {}, ids, new)
        if inputs.get("connection") == "[secret]":  # it would be that of the machine that this runs on
            inputs["connection"] = {"host": "192.0.2.10"}
        if "__provider" in inputs:
            inputs["__provider"] = providers[str(new["type"])]
        if new.get("custom"):
            record |= {"id": ids[str(new["urn"])], "inputs": inputs, "outputs": _plain(inputs) | _outputs(new)}
            if new["type"].startswith("docker:"):
                record["outputs"] |= {
                    "id": record["id"],
                    "__meta": json.dumps({"schema_version": SCHEMAS[new["type"]]}),
                }
            record["additionalSecretOutputs"] = new.get("additionalSecretOutputs", [])
            record["replaceOnChanges"] = new.get("replaceOnChanges", [])
        if new.get("provider"):
            urn = str(new["provider"]).rpartition("::")[0] if _UNKNOWN in new["provider"] else str(new["provider"])
            if urn not in ids:
                defaults.setdefault(urn, _default_provider(urn))
            record["provider"] = f"{urn}::{ids.get(urn) or defaults[urn]['id']}"
        records.append(record)
    stack, *rest = records
    return {**empty, "deployment": {**empty["deployment"], "resources": [stack, *defaults.values(), *rest]}}


SERIALIZE = """
import importlib, json, pathlib, re
from pulumi.dynamic.dynamic import serialize_provider
found = {}
for path in sorted(pathlib.Path("providers").glob("*.py")):
    for name in re.findall(r'^class \\w+\\(Resource, module="spark", name="(\\w+)"', path.read_text(), re.MULTILINE):
        module = importlib.import_module(f"providers.{path.stem}")
        found[f"pulumi-python:dynamic/spark:{name}"] = serialize_provider(getattr(module, f"{name}Provider")())
print(json.dumps(found))
"""


def providers_of(stack: EngineStack) -> dict[str, str]:
    """The providers of a release: what state has of them is the path by which they are imported."""
    done = stack.run('exec python -c "$1"', SERIALIZE, cwd=conftest.PROJECT)
    assert done.returncode == 0, done.stdout
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


SCHEMAS = {"docker:index/container:Container": "2", "docker:index/volume:Volume": "1"}
"""Versions of the Docker provider's schemas, as the provider notes them in what it makes."""


def _plain(value: Any) -> Any:
    """Inputs as outputs: without the engine's note of which values are defaults."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if key != "__defaults"}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _id(new: Mapping[str, Any]) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_URL, str(new["urn"])))


def _default_provider(urn: str) -> dict[str, Any]:
    kind = urn.split("::")[2]
    version = {"version": "1.2.1"} if kind.endswith(":command") else {}
    return {
        "urn": urn,
        "custom": True,
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, urn)),
        "type": kind,
        "inputs": version,
        "outputs": version,
    }


def _outputs(new: Mapping[str, Any]) -> dict[str, Any]:
    return next((value for end, value in _OUTPUTS.items() if str(new["type"]).endswith(end)), {})


def _made(inputs: Mapping[str, Any], ids: Mapping[str, str], new: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs with the values that were not known yet; only ids of other resources are not, in the reference."""
    made: dict[str, Any] = {}
    for key, value in inputs.items():
        sources = (new.get("propertyDependencies") or {}).get(key) or []
        if isinstance(value, list) and _UNKNOWN in value:
            containers = [ids[urn] for urn in sorted(sources) if "docker:index/container" in urn]
            value = containers if len(containers) == len(value) else ["none"] * len(value)
        elif value == _UNKNOWN:
            value = "0" * 40
        made[key] = value
    return made


def main() -> int:
    """Keep the state of this release."""
    version, *checkout = sys.argv[1:]
    if checkout:
        conftest.PROJECT = Path(checkout[0])  # an earlier release keeps its own
    with tempfile.TemporaryDirectory() as home:
        stack = EngineStack(Path(home), "reference")
        assert stack.run("python3 toolchain/bootstrap.py", cwd=conftest.PROJECT).returncode == 0
        stack.configure(lambda config: None, REFERENCE)
        made = stack.run('python3 toolchain/stack.py "$@"', stack.name, cwd=conftest.PROJECT)
        assert made.returncode == 0, made.stdout
        exported = stack.pulumi("stack", "export", "-s", stack.name, cwd=conftest.PROJECT)
        empty = json.loads(exported.stdout[exported.stdout.index("{") :])
        state = state_of(plan(stack), empty, providers_of(stack))
    state["deployment"].pop("secrets_providers", None)
    target = FOLDER / version / "state.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(state, indent=1, sort_keys=True) + "\n")
    print(f"kept {target.relative_to(FOLDER.parent.parent)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.TimeoutExpired as late:
        sys.exit(str(late))
