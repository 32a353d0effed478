"""How much two nodes move over the fabric in each direction, and how long a round trip takes.

``ib_write_bw`` measures where both nodes have it and RDMA devices are declared for every link; else TCP does, with ends
of our own (:mod:`spark_core.proof.tcp_ends`). Both run on the two nodes at the same time, for a second in each
direction, over all links of the pair together, since the two halves of one port share it.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spark_core.errors import CommandError, ObservationError, join_errors
from spark_core.findings import Finding
from spark_core.proof.idle import Readiness
from spark_core.proof.perftest import Endpoint, read_run, run_write_bandwidth
from spark_core.proof.verdicts import Method, Rate, Rdma
from spark_core.settings import FabricInterface, NodeSettings
from spark_core.transport.base import Command, Transport, run_checked

TCP_STREAMS = 4
"""Streams over each link; one alone is bound by one processor."""
TCP_SECONDS = 1.0
TCP_LIMIT_BYTES = 16 << 30
"""In each direction, over all streams together: what a healthy pair of twins moves in 0.7 s."""
_TCP_ALARM_S = 15
_TCP_ENDS = Path(__file__).with_name("tcp_ends.py")


@dataclass(frozen=True)
class PairBandwidth:
    """What was measured between two nodes.

    Attributes:
        first, second: Names of the nodes.
        method: How the rates were measured.
        links: How many links there are between them.
        forward_gbps: From the first to the second, over all links together, in Gb/s.
        backward_gbps: The other way.
        round_trip_us: Median of a TCP round trip over the first link, in microseconds.
    """

    first: str
    second: str
    method: Method
    links: int
    forward_gbps: float
    backward_gbps: float
    round_trip_us: float

    @property
    def rate(self) -> Rate:
        """The slower direction, for the verdict."""
        return Rate((self.first, self.second), self.method, self.links, min(self.forward_gbps, self.backward_gbps))

    def __str__(self) -> str:
        return (
            f"{self.first} - {self.second}: {self.forward_gbps:.1f} and {self.backward_gbps:.1f} Gb/s by {self.method} "
            f"over {self.links} link{'s' if self.links != 1 else ''}, round trip {self.round_trip_us:.0f} µs"
        )


Links = Sequence[tuple[FabricInterface, FabricInterface]]


def links_between(first: NodeSettings, second: NodeSettings) -> list[tuple[FabricInterface, FabricInterface]]:
    """The interfaces of two nodes that are joined: those on one subnet."""
    return [(one, other) for one in first.fabric for other in second.fabric if one.network == other.network]


def pairs_to_measure(nodes: Sequence[NodeSettings]) -> list[tuple[NodeSettings, NodeSettings]]:
    """Pairs such that every interface is used: on each subnet, every node with the next one.

    On two nodes that is the one pair, in a ring every cable once, and behind a switch N-1 pairs instead of all.
    """
    networks = dict.fromkeys(interface.network for node in nodes for interface in node.fabric)
    pairs: dict[tuple[str, str], tuple[NodeSettings, NodeSettings]] = {}
    for network in networks:
        members = [node for node in nodes if any(interface.network == network for interface in node.fabric)]
        for first, second in itertools.pairwise(members):
            pairs.setdefault((first.name, second.name), (first, second))
    return list(pairs.values())


def measure_pair(
    first: NodeSettings,
    second: NodeSettings,
    transports: Mapping[str, Transport],
    ready: Mapping[str, Readiness],
    *,
    rdma: Rdma,
) -> tuple[PairBandwidth, list[Finding]]:
    """Measure two nodes; a write of RDMA that fails is a finding, and TCP measures instead.

    Args:
        rdma: What the settings ask for; with ``off`` only TCP is tried.

    Raises:
        ObservationError: nothing could be measured.
        UnreachableError: a node does not answer.
    """
    links = links_between(first, second)
    findings: list[Finding] = []
    with_hcas = all(one.hca and other.hca for one, other in links)
    if rdma != "off" and with_hcas and all("ib_write_bw" in ready[node.name].tools for node in (first, second)):
        try:
            forward = _write(first, second, links, transports, ready)
            backward = _write(second, first, [(other, one) for one, other in links], transports, ready)
            _, _, round_trip = _tcp(first, second, links, transports, ready, streams=0)
            return PairBandwidth(
                first.name, second.name, "ib_write_bw", len(links), forward, backward, round_trip
            ), findings
        except (ObservationError, CommandError) as error:
            findings.append(
                Finding(
                    "rdma-write-failed",
                    f"{first.name} - {second.name} (fabric)",
                    error.what,
                    "check the RoCE v2 entry of the address on both nodes (show_gids) and the MTU at both ends",
                    told_as=None if rdma == "required" else "warn",
                )
            )
    forward, backward, round_trip = _tcp(first, second, links, transports, ready, streams=TCP_STREAMS)
    return PairBandwidth(first.name, second.name, "tcp", len(links), forward, backward, round_trip), findings


def both_ends(server: tuple[Transport, Command], client: tuple[Transport, Command], purpose: str) -> tuple[str, str]:
    """Run the two ends of a measurement at the same time; what each printed.

    Raises:
        CommandError: an end did not end as it must; both are told.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
        futures = [pool.submit(run_checked, transport, cmd, purpose=purpose) for transport, cmd in (client, server)]
        errors = [error for future in futures if isinstance(error := future.exception(), CommandError)]
    if errors:
        raise join_errors(errors)
    return futures[1].result(), futures[0].result()


def _write(
    source: NodeSettings,
    target: NodeSettings,
    links: Links,
    transports: Mapping[str, Transport],
    ready: Mapping[str, Readiness],
) -> float:
    """Rate of RDMA writes from one node to the other over all links together."""
    ports = ready[target.name].ports
    if len(ports) < len(links):
        raise ObservationError("expected free ports for ib_write_bw, found too few", where=target.name)
    ends = [
        (Endpoint(there.hca or "", there.ip, port, there.ip), Endpoint(here.hca or "", here.ip, port, there.ip))
        for (here, there), port in zip(links, ports, strict=False)
    ]
    clients = [client for _, client in ends]
    _, text = both_ends(
        (transports[target.name], run_write_bandwidth("server", [server for server, _ in ends])),
        (transports[source.name], run_write_bandwidth("client", clients)),
        "expected the result of ib_write_bw",
    )
    return sum(found.gbps for found in read_run(text, clients).values())


def _tcp(
    first: NodeSettings,
    second: NodeSettings,
    links: Links,
    transports: Mapping[str, Transport],
    ready: Mapping[str, Readiness],
    *,
    streams: int,
) -> tuple[float, float, float]:
    """Rates there and back, and the round trip; without streams only the round trip."""
    for node in (first, second):
        if "python3" not in ready[node.name].tools:
            raise ObservationError("expected python3 to measure the fabric with, found none", where=node.name)
    if not ready[second.name].ports:
        raise ObservationError("expected a free port on the fabric address, found none", where=second.name)
    port = ready[second.name].ports[-1]
    heard, told = both_ends(
        (transports[second.name], _end("server", port, [(other, one) for one, other in links], streams)),
        (transports[first.name], _end("client", port, links, streams)),
        "expected the result of a TCP measurement",
    )
    server, client = _answer(second.name, heard), _answer(first.name, told)
    faults = [
        f"{name}: {answer['error']}"
        for name, answer in ((second.name, server), (first.name, client))
        if "error" in answer
    ]
    if faults:
        raise ObservationError(
            f"expected the result of a TCP measurement, found: {'; '.join(faults)}",
            where=f"{first.name} - {second.name} (fabric)",
            do="check the addresses of the fabric and whether a packet filter of the nodes keeps TCP out",
        )
    try:
        return _total_gbps(server["received"]), _total_gbps(client["received"]), float(client["round_trip_us"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise ObservationError(
            "expected rates of a TCP measurement, found something else", where=f"{first.name} - {second.name}"
        ) from None


def _end(role: str, port: int, links: Links, streams: int) -> Command:
    words = [
        *(role, str(_TCP_ALARM_S), str(port), str(streams), str(TCP_SECONDS), str(TCP_LIMIT_BYTES)),
        *(f"{own.ip}={peer.ip}" for own, peer in links),
    ]
    return Command(("python3", "-c", _TCP_ENDS.read_text(), *words), timeout_s=_TCP_ALARM_S + 10)


def _answer(node: str, text: str) -> dict[str, Any]:
    lines = text.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ObservationError("expected the result of a TCP measurement, found none", where=node, evidence=lines[-4:])
    return answer


def _total_gbps(links: Sequence[Mapping[str, float]]) -> float:
    return sum(float(link["bytes"]) * 8 / float(link["seconds"]) for link in links) / 1e9
