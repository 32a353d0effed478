"""A stack's settings made from what is on its nodes; pure. What can be read there is not invented."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spark_core.fabric.discovery import discover
from spark_core.fabric.facts import NetworkFacts
from spark_core.fabric.foreign import foreign_configuration
from spark_core.facts import NodeFacts
from spark_core.first_day.choices import (
    Choice,
    choose_image,
    choose_model,
    choose_serving,
    replaced_containers,
    running_server,
    wished_model,
)
from spark_core.first_day.peers import cabled
from spark_core.first_day.survey import Survey
from spark_core.settings import FabricInterface, FabricSettings, read_settings

GROUP = "main"
MTU_BYTES = 9000
_FIRST_HOST = 12


@dataclass(frozen=True)
class FirstLook:
    """A node as it was reached and seen.

    Attributes:
        address: What ssh connects to.
        user: Deploy user.
        host_key: The key that it showed and that was agreed to.
        port: sshd's port, or None for what the ssh configuration says.
        via: The address of the node that it is reached through, or empty.
    """

    address: str
    user: str
    host_key: str
    facts: NodeFacts
    network: NetworkFacts
    survey: Survey
    port: int | None = None
    via: str = ""


@dataclass(frozen=True)
class Wishes:
    """What the person asked for: each empty text is left to what is found."""

    image: str = ""
    model: str = ""
    ssh_config: str = ""
    sudo_password_file: str = ""
    hub_endpoint: str = ""


@dataclass
class Draft:
    """Settings as a stack file has them.

    Attributes:
        values: The settings.
        reasons: For the path of a setting, such as ``image.local_id``, lines that say why it is so.
        names: The name of each node, by its address.
    """

    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def take(self, path: str, choice: Choice) -> dict[str, Any]:
        """The values of a choice; its reasons are kept."""
        for below, lines in choice.reasons.items():
            self.reasons[f"{path}.{below}" if below else path] = lines
        return choice.values


def names_of(looks: Sequence[FirstLook]) -> dict[str, str]:
    """A name for each node by its address: its own where that fits, each once."""
    own = [re.sub(r"[^a-z0-9-]+", "-", look.survey.name.split(".")[0].lower()).strip("-")[:31] for look in looks]
    fits = [bool(re.fullmatch(r"[a-z][a-z0-9-]{1,30}", name)) and name != "localhost" for name in own]
    kept = [
        name if fit and name not in own[:place] else "" for place, (name, fit) in enumerate(zip(own, fits, strict=True))
    ]
    spare = (name for letter in "abcdefghijklmnopqrstuvwxyz" if (name := f"spark-{letter}") not in kept)
    return {look.address: name or next(spare) for look, name in zip(looks, kept, strict=True)}


def draft_settings(looks: Sequence[FirstLook], wishes: Wishes) -> Draft:
    """Settings that fit what was seen; the first node is the head."""
    draft = Draft(names=names_of(looks))
    surveys = {draft.names[look.address]: look.survey for look in looks}
    networks = {draft.names[look.address]: look.network for look in looks}
    hardware = _hardware(draft, looks)
    draft.values["hardware"] = hardware
    if wishes.ssh_config:
        draft.values["ssh"] = {"config_file": wishes.ssh_config}
    replaced = replaced_containers(surveys)
    if replaced:
        draft.values["replaces"] = sorted({one.name for containers in replaced.values() for one in containers})
        for node, containers in replaced.items():
            told = ", ".join(f"{one.name} of {one.launcher or 'somebody'}" for one in containers)
            draft.reasons.setdefault("replaces", []).append(f"{node}: {told}")
    draft.values["nodes"] = [_node(draft.names, look) for look in looks]
    image = choose_image(surveys)
    if wishes.image:
        image = Choice({"local_id" if wishes.image.startswith("sha256:") else "registry": wishes.image})
    server = running_server(surveys)
    model, found, cache = choose_model(surveys)
    if wishes.model:
        (model, found), cache = wished_model(wishes.model, surveys), ""
        # How another model is served says nothing of this one.
        server = server if server is not None and server.model in wishes.model else None
    serving = draft.take(f"groups.{GROUP}.serving", choose_serving(len(looks), server, hardware, found))
    draft.values["fabric"] = {}
    draft.values["image"] = draft.take("image", image)
    if cache or wishes.hub_endpoint:
        hub = {"endpoint": wishes.hub_endpoint, "cache": cache}
        draft.values["hub"] = {key: value for key, value in hub.items() if value}
    draft.values["groups"] = {
        GROUP: {
            "nodes": list(draft.names.values()),
            "model": draft.take(f"groups.{GROUP}.model", model),
            "serving": serving,
        }
    }
    _fabric(draft, networks)
    _sudo(draft, looks, wishes.sudo_password_file)
    return draft


def _hardware(draft: Draft, looks: Sequence[FirstLook]) -> str:
    other = [f"{draft.names[look.address]} ({look.facts.architecture})" for look in looks if not _is_spark(look.facts)]
    if other:
        draft.reasons["hardware"] = [f"no DGX Spark: {', '.join(other)}"]
    return "cpu" if other else "spark"


def _is_spark(facts: NodeFacts) -> bool:
    return facts.architecture == "arm64"


def _node(names: Mapping[str, str], look: FirstLook) -> dict[str, Any]:
    values: dict[str, Any] = {"name": names[look.address], "management_address": look.address, "user": look.user}
    if look.port is not None:
        values["ssh_port"] = look.port
    values["host_key"] = look.host_key
    if look.via:
        values["via"] = names[look.via]
    return values


def _fabric(draft: Draft, networks: Mapping[str, NetworkFacts]) -> None:
    """The fabric as it is configured already; else addresses of ours, which up then writes."""
    if len(networks) < 2:
        draft.values.pop("fabric")
        return
    found = discover(read_settings(draft.values), networks).settings
    fabrics = {node.name: node.fabric for node in found.nodes}
    mtus = {networks[name].links[one.netdev].mtu_bytes for name, fabric in fabrics.items() for one in fabric}
    if all(fabrics.values()) and len(mtus) == 1:
        draft.values["fabric"] = {"manage": False, "mtu_bytes": mtus.pop()}
        draft.reasons["fabric.manage"] = [f"the owner's own configuration fits: {_files(networks, fabrics)}"]
    else:
        planned = fabrics if all(fabrics.values()) else _planned(networks)
        if planned is None:
            told = ", ".join(f"{name} {len(cabled(network))}" for name, network in networks.items())
            draft.reasons["fabric"] = [
                f"no addresses on a common subnet, and the cables do not tell which ports face each other ({told} "
                "interfaces with a carrier): declare nodes[].fabric"
            ]
            return
        why = f"MTUs differ ({', '.join(map(str, sorted(mtus)))})" if mtus else "the cables have no addresses yet"
        fabrics = planned
        draft.values["fabric"] = {"manage": True, "mtu_bytes": MTU_BYTES}
        draft.reasons["fabric.manage"] = [f"{why}: up writes a netplan file of its own, and destroy takes it away"]
        over = _take_over(networks, fabrics)
        if over:
            draft.values["fabric"]["take_over"] = over
    for node in draft.values["nodes"]:
        node["fabric"] = [one.model_dump(exclude_none=True) for one in fabrics[node["name"]]]


def _files(networks: Mapping[str, NetworkFacts], fabrics: Mapping[str, Sequence[FabricInterface]]) -> str:
    found = []
    for name, network in networks.items():
        netdevs = [one.netdev for one in fabrics[name]]
        paths = [one.path for one in foreign_configuration(FabricSettings(), netdevs, network)]
        closed = [path for path, text in network.netplan.items() if text is None]
        told = ", ".join(dict.fromkeys(paths)) or (
            f"one of {', '.join(closed)}" if closed else "no file that we can read"
        )
        found.append(f"{name} {told}")
    return "; ".join(found)


def _planned(networks: Mapping[str, NetworkFacts]) -> dict[str, tuple[FabricInterface, ...]] | None:
    """Addresses for cables that have none, where each node has one port cabled; None where that is not so."""
    ends = {name: cabled(network) for name, network in networks.items()}
    counts = {len(netdevs) for netdevs in ends.values()}
    if counts not in ({1}, {2}):
        return None
    taken = [subnet for network in networks.values() for link in network.links.values() for subnet in link.networks]
    free = [
        subnet
        for number in range(200, 250)
        if not any((subnet := ipaddress.IPv4Network(f"192.168.{number}.0/24")).overlaps(other) for other in taken)
    ]
    return {
        name: tuple(
            FabricInterface(netdev=netdev, address=f"{free[half].network_address + _FIRST_HOST + place}/24")
            for half, netdev in enumerate(netdevs)
        )
        for place, (name, netdevs) in enumerate(ends.items())
    }


def _take_over(networks: Mapping[str, NetworkFacts], fabrics: Mapping[str, Sequence[FabricInterface]]) -> list[str]:
    """Netplan files of others that speak of the fabric's interfaces and of nothing else."""
    paths: dict[str, bool] = {}
    for name, network in networks.items():
        netdevs = [one.netdev for one in fabrics[name]]
        for found in foreign_configuration(FabricSettings(manage=True), netdevs, network):
            if not found.path.startswith("/etc/netplan/"):
                continue
            alone = FabricSettings(manage=True, take_over=(found.path,))
            mixed = any(one.path == found.path for one in foreign_configuration(alone, netdevs, network))
            paths[found.path] = paths.get(found.path, True) and not mixed
    return sorted(path for path, whole in paths.items() if whole)


def _sudo(draft: Draft, looks: Sequence[FirstLook], password_file: str) -> None:
    """What sudo needs for the netplan file, where one is to be written."""
    asks = [draft.names[look.address] for look in looks if look.facts.sudo == "asks" and look.user != "root"]
    if not asks or not draft.values.get("fabric", {}).get("manage"):
        return
    if password_file:
        draft.values.setdefault("ssh", {})["sudo_password_file"] = password_file
    else:
        draft.reasons["fabric.manage"].append(
            f"sudo asks for a password on {', '.join(asks)}: set it with `pulumi config set --secret sudo_password`"
        )
