"""The system that every emulated host runs: Debian with systemd, sshd, Docker, netplan and networkd.

It stands for DGX OS: the same init, the same network configuration, the same container engine, the same
release file. What only the hardware has is stood in for by recorded outputs under ``recorded/``.
"""

from __future__ import annotations

import base64

from lab import paths
from lab.debian import Recipe

DEPLOY_USER = "spark"

PACKAGES = (
    "systemd",
    "systemd-sysv",
    "libpam-systemd",
    "dbus",
    "udev",
    "netplan.io",
    "openssh-server",
    "docker.io",
    "nftables",
    "iproute2",
    "iputils-ping",
    "rsync",
    "sudo",
    "python3",
    "curl",
    "ca-certificates",
    "procps",
    "ethtool",
    "less",
    "login",
)

MASKED_UNITS = (
    # Devices, clock and name resolution belong to the machine; waiting for every link to be online would
    # delay a boot whose fabric has no address yet.
    "systemd-udevd.service",
    "systemd-udev-trigger.service",
    "systemd-udevd-control.socket",
    "systemd-udevd-kernel.socket",
    "systemd-timesyncd.service",
    "systemd-resolved.service",
    "systemd-networkd-wait-online.service",
    "systemd-modules-load.service",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "sys-kernel-config.mount",
    "sys-fs-fuse-connections.mount",
    "dev-mqueue.mount",
    "dev-hugepages.mount",
    "console-getty.service",
    "getty.target",
    # Daily package work on a machine without a way out.
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "systemd-tmpfiles-clean.timer",
)

DOCKER_DAEMON = """{
  "bridge": "none",
  "iptables": false,
  "ip6tables": false,
  "storage-driver": "overlay2",
  "log-driver": "json-file"
}
"""
"""Containers use the host's network only, as serving over RDMA does; so Docker changes no packet filter."""

SYSCTL_AT_BOOT = """[Service]
ExecStart=
ExecStart=/lib/systemd/systemd-sysctl --prefix=/net
"""
"""What is below net is a host's own. The rest is shared with the machine, and must not be set from inside."""

STAND_INS = {
    "/usr/bin/nvidia-smi": "nvidia-smi.py",
    "/usr/bin/ibdev2netdev": "ibdev2netdev.py",
}


def _write_file(path: str, text: str, mode: str) -> str:
    """Shell text that writes a file; base64 keeps any content out of the shell's reach."""
    encoded = base64.b64encode(text.encode()).decode()
    return f"mkdir -p $(dirname {path}); echo {encoded} | base64 -d > {path}; chmod {mode} {path}"


def _finish() -> str:
    recorded = paths.package_dir() / "recorded"
    lines = [
        f"useradd --create-home --shell /bin/bash --groups docker,sudo {DEPLOY_USER}",
        "systemctl mask " + " ".join(MASKED_UNITS),
        "systemctl enable ssh.service docker.service systemd-networkd.service",
        "systemctl set-default multi-user.target",
        # A journal that outlives a restart, as on DGX OS.
        "mkdir -p /var/log/journal",
        # Keys and identities are each host's own.
        "rm -f /etc/ssh/ssh_host_*",
        _write_file("/etc/systemd/system/systemd-sysctl.service.d/lab.conf", SYSCTL_AT_BOOT, "0644"),
        _write_file("/etc/docker/daemon.json", DOCKER_DAEMON, "0644"),
        _write_file("/etc/dgx-release", (recorded / "dgx-release").read_text(), "0644"),
    ]
    for target, source in STAND_INS.items():
        lines.append(_write_file(target, (recorded / source).read_text(), "0755"))
    for file in sorted((recorded / "outputs").iterdir()):
        target = f"/usr/share/spark-lab/recorded/{file.name}"
        lines.append(_write_file(target, file.read_text(), "0644"))
    return "\n".join(lines)


def recipe() -> Recipe:
    """The recipe of the hosts' root; its name changes with any of its parts."""
    return Recipe(name="spark-host", packages=PACKAGES, finish=_finish())
