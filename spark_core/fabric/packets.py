"""Proof that packets of the declared MTU arrive at every peer, in both directions.

Each node sends one UDP datagram that fills the MTU and must not be fragmented to a closed port of each peer. The peer's
kernel answers that the port is closed: the packet has arrived whole. No listener, no root and no ``ping`` is needed,
nothing is left behind, and each direction is a node's own proof. If a large packet gets no answer, small ones tell
whether the size is the reason (NVIDIA/nccl#1524: an MTU that differs hangs NCCL without a warning).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, get_args

from spark_core.fabric.facts import NETWORK, NetworkFacts, parse_network
from spark_core.settings import FabricInterface, NodeSettings, Settings
from spark_core.transport.base import Fragment, Transport, compose, parse_sections, run_checked

Outcome = Literal["arrived", "too-long", "large-lost", "no-neighbour", "no-route", "silent", "absent", "unread"]
"""What became of the packets.

- ``arrived``: whole, at the peer.
- ``too-long``: the kernel refused to send them: the interface's or the path's MTU is smaller.
- ``large-lost``: small ones arrive, large ones do not.
- ``no-neighbour``: nobody on the link has the peer's address.
- ``no-route``: the node has no way to the peer's network.
- ``silent``: the peer is on the link and says nothing: its answers are filtered.
- ``absent``: the node does not have its own declared address yet; nothing was sent.
- ``unread``: the probe gave no answer (no python3, an error of its own).
"""

UDP_HEADERS_BYTES = 28
CLOSED_PORT = 61997
"""Above the ports that Linux gives out by itself."""

# Of one source, Linux answers six such packets at once and then one in a second (net.ipv4.icmp_ratelimit), so there are
# five at most: three large and two small ones, in 1.25 s. Runs that follow each other closely use that limit up, and
# the small one may get the answer that a large one was due: before large ones are called lost, one more is sent after a
# second of silence. /proc/net/arp tells a silent peer from one that is not there, since the kernel itself gives up only
# after three seconds.
_PROBE = r"""
import errno, select, socket, sys, time
MTU_DISCOVER, DONT_FRAGMENT, RECVERR = 10, 2, 11
mtu, port = int(sys.argv[1]), int(sys.argv[2])
rows = [sys.argv[i:i + 4] for i in range(3, len(sys.argv), 4)]
outcome, waiting, poll = {}, {}, select.poll()
NAMES = {errno.EMSGSIZE: "too-long", errno.EHOSTUNREACH: "no-neighbour", errno.ENETUNREACH: "no-route"}
def learn(row, code, size):
    if code == errno.ECONNREFUSED:
        outcome[row] = "arrived" if size > 100 else "large-lost"
    elif code:
        outcome[row] = NAMES.get(code, "silent" if code in (errno.EPERM, errno.EACCES) else "unread")
for row, (_, own, _, peer) in enumerate(rows):
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_IP, MTU_DISCOVER, DONT_FRAGMENT)
    end.setsockopt(socket.IPPROTO_IP, RECVERR, 1)
    try:
        end.bind((own, 0))
    except OSError:
        outcome[row] = "absent"
        continue
    try:
        end.connect((peer, port))
    except OSError as error:
        learn(row, error.errno, mtu)
        continue
    waiting[row] = end
def ask(asked, size):
    for row in asked:
        try:
            waiting[row].send(bytes(size))
            poll.register(waiting[row], 0)
        except OSError as error:
            learn(row, error.errno, size)
    until = time.monotonic() + 0.25
    while len(outcome) < len(rows) and (left := until - time.monotonic()) > 0:
        ready = {found for found, _ in poll.poll(left * 1000)}
        for row, end in waiting.items():
            if end.fileno() in ready and row not in outcome:
                learn(row, end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), size)
                try:
                    end.recv(1, 0x2000)
                except OSError:
                    pass
for size in [mtu - 28] * 3 + [32] * 2:
    ask([row for row in waiting if row not in outcome], size)
late = [row for row in waiting if outcome.get(row) == "large-lost"]
if late:
    time.sleep(1.1)
    for row in late:
        del outcome[row]
    ask(late, mtu - 28)
    for row in late:
        outcome.setdefault(row, "large-lost")
with open("/proc/net/arp") as table:
    known = {words[0] for words in map(str.split, table) if len(words) > 3 and words[2] != "0x0"}
for row, (netdev, _, peer, address) in enumerate(rows):
    found = outcome.get(row) or ("silent" if address in known else "no-neighbour")
    print(netdev, peer, address, found, sep="\t")
"""


@dataclass(frozen=True)
class PacketProof:
    """What became of the packets of one node to one address of a peer."""

    node: str
    netdev: str
    peer: str
    address: str
    outcome: Outcome


def ends_of(settings: Settings, node: NodeSettings) -> Iterator[tuple[FabricInterface, NodeSettings, FabricInterface]]:
    """Each own interface with each interface of a peer on the same subnet."""
    for interface in node.fabric:
        for peer in settings.nodes:
            if peer.name != node.name and peer.name not in settings.abandoned_nodes:
                for far in peer.fabric:
                    if far.network == interface.network:
                        yield interface, peer, far


def packet_probe(settings: Settings, node: NodeSettings) -> Fragment:
    """The part of the node's observation script that sends the packets, and looks at the neighbours after it."""
    rows = [word for own, peer, far in ends_of(settings, node) for word in (own.netdev, own.ip, peer.name, far.ip)]
    text = 'echo "=== packets"; python3 -c "$@" || true\necho "=== net-neighbours-after"; ip -j neigh show || true'
    if not rows:
        return Fragment('echo "=== packets"')
    return Fragment(text, (_PROBE, str(settings.fabric.mtu_bytes), str(CLOSED_PORT), *rows))


def parse_packets(settings: Settings, node: NodeSettings, sections: Mapping[str, str]) -> tuple[PacketProof, ...]:
    """The proofs of one node; one that the probe gave no answer for is ``unread``."""
    said: dict[tuple[str, str], Outcome] = {}
    for line in sections.get("packets", "").splitlines():
        words = line.split("\t")
        if len(words) == 4 and words[3] in get_args(Outcome):
            said[words[0], words[2]] = words[3]  # type: ignore[assignment]
    return tuple(
        PacketProof(node.name, own.netdev, peer.name, far.ip, said.get((own.netdev, far.ip), "unread"))
        for own, peer, far in ends_of(settings, node)
    )


def probe_nodes(
    transports: Mapping[str, Transport], settings: Settings
) -> tuple[dict[str, NetworkFacts], dict[str, tuple[PacketProof, ...]]]:
    """Look at the network of all nodes and send the packets, everywhere at the same time.

    Raises:
        SparkError: a node could not be asked.
    """

    def probe(node: NodeSettings) -> tuple[NetworkFacts, tuple[PacketProof, ...]]:
        text = run_checked(
            transports[node.name],
            compose(NETWORK, packet_probe(settings, node)),
            purpose="expected to send packets over the fabric",
        )
        sections = parse_sections(text)
        return parse_network(sections), parse_packets(settings, node, sections)

    nodes = [node for node in settings.nodes if node.name in transports]
    with ThreadPoolExecutor(max_workers=max(1, len(nodes))) as pool:
        looks = dict(zip((node.name for node in nodes), pool.map(probe, nodes), strict=True))
    return {name: look[0] for name, look in looks.items()}, {name: look[1] for name, look in looks.items()}
