"""Mutants of the protocol: what the simulation must notice. A patch that does not fit exactly once is an error, so that
they cannot grow stale while the file changes."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

SOURCE = Path(__file__).resolve().parents[2] / "spark_runtime" / "protocol.py"


@dataclass(frozen=True)
class Mutant:
    """A fault in the protocol, as a replacement in its source."""

    name: str
    before: str
    after: str


REQUIRED = (
    Mutant("lease ignored", "    return now - seen > timeout_s\n", "    return False\n"),
    Mutant(
        "incarnation ignored",
        "        return self.members.get(request.rank) == request.incarnation\n",
        "        return request.rank in self.members\n",
    ),
    Mutant(
        "cleanup skipped",
        "            return self._end_processes(now, remains, limits)\n",
        "            return None\n",
    ),
    Mutant("counter reset", "        self.number += 1\n", "        self.number = 1\n"),
    Mutant("order swapped", "        if not self.may_join and seen.joinable:\n", "        if not self.may_join:\n"),
)
"""The five that must never go unnoticed."""

FURTHER = (
    Mutant(
        "order not acknowledged",
        "            elif lease.request.known != self.generation:\n",
        "            elif False:\n",
    ),
    Mutant("busy node taken", "            elif not lease.request.idle:\n", "            elif False:\n"),
    Mutant("sweep skipped", '            return "sweep"\n', '            return "wait"\n'),
    Mutant("memory ignored", "        if remains.lacking_bytes > 0:\n", "        if False:\n"),
    Mutant("old question counted", "!= request.incarnation or last.sequence < request.sequence:\n", "or True:\n"),
    Mutant(
        "vLLM before the workers",
        "        complete = self.may_join and seen.complete and self.may_serve(now)\n",
        "        complete = self.may_join\n",
    ),
    Mutant(
        "silent head followed",
        "            elif lapsed(self._heard, now, self.limits.lease_timeout_s):\n",
        "            elif False:\n",
    ),
    Mutant("own pause blamed on others", "        if gap > timeout and self.members:\n", "        if False:\n"),
    Mutant("bad answers ignored", "        elif self._bad_answers >= 2:", "        elif False:"),
    Mutant("no verdict", " or failure.waits or hopeless or verdict:\n", ":\n"),
    Mutant("no way back", ' if self._resumes and not self.missing(now) else "wait"\n', " if False else 'wait'\n"),
    Mutant("no back-off", "        self.retry_at = now + delay\n", "        self.retry_at = now\n"),
    Mutant("stop ignored", "        if self.held and not self.ended:\n", "        if False:\n"),
    Mutant(
        "stop ignored by a worker",
        '                self._end("stopped on request", now, self.limits.leave_s)\n',
        "                pass\n",
    ),
    Mutant("undead is idle", '        return "kill"\n', '        return None if self.stuck else "kill"\n'),
)
"""Others, each of a line that matters."""


def load(mutant: Mutant) -> ModuleType:
    """The protocol with this fault."""
    text = SOURCE.read_text()
    found = text.count(mutant.before)
    if found != 1:
        raise ValueError(f"mutant {mutant.name!r}: expected its line once in {SOURCE.name}, found it {found} times")
    name = "mutant_" + mutant.name.replace(" ", "_")
    spec = importlib.util.spec_from_loader(name, loader=None)
    if spec is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        exec(compile(text.replace(mutant.before, mutant.after), f"<{mutant.name}>", "exec"), module.__dict__)  # noqa: S102
    finally:
        del sys.modules[name]
    return module
