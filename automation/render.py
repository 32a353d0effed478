"""``render``: for each node one shell script with the plain ``docker run``, files and environment; it needs no Pulumi.

Made from the program's own plan, so that it is what ``up`` would run. Image and weights have to be on the node.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from automation import session as frame
from automation.engine import pulumi_json
from automation.events import CONTAINER, GROUP
from automation.exit_codes import Exit
from automation.reports import RenderReport, ScriptReport
from automation.session import chosen_stack
from automation.stack_file import PROJECT, open_stack_file
from spark_core.errors import SparkError
from spark_core.group import KEY_TARGET

_COPY = "command:remote:CopyToRemote"
_FABRIC_LINK = "pulumi-python:dynamic/spark:FabricLink"
_UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
"""How the engine writes a value that it does not know yet."""
_CAPS = "CAP_"

_HEAD = """#!/bin/sh
# {name}: {node} of stack {stack}, as `python -m automation render` gives it. It needs sh, base64 and docker.
# The image and the weights have to be on the node already. Run it on every node of the group.
# `docker rm -f {name}` ends it.
set -eu
put() {{
    mkdir -p "$(dirname "$1")"
    base64 -d > "$1.new"
    mv -f "$1.new" "$1"
}}
"""
_KEY = """# The API key is made here, once, and shown nowhere; read it in this file.
(umask 077; mkdir -p {folder})
[ -s {key} ] || (umask 077; head -c 48 /dev/urandom | base64 | tr -dc 'A-Za-z0-9' > {key})
"""
_FABRIC = """# The fabric's addresses. Where one is missing, they come from a netplan file, as root.
as_root() {{ if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi; }}
has_addresses() {{
    for address in {addresses}; do
        ip -o -4 address show | grep -qF " $address " || return 1
    done
}}
"""
_NETPLAN = """if ! has_addresses; then
    netplan=$(mktemp)
    base64 -d > "$netplan" <<'END_OF_FILE'
{content}END_OF_FILE
    as_root install -m 600 "$netplan" {path}
    rm -f "$netplan"
    as_root netplan apply
    for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do has_addresses && break; sleep 1; done
fi
"""
_ADDRESSED = """has_addresses || {{ echo {addresses} is missing >&2; exit 1; }}
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add it to the command line."""
    parser = commands.add_parser(
        "render",
        help="print for each node the plain docker run, files and environment that work without Pulumi",
        description="Prints one shell script for each node of the group, from the program's own plan. Changes nothing.",
    )
    frame.add_arguments(parser, runs=False)
    parser.add_argument("node", metavar="NODE", nargs="?", help="only this node")
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="write NODE.sh files there instead")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plan and print."""
    stack = chosen_stack(options)
    settings = open_stack_file(stack).settings()
    plan = pulumi_json("preview", "-s", stack, "--json", "--refresh=false", "--show-sames")
    image = settings.image.registry or settings.image.local_id or ""
    scripts = scripts_of(plan, stack.rsplit("/", 1)[-1], image)
    chosen = {node: text for node, text in scripts.items() if options.node in (None, node)}
    if not chosen:
        raise SparkError(f"expected one of {', '.join(scripts) or 'the nodes'}, found {options.node!r}", where="NODE")
    entries = [ScriptReport(node=node, script=text) for node, text in chosen.items()]
    report = RenderReport(command="render", stack=stack, exit_code=Exit.DONE, nodes=entries)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        for node, text in chosen.items():
            (options.output / f"{node}.sh").write_text(text)
    if options.json:
        print(report.model_dump_json(indent=2))
    elif not options.output:
        print("\n".join(chosen.values()), end="")
    return report.exit_code


def scripts_of(plan: Mapping[str, Any], stack: str, image: str) -> dict[str, str]:
    """The script of each node, by its name.

    Args:
        plan: What ``pulumi preview --json`` gives.
        stack: Name of the stack.
        image: How the image is named where its id is not known yet.
    """
    resources = [step["newState"] for step in plan.get("steps", []) if step.get("newState")]
    copies = [resource for resource in resources if resource["type"] == _COPY]
    ranks = [resource for resource in resources if resource["type"] == CONTAINER and GROUP in resource["urn"]]
    links = {
        str(resource["inputs"]["node"]): resource["inputs"]
        for resource in resources
        if resource["type"] == _FABRIC_LINK
    }
    text = json.dumps([rank["inputs"] for rank in ranks], sort_keys=True)
    deployment = hashlib.sha256(text.encode()).hexdigest()[:12]
    found = {}
    for rank in ranks:
        node = str(rank["provider"]).rpartition("::")[0].rpartition("::")[2].removesuffix("-docker")
        inputs = _known(rank["inputs"], deployment)
        if rank["inputs"].get("image") == _UNKNOWN:
            inputs["image"] = image
        files = {
            str(copy["inputs"]["remotePath"]): PROJECT / str(copy["inputs"]["source"]["path"])
            for copy in copies
            if str(copy.get("parent", "")).endswith(f"::{node}")
        }
        found[node] = script_of(stack, node, inputs, files, links.get(node))
    return found


def script_of(
    stack: str,
    node: str,
    container: Mapping[str, Any],
    files: Mapping[str, Path],
    link: Mapping[str, Any] | None = None,
) -> str:
    """The script of one node.

    Args:
        container: Inputs of its container, as Pulumi's Docker provider takes them.
        files: For each path on the node, the file here that lies there.
        link: Inputs of its part of the fabric, if it has one.
    """
    name = str(container["name"])
    parts = [_HEAD.format(name=name, node=node, stack=stack)]
    if link is not None:
        parts.append(_fabric(link))
    for mount in container.get("mounts") or []:
        source, target = str(mount["source"]), str(mount["target"])
        if mount["type"] == "volume":
            parts.append(f"docker volume create {shlex.quote(source)} > /dev/null\n")
        elif target == KEY_TARGET.rpartition("/")[0]:
            key = f"{source}/{KEY_TARGET.rpartition('/')[2]}"
            parts.append(_KEY.format(folder=shlex.quote(source), key=shlex.quote(key)))
        elif not mount.get("readOnly"):
            parts.append(f"mkdir -p {shlex.quote(source)}\n")
        elif source not in files:
            parts.append(f"[ -e {shlex.quote(source)} ] || {{ echo {shlex.quote(source)} is missing >&2; exit 1; }}\n")
    for path, local in sorted(files.items()):
        content = base64.encodebytes(local.read_bytes()).decode()
        parts.append(f"put {shlex.quote(path)} <<'END_OF_FILE'\n{content}END_OF_FILE\n")
    parts.append(_joined(docker_run(container)))
    return "".join(parts)


def _fabric(link: Mapping[str, Any]) -> str:
    """What gives a node its addresses on the fabric, or says that they are missing."""
    addresses = shlex.join(str(interface["address"]) for interface in link["interfaces"])
    if not addresses:
        return ""
    parts = [_FABRIC.format(addresses=addresses)]
    if link.get("managed"):
        content = base64.encodebytes(str(link["netplan"]).encode()).decode()
        parts.append(_NETPLAN.format(content=content, path=shlex.quote(str(link["netplan_file"]))))
    return "".join([*parts, _ADDRESSED.format(addresses=shlex.quote(addresses))])


def docker_run(container: Mapping[str, Any]) -> list[str]:
    """A container as words of ``docker run``."""
    entrypoint, *first = [str(word) for word in container.get("entrypoints") or []]
    words = ["docker", "run", "--detach", f"--name={container['name']}", f"--entrypoint={entrypoint}"]
    for flag, key in (("network", "networkMode"), ("ipc", "ipcMode"), ("restart", "restart"), ("gpus", "gpus")):
        words += [f"--{flag}={container[key]}"] if container.get(key) else []
    words += [f"--shm-size={_whole(container['shmSize'])}m"] if container.get("shmSize") else []
    words += [f"--stop-timeout={_whole(container['stopTimeout'])}"] if container.get("stopTimeout") else []
    words += [f"--env={value}" for value in container.get("envs") or []]
    words += [f"--label={label['label']}={label['value']}" for label in container.get("labels") or []]
    for mount in container.get("mounts") or []:
        read_only = ",readonly" if mount.get("readOnly") else ""
        words.append(f"--mount=type={mount['type']},source={mount['source']},target={mount['target']}{read_only}")
    for device in container.get("devices") or []:
        words.append(f"--device={device['hostPath']}:{device['containerPath']}:{device['permissions']}")
    added = (container.get("capabilities") or {}).get("adds") or []
    words += [f"--cap-add={name.removeprefix(_CAPS)}" for name in added]
    for limit in container.get("ulimits") or []:
        words.append(f"--ulimit={limit['name']}={_whole(limit['soft'])}:{_whole(limit['hard'])}")
    words += _health(container.get("healthcheck") or {})
    words += [f"--log-driver={container['logDriver']}"] if container.get("logDriver") else []
    words += [f"--log-opt={key}={value}" for key, value in sorted((container.get("logOpts") or {}).items())]
    return [*words, str(container["image"]), *first, *(str(word) for word in container.get("command") or [])]


def _health(check: Mapping[str, Any]) -> list[str]:
    tests = [str(word) for word in check.get("tests") or []]
    if tests[:1] != ["CMD"]:
        return []
    words = [f"--health-cmd={shlex.join(tests[1:])}"]
    for flag, key in (("interval", "interval"), ("timeout", "timeout"), ("start-period", "startPeriod")):
        words += [f"--health-{flag}={check[key]}"] if check.get(key) else []
    return [*words, *([f"--health-retries={_whole(check['retries'])}"] if check.get("retries") else [])]


def _known(value: Any, deployment: str) -> Any:
    """Inputs without the engine's marks, and with a deployment where that is not known yet."""
    if isinstance(value, dict):
        return {key: _known(item, deployment) for key, item in value.items() if key != "__defaults"}
    if isinstance(value, list):
        return [_known(item, deployment) for item in value]
    return value.replace(_UNKNOWN, deployment) if isinstance(value, str) else value


def _whole(number: object) -> int:
    return int(float(str(number)))


def _joined(words: Sequence[str]) -> str:
    return " \\\n    ".join(shlex.quote(word) for word in words) + "\n"
