"""A carrier for tests: answers from a function, remembers what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from spark_core.transport.base import Command, Result


class ScriptedTransport:
    """Answers each command by a function of it; every command is kept in ``asked``.

    Args:
        node: Name of the node.
        answer: Called with each command; may raise what a real carrier raises.
    """

    def __init__(self, node: str, answer: Callable[[Command], Result | str]) -> None:
        self._node = node
        self._answer = answer
        self.asked: list[Command] = []
        self.logins = 1

    @property
    def node(self) -> str:
        return self._node

    def run(self, cmd: Command) -> Result:
        self.asked.append(cmd)
        answer = self._answer(cmd)
        return answer if isinstance(answer, Result) else Result(0, answer, "")

    def stream(self, cmd: Command, chunks: Iterable[bytes]) -> Result:
        return self.run(replace(cmd, stdin=b"".join(chunks)))

    def fresh_answer(self, timeout_s: float) -> bool:
        return True

    def log_in_again(self) -> None:
        self.logins += 1
