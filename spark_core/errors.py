"""What a person at the terminal reads when something is not as declared.

::

    SparkError                  one line that stands alone, then what to do, then evidence
    ├── SettingsError           the stack file is wrong; every violation at once
    ├── UnreachableError        a node does not answer: which step of the connection failed
    ├── CommandError            a remote command did not end as it must
    ├── ObservationError        a node answered something that cannot be understood
    ├── ForeignObjectError      something that is not ours is in the way
    ├── HubError                the model hub did not give what was asked for
    └── GateError               the endpoint does not serve: what failed first, and where

"Could not ask" is never turned into "absent" or "healthy": the three kinds are different classes.
"""

from __future__ import annotations

from collections.abc import Sequence

_EVIDENCE_LINES = 25


class SparkError(Exception):
    """A failure that a person can act on.

    Args:
        what: What was found and what was expected, in one line.
        where: The node, and the setting if there is one, such as ``spark-b`` or ``spark-b (fabric.mtu_bytes)``.
        do: What to do next.
        evidence: Lines that prove it (log lines, stderr). Never holds a secret.
    """

    def __init__(self, what: str, *, where: str = "", do: str = "", evidence: Sequence[str] = ()) -> None:
        self.what = what
        self.where = where
        self.do = do
        self.evidence = tuple(evidence)
        super().__init__(self.render())

    @property
    def line(self) -> str:
        """The one line that stands alone."""
        return f"{self.where}: {self.what}" if self.where else self.what

    def render(self) -> str:
        """The whole text: the line, what to do, the evidence."""
        lines = [self.line]
        if self.do:
            lines.append(f"  do: {self.do}")
        shown = self.evidence[-_EVIDENCE_LINES:]
        lines.extend(f"  seen: {text}" for text in shown)
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()


class SettingsError(SparkError):
    """The stack file does not say a deployment that can exist; nothing was contacted."""

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        count = len(self.violations)
        super().__init__(
            f"the stack file has {count} setting{'s' if count != 1 else ''} that cannot be used; no node was contacted"
        )

    def render(self) -> str:
        return "\n".join([self.line, *(f"  {violation}" for violation in self.violations)])


class UnreachableError(SparkError):
    """A node could not be asked, or gives no root. ``step`` is the part of the connection that failed.

    Args:
        code: The kind of finding that it is (a key of ``spark_core.findings.KINDS``).
    """

    def __init__(
        self, what: str, *, node: str, step: str, code: str = "", do: str = "", evidence: Sequence[str] = ()
    ) -> None:
        self.node = node
        self.step = step
        self.code = code
        super().__init__(what, where=f"{node}, {step}", do=do, evidence=evidence)


class CommandError(SparkError):
    """A remote command ended otherwise than it must, or did not end in time."""


class ObservationError(SparkError):
    """A node answered, but the answer cannot be understood."""


class ForeignObjectError(SparkError):
    """Something that this stack did not make is in the way; it is never removed by us."""


class HubError(SparkError):
    """The hub did not give what was asked for. ``code`` is the kind of finding that it is.

    Args:
        code: A key of ``spark_core.findings.KINDS``.
    """

    def __init__(self, what: str, *, code: str, where: str = "", do: str = "") -> None:
        self.code = code
        super().__init__(what, where=where, do=do)


class GateError(SparkError):
    """The endpoint does not serve."""


def join_errors(errors: Sequence[SparkError]) -> SparkError:
    """One error that tells several: the first one's line leads, the others follow whole."""
    if len(errors) == 1:
        return errors[0]
    first, *rest = errors
    return SparkError(
        first.what,
        where=first.where,
        do=first.do,
        evidence=[*first.evidence, *(line.strip() for error in rest for line in error.render().splitlines())],
    )
