"""Networks of a clean pair, and recordings in the form in which the observation script prints them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spark_core.fabric.facts import Gid, Hca, Link, Neighbour, NetworkFacts
from spark_core.fabric.packets import Outcome, PacketProof, ends_of
from spark_core.settings import Settings, read_settings
from tests.config_cases import apply_change, load_base

SPARK = Path(__file__).resolve().parents[2] / "fixtures" / "spark"
MANAGEMENT, PORT0, PORT, TWIN0, TWIN = "enP7s7", "enp1s0f0np0", "enp1s0f1np1", "enP2p1s0f0np0", "enP2p1s0f1np1"
HCAS = {PORT0: "rocep1s0f0", PORT: "rocep1s0f1", TWIN0: "roceP2p1s0f0", TWIN: "roceP2p1s0f1"}
PCI = {PORT0: "0000:01:00.0", PORT: "0000:01:00.1", TWIN0: "0002:01:00.0", TWIN: "0002:01:00.1"}


def recorded(name: str) -> str:
    return (SPARK / name).read_text()


def settings_with(change: Mapping[str, Any] | None = None, remove: Sequence[str] = ()) -> Settings:
    """The pair of the base settings, with changes."""
    return read_settings(apply_change(load_base(), change or {}, remove))


def spark(number: int, **changes: Link | None) -> NetworkFacts:
    """The network of spark-a (12) or spark-b (13) as declared: both halves of port 1 cabled, port 0 not.

    Args:
        changes: Link of an interface in the place of its own; None for an interface that is gone.
    """
    macs = {name: f"02:00:5e:00:{number:02x}:{place:02x}" for place, name in enumerate((MANAGEMENT, *HCAS))}
    links: dict[str, Link | None] = {
        "lo": Link(65536, ("127.0.0.1/8",), True),
        MANAGEMENT: Link(1500, (f"10.1.230.{number + 168}/24",), True, mac=macs[MANAGEMENT], speed_mbit_s=10000),
        "wlP9s9": Link(1500, (), False),
        "docker0": Link(1500, ("172.17.0.1/16",), False, mac="02:42:00:00:00:01"),
    }
    for name, subnet in ((PORT0, None), (PORT, 200), (TWIN0, None), (TWIN, 201)):
        links[name] = Link(
            9000 if subnet else 1500,
            (f"192.168.{subnet}.{number}/24",) if subnet else (),
            carrier=subnet is not None,
            mac=macs[name],
            pci=PCI[name],
            hca=HCAS[name],
            speed_mbit_s=200_000 if subnet else None,
            port="p1" if name in (PORT, TWIN) else "p0",
        )
    present = {name: link for name, link in (links | changes).items() if link is not None}
    states = {name: Hca("ACTIVE" if link.carrier else "DOWN", name, 200) for name, link in present.items() if link.hca}
    return NetworkFacts(
        present,
        {str(present[name].hca): hca for name, hca in states.items()},
        tuple(
            Gid(str(link.hca), 3, address.split("/")[0])
            for link in present.values()
            if link.hca
            for address in link.addresses
        ),
        management=MANAGEMENT,
        management_address=f"10.1.230.{number + 168}",
        controller="10.1.230.7",
        netplan={"/etc/netplan/40-cx7.yaml": None},
    )


def pair() -> dict[str, NetworkFacts]:
    """Both nodes as declared; each has seen the other."""
    a, b = spark(12), spark(13)
    return {
        "spark-a": replace(a, neighbours=(Neighbour(PORT, "192.168.200.13", b.links[PORT].mac),)),
        "spark-b": replace(b, neighbours=(Neighbour(PORT, "192.168.200.12", a.links[PORT].mac),)),
    }


def changed(network: NetworkFacts, netdev: str, **values: Any) -> NetworkFacts:
    """The network with other values of one link."""
    return replace(network, links={**network.links, netdev: replace(network.links[netdev], **values)})


def proofs(settings: Settings, **others: Outcome) -> dict[str, tuple[PacketProof, ...]]:
    """Every packet arrives, but for those of a node (``spark_a``) over its primary interface."""
    return {
        node.name: tuple(
            PacketProof(
                node.name,
                own.netdev,
                peer.name,
                far.ip,
                others.get(node.name.replace("-", "_"), "arrived") if own is node.fabric[0] else "arrived",
            )
            for own, peer, far in ends_of(settings, node)
        )
        for node in settings.nodes
    }


def ip_address_show(name: str) -> str:
    """A recording of ``ip address show``, ``ip -br`` or ``ip -s link`` as ``ip -j address show`` would say it."""
    text = recorded(name)
    rows: list[dict[str, Any]] = []
    for line in text.splitlines():
        brief = re.match(r"^(\S+) +(UP|DOWN|UNKNOWN)\s+(.*)$", line)
        full = re.match(r"^\d+: ([^:@]+)(?:@\S+)?: <(.*)> mtu (\d+)", line)
        if full is not None:
            rows.append({"ifname": full[1], "flags": full[2].split(","), "mtu": int(full[3]), "addr_info": []})
        elif brief is not None:
            rest = brief[3]
            flags = re.findall(r"<(.*)>", rest)
            found = {"ifname": brief[1], "mtu": 1500, "addr_info": _addresses(rest.split())}
            found["flags"] = flags[0].split(",") if flags else ["UP", *(["LOWER_UP"] if brief[2] == "UP" else [])]
            rows.append(found | ({"address": rest.split()[0]} if flags else {}))
        elif line.strip().startswith("link/ether"):
            rows[-1]["address"] = line.split()[1]
        elif line.strip().startswith("inet "):
            if not rows:
                rows.append({"ifname": line.split()[-1], "flags": ["UP"], "mtu": 1500, "addr_info": []})
            rows[-1]["addr_info"] += _addresses([line.split()[1]])
    return json.dumps(rows)


def _addresses(words: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for word in words:
        local, _, length = word.partition("/")
        if length.isdigit():
            found.append({"family": "inet6" if ":" in local else "inet", "local": local, "prefixlen": int(length)})
    return found


def ibdev2netdev(name: str) -> tuple[str, str]:
    """A recording of ``ibdev2netdev`` as the sections of the interfaces and of the RDMA devices."""
    devices, hcas = [], []
    for line in recorded(name).splitlines():
        match = re.match(r"^(\S+) port 1 ==> (\S+) \((Up|Down)\)$", line)
        if match is None:
            raise ValueError(line)
        up = match[3] == "Up"
        devices.append(f"netdev={match[2]} carrier={int(up)} speed={200000 if up else -1}")
        hcas.append(f"link {match[1]}/1 state {'ACTIVE' if up else 'DOWN'} physical_state x netdev {match[2]} rate ")
    return "\n".join(devices), "\n".join(hcas)
