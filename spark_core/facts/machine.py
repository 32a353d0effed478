"""The machine and its operating system."""

from __future__ import annotations

import re
from dataclasses import dataclass

from spark_core.facts.answer import Answer, Fact, Unread

_DOCKER_ARCHITECTURE = {"aarch64": "arm64", "arm64": "arm64", "x86_64": "amd64", "amd64": "amd64"}
_MACHINES = re.compile(r"aarch64|arm64|armv\d\w*|x86_64|amd64|i[3-6]86|ppc64le|riscv64|s390x|loongarch64")
_VERSION = re.compile(r"\d{1,6}(\.\w{1,12})+")


@dataclass(frozen=True)
class DgxRelease:
    """What /etc/dgx-release says.

    Args:
        name: The product line, such as ``DGX Spark``.
        platform: The vendor's name of the machine, or None.
        build: Version of the image that the machine was set up with, or None.
        version: The running version: the last update over the air, or the build if there was none.
    """

    name: str | None
    platform: str | None
    build: str | None
    version: str


def parse_architecture(answer: Answer) -> str | Unread:
    """Architecture in Docker's words from ``uname -a`` or ``uname -m``, such as ``arm64``."""
    for line in answer.lines[:1]:
        # From the right: the host's own name, which may be anything, stands on the left.
        for word in reversed(line.split()):
            if _MACHINES.fullmatch(word):
                return _DOCKER_ARCHITECTURE.get(word, word)
    return answer.unread("the architecture", "uname")


def parse_kernel(answer: Answer) -> str | Unread:
    """Kernel release from ``uname -a``."""
    found = re.match(r"\s*Linux +\S+ +(\d+\.\d+[\w.+~-]*)(\s|$)", answer.text, re.ASCII)
    return found.group(1) if found else answer.unread("the kernel release", "uname")


def parse_os(answer: Answer) -> Fact[str]:
    """Name of the distribution from /etc/os-release."""
    if answer.absent:
        return None
    name = release_values(answer.text).get("PRETTY_NAME", "")
    return name if name.isprintable() and name else answer.unread("the operating system", "/etc/os-release")


def parse_dgx_release(answer: Answer) -> Fact[DgxRelease]:
    """The DGX software from /etc/dgx-release, or None on other machines.

    Values may lack quotes, and every update over the air adds a version and a date, in the language of whoever ran it;
    the last one is running. The serial number is never shown.
    """
    if answer.absent:
        return None
    values: dict[str, str] = {}
    for key, value in _pairs(answer.text):
        if value and value.isprintable():
            values[key] = value
    versions = [values.get(key, "") for key in ("DGX_OTA_VERSION", "DGX_SWBUILD_VERSION")]
    version = next((text for text in versions if _VERSION.fullmatch(text)), None)
    if version is None:
        public = "\n".join(line for line in answer.text.splitlines() if "SERIAL" not in line.upper())
        return Answer(public, answer.status).unread("the DGX release", "/etc/dgx-release")
    build = values.get("DGX_SWBUILD_VERSION")
    return DgxRelease(values.get("DGX_NAME"), values.get("DGX_PLATFORM"), build, version)


def release_values(text: str) -> dict[str, str]:
    """``KEY=value`` lines with or without quotes, as in os-release and dgx-release; the last of a key counts."""
    return dict(_pairs(text))


def parse_boot_id(answer: Answer) -> Fact[str]:
    """The id of this boot of the kernel."""
    if answer.absent:
        return None
    for line in answer.lines[:1]:
        if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", line):
            return line
    return answer.unread("the boot id", "/proc/sys/kernel/random/boot_id")


def parse_product(answer: Answer) -> Fact[str]:
    """The product's name that the firmware gives, such as ``NVIDIA_DGX_Spark``."""
    if answer.absent:
        return None
    if len(answer.lines) == 1 and answer.lines[0].isprintable() and len(answer.lines[0]) <= 80 and answer.status == 0:
        return answer.lines[0]
    return answer.unread("the product name", "/sys/class/dmi/id/product_name")


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for line in text.splitlines():
        key, sign, value = line.partition("=")
        if sign and re.fullmatch(r"[A-Za-z_]\w*", key.strip(), re.ASCII):
            pairs.append((key.strip(), value.strip().strip("\"'").strip()))
    return pairs
