"""What tests see of emulated hosts from outside: every byte on their disks, and what sessions over SSH cost there.

Looking from outside leaves no trace on a host, which a look over SSH would.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lab import cgroup, instance
from tests.lab.deployment import Deployment

CHANGES_BY_ITSELF = (
    "upper/var/log/journal/",
    "upper/var/log/wtmp",
    "upper/var/log/lastlog",
    "upper/var/log/btmp",
    "upper/var/lib/systemd/",
    "upper/var/lib/private/",
)
"""What a host writes whenever somebody logs in, and by its own timers (units that come and go: folders in /tmp)."""

IN_MEMORY = ("tmp", "dev/shm", "run/lock")
"""Folders in memory that a deploy user may write to."""

LARGE_BYTES = 8 << 20


def disk(deployment: Deployment, host: str) -> dict[str, str]:
    """Every file of a host's own disk, Docker's data and folders in memory: its mode, owner, times and content.

    A host's disk is what differs from the root that all hosts share, so a change of any file anywhere shows.
    """
    folder = deployment.folder / "hosts" / host
    found: dict[str, str] = {}
    for part in ("upper", "docker"):
        found |= {f"{part}/{name}": what for name, what in _tree(folder / part)}
    root = Path("/proc", str(init_pid(deployment, host)), "root")
    for part in IN_MEMORY:
        found |= {f"{part}/{name}": what for name, what in _tree(root / part)}
    return {
        name: what
        for name, what in found.items()
        if not name.startswith(CHANGES_BY_ITSELF) and "/systemd-private-" not in name
    }


def _tree(top: Path) -> Iterator[tuple[str, str]]:
    for folder, folders, files in os.walk(top):
        for name in sorted(folders + files):
            path = Path(folder, name)
            try:
                stat = path.lstat()
                if path.is_symlink():
                    content = str(path.readlink())
                elif path.is_file() and stat.st_size <= LARGE_BYTES:
                    content = hashlib.sha256(path.read_bytes()).hexdigest()
                else:
                    content = ""
            except FileNotFoundError:
                continue
            times = "" if path.is_dir() and top.name == "tmp" else str(stat.st_mtime_ns)
            yield (
                str(path.relative_to(top)),
                f"{stat.st_mode:o} {stat.st_uid}:{stat.st_gid} {stat.st_size} {times} {content}",
            )


def differing(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Names whose entry is not the same in both, each with both entries."""
    return [
        f"{name}: {before.get(name, 'absent')} -> {after.get(name, 'absent')}"
        for name in sorted(set(before) | set(after))
        if before.get(name) != after.get(name)
    ]


def init_pid(deployment: Deployment, host: str) -> int:
    """PID 1 of a host, as this machine numbers it."""
    return int(json.loads((deployment.folder / "hosts" / host / "power.json").read_text())["init"])


@dataclass
class Cost:
    """What something cost one host.

    Attributes:
        peak_session_bytes: Largest sum of the memory of all processes of SSH sessions, sshd's own among them. A page
            that several processes share is counted in parts (PSS).
        cpu_s: Processor time of the whole host: sessions, sshd, logind, dockerd and whatever else ran.
    """

    peak_session_bytes: int = 0
    cpu_s: float = 0.0


class CostWatch(threading.Thread):
    """Looks at a host's processes every few milliseconds, from its start until :meth:`finish`."""

    def __init__(self, deployment: Deployment, host: str) -> None:
        super().__init__(daemon=True)
        self._tag = instance.tag_of(deployment.folder)
        self._host = host
        self._end = threading.Event()
        self._cpu_at_start = self._cpu_s()
        self._cost = Cost()
        self.looks = 0

    def run(self) -> None:
        while not self._end.wait(0.02):
            total = 0
            for pid in cgroup.processes(self._tag, self._host):
                try:
                    if ".slice/session-" not in Path(f"/proc/{pid}/cgroup").read_text():
                        continue
                    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                    total += int(rollup.partition("\nPss:")[2].split()[0]) * 1024
                except (OSError, IndexError):
                    continue  # it has just ended
            self.looks += 1
            self._cost.peak_session_bytes = max(self._cost.peak_session_bytes, total)

    def finish(self) -> Cost:
        """Stop looking; what was seen."""
        self._end.set()
        self.join()
        self._cost.cpu_s = self._cpu_s() - self._cpu_at_start
        return self._cost

    def _cpu_s(self) -> float:
        for group in cgroup.groups(self._tag, self._host):
            if (group / "cpuacct.usage").is_file():
                return int((group / "cpuacct.usage").read_text()) / 1e9
            if (group / "cpu.stat").is_file() and "usage_usec" in (group / "cpu.stat").read_text():
                return int((group / "cpu.stat").read_text().split()[1]) / 1e6
        raise AssertionError(f"no control group counts the processor time of {self._host}")


IMAGE = "vllm-node:latest"

_IMAGE = r"""
set -e
{ libraries=$(ldd /usr/bin/python3.11 /usr/bin/dash | grep -o '/lib[^ :]*' | sed 's,^/lib/,/usr/lib/,')
  { echo "$libraries"; readlink -f $libraries; } | grep -v ^/lib64 | sort -u
  printf '/%s\n' bin lib lib64 usr/lib64 usr/bin/sh usr/bin/dash usr/bin/sleep usr/bin/python3 usr/bin/python3.11 \
    usr/lib/python3.11
} | sed 's,^/,,' | tar -C / -c -T - | docker import - "$IMAGE" > /dev/null
"""

SERVER = """
import http.server
class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version, wbufsize = "HTTP/1.1", -1
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "3"); self.end_headers(); self.wfile.write(b"ok\\n")
    def log_message(self, *words): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Answer).serve_forever()
"""

LOAD = """
import http.client, sys, time
end, good, bad = time.monotonic() + float(sys.argv[1]), 0, 0
connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=10)
while time.monotonic() < end:
    try:
        connection.request("GET", "/"); answer = connection.getresponse(); answer.read()
        good, bad = good + (answer.status == 200), bad + (answer.status != 200)
    except OSError:
        bad += 1; connection.close()
    time.sleep(0.002)
print(good, bad)
"""


def launcher(name: str = "vllm_node", *, serve: bool = False) -> str:
    """Shell text for a host's console that runs a container as another launcher leaves one: an image that sleeps.

    Args:
        name: Name of the container; eugr/spark-vllm-docker calls its own ``vllm_node``.
        serve: Whether a small HTTP server answers on port 8000 of the loopback interface instead.
    """
    words = ["sleep", "infinity"] if not serve else ["python3", "-B", "-c", SERVER]
    return (
        f"IMAGE={IMAGE}\ndocker image inspect $IMAGE > /dev/null 2>&1 || {{ {_IMAGE} }}\n"
        f"docker run -d --name {name} --network host {IMAGE} {shlex.join(words)} > /dev/null"
    )


class Load(threading.Thread):
    """Requests to the server of :func:`launcher`, one by one from the host itself, for a bounded time."""

    def __init__(self, deployment: Deployment, host: str, seconds: float) -> None:
        super().__init__(daemon=True)
        self._deployment, self._host, self._seconds = deployment, host, seconds
        self._answer = ""

    def run(self) -> None:
        shell = f"exec python3 -B - {self._seconds} <<'END'\n{LOAD}\nEND"
        self._answer = self._deployment.on(self._host, shell, timeout_s=self._seconds + 60)

    def finish(self) -> tuple[int, int]:
        """Wait for the end; how many requests were answered, and how many were not."""
        self.join()
        good, bad = self._answer.split()
        return int(good), int(bad)
