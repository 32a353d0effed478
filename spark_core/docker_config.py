"""Docker's cgroup driver in its daemon.json: put in beside what others have there, and taken out again.

Other tools write the same file (NVIDIA's toolkit registers its runtime there), so what they add after us must stay when
we leave; if nothing was added, the file comes back byte for byte.
"""

from __future__ import annotations

import json
from typing import Any

from spark_core.errors import CommandError

PATH = "/etc/docker/daemon.json"
_OPTION = "native.cgroupdriver="


def cgroup_driver_of(content: bytes | None) -> str | None:
    """The cgroup driver that a daemon.json names; None if it names none."""
    options = _parsed(content).get("exec-opts", [])
    found = [option.removeprefix(_OPTION) for option in options if str(option).startswith(_OPTION)]
    return found[-1] if found else None


def with_cgroup_driver(content: bytes | None, driver: str | None) -> bytes:
    """A daemon.json with this driver, or with none, and all else as it was.

    Raises:
        CommandError: the file is no object of JSON.
    """
    values = _parsed(content)
    others = [option for option in values.pop("exec-opts", []) if not str(option).startswith(_OPTION)]
    options = [*others, *([f"{_OPTION}{driver}"] if driver else [])]
    if options:
        values["exec-opts"] = options
    return (json.dumps(values, indent=2) + "\n").encode()


def restored(current: bytes | None, old: bytes | None) -> bytes | None:
    """What is to stand when we leave; None for no file.

    Args:
        current: The file as it is now.
        old: The file before us.
    """
    if current is None or current == old:
        return old
    try:
        if current == with_cgroup_driver(old, cgroup_driver_of(current)):
            return old
        return with_cgroup_driver(current, cgroup_driver_of(old))
    except CommandError:  # Docker cannot start with such a file
        return old


def _parsed(content: bytes | None) -> dict[str, Any]:
    if content is None or not content.strip():
        return {}
    try:
        values = json.loads(content)
        if isinstance(values, dict) and isinstance(values.get("exec-opts", []), list):
            return values
    except ValueError:
        pass
    raise CommandError(
        f"expected an object of JSON in {PATH}, found something else",
        do="repair the file; Docker does not start with it either",
    )
