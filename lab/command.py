"""Running other programs: one line when they fail, with the end of what they said beneath it."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence

from lab.errors import StepFailed

EVIDENCE_LINES = 15

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """End the calling process when its parent ends, however that ends; to be called between fork and exec."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def evidence(text: str, lines: int = EVIDENCE_LINES) -> str:
    """The last lines of some output, indented so that they read as evidence under an error line."""
    kept = [line for line in text.strip().splitlines() if line.strip()][-lines:]
    return "".join(f"\n    {line}" for line in kept)


def run(
    argv: Sequence[str],
    *,
    what: str,
    timeout_s: float = 60,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
    cwd: str | os.PathLike[str] | None = None,
    die_with_us: bool = False,
) -> str:
    """Run a program to its end and return its standard output.

    With `die_with_us` it ends with this process even when that is killed: a build must not go on writing
    into a folder that the next build clears away.

    `what` names the step in the reader's words; it starts the error line. `env` is added to this process's
    own. Raises StepFailed when the program fails, is missing, or is not done within `timeout_s`.
    """
    try:
        done = subprocess.run(
            list(argv),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env=None if env is None else {**os.environ, **env},
            cwd=cwd,
            preexec_fn=die_with_parent if die_with_us else None,
        )
    except FileNotFoundError as error:
        raise StepFailed(f"{what}: {argv[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise StepFailed(f"{what}: not done after {timeout_s:.0f} s ({shlex.join(argv)})") from error
    if done.returncode != 0:
        said = evidence(done.stderr or done.stdout)
        raise StepFailed(f"{what}: {shlex.join(argv)} ended with {done.returncode}{said}")
    return done.stdout


def succeeds(argv: Sequence[str], *, timeout_s: float = 30) -> bool:
    """Whether a program runs and exits 0; what it says is thrown away."""
    try:
        done = subprocess.run(list(argv), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
