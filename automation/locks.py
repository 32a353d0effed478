"""Who holds a stack: the locks of backends that are files, such as ``file://`` and ``s3://``.

The engine writes who took a lock: process, user, host and time. A lock of this host whose process is gone, or is
another one that began later, is stale. That of another host cannot be judged from here and counts as live. A stale lock
is removed when asked for, by its own name: ``pulumi cancel`` would take with it the lock of a run that has just begun.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import unquote, urlsplit

from automation.exit_codes import CommandEnd, Exit
from spark_core.errors import SparkError

_LINE = re.compile(
    r"^\s*(?P<at>\S+://\S+?\.json)\S*: created by (?P<who>.*)@(?P<host>\S+) \(pid (?P<pid>\d+)\) at (?P<t>\S+)"
)


@dataclass(frozen=True)
class Lock:
    """A lock of a stack.

    Attributes:
        where: Its URL.
        user: Who took it.
        host: On which machine.
        pid: Its process there.
        since: When, in UTC.
    """

    where: str
    user: str
    host: str
    pid: int
    since: datetime

    @property
    def holder(self) -> str:
        """Who holds it and since when, in words."""
        return f"{self.user}@{self.host}, process {self.pid}, since {self.since:%Y-%m-%d %H:%M:%S} UTC"

    @property
    def stale(self) -> bool:
        """Whether its process is known to be gone."""
        if self.host != socket.gethostname():
            return False
        began = began_at(self.pid)
        return began is None or (began != _UNKNOWN and began > self.since.timestamp() + 5)


_UNKNOWN = -1.0


def began_at(pid: int) -> float | None:
    """When a process of this machine began, in seconds since the epoch; None: there is none, -1: it is not known."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":  # ended, and its parent has not asked how
            return None
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        return float(boot.split()[1]) + float(fields[19]) / os.sysconf("SC_CLK_TCK")
    return _UNKNOWN


def locks_of(project: str, stack: str) -> list[Lock]:
    """The locks that lie in a ``file://`` backend; for any other kind the engine has to say it."""
    folder = _folder(project, stack)
    found = []
    for path in sorted(folder.glob("*.json")) if folder is not None else []:
        try:
            content = json.loads(path.read_text())
            since = datetime.fromisoformat(re.sub(r"\.\d+", "", content["timestamp"]).replace("Z", "+00:00"))
            found.append(
                Lock(
                    path.as_uri(), content["username"], content["hostname"], int(content["pid"]), since.astimezone(UTC)
                )
            )
        except FileNotFoundError:
            continue  # given up meanwhile
        except (OSError, ValueError, KeyError, TypeError):
            raise SparkError("expected a lock of a stack, found something else", where=str(path)) from None
    return found


def locks_told(text: str) -> list[Lock]:
    """The locks that the engine names when it refuses to run."""
    found = []
    for match in filter(None, map(_LINE.match, text.splitlines())):
        since = datetime.fromisoformat(match["t"].replace("Z", "+00:00")).astimezone(UTC)
        found.append(Lock(match["at"], match["who"], match["host"], int(match["pid"]), since))
    return found


def require_free(
    project: str,
    stack: str,
    *,
    clear_stale: bool,
    wait_s: float,
    say: Callable[[str], None],
    sleep: Callable[[float], None],
) -> None:
    """Go on only if nobody holds the stack.

    Args:
        clear_stale: Whether a lock that a dead process left is removed.
        wait_s: How long a live one is waited for.
        sleep: Waits for seconds; may raise.

    Raises:
        CommandEnd: somebody does, or did and is dead; it says who and since when.
    """
    waited = 0.0
    while locks := locks_of(project, stack):
        dead = [lock for lock in locks if lock.stale]
        for lock in dead if clear_stale else []:
            Path(unquote(urlsplit(lock.where).path)).unlink(missing_ok=True)
            say(f"cleared the lock that a dead run left: {lock.holder}")
        live = [lock for lock in locks if lock not in dead]
        if clear_stale and not live:
            continue
        if not live or waited >= wait_s:
            raise refusal(stack, locks)
        if waited == 0:
            say(f"waiting up to {wait_s:.0f} s for {live[0].holder}")
        sleep(min(1.0, wait_s - waited))
        waited += 1.0


def refusal(stack: str, locks: list[Lock]) -> CommandEnd:
    """What the second of two runs says."""
    live = [lock for lock in locks if not lock.stale]
    evidence = [f"{lock.holder}{' (dead)' if lock.stale else ''}: {lock.where}" for lock in locks]
    if locks and not live:
        return CommandEnd(
            Exit.LOCKED,
            f"expected nobody to hold the stack {stack}, found the lock of a run that is dead: {locks[0].holder}",
            do="run the same command with --clear-stale-lock",
            evidence=evidence,
        )
    holder = live[0].holder if live else "another run"
    do = "wait for it, or give --wait-lock"
    if live and live[0].host != socket.gethostname():
        do += f"; if it is dead, run the same command with --clear-stale-lock on {live[0].host}, which can tell"
    return CommandEnd(
        Exit.LOCKED,
        f"expected nobody to hold the stack {stack}, found a run of {holder}",
        do=do,
        evidence=evidence,
    )


def _folder(project: str, stack: str) -> Path | None:
    parts = urlsplit(os.environ.get("PULUMI_BACKEND_URL", ""))
    if parts.scheme != "file":
        return None
    path = Path(unquote(parts.netloc + parts.path)).expanduser()
    return path / ".pulumi" / "locks" / "organization" / project / stack.rsplit("/", 1)[-1]
