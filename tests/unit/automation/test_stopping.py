"""What ends a run early: two stages of Ctrl-C, and the deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from automation.exit_codes import CommandEnd, Exit
from automation.stopping import Stopper

POLITE = "import signal, sys, time; signal.signal(2, lambda *_: sys.exit(7)); print('up', flush=True); time.sleep(60)"
DEAF = "import signal, time; signal.signal(2, lambda *_: None); print('up', flush=True); time.sleep(60)\ntime.sleep(60)"


def start(text: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    return process


def later(seconds: float, times: int = 1) -> None:
    """Send this process Ctrl-C a little later, as often as said."""

    def send() -> None:
        for _ in range(times):
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()


def test_the_first_ctrl_c_asks_and_the_run_ends_in_its_own_way() -> None:
    said: list[str] = []
    stopper = Stopper(None, said.append)
    with start(POLITE) as process, stopper.listening():
        later(0.3)
        assert stopper.follow(process, lambda: None) == 7
    assert said == ["interrupted: finishing or parking the step in hand; Ctrl-C again stops at once"]
    with pytest.raises(CommandEnd) as ended:
        stopper.check()
    assert ended.value.code == Exit.INTERRUPTED


def test_the_second_ctrl_c_kills_what_does_not_end() -> None:
    stopper = Stopper(None, lambda _: None)
    with start(DEAF) as process, stopper.listening():
        later(0.3, 2)
        begun = time.monotonic()
        assert stopper.follow(process, lambda: None) == -signal.SIGKILL
    assert time.monotonic() - begun < 15


def test_a_deadline_asks_like_the_first_ctrl_c() -> None:
    said: list[str] = []
    stopper = Stopper(0.5, said.append)
    with start(POLITE) as process:
        assert stopper.follow(process, lambda: None) == 7
    assert said == ["the deadline has passed: stopping"]
    with pytest.raises(CommandEnd, match="expected the command to end") as ended:
        stopper.check()
    assert ended.value.code == Exit.OUT_OF_TIME


def test_waiting_between_steps_ends_with_the_deadline() -> None:
    stopper = Stopper(0.2, lambda _: None)
    with pytest.raises(CommandEnd) as ended:
        stopper.wait(30)
    assert ended.value.code == Exit.OUT_OF_TIME
