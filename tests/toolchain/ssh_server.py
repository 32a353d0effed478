"""A real sshd on loopback, for one test session: own configuration, own keys, nothing left behind."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

START_LIMIT_S = 15
SFTP = "internal-sftp"


class SshServer(NamedTuple):
    """Where it listens and how to get in."""

    port: int
    user: str
    host_key: str
    other_host_key: str
    private_key: str
    locked_key: str
    locked_key_password: str
    log: Path


def find_sshd() -> Path | None:
    """The sshd that the environment names, an installed one, or the one unpacked into the cache."""
    cache = os.environ.get("SPARK_VLLM_CACHE") or str(
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spark-vllm"
    )
    places = (
        os.environ.get("SPARK_VLLM_TEST_SSHD"),
        shutil.which("sshd"),
        "/usr/sbin/sshd",
        f"{cache}/sshd/usr/sbin/sshd",
    )
    return next((Path(place) for place in places if place and os.access(place, os.X_OK)), None)


def make_key(path: Path, password: str = "") -> str:
    """A key pair; returns the public half."""
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", password, "-C", "test", "-f", str(path)]
    subprocess.run(argv, check=True, timeout=20)
    return path.with_suffix(".pub").read_text().strip()


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _libraries(sshd: Path) -> dict[str, str]:
    # An unpacked package has its libraries beside it.
    root = sshd.parents[2]
    folders = {str(path.parent) for path in root.glob("lib/**/libwrap.so*")} if root != Path("/") else set()
    folders |= {str(path.parent) for path in root.glob("usr/lib/**/libwrap.so*")} if root != Path("/") else set()
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(sorted(folders))} if folders else dict(os.environ)


def _argv(sshd: Path, config: Path, folder: Path) -> list[str]:
    argv = [str(sshd), "-D", "-e", "-f", str(config)]
    if os.getuid() != 0:
        return argv
    # As root sshd wants a user and a folder of its own; a mount namespace gives it both without a trace.
    passwd = folder / "passwd"
    passwd.write_text(Path("/etc/passwd").read_text() + "sshd:x:74:65534::/run/sshd:/usr/sbin/nologin\n")
    script = (
        f"mount --bind {shlex.quote(str(passwd))} /etc/passwd && mount -t tmpfs none /run"
        f" && mkdir -m 755 /run/sshd && exec {shlex.join(argv)}"
    )
    return ["unshare", "--mount", "sh", "-c", script]


@contextmanager
def running(sshd: Path, folder: Path) -> Iterator[SshServer]:
    """An sshd that accepts one user, by key, and of the environment only what begins with ALLOWED_."""
    import getpass

    host_key, other = make_key(folder / "host_key"), make_key(folder / "other_host_key")
    client, locked = make_key(folder / "client_key"), make_key(folder / "locked_key", "open sesame")
    (folder / "authorized_keys").write_text(f"{client}\n{locked}\n")
    port = free_port()
    config = folder / "sshd_config"
    config.write_text(
        f"""
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
AcceptEnv ALLOWED_*
MaxStartups 100
Subsystem sftp {SFTP}
"""
    )
    log = folder / "sshd.log"
    with log.open("w") as output:
        process = subprocess.Popen(_argv(sshd, config, folder), stdout=output, stderr=output, env=_libraries(sshd))
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                running_still = process.poll() is None and time.monotonic() < deadline
                assert running_still, f"{sshd} did not start:\n{log.read_text()}"
                time.sleep(0.05)
        yield SshServer(
            port=port,
            user=getpass.getuser(),
            host_key=host_key,
            other_host_key=other,
            private_key=(folder / "client_key").read_text(),
            locked_key=(folder / "locked_key").read_text(),
            locked_key_password="open sesame",
            log=log,
        )
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
