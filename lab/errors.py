"""What the lab says when it cannot go on.

LabError
├── CannotRun        this machine lacks something (not root, not Linux, a missing tool)
├── UnknownHost      a host or instance that does not exist was named
└── StepFailed       a step on a host or in a build did not succeed
"""


class LabError(Exception):
    """Root of all expected failures; the text is one line that stands alone, evidence may follow indented."""

    exit_code = 1


class CannotRun(LabError):
    """This machine cannot hold a lab as it is; the text says what to install or how to start."""

    exit_code = 3


class UnknownHost(LabError):
    """A host or instance was named that the lab does not have."""

    exit_code = 2


class StepFailed(LabError):
    """A step did not succeed, or not within its time."""
