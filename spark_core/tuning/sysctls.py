"""Kernel parameters: read, compared, set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spark_core import root_commands as root
from spark_core.errors import ObservationError
from spark_core.transport.base import Command, Fragment, Transport, compose, parse_sections, run_checked

# /proc and not the sysctl command, which is not on the PATH of an unprivileged shell everywhere.
_READ = """
for k in "$@"; do
  echo "=== sysctl $k"
  f="/proc/sys/${k//.//}"
  if [ ! -e "$f" ]; then echo "--absent--"; else cat "$f" 2>/dev/null || echo "--unreadable--"; fi
done
"""


def sysctls_fragment(names: Sequence[str]) -> Fragment:
    """The part of an observation script that reads kernel parameters; changes nothing and needs no root."""
    return Fragment(_READ, tuple(names))


def parse_sysctls(transport: Transport, sections: Mapping[str, str], names: Sequence[str]) -> dict[str, str | None]:
    """Value of each parameter, blanks made single; None where the kernel has no such parameter.

    One that only root can read is read by root.

    Raises:
        CommandError: a parameter is there and cannot be read; that is not "absent".
    """
    found: dict[str, str | None] = {}
    for name in names:
        value = sections.get(f"sysctl {name}")
        if value is None:
            raise ObservationError(
                f"expected the kernel parameter {name} in the answer, found none", where=transport.node
            )
        if "--unreadable--" in value.splitlines():
            value = run_checked(
                transport,
                root.read_parameter(name),
                purpose=f"expected to read the kernel parameter {name}",
                setting="host.sysctls",
            )
        found[name] = None if value.strip() == "--absent--" else " ".join(value.split())
    return found


def observe_sysctls(transport: Transport, names: Sequence[str]) -> dict[str, str | None]:
    """Current value of each kernel parameter; see :func:`parse_sysctls`."""
    if not names:
        return {}
    text = run_checked(transport, compose(sysctls_fragment(names)), purpose="expected to read kernel parameters")
    return parse_sysctls(transport, parse_sections(text), names)


def plan_sysctls(wanted: Mapping[str, str], found: Mapping[str, str | None]) -> list[Command]:
    """The commands that bring the parameters to their wanted values; empty when nothing differs."""
    return [
        root.set_parameter(name, value)
        for name, value in sorted(wanted.items())
        if found.get(name) != " ".join(value.split())
    ]
