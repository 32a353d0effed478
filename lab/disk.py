"""A host's own disk: the layer over the shared Debian root that holds everything that is only this host's.

It lies in the lab's folder, not in memory, so a restart or a power cut keeps what was written. The files
put here before the first start are what the installer of a real Spark would have asked for: name, user,
key, address.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from lab import paths
from lab.command import run
from lab.host_root import DEPLOY_USER
from lab.instance import Instance, write_whole

DEPLOY_UID = 1000
SHADOW_GID = 42
DISK_FOLDERS = ("upper", "work", "root", "docker")
CUDA_LIBRARIES_ON_HOST = "/opt/cuda-libs"

MANAGEMENT_NETPLAN = """# Management network of this host; the fabric belongs to whoever deploys on it.
network:
  version: 2
  renderer: networkd
  ethernets:
    eth0:
      dhcp4: false
      dhcp6: false
      accept-ra: false
      link-local: []
      addresses: [{address}/{prefix_length}]
"""


MANAGEMENT_NETPLAN_FILE = "etc/netplan/10-management.yaml"


def management_netplan(lab: Instance, host: str) -> str:
    """The netplan file that gives a host its management address."""
    return MANAGEMENT_NETPLAN.format(address=lab.address(host), prefix_length=lab.subnet.prefixlen)


def cuda_libraries_dir() -> Path:
    """Folder in the cache that every host sees, read-only, as /opt/cuda-libs; filled with the image."""
    return paths.cache_dir() / "cuda-libs"


def shared_folders() -> tuple[tuple[Path, str], ...]:
    """What lies once on this machine for all hosts, as driver libraries lie on a real host."""
    folder = cuda_libraries_dir()
    folder.mkdir(parents=True, exist_ok=True)
    return ((folder, CUDA_LIBRARIES_ON_HOST),)


def sudo_password(lab: Instance) -> str:
    """The deploy user's password for sudo, random for every lab; made on first use."""
    file = lab.folder / "sudo_password"
    if not file.exists():
        write_whole(file, secrets.token_urlsafe(18) + "\n", 0o600)
    return file.read_text().strip()


def wipe(lab: Instance, host: str) -> None:
    """Throw a host's disk away, with the keys on it; the host must be off."""
    folder = lab.host_dir(host)
    # First, so that an interrupted wipe is taken for a disk that was never finished.
    (folder / "disk-ready").unlink(missing_ok=True)
    for name in DISK_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for key in folder.glob("ssh_host_*"):
        key.unlink()


def prepare(lab: Instance, host: str, public_key: str, host_key: Path) -> None:
    """Make a host's disk, unless it has one."""
    folder = lab.host_dir(host)
    done = folder / "disk-ready"
    if done.exists():
        return
    for name in DISK_FOLDERS:
        # A half-made disk of a killed start has nothing worth keeping.
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir(parents=True)
    (folder / "docker").chmod(0o710)
    upper = folder / "upper"
    upper.chmod(0o755)
    _put(upper, "etc/hostname", f"{host}\n")
    _put(
        upper,
        "etc/hosts",
        f"127.0.0.1 localhost\n127.0.1.1 {host}\n::1 localhost ip6-localhost ip6-loopback\n",
    )
    _put(upper, "etc/machine-id", secrets.token_hex(16) + "\n")
    _put(upper, MANAGEMENT_NETPLAN_FILE, management_netplan(lab, host), mode=0o600)
    _put(upper, "etc/ssh/ssh_host_ed25519_key", host_key.read_text(), mode=0o600)
    _put(upper, "etc/ssh/ssh_host_ed25519_key.pub", host_key.with_suffix(".pub").read_text())
    home = f"home/{DEPLOY_USER}"
    _put(upper, f"{home}/.ssh/authorized_keys", public_key, mode=0o600)
    for part in (home, f"{home}/.ssh", f"{home}/.ssh/authorized_keys"):
        os.chown(upper / part, DEPLOY_UID, DEPLOY_UID)
    (upper / home / ".ssh").chmod(0o700)
    _put(upper, "etc/shadow", _shadow(lab), mode=0o640)
    os.chown(upper / "etc/shadow", 0, SHADOW_GID)
    done.touch()


def _put(upper: Path, name: str, text: str, mode: int = 0o644) -> None:
    target = upper / name
    missing = [parent for parent in target.parents if not parent.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    for parent in missing:
        parent.chmod(0o755)
    target.write_text(text)
    target.chmod(mode)


def _shadow(lab: Instance) -> str:
    """The root's shadow file, with the deploy user's password set."""
    # The host's own openssl makes the hash; the password goes over standard input, never into an argument
    # list.
    hashed = run(
        ["chroot", str(lab.root), "openssl", "passwd", "-6", "-stdin"],
        what="hash the sudo password",
        stdin=sudo_password(lab) + "\n",
    ).strip()
    lines = []
    for line in (lab.root / "etc/shadow").read_text().splitlines():
        fields = line.split(":")
        if fields[0] == DEPLOY_USER:
            fields[1] = hashed
        lines.append(":".join(fields))
    return "\n".join(lines) + "\n"
