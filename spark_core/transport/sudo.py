"""Root on a node, by sudo: without a password where sudoers allows the very command, with one where it asks for it.

Nothing else than the command itself is tried, since sudoers may allow listed commands only. Whether sudo asks depends
on the command, so the password is sent only after it asked: sent unasked, it would be the first line of the command's
own input. All texts are those of sudo 1.9 and of sudo-rs, in the C locale.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from spark_core.errors import CommandError, UnreachableError
from spark_core.transport.base import Command, Result

_SUDO = "env LC_ALL=C sudo -k"
# -k: a cached credential must not hide that a password is needed, since it would then not be read.
_FREE = f"{_SUDO} -n"
_WITH_PASSWORD = f"{_SUDO} -S -p ''"

_ASKED = re.compile(
    r"^sudo(-rs)?: (a password is required|a terminal is required|interactive authentication is required)", re.M
)
_WRONG = re.compile(r"^(Sorry, try again|.*incorrect password|.*no password was provided|.*uthentication failed)", re.M)
_REFUSED = re.compile(
    r"^(Sorry, user \S+ (is not allowed to|may not run).*|\S+ is not in the sudoers file.*|sudo: .*must have a tty.*"
    r"|.*I'm afraid I can't do that.*|env: .*sudo.*: No such file or directory)$",
    re.M,
)

Session = Callable[[str, bytes, float, str], Result]
"""Runs a line on the node: line, standard input, time limit in seconds, what it is for."""


class Sudo:
    """Runs commands as root on one node.

    Args:
        node: The node's name.
        session: Runs a line on it.
        password: The deploy user's password, asked for only when sudo asks.
    """

    def __init__(self, node: str, session: Session, password: Callable[[], str | None]) -> None:
        self._node = node
        self._session = session
        self._password = password
        self._is_root: bool | None = None
        self._has_asked = self._always_asks = False
        self._accepted: str | None = None

    def run(self, cmd: Command) -> Result:
        """Run a command as root.

        Raises:
            UnreachableError: sudo gives no root for it, with the reason.
        """
        line = cmd.remote_line()
        if self._user_is_root():
            return self._session(line, cmd.stdin, cmd.timeout_s, cmd.told)
        if not self._always_asks:
            result = self._session(f"{_FREE} -- {line}", cmd.stdin, cmd.timeout_s, cmd.told)
            if not (result.status == 1 and _ASKED.search(result.stderr)):
                return self._unless_refused(cmd, result)
        password = self._password()
        if not self._always_asks:
            # With a password, one command says by itself what sudo thinks of it; asking is for the sake of the next.
            if self._has_asked or password is None:
                self._learn_rules(cmd, line)
            self._has_asked = True
        password = self._usable(password, cmd)
        stdin = password.encode() + b"\n" + cmd.stdin
        result = self._session(f"{_WITH_PASSWORD} -- {line}", stdin, cmd.timeout_s, cmd.told)
        if password != self._accepted:
            self._unless_wrong(result)
            if result.ok:
                self._accepted = password
        return self._unless_refused(cmd, result)

    def _user_is_root(self) -> bool:
        if self._is_root is None:
            answer = self._session("id -u", b"", 15, "expected to learn whether the deploy user is root")
            user = answer.stdout.strip()
            if not answer.ok or not user.isdigit():
                raise CommandError(
                    f"expected the number of the deploy user from `id -u`, found: {(user or answer.stderr)[-160:]!r}",
                    where=self._node,
                )
            self._is_root = user == "0"
        return self._is_root

    def _learn_rules(self, cmd: Command, line: str) -> None:
        """After sudo asked for a password: whether it would allow the command with one, and whether it always asks."""
        listed = self._session(f"{_FREE} -l -- {line}", b"", 15, "expected to learn what sudo allows")
        # Listing asks for a password only where no rule of the user goes without one (listpw=any).
        if _ASKED.search(listed.stderr):
            self._always_asks = True
        elif listed.status == 1:
            raise self._error(cmd, "sudoers does not list this command")

    def _usable(self, password: str | None, cmd: Command) -> str:
        """The password; tried alone first where input follows it, which sudo would take for more attempts."""
        if password is None:
            do = "set the secret sudo_password (or sudo_password_file), or"
            raise self._error(cmd, "sudo asks for a password", do)
        if password != self._accepted and cmd.stdin:
            told = "expected that sudo accepts the password"
            answer = self._session(f"{_WITH_PASSWORD} -v", password.encode() + b"\n", 20, told)
            self._unless_wrong(answer)
            self._unless_refused(cmd, answer)
            self._accepted = password
        return password

    def _unless_wrong(self, answer: Result) -> None:
        if not answer.ok and _WRONG.search(answer.stderr):
            raise UnreachableError(
                "expected that sudo accepts the password of the settings, found that it refuses it",
                node=self._node,
                step="sudo (sudo_password)",
                code="sudo-refused",
                do="correct the secret sudo_password (or sudo_password_file)",
            )

    def _unless_refused(self, cmd: Command, result: Result) -> Result:
        if result.status in (1, 127) and (found := _REFUSED.search(result.stderr)):
            raise self._error(cmd, re.sub(r"execute '.*' as", "execute it as", found[0].strip()))
        return result

    def _error(self, cmd: Command, found: str, do: str = "") -> UnreachableError:
        if "must have a tty" in found:
            do = "`Defaults !requiretty` in the node's sudoers lets sudo do without a terminal; or"
        return UnreachableError(
            f"{cmd.told} as root, found: {found}",
            node=self._node,
            step="sudo",
            code="sudo-refused",
            do=f"{do} allow it in sudoers (`python -m automation sudoers` prints the lines)".strip(),
        )
