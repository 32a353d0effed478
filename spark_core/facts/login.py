"""The deploy user's login: who it is, what it may do, and what the host does to it."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

from spark_core.facts.answer import Answer, Fact, Unread

_LAST_SYSTEM_UID = 999
"""logind leaves the shared memory of system users alone, whatever RemoveIPC says."""
_CAN_RAISE_LIMITS = 1 << 24
"""CAP_SYS_RESOURCE."""
_NO_LOGIND = re.compile(
    r"org\.freedesktop\.login1 (was not|is not|has no)|NameHasNoOwner|Unit \S+ (is masked|not found)"
)
_TRUE = {"yes", "true", "on", "1", "y", "t"}
_FALSE = {"no", "false", "off", "0", "n", "f"}


@dataclass(frozen=True)
class Login:
    """The deploy user.

    Args:
        user: Its name.
        uid: Its number.
        groups: Its groups in this session.
    """

    user: str
    uid: int
    groups: tuple[str, ...]

    @property
    def is_system(self) -> bool:
        return self.uid <= _LAST_SYSTEM_UID


@dataclass(frozen=True)
class LockedMemory:
    """What the Docker daemon can give containers of locked memory.

    Args:
        limit_bytes: Its own hard limit, or None if it has none.
        may_raise: Whether it may go above that limit.
    """

    limit_bytes: int | None
    may_raise: bool


def parse_login(answer: Answer) -> Login | Unread:
    """The user from ``id``; a number without a name stands for itself."""
    entry = r"(\d{1,10})(?:\(([^()]+)\))?"
    found = re.match(rf"\s*uid={entry} gid={entry} \S+=({entry}(?:,{entry})*)", answer.text, re.ASCII)
    if found is None:
        return answer.unread("the deploy user", "id")
    groups = tuple(name or number for number, name in re.findall(entry, found.group(5), re.ASCII))
    return Login(found.group(2) or found.group(1), int(found.group(1)), groups)


def parse_sudo(answer: Answer) -> Fact[Literal["free", "asks", "tty"]]:
    """Whether ``sudo -kn -l`` works, as it does where any rule of the user needs no password; None without sudo.

    A wanted password and a refusal look alike, but for that of sudo which wants a terminal (``requiretty``).
    """
    if answer.absent:
        return None
    if answer.status == 0:
        return "free"
    if answer.status is None or answer.status < 0 or answer.timed_out:
        return answer.unread("whether sudo asks for a password", "sudo")
    return "tty" if "must have a tty" in answer.text else "asks"


def parse_remove_ipc(bus: Answer, files: Answer) -> Fact[bool]:
    """Whether logind removes a user's shared memory at its last logout; None where no logind runs.

    The running logind's own word counts; where it cannot be asked, its configuration does, and its default is yes.

    Args:
        bus: What ``busctl`` says of the manager's property.
        files: Lines ``FILE:RemoveIPC=VALUE`` of its configuration, those of files that override others first.
    """
    said = re.fullmatch(r"(?:v )?b (true|false)", bus.text.strip())
    if said and bus.status == 0:
        return said.group(1) == "true"
    if files.absent or _NO_LOGIND.search(bus.text):
        return None
    values: dict[str, str] = {}
    for line in files.lines:
        path, _, rest = line.partition(":")
        found = re.fullmatch(r"\s*RemoveIPC\s*=\s*(\w*)\s*", rest, re.ASCII)
        if found is None or found.group(1).lower() not in _TRUE | _FALSE | {""}:
            return Answer(line, files.status).unread("RemoveIPC", "logind.conf")
        values[path] = found.group(1).lower()
    if files.status not in (0, 1, 2):
        return files.unread("RemoveIPC", "logind.conf")
    # Drop-in files are read after the main one, in the order of their own names.
    names = {path: "" if path.endswith("/logind.conf") else path.rpartition("/")[2] for path in values}
    last = max(values, key=lambda path: names[path], default="")
    return values.get(last, "") not in _FALSE


def parse_own_addresses(answer: Answer) -> Fact[tuple[str, ...]]:
    """The addresses that the node's own name resolves to, or None if it resolves to none."""
    if answer.absent or (answer.status == 2 and not answer.lines):
        return None
    found = []
    for line in answer.lines:
        try:
            found.append(str(ipaddress.ip_address(line.split()[0].partition("%")[0])))
        except ValueError:
            return Answer(line, answer.status).unread("the node's own address", "getent")
    return tuple(found) if found and answer.status == 0 else answer.unread("the node's own address", "getent")


def parse_locked_memory(answer: Answer) -> Fact[LockedMemory]:
    """The Docker daemon's limit and capabilities, from /proc; None if its process cannot be told."""
    if answer.absent:
        return None
    limit = re.search(r"^Max locked memory +\S+ +(unlimited|\d{1,20}) ", answer.text, re.MULTILINE | re.ASCII)
    rights = re.search(r"^CapEff:\s*([0-9a-f]{1,16})$", answer.text, re.MULTILINE)
    if limit is None or rights is None:
        return answer.unread("the limit of locked memory", "/proc of the Docker daemon")
    return LockedMemory(
        None if limit.group(1) == "unlimited" else int(limit.group(1)),
        bool(int(rights.group(1), 16) & _CAN_RAISE_LIMITS),
    )
