"""Whether this machine can hold a lab, said in one line when it cannot."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

from lab.command import run
from lab.errors import CannotRun

TOOLS = {
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "util-linux",
    "ssh": "openssh-client",
    "ssh-agent": "openssh-client",
    "ssh-keygen": "openssh-client",
    "chroot": "coreutils",
    "cp": "coreutils",
    "tar": "tar",
}
BUILD_TOOLS = {"wget": "wget", "gpgv": "gpgv", "dpkg-deb": "dpkg"}


def require_lab_machine() -> None:
    """Raise CannotRun unless this is Linux on x86-64, the user is root and every tool is there.

    A missing iproute2 is installed where apt is at hand, since nothing works without it; other tools are
    only named.
    """
    if platform.system() != "Linux":
        raise CannotRun(
            f"the lab needs Linux (network namespaces), this is {platform.system()}: run it on a Linux machine or VM"
        )
    if os.geteuid() != 0:
        raise CannotRun("the lab needs root, for network namespaces and mounts: run it again with sudo")
    if platform.machine() != "x86_64":
        raise CannotRun(f"the lab's vLLM for CPU is built for x86_64, this machine is {platform.machine()}")
    if not shutil.which("ip") and shutil.which("apt-get"):
        run(
            ["sh", "-c", "apt-get -q update && apt-get -q install -y --no-install-recommends iproute2"],
            what="install iproute2",
            timeout_s=300,
        )
    _require(TOOLS)
    if "overlay" not in Path("/proc/filesystems").read_text():
        raise CannotRun("the lab needs overlayfs, which this kernel does not list: modprobe overlay")


def require_build_tools() -> None:
    """Raise CannotRun unless what a Debian root is built with is there."""
    _require(BUILD_TOOLS)


def _require(tools: dict[str, str]) -> None:
    missing = sorted({package for tool, package in tools.items() if not shutil.which(tool)})
    if missing:
        raise CannotRun(f"the lab needs {', '.join(missing)}: apt-get install {' '.join(missing)}")
