"""Exit statuses of the commands; docs/automation.md is generated from this table, and each has a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

from spark_core.errors import SparkError


class Exit(IntEnum):
    """How a command ended."""

    DONE = 0
    FAILED = 1
    DRIFT = 2
    MORE_NEEDED = 3
    REFUSED = 4
    LOCKED = 5
    ROLLED_BACK = 6
    OUT_OF_TIME = 7
    USAGE = 64
    INTERRUPTED = 130


MEANINGS: Mapping[Exit, str] = {
    Exit.DONE: "done; `drift` found none, and `status` found everything as wanted",
    Exit.FAILED: "failed: an engine, a node, the settings or the preflight; what is said first is the cause",
    Exit.DRIFT: "`drift` and `status`: what is there is not as wanted; nothing was changed. `bench`: it got slower",
    Exit.MORE_NEEDED: "`up --no-restart` applied what keeps serving up, and more is needed that would not",
    Exit.REFUSED: "refused: it was not agreed to; or these settings failed and were rolled back, and "
    "`--retry-failed` tries them again",
    Exit.LOCKED: "another run holds the stack, or a dead one left its lock; nothing was changed",
    Exit.ROLLED_BACK: "`up --rollback-on-failure`: the settings failed, and the last good ones serve again",
    Exit.OUT_OF_TIME: "the overall deadline passed; the run was stopped as by Ctrl-C, and the same command goes on",
    Exit.USAGE: "the command line is wrong; nothing was done",
    Exit.INTERRUPTED: "interrupted by Ctrl-C or SIGTERM; the same command goes on",
}


class CommandEnd(SparkError):
    """An end with an exit status of its own."""

    def __init__(self, code: Exit, what: str, *, where: str = "", do: str = "", evidence: Sequence[str] = ()) -> None:
        super().__init__(what, where=where, do=do, evidence=evidence)
        self.code = code
