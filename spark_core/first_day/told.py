"""What is on a node already, in lines for a person; pure."""

from __future__ import annotations

from collections.abc import Iterator

from spark_core.facts import Unread
from spark_core.facts.docker import Docker, DockerProblem
from spark_core.first_day.draft import FirstLook
from spark_core.first_day.peers import cabled

_MOST = 8


def told_of(look: FirstLook) -> list[str]:
    """Machine, cables, netplan, models, images, and other launchers' things."""
    return [*_machine(look), *_network(look), *_things(look)]


def _machine(look: FirstLook) -> Iterator[str]:
    facts = look.facts
    system = facts.os if isinstance(facts.os, str) else "a system that does not say its name"
    gpu = ", ".join(gpu.name for gpu in facts.gpus) if isinstance(facts.gpus, tuple) else "no GPU"
    yield f"{look.survey.name}: {system}, {_word(facts.architecture)}, {gpu}"
    docker = facts.docker
    if isinstance(docker, Docker):
        yield f"Docker {docker.version}"
    else:
        yield f"Docker: {docker.found if isinstance(docker, DockerProblem) else docker.line}"


def _network(look: FirstLook) -> Iterator[str]:
    network = look.network
    for name in cabled(network):
        link = network.links[name]
        hca = f", {link.hca}" if link.hca else ""
        yield f"cable: {name} {', '.join(link.addresses) or 'without an address'}, MTU {link.mtu_bytes}{hca}"
    for path, text in sorted(network.netplan.items()):
        if "/netplan/" in path:
            yield f"netplan: {path}" + (" (only root reads it)" if text is None else "")


def _things(look: FirstLook) -> Iterator[str]:
    survey = look.survey
    for model in survey.models[:_MOST]:
        name = f"{model.repository}@{model.commit[:12]}" if model.repository else model.path
        yield f"model: {name}, " + (model.fault or f"{model.bytes / 1e9:.1f} GB, whole")
    named = [name for names in survey.images.values() for name in names[:1] if "vllm" in name.lower()]
    if survey.images:
        yield f"images: {len(survey.images)}" + (f", among them {', '.join(named[:_MOST])}" if named else "")
    for container in survey.containers:
        if container.running and (container.launcher or container.servers):
            serves = ", ".join(server.model for server in container.servers if server.model)
            yield (
                f"runs: {container.name} of {container.launcher or 'somebody'} ({container.image})"
                + (f", serves {serves}" if serves else "")
            )
    for launcher in survey.launchers:
        nodes = ", ".join(launcher.addresses)
        yield f"eugr/spark-vllm-docker: {launcher.folder}" + (f", nodes {nodes}" if nodes else "")
    for cluster in survey.clusters:
        yield f"sparkrun: {cluster.file}, hosts {', '.join(cluster.hosts) or 'none'}"


def _word(fact: str | Unread) -> str:
    return fact if isinstance(fact, str) else "unknown architecture"
