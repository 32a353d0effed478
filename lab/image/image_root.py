"""The operating system inside the serving image: Debian with Python, and no compiler.

torch would compile small kernels at run time, which takes 20 s at the first completion and needs a C++
compiler and headers of 300 MB in 10 000 files, to be loaded on every host. The image switches that off
instead (see `serving`).
"""

from __future__ import annotations

from lab.debian import Recipe

PACKAGES = (
    "python3",
    "libgomp1",
    "libnuma1",
    "procps",
    "iproute2",
    "ca-certificates",
)

BUILD_PACKAGES = (*PACKAGES, "binutils")
"""The environment is installed with the same interpreter; debug symbols are taken out with strip."""

FINISH = "\n".join(
    [
        # Bytecode that is valid whatever the files' dates: the image's layers carry one fixed date.
        "python3 -m compileall -q -f --invalidation-mode unchecked-hash /usr/lib/python3.11 || true",
        "rm -rf /usr/share/doc /usr/share/man /usr/share/locale /usr/share/info /usr/share/common-licenses",
        "rm -rf /var/cache/ldconfig/aux-cache /var/cache/debconf /var/lib/dpkg/*-old /var/log/*",
    ]
)


def recipe() -> Recipe:
    """The recipe of the image's root; its name changes with any of its parts."""
    return Recipe(name="image-root", packages=PACKAGES, finish=FINISH)


def build_recipe() -> Recipe:
    """The recipe of the root in which the environment is installed."""
    return Recipe(name="image-build", packages=BUILD_PACKAGES)
