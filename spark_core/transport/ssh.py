"""OpenSSH as the carrier: one multiplexed connection per node, each step of it with its own deadline.

The master connection is opened once under a lock (simultaneous ``ControlMaster=auto`` starts race, OpenSSH 9.2) and
ends by itself a minute after its last use. Everybody else, the Docker provider's ssh included, goes through it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from spark_core.errors import CommandError, UnreachableError
from spark_core.transport.base import Command, Result, script, tail_lines
from spark_core.transport.connection import CONTROL_DIR, Connection, config_arguments, ssh_path

TCP_TIMEOUT_S = 6.0
LOGIN_TIMEOUT_S = 15.0
PERSIST_S = 60
MAX_SESSIONS = 4
"""Our own sessions per node at a time; stock sshd allows ten and the Docker provider needs some."""

_SSH_FAILED = 255


class SshTransport:
    """Carries commands to one node over OpenSSH. Safe for use from several threads.

    Args:
        connection: Where the node is and which key it must show.
        sudo_password: Called when sudo asks; the password travels on standard input only.
    """

    def __init__(self, connection: Connection, sudo_password: Callable[[], str | None] = lambda: None) -> None:
        self._connection = connection
        self._sudo_password = sudo_password
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_SESSIONS)
        self._master_seen = 0.0
        self._is_root: bool | None = None
        self._sudo_free: bool | None = None

    @property
    def node(self) -> str:
        return self._connection.node

    @property
    def connection(self) -> Connection:
        return self._connection

    def run(self, cmd: Command) -> Result:
        self.open()
        with self._slots:
            line, stdin = self._with_sudo(cmd) if cmd.sudo else (cmd.remote_line(), cmd.stdin)
            return self._session(line, stdin, cmd.timeout_s, cmd.told)

    def stream(self, cmd: Command, chunks: Iterable[bytes]) -> Result:
        """Feed a command from an iterable of chunks; bounded by the command's own time limit.

        A reader that stops early is not an error here: the command's status says why.
        """
        self.open()
        words = self._session_words(cmd.remote_line())
        with self._slots, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=out, stderr=err)
            timer = threading.Timer(cmd.timeout_s, process.kill)
            timer.start()
            try:
                pipe = process.stdin
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        for chunk in chunks:
                            pipe.write(chunk)
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
                self._master_seen = 0.0
                raise CommandError(
                    f"{cmd.told}: no answer in {cmd.timeout_s:g} s",
                    where=self.node,
                    do="run it again; what has arrived is kept where that is possible",
                )
            out.seek(0)
            err.seek(0)
            return self._answer(
                Result(status, out.read().decode(errors="replace"), err.read().decode(errors="replace"))
            )

    def open(self) -> None:
        """Make sure that the master connection is there.

        Raises:
            UnreachableError: naming the step that failed: TCP, host key, authentication.
        """
        with self._lock:
            if time.monotonic() - self._master_seen < PERSIST_S / 3:
                self._master_seen = time.monotonic()
                return
            directory = ssh_path(CONTROL_DIR)
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(directory / (Path(self._connection.control_path).name + ".lock")):
                if not self._master_alive():
                    self._check_tcp()
                    self._start_master()
            self._master_seen = time.monotonic()

    def _base(self) -> list[str]:
        return ["ssh", *config_arguments(self._connection.spec.ssh_config), *self._connection.pin_options()]

    def _master_alive(self) -> bool:
        if not self._master("check"):
            return False
        # A master over a dead path still says "running": only an answer from the node counts.
        try:
            return self._session("true", b"", TCP_TIMEOUT_S, "expected an answer over the open connection").ok
        except (CommandError, UnreachableError):
            self._master("exit")
            return False

    def _master(self, request: str) -> bool:
        """Whether the master process, if there is one, does what is requested (``check``, ``exit``)."""
        path = ssh_path(self._connection.control_path)
        if not path.exists():
            return False
        try:
            done = subprocess.run(
                ["ssh", "-o", f"ControlPath={path}", "-O", request, self._connection.spec.address],
                capture_output=True,
                timeout=TCP_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def _check_tcp(self) -> None:
        """Tell "nobody there" from "refused" before ssh wraps both in its own words."""
        if self._connection.proxy_jump:
            return
        address = (self._connection.host_name, self._connection.port)
        where = f"{address[0]} port {address[1]}"
        try:
            with socket.create_connection(address, timeout=TCP_TIMEOUT_S):
                return
        except TimeoutError as error:
            found, do = f"no answer in {TCP_TIMEOUT_S:.0f} s", "check that the node has power and its management cable"
            cause: OSError = error
        except ConnectionRefusedError as error:
            found, do = "connection refused", "check that sshd runs on the node (it may still be starting)"
            cause = error
        except socket.gaierror as error:
            found, do = "the name cannot be resolved", "use the node's address as management_address"
            cause = error
        except OSError as error:
            found, do = error.strerror or str(error), "check that the node has power and its management cable"
            cause = error
        raise UnreachableError(
            f"expected sshd at {where}, found: {found}", node=self.node, step="connect (TCP)", do=do
        ) from cause

    def _start_master(self) -> None:
        path = ssh_path(self._connection.control_path)
        path.unlink(missing_ok=True)
        words = [
            *self._base(),
            "-o",
            "ControlMaster=yes",
            "-o",
            f"ControlPath={path}",
            "-o",
            f"ControlPersist={PERSIST_S}",
            "-N",
            "-f",
            *self._connection.target(),
        ]
        # The master keeps its standard error open, so it must be a file: a pipe would never end.
        with tempfile.TemporaryFile() as log:
            try:
                done = subprocess.run(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    timeout=LOGIN_TIMEOUT_S,
                    check=False,
                    start_new_session=True,
                )
            except subprocess.TimeoutExpired as error:
                raise UnreachableError(
                    f"expected a login in {LOGIN_TIMEOUT_S:.0f} s, "
                    "found none: sshd accepts connections but does not answer",
                    node=self.node,
                    step="login",
                    do="the node may be wedged or out of memory: look at its console, power-cycle it if it stays so",
                ) from error
            log.seek(0)
            stderr = log.read().decode(errors="replace")
        if done.returncode != 0:
            raise self._login_error(stderr)

    def _login_error(self, stderr: str) -> UnreachableError:
        lines = tail_lines(stderr, 4)
        last = lines[-1] if lines else "ssh ended without a word"
        if "Host key verification failed" in stderr or "no matching host key type" in stderr:
            return UnreachableError(
                f"expected host key {_fingerprint(self._connection.pin)}, found another key at "
                f"{self._connection.host_name}",
                node=self.node,
                step="host key (nodes[].host_key)",
                do="if the node was reinstalled, compare its new key on its own console and change the pin; "
                "if not, somebody else answers at this address",
            )
        if "Permission denied" in stderr:
            return UnreachableError(
                f"expected a login as {self._connection.spec.user} without a prompt, found: {last}",
                node=self.node,
                step="authentication",
                do="install your public key on the node (ssh-copy-id); a key with a passphrase needs ssh-agent",
            )
        return UnreachableError(f"expected a login, found: {last}", node=self.node, step="login", evidence=lines[:-1])

    def _session(self, line: str, stdin: bytes, timeout_s: float, told: str) -> Result:
        try:
            done = subprocess.run(
                self._session_words(line), input=stdin, capture_output=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            self._master_seen = 0.0
            raise CommandError(
                f"{told}: no answer in {timeout_s:g} s",
                where=self.node,
                do="run it again; if it stays so, the node may be wedged",
            ) from error
        return self._answer(
            Result(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
        )

    def _answer(self, result: Result) -> Result:
        """The result, if it is the command's own.

        Raises:
            UnreachableError: ssh says that the node could not be asked; the next command connects anew.
        """
        if result.status != _SSH_FAILED:
            return result
        if _ssh_itself_failed(result.stderr):
            self._master_seen = 0.0
            raise self._login_error(result.stderr)
        # A session whose master went away ends with 255 and no word of ssh.
        if not result.stderr.strip() or not self._master("check"):
            self._master_seen = 0.0
            raise UnreachableError(
                "expected an answer, found: the connection was lost",
                node=self.node,
                step="session",
                do="run it again: the connection is then opened anew; what the command has done by then is not known",
                evidence=tail_lines(result.stderr, 4),
            )
        return result

    def _session_words(self, line: str) -> list[str]:
        path = ssh_path(self._connection.control_path)
        return [
            *self._base(),
            "-o",
            "ControlMaster=no",
            "-o",
            f"ControlPath={path}",
            "-T",
            *self._connection.target(),
            "--",
            line,
        ]

    def _with_sudo(self, cmd: Command) -> tuple[str, bytes]:
        if self._is_root is None:
            answer = self._session("id -u", b"", 15, "expected to learn whether the deploy user is root")
            user = answer.stdout.strip()
            if not answer.ok or not user.isdigit():
                raise CommandError(
                    f"expected the number of the deploy user from `id -u`, found: {(user or answer.stderr)[-160:]!r}",
                    where=self.node,
                )
            self._is_root = user == "0"
        if self._is_root:
            return cmd.remote_line(), cmd.stdin
        if self._sudo_free is None:
            # -k: a cached credential must not hide that a password is needed, since it would then not be read.
            self._sudo_free = self._session(
                "sudo -kn true", b"", 15, "expected to learn whether sudo asks for a password"
            ).ok
        if self._sudo_free:
            return "sudo -n -- " + cmd.remote_line(), cmd.stdin
        password = self._sudo_password()
        if password is None:
            raise CommandError(
                f"expected root without a password for `{' '.join(cmd.argv[:3])} …`, found that sudo asks for one",
                where=f"{self.node} (sudo_password)",
                do="set the secret sudo_password (or sudo_password_file), or allow the listed commands in sudoers",
            )
        accepted = self._session(
            "sudo -k -S -p '' -- true", password.encode() + b"\n", 20, "expected that sudo accepts the password"
        )
        if not accepted.ok:
            raise CommandError(
                "expected that sudo accepts the password of the settings, found that it refuses it",
                where=f"{self.node} (sudo_password)",
                do="correct the secret sudo_password (or sudo_password_file)",
            )
        return "sudo -k -S -p '' -- " + cmd.remote_line(), password.encode() + b"\n" + cmd.stdin


def write_file(path: str, content: bytes, *, mode: str = "0600", sudo: bool = False) -> Command:
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
        sudo=sudo,
        stdin=content,
        timeout_s=60,
    )


def _ssh_itself_failed(stderr: str) -> bool:
    signs = (
        "ssh: ",
        "Connection ",
        "Host key verification failed",
        "Permission denied (",
        "mux_client",
        "kex_exchange",
        "client_loop",
        "Control socket",
    )
    return any(line.startswith(signs) or "Permission denied (" in line for line in stderr.splitlines())


def _fingerprint(pin: str) -> str:
    try:
        done = subprocess.run(
            ["ssh-keygen", "-l", "-f", "-"], input=pin + "\n", capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return pin.split(" ", 1)[0]
    words = done.stdout.split()
    return words[1] if len(words) > 1 else pin.split(" ", 1)[0]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
