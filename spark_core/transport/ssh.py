"""OpenSSH as the carrier: sessions over one open connection per node, each step of it with its own deadline.

Commands may be run again by rule (they are idempotent and judged by what is observed afterwards), so a connection that
breaks off during one is opened anew and the command repeated. Where sshd allows no further session (MaxSessions), ssh
connects for itself, and where sshd drops that (MaxStartups), it is tried again after a pause.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from spark_core.errors import CommandError, UnreachableError
from spark_core.transport.backoff import Backoff
from spark_core.transport.base import Command, Result, command, script, tail_lines
from spark_core.transport.connection import CONNECT_TIMEOUT_S, Connection, on_the_way, ssh_path
from spark_core.transport.login_errors import LoginFailure, login_failure, own_words, tcp_failure
from spark_core.transport.master import REQUEST_TIMEOUT_S, Master, Patience
from spark_core.transport.openssh import SSH_FAILED, OwnLog
from spark_core.transport.sudo import Sudo

MAX_SESSIONS = 3
"""Our own sessions per node at a time; stock sshd allows ten, a strict one four, and the Docker provider needs some."""

REPEATS = 2
"""How often a command is run again after the connection broke off."""

BUSY_S = 30.0
"""How long a session that sshd has no room for is tried again."""

BEGIN = "spark-vllm-begins"
"""The first word of every answer. What the login shell prints before it, from a ~/.bashrc, is no part of it: taken for
one, it would be a part of a file's old content, and it breaks the copying of files and Docker's own ssh."""

_BEGIN = command("sh", "-c", 'echo "$0"; exec "$@"', BEGIN).remote_line()
_CSH = 90

_NO_ROOM = ("session request failed", "open failed")
_BROKE_OFF = re.compile(
    r"^(mux_client|client_loop|packet_write|Timeout, server|Write failed|Connection to \S+ closed by remote)", re.M
)

_PIPE_BYTES = 65536
"""What a pipe takes in before anybody reads from it (Linux; less elsewhere)."""


def begun(line: str) -> str:
    """A line for a login shell, whose answer begins with :data:`BEGIN`.

    A csh would take the lines of a script for commands of its own. It alone has a variable ``shell``, and makes way at
    once; after ``exit`` it would go on (tcsh 6.24).
    """
    return f'test -z "$shell" || exec sh -c "exit {_CSH}"\n{_BEGIN} {line}'


class SshTransport:
    """Carries commands to one node over OpenSSH. Safe for use from several threads.

    Args:
        connection: Where the node is and which key it must show.
        sudo_password: Called when sudo asks; the password travels on standard input only.
        via: The transport of the node that this one is reached through.
        patience: How it is waited for where it does not answer.
    """

    def __init__(
        self,
        connection: Connection,
        sudo_password: Callable[[], str | None] = lambda: None,
        *,
        via: SshTransport | None = None,
        patience: Patience = Patience(),  # noqa: B008 (it is frozen)
    ) -> None:
        self.patience = patience
        self._connection = connection
        self._via = via
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_SESSIONS)
        self._failed: UnreachableError | None = None
        self._master = Master(connection, self._answers, self._clarify)
        self._sudo = Sudo(connection.node, self._session, sudo_password)

    @property
    def node(self) -> str:
        return self._connection.node

    @property
    def connection(self) -> Connection:
        return self._connection

    def run(self, cmd: Command) -> Result:
        repeats = 0
        while True:
            self.open()
            try:
                with self._slots:
                    if cmd.sudo:
                        return self._sudo.run(cmd)
                    return self._session(cmd.remote_line(), cmd.stdin, cmd.timeout_s, cmd.told)
            except UnreachableError as error:
                if error.code in ("sudo-refused", "session-refused", "login-shell") or repeats == REPEATS:
                    raise
            repeats += 1

    def stream(self, cmd: Command, chunks: Iterable[bytes]) -> Result:
        """Feed a command from an iterable of chunks; bounded by the command's own time limit.

        A reader that stops early is not an error here: the command's status says why. It is not repeated when the
        connection breaks off, since what was read of the chunks is gone.
        """
        source, backoff = _Chunks(chunks), Backoff()
        while True:
            self.open()
            with self._slots, OwnLog() as log:
                result, said = self._fed_session(cmd, source, log), log.text
            if not _has_no_room(result, said):
                return self._answer(result, said)
            if not source.is_whole or not backoff.wait(min(BUSY_S, cmd.timeout_s)):
                raise self._no_room(said)

    def fresh_answer(self, timeout_s: float) -> bool:
        """Whether the node answers over a connection of its own, made now, within the time."""
        words = [
            "-o",
            f"ConnectTimeout={max(1, min(CONNECT_TIMEOUT_S, int(timeout_s)))}",
            *self._connection.own_options(),
            "-o",
            "ControlPath=none",
            "-T",
            *self._connection.target(),
            "--",
            "true",
        ]
        with OwnLog() as log:
            try:
                done = subprocess.run(
                    ["ssh", *log.options(), "-o", "LogLevel=INFO", *words],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return False
        return done.returncode == 0

    def log_in_again(self) -> None:
        self._master.leave()

    def forget(self) -> None:
        """Look at the open connection again before its next use."""
        self._master.forget()

    def open(self) -> None:
        """Make sure that the open connection is there.

        Raises:
            UnreachableError: naming the step that failed: TCP, key exchange, host key, authentication.
        """
        failed_before = self._failed
        with self._lock:
            if self._failed is not None and self._failed is not failed_before:
                # Another thread has waited in vain while this one waited for the lock.
                raise self._failed
            try:
                if self._via is not None and not self._master.is_fresh:
                    self._open_via(self._via)
                self._master.open(self.patience)
            except UnreachableError as error:
                self._failed = error
                raise
            self._failed = None

    def _open_via(self, via: SshTransport) -> None:
        try:
            via.open()
        except UnreachableError as error:
            raise on_the_way(error, self.node) from None

    def _clarify(self, failure: LoginFailure) -> LoginFailure:
        """Let the node on the way try, since a forwarded connection that fails does not say why."""
        if self._via is None:
            return failure
        host, port = self._connection.host_name, str(self._connection.port)
        probe = script(
            'timeout "$3" bash -c \'exec 3<>"/dev/tcp/$1/$2"\' probe "$1" "$2"',
            host,
            port,
            str(CONNECT_TIMEOUT_S),
            purpose=f"expected to learn whether {host} port {port} answers",
        )
        self._via.forget()
        try:
            result = self._via.run(probe)
        except UnreachableError as error:
            return LoginFailure(on_the_way(error, self.node), failure.passing)
        except CommandError:
            return failure
        if result.status == 124:
            return tcp_failure(self._connection, "timed out")
        if not result.ok:
            words = [line for line in result.stderr.splitlines() if line.strip()] or ["no answer"]
            return tcp_failure(self._connection, words[-1].rpartition(": ")[2])
        if failure.error.code == "connect-failed":
            forbidden = tcp_failure(self._connection, "administratively prohibited: open failed")
            return LoginFailure(forbidden.error, "boot")
        return failure

    def _answers(self) -> bool:
        with OwnLog() as log:
            try:
                result = self._once("true", b"", REQUEST_TIMEOUT_S, log)
            except subprocess.TimeoutExpired:
                return False
            return result.ok or _has_no_room(result, log.text)

    def _once(self, line: str, stdin: bytes, timeout_s: float, log: OwnLog) -> Result:
        done = subprocess.run(
            self._session_words(line, log), input=stdin, capture_output=True, timeout=timeout_s, check=False
        )
        return Result(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    def _session_words(self, line: str, log: OwnLog) -> list[str]:
        connection = self._connection
        shared = ["-o", "ControlMaster=no", "-o", f"ControlPath={ssh_path(connection.control_path)}"]
        options = [*log.options(), "-o", "LogLevel=INFO", *connection.own_options(), *shared]
        return ["ssh", *options, "-T", *connection.target(), "--", begun(line)]

    def _session(self, line: str, stdin: bytes, timeout_s: float, told: str) -> Result:
        backoff = Backoff()
        while True:
            with OwnLog() as log:
                try:
                    result = self._once(line, stdin, timeout_s, log)
                except subprocess.TimeoutExpired:
                    self._master.forget()
                    if not self._master.is_alive():
                        raise self._lost() from None
                    raise CommandError(
                        f"{told}: no answer in {timeout_s:g} s",
                        where=self.node,
                        do="run it again; if it stays so, the node may be wedged",
                    ) from None
                said = log.text
            if not _has_no_room(result, said):
                return self._answer(result, said)
            if not backoff.wait(min(BUSY_S, timeout_s)):
                raise self._no_room(said)

    def _fed_session(self, cmd: Command, source: _Chunks, log: OwnLog) -> Result:
        words = self._session_words(cmd.remote_line(), log)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=out, stderr=err)
            timer = threading.Timer(cmd.timeout_s, process.kill)
            timer.start()
            try:
                pipe = process.stdin
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        for chunk in source:
                            pipe.write(chunk)
                            pipe.flush()  # who makes the chunks may wait for what this one brings about
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
                status = process.wait()
            finally:
                process.kill()
                timed_out = not timer.is_alive()
                timer.cancel()
                if process.stdin is not None:
                    with contextlib.suppress(BrokenPipeError):
                        process.stdin.close()
                process.wait()
            if timed_out:
                self._master.forget()
                raise CommandError(
                    f"{cmd.told}: no answer in {cmd.timeout_s:g} s",
                    where=self.node,
                    do="run it again; what has arrived is kept where that is possible",
                )
            out.seek(0)
            err.seek(0)
            return Result(status, out.read().decode(errors="replace"), err.read().decode(errors="replace"))

    def _answer(self, result: Result, said: str) -> Result:
        """The result, if it is the command's own.

        Raises:
            UnreachableError: ssh says that the node could not be asked; the next command connects anew.
        """
        if result.status != SSH_FAILED:
            return self._own_answer(result)
        words = own_words(said)
        # A session whose master went away ends with 255 and no word of ssh.
        if not words and self._master.runs():
            return self._own_answer(result)
        self._master.forget()
        if not words or _BROKE_OFF.search(said):
            raise self._lost([*tail_lines(result.stderr, 3), *words[:1]])
        raise login_failure(self._connection, said, result.stderr).error

    def _own_answer(self, result: Result) -> Result:
        """What the command itself printed.

        Raises:
            UnreachableError: the login shell printed something before, or did not run the command at all.
        """
        aside, begun, text = result.stdout.partition(f"{BEGIN}\n")
        if begun and not aside:
            return replace(result, stdout=text)
        said = next(iter(tail_lines(aside, 1) or tail_lines("" if begun else result.stderr, 1)), "").strip()[:120]
        said = said or ("an empty line" if begun else "nothing")
        user = self._connection.spec.user
        if begun:
            what = f"expected a login shell of {user} that prints nothing by itself, found: {said}"
            do = (
                "print it in interactive shells only (in ~/.bashrc, after the line `case $- in *i*) ;; *) return;; "
                "esac`): it also breaks the copying of files and Docker's own ssh"
            )
        elif result.status == _CSH:
            what = f"expected a login shell of {user} that takes POSIX quotes (sh, bash, zsh, fish), found a csh"
            do = f"`sudo chsh -s /bin/bash {user}` on the node"
        else:
            what = (
                f"expected the login shell of {user} to run a command, found that it ended with {result.status}: {said}"
            )
            do = "`ssh NODE true; echo $?` must print 0: look at the user's shell (/etc/passwd) and its start files"
        raise UnreachableError(what, node=self.node, step="login shell", code="login-shell", do=do)

    def _lost(self, evidence: Sequence[str] = ()) -> UnreachableError:
        return UnreachableError(
            "expected an answer, found: the connection was lost",
            node=self.node,
            step="session",
            code="connection-lost",
            do="run it again: the connection is then opened anew; what the command has done by then is not known",
            evidence=evidence,
        )

    def _no_room(self, said: str) -> UnreachableError:
        return UnreachableError(
            f"expected a session, found: {(own_words(said) or ['refused'])[0]}",
            node=self.node,
            step="session",
            code="session-refused",
            do="end other sessions on the node, or allow more in its sshd_config (MaxSessions, MaxStartups)",
            evidence=own_words(said)[1:2],
        )


class _Chunks:
    """Chunks that can be given once more as long as no more was taken of them than a pipe holds."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._source = iter(chunks)
        self._kept: list[bytes] = []
        self.is_whole = True
        """Whether everything that was taken is still here."""

    def __iter__(self) -> Iterator[bytes]:
        yield from tuple(self._kept)
        for chunk in self._source:
            if self.is_whole and sum(map(len, self._kept)) <= _PIPE_BYTES:
                self._kept.append(chunk)
            else:
                self.is_whole, self._kept = False, []
            yield chunk


def _has_no_room(result: Result, said: str) -> bool:
    return result.status == SSH_FAILED and any(sign in said for sign in _NO_ROOM)


def write_file(path: str, content: bytes, *, mode: str = "0600") -> Command:
    """A command that replaces a file by one rename, so that no reader ever sees half of it.

    Args:
        path: Absolute path on the node.
        content: The bytes; they travel on standard input.
        mode: Octal mode of the new file.
    """
    return script(
        # The length is checked, since a connection that is cut ends the input like a whole file does.
        'umask 077; mkdir -p "$(dirname "$1")"; tmp=$(mktemp "$1.XXXXXX"); trap \'rm -f "$tmp"\' EXIT; '
        'cat > "$tmp"; [ "$(stat -c %s "$tmp")" = "$3" ] || { echo "the input was cut" >&2; exit 5; }; '
        'chmod "$2" "$tmp"; sync "$tmp"; mv -f "$tmp" "$1"; trap - EXIT',
        path,
        mode,
        str(len(content)),
        stdin=content,
        timeout_s=60,
    )
