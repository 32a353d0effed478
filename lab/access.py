"""How one gets onto the hosts: the lab's key, an agent that holds it, pinned host keys, and an ssh_config."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

from lab.command import run
from lab.host_root import DEPLOY_USER
from lab.instance import Instance, write_whole


def ssh_config(lab: Instance) -> Path:
    """The file to give to `ssh -F`."""
    return lab.folder / "ssh_config"


def agent_socket(folder: Path) -> Path:
    """Socket of the lab's agent; its value for SSH_AUTH_SOCK."""
    return folder / "agent.sock"


def public_key(lab: Instance) -> str:
    """The deploy user's public key; made with the private one on first use."""
    file = lab.folder / "id_ed25519"
    _make_key(file, comment=f"spark-lab-{lab.name}")
    return file.with_suffix(".pub").read_text()


def host_key(lab: Instance, host: str) -> Path:
    """A host's private key, made on first use and kept as long as the lab."""
    file = lab.host_dir(host) / "ssh_host_ed25519_key"
    file.parent.mkdir(parents=True, exist_ok=True)
    _make_key(file, comment=f"root@{host}")
    return file


def _make_key(file: Path, *, comment: str) -> None:
    if file.exists() and file.with_suffix(".pub").exists():
        return
    file.unlink(missing_ok=True)
    temporary = file.with_name(f".{file.name}.new")
    temporary.unlink(missing_ok=True)
    run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(temporary)],
        what="make an SSH key",
    )
    temporary.with_suffix(".new.pub").rename(file.with_suffix(".pub"))
    temporary.rename(file)


def write_ssh_files(lab: Instance) -> None:
    """Write known_hosts and ssh_config for all hosts."""
    known = []
    blocks = [f"# Hosts of the lab {lab.name}. Written by `python -m lab up`; removed by `down`.\n"]
    for host in lab.hosts:
        address = lab.address(host)
        kind, key = host_key(lab, host).with_suffix(".pub").read_text().split()[:2]
        known.append(f"{host},{address} {kind} {key}\n")
        blocks.append(
            f"Host {host} {address}\n"
            f"  HostName {address}\n"
            f"  User {DEPLOY_USER}\n"
            f"  IdentityFile {_quoted(lab.folder / 'id_ed25519')}\n"
            f"  IdentitiesOnly yes\n"
            f"  IdentityAgent {_quoted(agent_socket(lab.folder))}\n"
            f"  UserKnownHostsFile {_quoted(lab.folder / 'known_hosts')}\n"
            f"  GlobalKnownHostsFile /dev/null\n"
            f"  StrictHostKeyChecking yes\n"
        )
    write_whole(lab.folder / "known_hosts", "".join(known))
    write_whole(ssh_config(lab), "\n".join(blocks))


def _quoted(path: Path) -> str:
    return f'"{path}"'


def ensure_agent(lab: Instance) -> None:
    """Have an agent with the key loaded behind the lab's socket."""
    socket = agent_socket(lab.folder)
    env = {**os.environ, "SSH_AUTH_SOCK": str(socket)}
    listed = subprocess.run(["ssh-add", "-l"], env=env, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return
    # 2 means that nobody answers: a socket file of a killed lab, or none.
    if listed.returncode == 2:
        stop_agent(lab.folder)
        said = run(["ssh-agent", "-s", "-a", str(socket)], what="start the SSH agent")
        found = re.search(r"SSH_AGENT_PID=(\d+)", said)
        if found:
            write_whole(lab.folder / "agent.pid", found.group(1) + "\n")
    run(["ssh-add", "-q", str(lab.folder / "id_ed25519")], what="load the key into the agent", env=env)


def stop_agent(folder: Path) -> None:
    """End the lab's agent, and any other that serves the same socket."""
    socket = agent_socket(folder)
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"ssh-agent") and str(socket).encode() in words:
            _end(int(process.name))
    socket.unlink(missing_ok=True)
    (folder / "agent.pid").unlink(missing_ok=True)


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    end = time.monotonic() + 3
    while Path("/proc", str(pid)).exists() and time.monotonic() < end:
        time.sleep(0.02)
