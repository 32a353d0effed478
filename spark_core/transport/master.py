"""The one open connection to a node that everybody's sessions go over (OpenSSH's ControlMaster).

It is opened under a lock of its own, since simultaneous ``ControlMaster=auto`` starts race (OpenSSH 9.2), and ends by
itself a minute after its last use.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spark_core.transport.backoff import Backoff
from spark_core.transport.connection import CONTROL_DIR, HOST_KEY_STEP, Connection, ssh_path
from spark_core.transport.first_contact import wrong_host_key
from spark_core.transport.login_errors import LoginFailure, login_failure, login_timeout
from spark_core.transport.openssh import attempt

LOGIN_TIMEOUT_S = 15.0
REQUEST_TIMEOUT_S = 6.0
PERSIST_S = 60
BUSY_S = 10.0
"""How long a connection that sshd drops (MaxStartups) is tried again, in preview too."""


@dataclass(frozen=True)
class Patience:
    """How a host that does not answer is waited for, since it may be booting.

    Attributes:
        seconds: How long.
        say: Called with one line when it is waited for.
        check: Called often; what it raises ends the wait.
    """

    seconds: float = 0.0
    say: Callable[[str], None] = lambda _: None
    check: Callable[[], None] = lambda: None


class Master:
    """The open connection to a node.

    Args:
        connection: Where the node is and which key it must show.
        answers: Whether a command over the connection gets an answer.
        clarify: Called with a failure that only the node on the way can explain; gives the explained one.
    """

    def __init__(
        self,
        connection: Connection,
        answers: Callable[[], bool],
        clarify: Callable[[LoginFailure], LoginFailure],
    ) -> None:
        self._connection = connection
        self._answers = answers
        self._clarify = clarify
        self._path = ssh_path(connection.control_path)
        self._seen = 0.0

    @property
    def is_fresh(self) -> bool:
        """Whether it answered a moment ago; then it is used without another look, and counts as used now."""
        if time.monotonic() - self._seen >= PERSIST_S / 3:
            return False
        self._seen = time.monotonic()
        return True

    def forget(self) -> None:
        """Look at it again before the next use."""
        self._seen = 0.0

    def leave(self) -> None:
        """Have it take no more sessions, so that the next use makes another; those that it has go on."""
        self._request("stop")
        self.forget()

    def runs(self) -> bool:
        """Whether its process is there."""
        return self._request("check")

    def is_alive(self) -> bool:
        """Whether the node answers over it; if not, it takes no more sessions and ends with those it has."""
        if not self.runs():
            return False
        # A master over a dead path still says "running": only an answer from the node counts.
        if self._answers():
            return True
        self._request("stop")
        return False

    def open(self, patience: Patience) -> None:
        """Make sure that it is there.

        Raises:
            UnreachableError: naming the step that failed.
        """
        if self.is_fresh:
            return
        directory = ssh_path(CONTROL_DIR)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(directory / f"{self._path.name}.lock"):
            if not self.is_alive():
                self._start(patience)
        self._seen = time.monotonic()

    def _start(self, patience: Patience) -> None:
        backoff, told, seconds = Backoff(), False, patience.seconds
        while (failure := self._failed_start(patience.check)) is not None:
            limit = {"never": 0.0, "busy": max(BUSY_S, seconds), "boot": seconds}[failure.passing]
            if failure.passing == "boot" and limit > 0 and not told:
                patience.say(f"{failure.error.line}; waiting up to {seconds:g} s (ssh.boot_wait_s)")
                told = True
            if not backoff.wait(limit):
                raise failure.error

    def _failed_start(self, check: Callable[[], None]) -> LoginFailure | None:
        check()
        self._path.unlink(missing_ok=True)
        words = [
            *self._connection.own_options(),
            "-o",
            "ControlMaster=yes",
            "-o",
            f"ControlPath={self._path}",
            "-o",
            f"ControlPersist={PERSIST_S}",
            "-N",
            "-f",
            *self._connection.target(),
        ]
        made = attempt(words, LOGIN_TIMEOUT_S, check)
        if made.status == 0:
            return None
        failure = (
            login_timeout(self._connection, made.log, LOGIN_TIMEOUT_S)
            if made.status is None
            else login_failure(self._connection, made.log, made.aside)
        )
        if failure.unclear:
            failure = self._clarify(failure)
        if failure.error.code == "host-key-mismatch" and failure.error.step == HOST_KEY_STEP:
            failure = wrong_host_key(self._connection, failure, made.log)
        return failure

    def _request(self, request: str) -> bool:
        """Whether the process, if there is one, does what is requested (``check``, ``stop``)."""
        if not self._path.exists():
            return False
        try:
            done = subprocess.run(
                ["ssh", "-F", "none", "-o", f"ControlPath={self._path}", "-O", request, self._connection.spec.address],
                capture_output=True,
                timeout=REQUEST_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
