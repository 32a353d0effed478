"""Kills this stack's newest container when too little memory is available for too long.

A Spark whose unified memory runs out wedges as a whole: no OOM kill, no panic (NVIDIA/open-gpu-kernel-modules#1358). A
killed container stays down until the next ``up``; a restarted one would fill the memory again.

Runs on the host, as the deploy user: ``memory_floor.py STACK FLOOR_MIB LOG_FILE``. It asks Docker's socket itself:
starting a program takes memory that is not there.
"""

import contextlib
import ctypes
import http.client
import json
import socket
import sys
import time
import urllib.parse
from pathlib import Path

PATIENCE_S = 10.0
INTERVAL_S = 1.0
DOCKER = "/var/run/docker.sock"
MEMINFO = Path("/proc/meminfo")


class DockerSocket(http.client.HTTPConnection):
    """HTTP over Docker's socket."""

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(10)
        self.sock.connect(DOCKER)


def ask(method: str, path: str) -> bytes:
    """One request to Docker; the body of its answer."""
    with contextlib.closing(DockerSocket("docker")) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        text = answer.read()
    if answer.status >= 400:
        raise OSError(f"Docker answers {answer.status} to {method} {path.partition('?')[0]}")
    return text


def kill_newest(stack: str) -> str | None:
    """Kill the newest running container of the stack; its name, or None if none runs."""
    wanted = urllib.parse.quote(json.dumps({"label": [f"spark-vllm.stack={stack}"], "status": ["running"]}))
    found = json.loads(ask("GET", f"/containers/json?filters={wanted}"))
    if not found:
        return None
    newest = max(found, key=lambda container: container["Created"])
    ask("POST", f"/containers/{newest['Id']}/kill")
    return str(newest["Names"][0]).lstrip("/")


def main(stack: str, floor_mib: int, log: Path) -> None:
    """Look at the memory once a second, for ever."""
    ctypes.CDLL(None).mlockall(3)  # MCL_CURRENT | MCL_FUTURE: its own pages must not be the ones that are missing
    below_since: float | None = None
    while True:
        have = int(MEMINFO.read_text().partition("MemAvailable:")[2].split()[0]) // 1024
        now = time.monotonic()
        if have >= floor_mib:
            below_since = None
        elif below_since is None:
            below_since = now
        elif now - below_since >= PATIENCE_S:
            below_since = None
            killed = kill_newest(stack)
            if killed is not None:
                line = f"{time.strftime('%FT%T%z')} {have} MiB available, floor {floor_mib} MiB: killed {killed}"
                with log.open("a") as file:
                    file.write(f"{line}\n")
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
