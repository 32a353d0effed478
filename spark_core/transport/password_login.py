"""A login by password, for the one time before a key is there; with OpenSSH alone.

OpenSSH gets the password from a program of its own choosing (``SSH_ASKPASS``, forced since 8.4). Ours is a few lines of
shell that read it from a pipe with a name, in a folder of this user's only; it answers one question for a password and
no other question, so that a password goes nowhere twice, and never to what asks for a key's passphrase. The password
stands in no argument, environment or file.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spark_core.errors import CommandError, UnreachableError
from spark_core.transport.base import Command, Result
from spark_core.transport.connection import Connection
from spark_core.transport.login_errors import login_failure, login_timeout
from spark_core.transport.openssh import SSH_FAILED, OwnLog
from spark_core.transport.ssh import BEGIN, begun

_ASKPASS = """#!/bin/sh
# Answers one question for a password; the folder that it makes says that it has.
case $1 in *assword*) mkdir "$0.asked" 2>/dev/null || exit 1 ;; *) exit 1 ;; esac
IFS= read -r answer < "$0.pipe" && printf '%s\\n' "$answer"
"""


@dataclass(frozen=True)
class _Askpass:
    program: Path

    @property
    def asked(self) -> bool:
        """Whether the password was asked for."""
        return self.program.with_name(f"{self.program.name}.asked").exists()


def run_with_password(connection: Connection, password: str, cmd: Command) -> Result:
    """Run a command over a connection of its own that a password opens.

    Raises:
        UnreachableError: nobody answers, the host key is not the pinned one, or the password is not taken.
        CommandError: the command did not end in time.
    """
    with _answering(password) as askpass, OwnLog() as log:
        words = [
            *("env", f"SSH_ASKPASS={askpass.program}", "SSH_ASKPASS_REQUIRE=force", "ssh", *log.options(), "-v"),
            *("-o", "BatchMode=no", "-o", "NumberOfPasswordPrompts=1", "-o", "PubkeyAuthentication=no"),
            *("-o", "PasswordAuthentication=yes", "-o", "KbdInteractiveAuthentication=yes"),
            *("-o", "PreferredAuthentications=password,keyboard-interactive"),
            *connection.own_options(),
            *("-o", "ControlMaster=no", "-o", "ControlPath=none", "-T", *connection.target()),
            *("--", begun(cmd.remote_line())),
        ]
        try:
            done = subprocess.run(
                words,
                input=cmd.stdin,
                capture_output=True,
                timeout=cmd.timeout_s,
                check=False,
                start_new_session=True,  # no terminal that anything could ask on instead
            )
        except subprocess.TimeoutExpired:
            failure = login_timeout(connection, log.text, cmd.timeout_s)
            if "Authenticated to" in log.text:
                raise CommandError(f"{cmd.told}: no answer in {cmd.timeout_s:g} s", where=connection.node) from None
            raise failure.error from None
        said, aside = log.text, done.stderr.decode(errors="replace")
        if done.returncode == SSH_FAILED and "Authenticated to" not in said:
            raise _refused(connection, said, aside, asked=askpass.asked)
        _, begins, text = done.stdout.decode(errors="replace").partition(f"{BEGIN}\n")
        return Result(done.returncode, text if begins else "", aside)


def _refused(connection: Connection, said: str, aside: str, *, asked: bool) -> UnreachableError:
    failure = login_failure(connection, said, aside).error
    if failure.code != "authentication-failed":
        return failure
    found = "it refuses it" if asked else "it asks for none (PasswordAuthentication no in its sshd_config)"
    return UnreachableError(
        f"expected that sshd takes the password of {connection.user}, found that {found}",
        node=connection.node,
        step="authentication",
        code="authentication-failed",
        do="run it again with the right password and user"
        if asked
        else f"put your public key into ~{connection.user}/.ssh/authorized_keys on the node's own console",
    )


@contextmanager
def _answering(password: str) -> Iterator[_Askpass]:
    """The program that ssh asks, as long as the ``with`` lasts."""
    with tempfile.TemporaryDirectory(prefix="spark-vllm-") as folder:
        program = Path(folder, "askpass")
        pipe = program.with_name("askpass.pipe")
        os.mkfifo(pipe, 0o600)
        program.write_text(_ASKPASS)
        program.chmod(0o700)
        # Opened for both, it neither waits for a reader nor ends before one has come.
        end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        try:
            with contextlib.suppress(BlockingIOError):
                os.write(end, password.encode() + b"\n")
            yield _Askpass(program)
        finally:
            os.close(end)
