"""Runs of pulumi and of the lab: how they ended, and one that goes on in the background."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]


@dataclass
class Outcome:
    """How a command ended and what it printed."""

    code: int
    text: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def count(self, what: str) -> int:
        """The number before a word in the summary of resources, such as ``27 unchanged``."""
        found = re.findall(rf"^\s*[~+-]*\s*(\d+) {what}\b", self.text, re.MULTILINE)
        return int(found[-1]) if found else 0


class BackgroundRun:
    """A run of pulumi that can be watched, interrupted and killed."""

    def __init__(self, command: list[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self.text = ""
        self._process = subprocess.Popen(
            command,
            cwd=cwd,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Wait until the run has printed a text."""
        end = time.monotonic() + timeout_s
        while text not in self.text:
            assert self._process.poll() is None, f"ended before it printed {text!r}: {self.text[-3000:]}"
            assert time.monotonic() < end, f"has not printed {text!r} in {timeout_s} s: {self.text[-3000:]}"
            time.sleep(0.1)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def interrupt(self) -> None:
        """Ctrl-C."""
        self._process.send_signal(signal.SIGINT)

    def wait(self, timeout_s: float) -> int:
        """Exit status."""
        code = self._process.wait(timeout_s)
        self._close()
        return code

    def kill(self) -> None:
        """Kill the run and every plugin and program that it has started, at once."""
        family = [self._process.pid]
        for pid in family:
            children = Path(f"/proc/{pid}/task/{pid}/children")
            family += [int(child) for child in children.read_text().split()] if children.is_file() else []
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(10)
        self._close()

    def _close(self) -> None:
        self._reader.join(30)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.text += line


def run_lab(instance: str, *arguments: str) -> None:
    """Run a command of a lab as a person would; it must succeed."""
    command, *rest = arguments
    done = subprocess.run(
        [sys.executable, "-m", "lab", command, "--instance", instance, *rest],
        cwd=PROJECT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
