"""Says what a command is doing meanwhile, ends cleanly when stopped, and sums up where the time went."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from toolchain.places import Stop

HEARTBEAT_S = 15.0
GRACE_S = 60.0
SHOWN_LINES = 30


def say(text: str) -> None:
    """One line for the person who watches."""
    print(text, flush=True)


def duration(seconds: float) -> str:
    """12.3 s below two minutes, 5 min 34 s above."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


class Steps:
    """Numbered steps of a command. Use `with steps("name"):` for each."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._taken: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        number = len(self._taken) + 1
        say(f"step {number}/{self._total} {name}")
        start = self._clock()
        how = "stopped"
        try:
            yield
            how = "done"
        finally:
            taken = self._clock() - start
            self._taken.append((name, taken))
            say(f"step {number}/{self._total} {name}: {how}, {duration(taken)}")

    def table(self) -> str:
        """Where the time went, one line per step taken and their sum."""
        rows = [*self._taken, ("all", sum(taken for _, taken in self._taken))]
        width = max(len(name) for name, _ in rows)
        return "\n".join(
            ["where the time went", *(f"  {name:<{width}}  {duration(taken):>11}" for name, taken in rows)]
        )


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def run_command(main: Callable[[], int]) -> int:
    """Run a command's main: Ctrl-C and kill end it as such, a Stop is one line. Returns the exit status."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return main()
    except KeyboardInterrupt:
        say("interrupted; run the same command again to go on")
        return 130
    except Stop as fault:
        print(fault, file=sys.stderr, flush=True)
        return 1


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Keep an interrupt back until the process that is being started has a name by which it can be ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, _frame: held.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            raise KeyboardInterrupt


def quietly(
    what: str,
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    limit_s: float,
    remedy: str = "",
) -> None:
    """Run a tool whose output matters only if it fails, with a heartbeat while it lasts.

    The tool and its children form a group of their own, so that stopping us stops all of them.
    """
    start = time.monotonic()
    process: subprocess.Popen[str] | None = None
    try:
        with _interrupts_held():
            process = subprocess.Popen(
                list(argv),
                cwd=cwd,
                env=None if env is None else dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        while True:
            try:
                output, _ = process.communicate(timeout=HEARTBEAT_S)
                break
            except subprocess.TimeoutExpired:
                taken = time.monotonic() - start
                if taken > limit_s:
                    late = f"{what}: not done after {duration(taken)}; run the same command again to go on"
                    raise Stop(late) from None
                say(f"  {what}: {duration(taken)} so far")
    except BaseException:
        if process is not None:
            _end_group(process)
            if process.stdout is not None:
                process.stdout.close()
        raise
    if process.returncode != 0:
        shown = "\n".join("  " + line for line in output.strip().splitlines()[-SHOWN_LINES:])
        advice = f"; {remedy}" if remedy else ""
        raise Stop(f"{what}: `{argv[0]} {argv[1]}` ended with status {process.returncode}{advice}\n{shown}")


def _end_group(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=5)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def openly(what: str, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], remedy: str = "") -> None:
    """Run a tool that talks to the person itself.

    It gets the terminal's Ctrl-C directly; a kill is passed on as the same. We wait for it to tidy up.
    """
    process: subprocess.Popen[bytes] | None = None
    try:
        with _interrupts_held():
            process = subprocess.Popen(list(argv), cwd=cwd, env=dict(env))
        status = process.wait()
    except KeyboardInterrupt:
        if process is not None:
            _wait_for_end(process)
        raise
    if status != 0:
        advice = f"; {remedy}" if remedy else ""
        raise Stop(f"{what}: ended with status {status}{advice}")


def _wait_for_end(process: subprocess.Popen[bytes]) -> None:
    # A kill reached only us. From a terminal the tool has its Ctrl-C already; a second makes it drop its
    # work.
    if not sys.stdin.isatty() and process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
