"""Whose packages are imported: ours, from this project folder, in the program and in Pulumi's provider process.

``components`` and ``providers`` are names that other distributions have too, and the provider process finds them by
its working folder alone. Where they would not be found, or somebody else's would be, the run is refused in one line.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from spark_core.errors import SparkError

OWN_PACKAGES = ("components", "providers", "spark_core")


def require_own_packages(project: Path, root: Path | None, safe_path: bool | None = None) -> None:
    """Make sure that our packages are the ones that will be imported.

    Args:
        project: The folder that holds ``__main__.py``.
        root: The folder in which Pulumi starts its provider process, or None if it is not known.
        safe_path: Whether Python leaves the working folder out of the module path; default: this process's own flag.

    Raises:
        SparkError: in one line, with what to change.
    """
    for name in OWN_PACKAGES:
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found != (project / name / "__init__.py").resolve():
            raise SparkError(f"expected the package {name} of {project}, found {found or 'none'}; "
                             "another package of that name was imported first")  # fmt: skip
    if sys.flags.safe_path if safe_path is None else safe_path:
        raise SparkError("expected PYTHONSAFEPATH to be unset, found it set: Pulumi's provider process "
                         "could then not find the package providers; unset it and run again")  # fmt: skip
    if root is not None and not (root / "providers" / "__init__.py").is_file():
        raise SparkError(f"expected Pulumi to run in {project}, found {root}: pass it as work_dir to the Automation API")
    if root is not None and root.resolve() != project.resolve():
        raise SparkError(f"expected Pulumi to run in {project}, found {root}, which has a package providers of its own")
