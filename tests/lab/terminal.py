"""A terminal at which commands are entered as a person would."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Terminal:
    """A shell in which commands are entered one after another; what one sets, the next ones have.

    Attributes:
        said: What each step printed, by its number.
    """

    shell: subprocess.Popen[bytes]
    said: dict[int, str] = field(default_factory=dict)

    def run(self, command: str, timeout_s: float) -> tuple[int, str]:
        """Status of a command, and what it printed."""
        assert self.shell.stdin is not None and self.shell.stdout is not None
        end = f"end-{uuid.uuid4().hex}"
        # Nobody is at this terminal: a command that reads gets the end of its input, and not the next command.
        self.shell.stdin.write(f"{{ {command}\n}} < /dev/null; printf '\\n%s %d\\n' {end} $?\n".encode())
        self.shell.stdin.flush()
        read, deadline = b"", time.monotonic() + timeout_s
        while f"\n{end} ".encode() not in read or not read.endswith(b"\n"):
            left = deadline - time.monotonic()
            ready = select.select([self.shell.stdout], [], [], max(left, 0))[0]
            assert ready, f"no end after {timeout_s:g} s: {command}\n{read.decode(errors='replace')[-3000:]}"
            piece = os.read(self.shell.stdout.fileno(), 65536)
            assert piece, f"the shell ended: {command}\n{read.decode(errors='replace')[-3000:]}"
            read += piece
        text, _, status = read.decode(errors="replace").rpartition(f"\n{end} ")
        return int(status), text


@contextlib.contextmanager
def open_terminal(folder: Path, environment: Mapping[str, str]) -> Iterator[Terminal]:
    """A terminal in a folder."""
    with subprocess.Popen(
        ["bash", "--noprofile", "--norc"],
        cwd=folder,
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as shell:
        try:
            yield Terminal(shell)
        finally:
            shell.kill()
