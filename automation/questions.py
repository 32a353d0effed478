"""Questions to a person: each has an option that answers it, and where nobody can be asked the answer is no."""

from __future__ import annotations

import argparse
import getpass
import sys
from dataclasses import dataclass, field
from pathlib import Path

from automation.redaction import learn
from automation.reports import QuestionReport
from automation.session import ask
from spark_core.errors import SparkError

QUESTIONS = {
    "host-keys": "trust the host keys that are shown",
    "make-key": "make an ed25519 key where this user has none",
    "install-key": "install this user's key on nodes that do not take it yet",
    "docker-group": "add the deploy user to the docker group where it may not use Docker",
    "peers": "take in nodes that are found on the cables, or that a launcher has written down",
    "overwrite": "replace the stack's file if it is there",
}
"""By the name of the option that says yes (``--yes-NAME``), what it says yes to."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that answer."""
    parser.add_argument("--yes", action="store_true", help="answer every question with yes; what is done is still told")
    for name, text in QUESTIONS.items():
        parser.add_argument(f"--yes-{name}", action="store_true", help=text)
    parser.add_argument(
        "--password-file",
        metavar="FILE",
        help="file whose first line is the nodes' password, for the login before a key is there and for sudo; without "
        "it a person is asked, once for each node",
    )


@dataclass
class Questions:
    """Asks, and keeps what was answered.

    Attributes:
        options: The command line.
        answered: Every question that came up.
    """

    options: argparse.Namespace
    answered: list[QuestionReport] = field(default_factory=list)
    _passwords: dict[str, str | None] = field(default_factory=dict, repr=False)

    @property
    def may_ask(self) -> bool:
        """Whether a person is there to be asked."""
        return not self.options.json and sys.stdin.isatty()

    def yes(self, name: str, question: str) -> bool:
        """The answer to a question of :data:`QUESTIONS`."""
        given = bool(self.options.yes or getattr(self.options, f"yes_{name.replace('-', '_')}"))
        said = given or (self.may_ask and ask(f"{question} [y/N] "))
        self.answered.append(QuestionReport(question=question, option=f"--yes-{name}", answer=said))
        if not said and not self.may_ask:
            print(f"{question} no: nobody was asked, --yes-{name} says yes", file=sys.stderr)
        return said

    def password(self, who: str) -> str | None:
        """A user's password on one node, asked for at most once; None where nobody can be asked.

        Raises:
            SparkError: its file cannot be read.
        """
        if who not in self._passwords:
            self._passwords[who] = self._ask_password(who)
            learn([self._passwords[who]])
        return self._passwords[who]

    def _ask_password(self, who: str) -> str | None:
        file = self.options.password_file
        if file is not None:
            try:
                return next(iter(Path(file).expanduser().read_text().splitlines()), "") or None
            except (OSError, UnicodeDecodeError) as error:
                reason = error.strerror if isinstance(error, OSError) else "no text"
                raise SparkError(f"expected a password in {file}, found: {reason}", where="--password-file") from None
        try:
            return (getpass.getpass(f"Password of {who}: ") or None) if self.may_ask else None
        except EOFError:
            return None
