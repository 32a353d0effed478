"""Locks: who holds a stack, whose process is gone, and what is removed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from automation.exit_codes import CommandEnd, Exit
from automation.locks import began_at, locks_of, locks_told, require_free

Place = Callable[..., Path]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Writes a lock into a backend of files."""
    monkeypatch.setenv("PULUMI_BACKEND_URL", f"file://{tmp_path}")
    folder = tmp_path / ".pulumi" / "locks" / "organization" / "spark-vllm" / "dev"

    def write(pid: int, host: str = "", timestamp: str = "", name: str = "a") -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        content = {
            "pid": pid,
            "username": "ci",
            "hostname": host or socket.gethostname(),
            "timestamp": timestamp or now,
        }
        (folder / f"{name}.json").write_text(json.dumps(content))
        return folder / f"{name}.json"

    return write


def dead_pid() -> int:
    """The number of a process that has ended."""
    done = subprocess.Popen(["true"])
    done.wait()
    return done.pid


def free(*, clear: bool = False, wait_s: float = 0.0, sleep: Callable[[float], None] = lambda _: None) -> list[str]:
    said: list[str] = []
    require_free("spark-vllm", "dev", clear_stale=clear, wait_s=wait_s, say=said.append, sleep=sleep)
    return said


def test_nobody_holds_a_stack_without_locks(place: Place) -> None:
    assert free() == []
    assert place(dead_pid()).is_file()


def test_a_lock_whose_process_is_gone_is_stale_and_goes_only_when_asked_for(place: Place) -> None:
    lock = place(dead_pid())
    with pytest.raises(CommandEnd, match="of a run that is dead") as refused:
        free()
    assert refused.value.code == Exit.LOCKED and lock.is_file()
    assert "cleared the lock that a dead run left: ci@" in free(clear=True)[0]
    assert not lock.exists()


def test_a_process_that_was_killed_and_not_waited_for_is_gone(place: Place) -> None:
    process = subprocess.Popen(["sleep", "60"])
    place(process.pid)
    assert not locks_of("spark-vllm", "dev")[0].stale
    process.kill()
    time.sleep(0.2)
    assert locks_of("spark-vllm", "dev")[0].stale
    process.wait()


def test_a_process_that_began_after_the_lock_is_another_one(place: Place) -> None:
    place(os.getpid(), timestamp="2020-01-02T03:04:05.123456789Z")
    [lock] = locks_of("spark-vllm", "dev")
    assert lock.stale
    assert lock.holder.endswith(f"process {os.getpid()}, since 2020-01-02 03:04:05 UTC")
    began = began_at(os.getpid())
    assert began is not None and abs(began - time.time()) < 3600


def test_a_live_lock_is_never_cleared_nor_one_of_another_machine(place: Place) -> None:
    for host, hint in (("", ""), ("elsewhere", "on elsewhere, which can tell")):
        lock = place(os.getpid() if not host else dead_pid(), host)
        with pytest.raises(CommandEnd, match="found a run of ci@") as refused:
            free(clear=True)
        assert hint in refused.value.do and lock.is_file()


def test_of_a_dead_and_a_live_lock_only_the_dead_one_goes(place: Place) -> None:
    dead, live = place(dead_pid(), name="dead"), place(os.getpid(), name="live")
    with pytest.raises(CommandEnd):
        free(clear=True)
    assert not dead.exists() and live.is_file()


def test_a_live_run_is_waited_for_as_long_as_asked(place: Place) -> None:
    lock = place(os.getpid())
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            lock.unlink()

    assert "waiting up to 10 s for ci@" in free(wait_s=10, sleep=sleep)[0]
    assert len(naps) == 3
    place(os.getpid())
    with pytest.raises(CommandEnd):
        free(wait_s=2, sleep=lambda _: None)


def test_the_engine_s_own_words_for_a_lock_are_read() -> None:
    text = (
        "error: the stack is currently locked by 1 lock(s). Either wait for the other process(es) to end or delete "
        "the lock file with `pulumi cancel`.\n"
        "  s3://state/.pulumi/locks/organization/spark-vllm/spark/5c.json?region=x: created by Ann B@laptop (pid 41)"
        " at 2026-11-30T22:00:00+01:00\n"
    )
    [lock] = locks_told(text)
    assert lock.holder == "Ann B@laptop, process 41, since 2026-11-30 21:00:00 UTC"
    assert not lock.stale
