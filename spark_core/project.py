"""Whose packages are imported: ours, from this project folder, in the program and in Pulumi's provider process.

``components`` and ``providers`` are names that other distributions have too, and the provider process finds them by
its working folder alone. Where they would not be found, or somebody else's would be, the run is refused in one line.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import FrameType

from spark_core.errors import SparkError

OWN_PACKAGES = ("components", "providers", "spark_core")


def root_of_run(told: str | None) -> Path | None:
    """The folder in which Pulumi starts its provider process; None in an inline program, which cannot know it.

    Args:
        told: What the SDK says. Language hosts before 3.80 do not tell it, but they run a program in that folder.
    """
    if told:
        return Path(told)
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "pulumi.automation._server":
            return None
        frame = frame.f_back
    return Path.cwd()


def require_own_packages(project: Path, root: Path | None, safe_path: bool | None = None) -> None:
    """Make sure that our packages are the ones that will be imported.

    Args:
        project: The folder that holds ``__main__.py``.
        root: The folder in which Pulumi starts its provider process, or None if it is not known (an inline program).
        safe_path: Whether Python leaves the working folder out of the module path; default: this process's own flag.

    Raises:
        SparkError: in one line, with what to change.
    """
    for name in OWN_PACKAGES:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found != (project / name / "__init__.py").resolve():
            raise SparkError(
                f"expected the package {name} of {project}, found {found or 'none'}; "
                "another package of that name was imported first"
            )
    if sys.flags.safe_path if safe_path is None else safe_path:
        raise SparkError(
            "expected PYTHONSAFEPATH to be unset, found it set: Pulumi's provider process "
            "could then not find the package providers; unset it and run again"
        )
    if root is None:
        # The provider process and the paths of files belong to a folder that an inline program cannot know.
        raise SparkError(
            f"expected a local program (work_dir={project}), found an inline one: "
            "Pulumi's provider process could not find the package providers"
        )
    if root.resolve() != project.resolve():
        raise SparkError(
            f"expected Pulumi to run in {project}, found {root}: pass it as work_dir to the Automation API"
        )
