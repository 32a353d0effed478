"""Both ends of a TCP measurement between two nodes. The source of this file is what runs on the nodes.

Standard library only, for the python3 of the hosts. One end listens on its fabric addresses and takes connections from
the other end's fabric addresses only. The client writes for a moment over several streams of every link at a time, then
the server does; who receives counts. Pages of one small file are sent without a copy, and what arrives is dropped in
the kernel, so that Python is not what is measured. Nothing is kept, and an alarm ends each end whatever happens.

Prints one line of JSON: ``received`` has bytes and seconds of each link, the client adds ``round_trip_us`` (median);
or ``error`` says why there is nothing to tell.
"""

import json
import os
import select
import signal
import socket
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

PINGS = 100
CONNECT_S = 6.0
CHUNK_BYTES = 1 << 20


class Count:
    """What one stream has received."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = 0
        self.begin = self.end = 0.0

    def receive(self) -> None:
        """Count until the other end has no more to send."""
        room = bytearray(CHUNK_BYTES)
        while True:
            size = self.connection.recv_into(room, CHUNK_BYTES, socket.MSG_TRUNC)
            self.end = time.monotonic()
            self.begin = self.begin or self.end
            if size == 0:
                return
            self.received += size


def send(connection: socket.socket, seconds: float, limit: int) -> None:
    """Send for a time, or until the limit of bytes is reached."""
    end, sent = time.monotonic() + seconds, 0
    file = os.memfd_create("spark-vllm")
    os.truncate(file, CHUNK_BYTES)
    while sent < limit and time.monotonic() < end:
        sent += os.sendfile(connection.fileno(), file, 0, min(CHUNK_BYTES, limit - sent))
    os.close(file)
    connection.shutdown(socket.SHUT_WR)


def receive_all(links: list[list[Count]]) -> list[dict[str, float]]:
    """Receive on every stream; bytes and seconds of each link."""
    counts = [count for link in links for count in link]
    with ThreadPoolExecutor(len(counts)) as pool:
        list(pool.map(Count.receive, counts))
    return [
        {
            "bytes": sum(count.received for count in link),
            "seconds": max(count.end for count in link) - min(count.begin for count in link),
        }
        for link in links
    ]


def send_all(links: list[list[Count]], seconds: float, limit: int) -> None:
    """Send on every stream; the limit is for all of them together."""
    connections = [count.connection for link in links for count in link]
    share = limit // len(connections)
    with ThreadPoolExecutor(len(connections)) as pool:
        list(pool.map(lambda connection: send(connection, seconds, share), connections))


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """That many bytes; raises ConnectionError if the other end closes before."""
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("the other end has closed the connection")
        data += more
    return data


def accept_all(port: int, addresses: list[tuple[str, str]], streams: int) -> tuple[socket.socket, list[list[Count]]]:
    """The control connection and every link's streams. Whoever else connects is turned away."""
    listeners = {}
    for own, peer in addresses:
        listener = socket.create_server((own, port), backlog=64)
        listeners[listener] = peer
    control = None
    links: list[list[Count]] = [[] for _ in addresses]
    while control is None or any(len(link) < streams for link in links):
        for listener in select.select(list(listeners), [], [])[0]:
            connection, (peer, _) = listener.accept()
            if peer != listeners[listener]:
                connection.close()
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            kind = read_exactly(connection, 1)[0]
            if kind == 255:
                control = connection
            else:
                links[kind].append(Count(connection))
    return control, links


def connect(server: str, port: int, own: str, kind: int) -> socket.socket:
    """A connection from one address to another; the server may not listen yet."""
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            connection = socket.create_connection((server, port), timeout=CONNECT_S, source_address=(own, 0))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"no connection from {own} to {server}:{port}: {error.strerror or error}"
                ) from None
            time.sleep(0.05)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(bytes([kind]))
    return connection


def serve(
    port: int, addresses: list[tuple[str, str]], streams: int, seconds: float, limit: int
) -> dict[str, list[dict[str, float]]]:
    """The end that listens: echoes, receives, then sends."""
    control, links = accept_all(port, addresses, streams)
    for _ in range(PINGS):
        control.sendall(read_exactly(control, 1))
    if not streams:
        return {"received": []}
    received = receive_all(links)
    control.sendall(b"g")
    send_all(links, seconds, limit)
    read_exactly(control, 1)
    return {"received": received}


def measure(port: int, addresses: list[tuple[str, str]], streams: int, seconds: float, limit: int) -> dict[str, object]:
    """The end that connects: times the echo, sends, then receives."""
    control = connect(addresses[0][1], port, addresses[0][0], 255)
    links = [
        [Count(connect(server, port, own, place)) for _ in range(streams)]
        for place, (own, server) in enumerate(addresses)
    ]
    trips = []
    for _ in range(PINGS):
        begin = time.perf_counter()
        control.sendall(b"p")
        read_exactly(control, 1)
        trips.append(time.perf_counter() - begin)
    found = {"received": [], "round_trip_us": statistics.median(trips) * 1e6}
    if streams:
        send_all(links, seconds, limit)
        read_exactly(control, 1)
        found["received"] = receive_all(links)
        control.sendall(b"d")
    return found


def main(words: list[str]) -> int:
    """Words: role, alarm in s, port, streams per link, s for each direction, limit in bytes, own=peer of each link."""
    role, alarm, port, streams, seconds, limit, *pairs = words

    def give_up(number: int, frame: object) -> None:
        print(json.dumps({"error": f"not done after {alarm} s; the other end may have gone"}), flush=True)
        os._exit(0)

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(int(alarm))
    addresses = [(own, peer) for own, _, peer in (pair.partition("=") for pair in pairs)]
    work = serve if role == "server" else measure
    try:
        print(json.dumps(work(int(port), addresses, int(streams), float(seconds), int(limit))), flush=True)
    except OSError as error:
        print(json.dumps({"error": error.strerror or str(error)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
