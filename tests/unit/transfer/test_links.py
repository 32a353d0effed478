"""Who may give files to a node: the expected address with the token, and nobody else."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spark_core.transfer.look import node_program

pytestmark = pytest.mark.slow

TOKEN = "0123456789abcdef" * 4
CONTENT = b"weights" * 1000


def connected(own: str, port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.12", port), 5, (own, 0))


def closed(link: socket.socket) -> bool:
    """Whether the other end closes it without asking for anything."""
    link.settimeout(10)
    with link:
        try:
            return link.recv(1) == b""
        except ConnectionResetError:
            return True


@pytest.mark.usefixtures("site")
def test_only_the_expected_node_with_the_token_is_let_in(tmp_path: Path) -> None:
    sha256 = "1e6a3d8e5b5e0b7c9a5f1ac6ed1c03b5b7b8d5c58c6a52a3c0e0a8e1bfbb0a00"
    status = tmp_path / "cache" / "transfer-1.json"
    orders = {
        "target": str(tmp_path / "weights" / "revision"),
        "cache": str(tmp_path / "cache" / "hashes.json"),
        "status": str(status),
        "files": {"w.bin": [len(CONTENT), sha256]},
        "from": {"listen": "127.0.0.12", "peer": "127.0.0.11", "token": TOKEN},
        "onward": False,
    }
    words = [sys.executable, *node_program("node_mover")[1:]]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdin is not None and program.stdout is not None
        program.stdin.write(json.dumps(orders).encode() + b"\n")
        program.stdin.flush()
        while not status.exists():
            time.sleep(0.01)
        port = json.loads(status.read_text())["port"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.11", port), 5)
        stranger = connected("127.0.0.13", port)
        stranger.sendall(TOKEN.encode())
        assert closed(stranger)
        liar = connected("127.0.0.11", port)
        liar.sendall(b"f" * len(TOKEN))
        assert closed(liar)
        links = [connected("127.0.0.11", port) for _ in range(4)]
        for link in links:
            link.sendall(TOKEN.encode())
        number, offset = struct.unpack("!IQ", links[0].recv(12, socket.MSG_WAITALL))
        assert (number, offset) == (0, 0)
        with pytest.raises(ConnectionRefusedError):
            connected("127.0.0.11", port)
        links[0].sendall(CONTENT)
        outcome = json.loads(program.stdout.readline())
        for link in links:
            link.close()
    assert outcome["whole"] is False
    assert [(fault["kind"], fault["file"]) for fault in outcome["faults"]] == [("wrong", "w.bin")]
    assert not list(tmp_path.glob("weights/revision*/*"))
