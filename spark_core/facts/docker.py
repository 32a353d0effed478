"""The Docker daemon of a node: whether the deploy user may use it, and how it is set up."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from spark_core.facts.answer import Answer, Unread, excerpt
from spark_core.findings import Finding

ANSWER_TIMEOUT_S = 8

DOCKER_VERSION = f"""
echo '=== docker'
if ! command -v docker >/dev/null; then echo missing
else
  timeout -k 1 {ANSWER_TIMEOUT_S} docker version --format '{{{{.Server.Version}}}} {{{{.Server.Arch}}}}' 2>&1 ||
    case $? in 124 | 137) echo no-answer ;; esac
fi
"""
"""Script text that prints the section ``docker``: the version of the daemon, or what is in the way."""

_SNAPSHOTTER = "io.containerd.snapshotter"
_DO = {
    "docker-missing": "install Docker, or put it on the PATH of a non-interactive shell (`ssh NODE docker version`)",
    "docker-permission": "`sudo usermod -aG docker USER` on that node, then a new login",
    "docker-down": "`systemctl status docker` on that node tells more",
}


@dataclass(frozen=True)
class DockerProblem:
    """Docker cannot be used.

    Args:
        code: The kind of finding.
        found: What was found, in words.
    """

    code: Literal["docker-missing", "docker-permission", "docker-down"]
    found: str


@dataclass(frozen=True)
class Docker:
    """The Docker daemon of a node; an empty value is one that the daemon does not tell.

    Args:
        version: Version of the daemon.
        storage_driver: Such as ``overlay2``, or ``overlayfs`` with the containerd image store.
        image_store: ``containerd`` or ``classic``; the same image has another id in each.
        cgroup_driver: ``systemd`` or ``cgroupfs``.
        runtimes: Names of the runtimes.
        default_runtime: The one that is used if none is named.
        cdi_directories: Where device descriptions (CDI) are looked for; empty where the daemon knows none.
        cdi_devices: Devices that the daemon found there (Docker 28.2 and later tell them).
        root: Where images and containers lie.
        engine_id: The daemon's own id.
        rootless: Whether it runs without root.
    """

    version: str
    storage_driver: str = ""
    image_store: Literal["containerd", "classic"] = "classic"
    cgroup_driver: str = ""
    runtimes: tuple[str, ...] = ()
    default_runtime: str = ""
    cdi_directories: tuple[str, ...] = ()
    cdi_devices: tuple[str, ...] = ()
    root: str = ""
    engine_id: str = ""
    rootless: bool = False


def parse_docker_version(text: str) -> str | DockerProblem:
    """Version of the daemon from what :data:`DOCKER_VERSION` prints, or what is in the way."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if lines == ["missing"]:
        return _missing()
    if lines[-1:] == ["no-answer"]:
        return _silent()
    for line in lines:
        if re.fullmatch(r"\d[\w.+~-]*( [a-z0-9_]+)?", line, re.ASCII):
            return line.split()[0]
    return _problem(" ".join(lines)) or DockerProblem("docker-down", f"no version but: {excerpt(text)}")


def docker_problem(node: str, parsed: object) -> Finding | None:
    """The finding for what is in the way of using Docker; None if nothing is."""
    if not isinstance(parsed, DockerProblem):
        return None
    return Finding(
        parsed.code,
        f"{node}, docker",
        f"expected a Docker daemon that answers, found: {parsed.found}",
        _DO[parsed.code],
    )


def may_change_with_login(parsed: object) -> bool:
    """Whether what is in the way may be gone after a new login: a user's groups are those of the login."""
    return isinstance(parsed, DockerProblem) and parsed.code == "docker-permission"


def parse_docker_info(answer: Answer) -> Docker | DockerProblem | Unread:
    """The daemon from ``docker info --format '{{json .}}'``; what ``docker info`` prints for people is read as well."""
    if answer.absent:
        return _missing()
    if answer.timed_out:
        return _silent()
    values = _json_values(answer) or _text_values(answer.text)
    version = _word(values, "ServerVersion")
    if not re.fullmatch(r"\d[\w.+~-]*", version, re.ASCII):
        # A client that could not ask prints its own half, and the daemon's half empty.
        errors = [str(error) for error in _list(values, "ServerErrors")]
        problem = _problem(" ".join(errors) or answer.text)
        return problem or answer.unread("Docker's facts", "docker info")
    status = values.get("DriverStatus")
    pairs = [pair for pair in status if isinstance(pair, list)] if isinstance(status, list) else []
    devices = [device for device in _list(values, "DiscoveredDevices") if isinstance(device, dict)]
    return Docker(
        version,
        storage_driver=_word(values, "Driver"),
        image_store="containerd" if any(_SNAPSHOTTER in str(value) for pair in pairs for value in pair) else "classic",
        cgroup_driver=_word(values, "CgroupDriver"),
        runtimes=tuple(sorted(_names(values, "Runtimes"))),
        default_runtime=_word(values, "DefaultRuntime"),
        cdi_directories=tuple(_names(values, "CDISpecDirs")),
        cdi_devices=tuple(str(device.get("ID")) for device in devices if device.get("ID")),
        root=_word(values, "DockerRootDir"),
        engine_id=_word(values, "ID"),
        rootless="name=rootless" in _names(values, "SecurityOptions"),
    )


def _missing() -> DockerProblem:
    return DockerProblem("docker-missing", "no docker command on the PATH of a non-interactive shell")


def _silent() -> DockerProblem:
    return DockerProblem("docker-down", f"the Docker daemon does not answer in {ANSWER_TIMEOUT_S} s")


def _problem(said: str) -> DockerProblem | None:
    """What the docker command complains about; a refused socket and a stopped daemon are two things."""
    if "permission denied" in said.lower():
        return DockerProblem(
            "docker-permission", "the deploy user may not use the Docker socket (is it in the docker group?)"
        )
    if re.search(r"Cannot connect to the Docker daemon|daemon running|error during connect", said):
        return DockerProblem("docker-down", "the Docker daemon does not answer (is docker.service running?)")
    return None


def _json_values(answer: Answer) -> dict[str, Any]:
    # A warning of the client may stand before the object.
    for line in answer.lines:
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                return found
    return {}


def _text_values(text: str) -> dict[str, Any]:
    """The same values from the indented text form, of which the daemon's part is taken."""
    words: dict[str, str] = {}
    lists: dict[str, list[str]] = {}
    heading = ""
    for line in text.partition("Server:")[2].splitlines():
        depth = len(line) - len(line.lstrip())
        key, sign, value = line.strip().partition(":")
        if depth == 1 and sign:
            heading = key
            words.setdefault(key, value.strip())
        elif depth > 1:
            lists.setdefault(heading, []).append(line.strip())
    devices = [value.partition(": ")[2] for value in lists.get("Discovered Devices", [])]
    return {
        "ServerVersion": words.get("Server Version", ""),
        "Driver": words.get("Storage Driver", ""),
        "DriverStatus": [[value] for value in lists.get("Storage Driver", [])],
        "CgroupDriver": words.get("Cgroup Driver", ""),
        "Runtimes": words.get("Runtimes", "").split(),
        "DefaultRuntime": words.get("Default Runtime", ""),
        "CDISpecDirs": lists.get("CDI spec directories", []),
        "DiscoveredDevices": [{"ID": device} for device in devices],
        "DockerRootDir": words.get("Docker Root Dir", ""),
        "ID": words.get("ID", ""),
        "SecurityOptions": [f"name={value}" for value in lists.get("Security Options", [])],
    }


def _word(values: Mapping[str, Any], key: str) -> str:
    value = values.get(key)
    return value if isinstance(value, str) else ""


def _list(values: Mapping[str, Any], key: str) -> list[Any]:
    value = values.get(key)
    return value if isinstance(value, list) else []


def _names(values: Mapping[str, Any], key: str) -> list[str]:
    value = values.get(key)
    return [str(name) for name in value] if isinstance(value, dict | list) else []
