"""From what ssh said of a connection that failed to one error: which step failed, in ssh's own words.

ssh writes its own log (``-E``, level DEBUG1) apart from its standard error, where the node's banner and a jump host's
own ssh speak. The log tells how far the connection came, so that "closed" before the key exchange is not taken for a
refused login. All texts are those of OpenSSH 8.5 and later, which does not translate them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from spark_core.errors import UnreachableError
from spark_core.transport.connection import CONNECT_TIMEOUT_S, HOST_KEY_STEP, Connection
from spark_core.transport.keys import locked_private_keys

Passing = Literal["never", "busy", "boot"]
"""Whether a failure passes by itself: never, as soon as sshd has fewer logins at a time, or when a host has booted."""

_NOISE = re.compile(
    r"debug\d: |OpenSSH_|Authenticated to |Transferred: |Bytes per second: |@|Warning: (Permanently|Identity file)"
)
_TCP = re.compile(r"ssh: connect to host (\S+) port (\d+): (.+)")
_NAME = re.compile(r"ssh: Could not resolve hostname (\S+): (.+)")
_CHANNEL = re.compile(r"channel \d+: open failed: (?:connect failed: )?(.+)")
_BOOTING = re.compile(r"pam_nologin|System is (booting up|going down)")
_IDENTIFICATION = ("kex_exchange_identification", "ssh_exchange_identification", "banner exchange")
_NO_KEY = ("Permission denied (", "Too many authentication failures", "No supported authentication methods")
_CONFIGURATION = ("ad configuration option", "Bad owner or permissions", "too long for Unix domain socket")

_TOLD_KEYS = 4
_POWER = "check that the node has power and its management cable"
_WEDGED = "the node may be wedged or out of memory: look at its console, power-cycle it if it stays so"
_DO_TCP = {
    "connection refused": "check that sshd runs on the node (it may still be starting)",
    "administratively prohibited: open failed": "allow TCP forwarding in sshd of the host that the way goes through",
}


@dataclass(frozen=True)
class LoginFailure:
    """A connection that was not made.

    Attributes:
        error: What the person reads.
        passing: Whether it is worth waiting.
        unclear: Whether only the node that the way goes through can tell if the node answers at all.
    """

    error: UnreachableError
    passing: Passing = "never"
    unclear: bool = False


def login_failure(connection: Connection, log: str, aside: str) -> LoginFailure:
    """Which step of a connection failed.

    Args:
        log: ssh's own log.
        aside: Its standard error.
    """
    failure = _Failures(connection)
    if (on_the_way := _failure_on_the_way(failure, aside)) is not None:
        return on_the_way
    lines = own_words(log)
    if not lines:
        return failure.of("a login", "ssh ended without a word", "login", "connect-failed")
    for line in lines:
        if found := _TCP.match(line):
            return tcp_failure(connection, found[3])
        if _NAME.match(line):
            return tcp_failure(connection, "the name cannot be resolved", seen=line)
        if "Host key verification failed" in line or "no matching host key type" in line:
            return failure.of("the pinned host key", line, HOST_KEY_STEP, "host-key-mismatch")
        if any(sign in line for sign in _CONFIGURATION):
            return failure.of("a usable ssh configuration", line, "local OpenSSH", "ssh-configuration")
        if any(sign in line for sign in _NO_KEY):
            return _authentication_failure(failure, log, line)
        if any(sign in line for sign in _IDENTIFICATION):
            return _key_exchange_failure(failure, log, line)
    if not _exchanged(log):
        return _key_exchange_failure(failure, log, lines[0])
    if _BOOTING.search(aside):
        said = next(line.strip() for line in aside.splitlines() if _BOOTING.search(line))
        do = "wait until the node has booted"
        return failure.of("a login", said, "session", "session-refused", do, passing="boot")
    do = "look at what sshd says on the node (journalctl -u ssh)"
    return failure.of("a login", lines[0], "session", "session-refused", do)


def login_timeout(connection: Connection, log: str, limit_s: float) -> LoginFailure:
    """A login that did not end in time, by how far it came."""
    failure, wanted = _Failures(connection), f"a login in {limit_s:g} s"
    if _exchanged(log):
        found = "none: sshd exchanged keys and then did not answer"
        return failure.of(wanted, found, "login", "session-refused", _WEDGED, passing="boot")
    found = "none: sshd accepts connections but does not answer"
    return failure.of(wanted, found, "key exchange", "key-exchange-failed", _WEDGED, passing="boot", unclear=True)


def tcp_failure(connection: Connection, reason: str, *, seen: str = "") -> LoginFailure:
    """Nobody answers where sshd should; ``reason`` as ssh or a shell gives it."""
    found = reason[:1].lower() + reason[1:]
    if "timed out" in found:
        found = f"no answer in {CONNECT_TIMEOUT_S} s"
    named = "name" in found
    do = "use the node's address as management_address" if named else _DO_TCP.get(found, _POWER)
    if connection.via and not named:
        do += f"; the way to it goes through {connection.via.node}"
    return _Failures(connection).of(
        f"sshd at {connection.host_name} port {connection.port}",
        found,
        "connect (TCP)",
        "connect-failed",
        do,
        passing="never" if named or "prohibited" in found else "boot",
        seen=seen,
    )


def offered_fingerprint(log: str) -> str | None:
    """``type SHA256:…`` of the host key that the other end showed, if it came so far."""
    found = re.search(r"^debug1: Server host key: (\S+ SHA256:\S+)", log, re.MULTILINE)
    return found[1] if found else None


def own_words(log: str) -> list[str]:
    """The lines of ssh's log that are about a failure."""
    return [line.strip() for line in log.splitlines() if line.strip() and not _NOISE.match(line)]


def _exchanged(log: str) -> bool:
    return "debug1: SSH2_MSG_NEWKEYS received" in log


@dataclass(frozen=True)
class _Failures:
    """Failures of one connection."""

    connection: Connection

    def of(
        self,
        wanted: str,
        found: str,
        step: str,
        code: str,
        do: str = "",
        *,
        passing: Passing = "never",
        unclear: bool = False,
        seen: str = "",
    ) -> LoginFailure:
        error = UnreachableError(
            f"expected {wanted}, found: {found}",
            node=self.connection.node,
            step=step,
            code=code,
            do=do,
            evidence=[seen] if seen else [],
        )
        return LoginFailure(error, passing, unclear and self.connection.via is not None)


def _key_exchange_failure(failure: _Failures, log: str, first: str) -> LoginFailure:
    banner = re.search(r"^debug1: .*banner line \d+: (.+)", log, re.MULTILINE)
    passing: Passing = "busy"
    do = "too many logins at a time (MaxStartups), or sshd is wedged or blocks this address: look at its log"
    if "Unable to negotiate" in first:
        do, passing = "let ssh and the node's sshd have an algorithm in common", "never"
    elif "timed out" in first:
        do, passing = _WEDGED, "boot"
    return failure.of(
        f"keys to be exchanged with {failure.connection.host_name} port {failure.connection.port}",
        first,
        "key exchange",
        "key-exchange-failed",
        do,
        passing=passing,
        unclear=True,
        seen=banner[1].strip() if banner else "",
    )


_ON_THE_WAY: tuple[tuple[re.Pattern[str], str, str, Passing], ...] = (
    (_TCP, "connect (TCP)", "connect-failed", "boot"),
    (_NAME, "connect (TCP)", "connect-failed", "never"),
    (re.compile("Host key verification failed"), "host key", "host-key-mismatch", "never"),
    (re.compile("|".join(re.escape(sign) for sign in _NO_KEY)), "authentication", "authentication-failed", "never"),
    (re.compile("|".join(_IDENTIFICATION)), "key exchange", "key-exchange-failed", "busy"),
)


def _failure_on_the_way(failure: _Failures, aside: str) -> LoginFailure | None:
    """What a jump host's own ssh said: which of the two hosts does not answer, or refuses."""
    connection = failure.connection
    if not (connection.via or connection.proxy_jump or connection.proxy_command):
        return None
    jump = connection.via.node if connection.via else connection.proxy_jump or "the proxy"
    for line in own_words(aside):
        if found := _CHANNEL.match(line):
            return tcp_failure(connection, found[1].strip())
        if "tdio forwarding" in line:
            wanted = f"{jump} to connect to {connection.host_name} port {connection.port}"
            return failure.of(wanted, line, "connect (TCP)", "connect-failed", passing="boot", unclear=True)
        for sign, step, code, passing in _ON_THE_WAY:
            if sign.search(line):
                do = f"make `ssh {jump}` work from here without a prompt"
                wanted, step = f"to get through {jump}", f"{step} of {jump}"
                return failure.of(wanted, line, step, code, do, passing=passing, unclear=True)
    return None


def _authentication_failure(failure: _Failures, log: str, first: str) -> LoginFailure:
    connection, agent = failure.connection, _agent(log)
    keys = r"key: (.+?) (\S+) (SHA256:\S+)(.*)$"
    offered = re.findall(r"^debug1: Offering public " + keys, log, re.MULTILINE)
    accepted = re.findall(r"^debug1: Server accepts " + keys, log, re.MULTILINE)
    told = [f"{mark} ({name}{', from the agent' if 'agent' in rest else ''})" for name, _, mark, rest in offered]
    if len(told) > _TOLD_KEYS:
        told[_TOLD_KEYS:] = [f"and {len(told) - _TOLD_KEYS} more"]
    names = {name for name, *_ in offered}
    locked = [name for name in locked_private_keys(connection.identity_files) if name not in names]
    # A wrong user and a key that is not installed look the same from here: sshd does not tell which users there are.
    install = (
        f"install a key for {connection.user} on the node (ssh-copy-id {connection.user}@{connection.host_name}), "
        "or correct nodes[].user"
    )
    if accepted:
        name, _, mark, rest = accepted[-1]
        do = (
            f"the node knows {mark}, and the agent that holds it did not sign: unlock or confirm it"
            if "agent" in rest
            else f"the node knows {mark}, and a passphrase locks {name}: this key needs an ssh-agent: ssh-add {name}"
        )
    elif "Too many" in first:
        do = "more keys are offered than sshd takes: name one in the ssh configuration (IdentityFile, IdentitiesOnly)"
    elif locked:
        do = f"a passphrase locks {', '.join(locked)}: such a key needs an ssh-agent: ssh-add {locked[0]}; or {install}"
    else:
        do = install if told else f"start an ssh-agent that holds a key, or make a key (ssh-keygen); then {install}"
    return failure.of(
        f"a login as {connection.user} without a prompt",
        f"{first}; offered: {', '.join(told) or 'no key'} ({agent})",
        "authentication",
        "authentication-failed",
        do,
    )


def _agent(log: str) -> str:
    if "agent contains no identities" in log:
        return "the ssh-agent holds no key"
    found = re.search(r"get_agent_identities: agent returned (\d+) keys", log)
    return f"keys in the ssh-agent: {found[1]}" if found else "no ssh-agent answers"
