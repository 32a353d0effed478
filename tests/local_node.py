"""A node that is a folder of this machine: commands run here for real, root's ones without ``sudo``.

Observation and change are thereby tested with the very scripts that a node runs, on real files. Programs
that would touch the machine itself (``docker``, ``ip``, ``sysctl``, ``netplan``) are replaced by small
scripts, put first on the ``PATH`` of the commands.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from spark_core.transport.base import Command, Result

SYSTEM_FOLDERS = (
    "/sys/class/",
    "/proc/sys",
    "/proc/swaps",
    "/dev/watchdog",
    "/etc/netplan/",
    "/run/netplan",
    "/run/spark-vllm",
    "/etc/systemd/",
    "/etc/docker",
    "/etc/security/",
    "/etc/sysctl.d",
    "/etc/owner",
)
"""What a node's commands read and write of its system; a fake host has them below its own folder."""


@dataclass
class LocalNode:
    """Carries commands to this machine.

    Args:
        node: Name of the node.
        programs: Folder that is searched first for programs.
        sandbox: Folder that holds the node's system folders, or None for this machine's own.
        before: Called with each command before it runs; may raise what a carrier raises.
        answers: Whether it answers over a new connection.
    """

    node: str = "spark-a"
    programs: Path | None = None
    sandbox: Path | None = None
    before: Callable[[Command], None] = lambda _: None
    answers: Callable[[], bool] = lambda: True
    asked: list[Command] = field(default_factory=list)

    def run(self, cmd: Command) -> Result:
        self.before(cmd)
        self.asked.append(cmd)
        environment = dict(os.environ)
        if self.programs is not None:
            environment["PATH"] = f"{self.programs}:{environment['PATH']}"
        # The python of the tests stands for the node's: a version manager's shim would take its
        # time for each command.
        words = [sys.executable if word == "python3" else word for word in cmd.argv[:1]] + list(cmd.argv[1:])
        for folder in SYSTEM_FOLDERS if self.sandbox is not None else ():
            words = [word.replace(folder, f"{self.sandbox}{folder}") for word in words]
        done = subprocess.run(words, input=cmd.stdin, capture_output=True, timeout=60, check=False, env=environment)
        return Result(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    def stream(self, cmd: Command, chunks: Iterable[bytes]) -> Result:
        return self.run(Command(cmd.argv, cmd.sudo, b"".join(chunks), cmd.timeout_s))

    def fresh_answer(self, timeout_s: float) -> bool:
        return self.answers()

    def log_in_again(self) -> None:
        pass  # nothing here changes with a login

    def install(self, name: str, text: str) -> None:
        """Put a program onto the node."""
        if self.programs is None:
            raise ValueError("a node without a folder for programs")
        self.programs.mkdir(parents=True, exist_ok=True)
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)


def never_asked(cmd: Command) -> Result:
    """An answer for what must not be asked."""
    raise AssertionError(f"asked: {cmd.argv}")
